"""Faults of Megatron-Core 0.19.2's DistributedOptimizer that saving and loading would run into, mended in this one place.

Each function takes one DistributedOptimizer and says what is wrong without it; tests/distributed/test_state.py shows it.
"""

from typing import Any

import torch


def distributed_optimizers(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def allocate_moments(part: Any) -> None:
    """Torch's Adam has no state before its first step, and Megatron can then neither save nor load it: make a step that changes
    nothing (no gradient, learning rate 0) and set the step counter back."""
    adam = part.optimizer
    if not isinstance(adam, torch.optim.Optimizer) or adam.state:
        return
    rates = [group["lr"] for group in adam.param_groups]
    for group in adam.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    adam.step()
    adam.zero_grad()
    for group, rate in zip(adam.param_groups, rates, strict=True):
        group["lr"] = rate
        if "step" in group:  # where Transformer Engine's Adam counts
            group["step"] = 0
    for state in adam.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()


def keep_bucket_padding(part: Any) -> None:
    """Gathered state leaves out the padding between buckets, and is then cut by positions that count it: every parameter behind
    a padded bucket is saved with its neighbours' values. It happens with tied embeddings under pipeline parallelism, which have
    a bucket of their own."""
    original = type(part).get_parameter_state_dp_zero

    def padded(*args: Any, **kwargs: Any) -> Any:
        state = original(part, *args, **kwargs)
        for number, buffer in enumerate(part.buffers if state is not None else []):
            if buffer.numel_unpadded == buffer.numel:
                continue
            for tensors in state[number].values():
                for key, packed in tensors.items():
                    if isinstance(packed, torch.Tensor):
                        tensors[key] = _spread(packed, buffer)
        return state

    part.get_parameter_state_dp_zero = padded


def _spread(packed: torch.Tensor, buffer: Any) -> torch.Tensor:
    full = packed.new_zeros(buffer.numel)
    start = 0
    for bucket in buffer.buckets:
        full[bucket.offset : bucket.offset + bucket.numel_unpadded] = packed[start : start + bucket.numel_unpadded]
        start += bucket.numel_unpadded
    return full


def expect_step_tensor(part: Any) -> None:
    """Megatron leaves torch Adam's `step` out of what it loads for a parameter, yet looks for it there and fails. The step
    itself comes with the parameter groups."""
    original = type(part)._set_main_param_and_optimizer_states

    def with_step(param: Any, tensors: dict[str, Any]) -> None:
        original(part, param, {"step": None, **tensors})

    part._set_main_param_and_optimizer_states = with_step


def unshare_step_tensors(part: Any) -> None:
    """Megatron loads one `step` tensor into all of torch Adam's states: every parameter would advance it for all others."""
    for state in part.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
