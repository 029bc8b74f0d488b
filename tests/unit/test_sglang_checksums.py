"""What a server must hold, computed from HF tensors, against its parameters put together by hand."""

import hashlib
import random

import pytest
import torch
from torch import Tensor

from dapo_megatron.rollout.sglang_weights import ServerLayout, engine_name, sglang_checksums

NUM_EXPERTS, HIDDEN, FFN = 3, 4, 38
MLP = "model.layers.7.mlp"


def expert(number: int, part: str, rows: int, columns: int) -> tuple[str, Tensor]:
    generator = torch.Generator().manual_seed(hash((number, part)) % 1000)
    return f"{MLP}.experts.{number}.{part}_proj.weight", torch.randn(rows, columns, generator=generator)


def checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(("tp", "rows"), [(1, 64), (2, 32)])
def test_experts_are_stacked_gate_before_up_padded_and_each_is_cut_by_the_ranks(tp: int, rows: int) -> None:
    tensors = [expert(n, part, FFN, HIDDEN) for n in range(NUM_EXPERTS) for part in ("gate", "up")]
    tensors += [expert(n, "down", HIDDEN, FFN) for n in range(NUM_EXPERTS)]
    of = dict(tensors)
    layout = ServerLayout(tp=tp, dtype="float32", device="cpu", num_kv_heads=2, num_experts=NUM_EXPERTS)
    random.Random(0).shuffle(tensors)  # expert-parallel ranks' experts come in turns
    expected = {}
    for rank in range(tp):
        w13 = torch.zeros(NUM_EXPERTS, 2 * rows, HIDDEN)
        w2 = torch.zeros(NUM_EXPERTS, HIDDEN, rows)
        own = slice(rank * rows, min((rank + 1) * rows, FFN))
        num = own.stop - own.start
        for n in range(NUM_EXPERTS):
            w13[n, :num] = of[f"{MLP}.experts.{n}.gate_proj.weight"][own]
            w13[n, rows : rows + num] = of[f"{MLP}.experts.{n}.up_proj.weight"][own]
            w2[n, :, :num] = of[f"{MLP}.experts.{n}.down_proj.weight"][:, own]
        expected |= {f"{rank}/{MLP}.experts.w13_weight": checksum(w13), f"{rank}/{MLP}.experts.w2_weight": checksum(w2)}
    assert sglang_checksums(tensors, layout) == expected
    with pytest.raises(ValueError, match=r"only some of the parts of \['model\.layers\.7\.mlp\.experts\.w2_weight'\]"):
        sglang_checksums([item for item in tensors if "experts.1.down" not in item[0]], layout)


def test_a_dense_mlp_and_the_router_are_no_experts() -> None:
    assert engine_name(f"{MLP}.up_proj.weight", 4) == (f"{MLP}.gate_up_proj.weight", 1, 2)
    assert engine_name(f"{MLP}.down_proj.weight", 4) == (f"{MLP}.down_proj.weight", 0, 1)
    assert engine_name(f"{MLP}.gate.weight", 4) == (f"{MLP}.gate.weight", 0, 1)
