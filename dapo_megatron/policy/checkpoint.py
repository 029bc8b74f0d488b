"""The sharded part of a checkpoint: model and optimizer in Megatron's torch_dist format, loadable on another layout."""

import os
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

# fully_reshardable optimizer state loads on any TP x PP x DP
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def _allocate_moments(optimizer: Any) -> None:
    """Torch's Adam has no state before its first step, and Megatron 0.19 can then neither save nor load it: make a step that
    changes nothing (no gradient, learning rate 0) and set the step counter back."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = part.optimizer
        if not isinstance(adam, torch.optim.Optimizer) or adam.state:
            continue
        rates = [group["lr"] for group in adam.param_groups]
        for group in adam.param_groups:
            group["lr"] = 0.0
            for param in group["params"]:
                param.grad = torch.zeros_like(param)
        adam.step()
        adam.zero_grad()
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in adam.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].zero_()


def _expect_step_tensor(optimizer: Any) -> None:
    """Megatron 0.19 leaves torch Adam's `step` out of what it loads for a parameter, yet looks for it there and fails. The step
    itself comes with the parameter groups."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        original = type(part)._set_main_param_and_optimizer_states
        part._set_main_param_and_optimizer_states = lambda param, tensors, part=part, original=original: original(
            part, param, {"step": None, **tensors}
        )


def _unshare_step_tensors(optimizer: Any) -> None:
    """Megatron 0.19 loads one `step` tensor into all of torch Adam's states: every parameter would advance it for all others."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _state(model: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    _allocate_moments(optimizer)
    weights = model.module.sharded_state_dict()
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_METADATA),
    }


def save(folder: Path, model: Any, optimizer: Any) -> None:
    """Collective. `folder` must exist and be empty; whoever calls gives the checkpoint its final name afterwards."""
    dist_checkpointing.save(_state(model, optimizer, is_loading=False), os.fspath(folder))


def load(folder: Path, model: Any, optimizer: Any) -> None:
    """Collective. Replaces weights, master weights and Adam's moments."""
    state = dist_checkpointing.load(_state(model, optimizer, is_loading=True), os.fspath(folder))
    model.module.load_state_dict(state["model"])
    _expect_step_tensor(optimizer)
    optimizer.load_state_dict(state["optimizer"])
    _unshare_step_tensors(optimizer)
