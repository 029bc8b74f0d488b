"""The optimizer's state and the gradients off the device and back: released for real, and as if nothing had been."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.weights.devices import HostMemory
from tests.distributed.harness import LAYOUTS, RankPool, make_config, make_samples, pack
from tests.distributed.test_state import state_bytes, worker_for


class CountingMemory(HostMemory):
    """The host in the place of a device."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1

    def give_back(self) -> None:
        self.calls["give_back"] += 1

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self.calls["host_buffer"] += 1
        return super().host_buffer(num_bytes)


def gradients(policy: Any) -> list[torch.Tensor]:
    return [buffer.grad_data for chunk in policy.model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def held_bytes(policy: Any) -> tuple[int, int, int]:
    """In the storages of weights, of the optimizer's state that isn't the weights, of gradients."""
    from dapo_megatron.policy.offload import _optimizer_tensors

    def storages(tensors: Any) -> dict[int, int]:
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}

    weights = storages(param for chunk in policy.gpt for param in chunk.parameters())
    grads = storages(gradients(policy))
    state = storages(_optimizer_tensors(policy.optimizer))
    return (
        sum(weights.values()),
        sum(n for key, n in state.items() if key not in weights.keys() | grads.keys()),
        sum(grads.values()),
    )


def train(rank: int, model_dir: str, cfg: Any, shares: list[Any], shared_device: bool) -> tuple[list[bytes], list[Any]]:
    """State after three updates; if the device is shared, with a turn of the servers after each, seen from inside."""
    from dapo_megatron.policy.offload import Offload

    worker = worker_for(rank, cfg, model_dir)
    policy, memory = worker.policy, CountingMemory()
    offload = Offload(policy, memory)
    worker.load_batch([shares[policy.dp_rank]])
    seen: list[Any] = []
    for _ in range(3):
        worker.old_logprobs()
        worker.update(0, lr=1e-3)
        if not shared_device:
            continue
        before, held = state_bytes(policy), held_bytes(policy)
        published = [tensor.clone() for _, tensor in policy.stream_weights()]
        offload.offload()
        offload.offload()
        away = held_bytes(policy)
        still = [tensor.clone() for _, tensor in policy.stream_weights()]
        offload.onload()
        offload.onload()
        seen.append(
            {
                "held": held,
                "away": away,
                "back": held_bytes(policy),
                "same state": state_bytes(policy) == before,
                "same weights meanwhile": all(map(torch.equal, published, still)),
                "gradients": sum(float(grad.abs().sum()) for grad in gradients(policy)),
                "main_grad is in the buffer": _aliases(policy),
                "calls": dict(memory.calls),
            }
        )
    return state_bytes(policy), seen


def _aliases(policy: Any) -> bool:
    """What is written through every param.main_grad is seen in the buffers, and nothing else is there."""
    params = [param for chunk in policy.gpt for param in chunk.parameters()]
    for param in params:
        param.main_grad.fill_(1.0)
    found = sum(float(grad.sum()) for grad in gradients(policy))
    for grad in gradients(policy):
        grad.zero_()
    return found == sum(param.numel() for param in params)


@pytest.mark.parametrize(
    ("layout", "name", "dtype"),
    [
        ("DP2", "llama_tied", "bfloat16"),
        ("DP2", "llama_tied", "float32"),  # the masters are the weights
        pytest.param("EP2", "qwen3_moe", "bfloat16", marks=pytest.mark.slow),  # two optimizers
    ],
)
def test_updates_with_the_servers_turns_between_equal_those_without(
    ranks: RankPool, models: dict[str, Path], layout: str, name: str, dtype: str
) -> None:
    cfg = make_config(**LAYOUTS[layout], model__dtype=dtype, optimizer__clip_grad=0.5)
    shares, model = pack(make_samples(), cfg), str(models[name])
    alone = ranks.run(train, cfg.world_size, model, cfg, shares, False)
    shared = ranks.run(train, cfg.world_size, model, cfg, shares, True)
    for (expected, _), (state, turns) in zip(alone, shared, strict=True):
        assert state == expected
        for number, turn in enumerate(turns):
            weights, optimizer, grads = turn["held"]
            assert min(weights, optimizer, grads) > 0
            assert turn["away"] == (weights, 0, 0) and turn["back"] == turn["held"]
            assert turn["same state"] and turn["same weights meanwhile"] and turn["main_grad is in the buffer"]
            assert turn["gradients"] == 0
            assert turn["calls"]["give_back"] == number + 1
        assert turns[0]["calls"]["host_buffer"] == turns[2]["calls"]["host_buffer"]  # kept from one turn to the next
    assert alone[0][0] != alone[1][0]  # the ranks hold different shards


def leave_alone(rank: int, model_dir: str, cfg: Any) -> tuple[Any, Any, bool]:
    from dapo_megatron.policy.offload import Offload

    policy = worker_for(rank, cfg, model_dir).policy
    before, offload = held_bytes(policy), Offload(policy)
    offload.offload()
    return before, held_bytes(policy), offload.away


def test_nothing_moves_on_a_machine_without_a_gpu(ranks: RankPool, models: dict[str, Path]) -> None:
    ((before, after, away),) = ranks.run(leave_alone, 1, str(models["llama_tied"]), make_config())
    assert after == before and not away
