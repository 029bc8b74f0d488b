"""The Triton kernels under the interpreter against plain formulas in fp64, and compiled for sm_90 (see triton_aot.py).

The interpreter's exponentials are exactly rounded, a GPU's are off by up to two units in the last place. It rounds fp32 to
bf16 toward zero.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dapo_megatron.ops.parts import NO_ROWS, Softmax

ROOT = Path(__file__).resolve().parents[2]
# Few programs and small groups give small cases several splits, steps and groups.
RUN_CALLS = """
import sys, torch
from dapo_megatron.ops import triton_kernels as kernels
kernels.PROGRAMS, kernels.GROUP = 6, 2
calls = torch.load(sys.argv[1], weights_only=False)
torch.save({case: getattr(kernels, case[0])(*args) for case, args in calls.items()}, sys.argv[2])
"""


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(dtype)


def rows_of(tokens: int, first: int, last: int) -> Tensor:
    return torch.randint(first, last, (tokens,), generator=torch.Generator().manual_seed(tokens))


def scaled(block: Tensor, inverse_temperature: float) -> Tensor:
    """The logits that everything is defined by: multiplied in fp32."""
    return (block.float() * inverse_temperature).double()


def plain_stats(logits: Tensor, index: Tensor) -> Tensor:
    """[4, tokens] as ops.parts defines it, from fp64 logits after the temperature."""
    top = logits.amax(0)
    exp = (logits - top).exp()
    owned = (index >= 0) & (index < len(logits))
    target = torch.where(owned, logits.gather(0, index.clamp(0, len(logits) - 1)[None])[0], 0.0)
    return torch.stack([top, exp.sum(0), target, ((logits - top) * exp).sum(0)])


STATS = {  # block, index
    "one split": (normal(7, 5), rows_of(5, 0, 7)),
    "several splits, steps and token blocks": (normal(600, 130), rows_of(130, 0, 600)),
    "bf16": (normal(600, 33, dtype=torch.bfloat16), rows_of(33, 0, 600)),
    "fp16": (normal(150, 33, dtype=torch.float16), rows_of(33, 0, 150)),
    "one token": (normal(300, 1), torch.tensor([299])),
    "some targets outside": (normal(90, 40), rows_of(40, -50, 140)),
    "a row stride that isn't the width": (normal(70, 50)[:, :37], rows_of(37, 0, 70)),
    "logits of 1e4": (normal(300, 20, scale=1e4), rows_of(20, 0, 300)),
    "no rows": (normal(0, 4), rows_of(4, 0, 9)),
}
LINEAR = {  # hidden, weight, index
    "TMA, several splits, steps, groups": (normal(300, 72), normal(1100, 72, scale=0.2), rows_of(300, 0, 1100)),
    "TMA, one token": (normal(1, 64), normal(80, 64, scale=0.2), torch.tensor([79])),
    "odd width": (normal(70, 33), normal(75, 33, scale=0.2), rows_of(70, 0, 75)),
    "targets outside, some within the last tile": (normal(150, 8), normal(90, 8), rows_of(150, -50, 140)),
    "no rows": (normal(3, 8), normal(0, 8), rows_of(3, 0, 9)),
}


def gradient_case(rows: int, tokens: int, scale: float = 3.0, sure: float = 0.0, lift: float = 0.0) -> tuple[Tensor, ...]:
    """(logits of the whole vocabulary, its targets, d_logprob, d_entropy).

    `lift` is added to all logits, `sure` to the targets'.
    """
    block, targets = normal(rows, tokens, scale=scale) + lift, rows_of(tokens, 0, rows)
    block[targets, torch.arange(tokens)] += sure
    return block, targets, normal(tokens), normal(tokens + 1)[1:]


GRADIENT = {
    "several programs": gradient_case(300, 130),
    "one token": gradient_case(70, 1),
    "p near 1 at the target": gradient_case(90, 20, scale=1.0, sure=18.0),
    "logits of +-1e4": gradient_case(90, 20, scale=1e4),
    "logits near 1e4": gradient_case(90, 20, lift=1e4),  # the log-sum-exp as one number would have lost the digits of p
}
SPLIT = 40  # row at which a gradient's vocabulary is divided into two blocks


def whole(logits: Tensor, targets: Tensor) -> Softmax:
    """fp64, of fp64 logits."""
    logp = logits.log_softmax(0)
    total = (logits - logits.amax(0)).exp().sum(0)
    return Softmax(logp.gather(0, targets[None])[0], -(logp.exp() * logp).sum(0), logits.amax(0), total.log())


def gradient_args(case: tuple, part: slice, with_entropy: bool, dtype: torch.dtype, block_dtype: torch.dtype) -> tuple:
    block, targets, d_logprob, d_entropy = case
    block = block.to(block_dtype)
    softmax = Softmax(*(x.float() for x in whole(scaled(block, 1 / 0.6), targets)))
    index = targets - (part.start or 0)
    # a copy for every call: fp32 to fp32 and bf16 to bf16 are done in place
    return (block[part].clone(), softmax, index, d_logprob, d_entropy if with_entropy else None, 1 / 0.6, dtype)


BLOCKS = {"first": slice(None, SPLIT), "second": slice(SPLIT, None)}


def calls() -> dict[tuple, tuple]:
    """(function, case, ...) -> arguments."""
    found: dict[tuple, tuple] = {}
    for name, args in STATS.items():
        found |= {("block_stats", name, inv): (*args, inv) for inv in (1.0, 1 / 0.6)}
    for name, (hidden, weight, index) in LINEAR.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found["linear_stats", name, dtype] = (hidden.to(dtype), weight.to(dtype), index, 1 / 0.6)
    for name, case in GRADIENT.items():
        for part, rows in BLOCKS.items():
            for entropy in (False, True):
                key = ("block_gradient", name, part, entropy)
                found[key] = gradient_args(case, rows, entropy, torch.float32, torch.float32)
    case = GRADIENT["several programs"]
    for dtype in (torch.float32, torch.bfloat16):
        found["block_gradient", "to bf16", dtype] = gradient_args(case, slice(None), True, torch.bfloat16, dtype)
    return found


CALLS = calls()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, Tensor]:
    """Every call's result, from one process with the interpreter on (this one can't switch it on)."""
    folder = tmp_path_factory.mktemp("interpreted")
    torch.save(CALLS, folder / "calls.pt")
    command = [sys.executable, "-c", RUN_CALLS, str(folder / "calls.pt"), str(folder / "results.pt")]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=120)
    return torch.load(folder / "results.pt")


def keys(function: str) -> list[tuple]:
    return [key for key in CALLS if key[0] == function]


def near(ours: Tensor, exact: Tensor, rtol: float, atol: float) -> None:
    torch.testing.assert_close(ours.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("key", keys("block_stats"), ids=str)
def test_block_stats(results: dict, key: tuple) -> None:
    block, index, inverse_temperature = CALLS[key]
    ours = results[key]
    assert ours.dtype == torch.float32
    if not len(block):
        assert (ours[0] == NO_ROWS).all() and (ours[1:] == 0).all()
        return
    exact = plain_stats(scaled(block, inverse_temperature), index)
    assert torch.equal(ours[0::2].double(), exact[0::2])  # logits, not sums
    near(ours, exact, 1e-6, 1e-7)


@pytest.mark.parametrize("key", keys("linear_stats"), ids=str)
def test_linear_stats(results: dict, key: tuple) -> None:
    """Logits of up to 20, rounded in fp32 (2e-6) by the sum over the width; products of bf16 and fp16 are exact in fp32."""
    hidden, weight, index, inverse_temperature = CALLS[key]
    ours = results[key]
    assert ours.dtype == torch.float32
    if not len(weight):
        assert (ours[0] == NO_ROWS).all() and (ours[1:] == 0).all()
        return
    near(ours, plain_stats((weight.double() @ hidden.double().T) * inverse_temperature, index), 5e-6, 1e-5)


def exact_gradient(case: tuple, entropy: bool, block_dtype: torch.dtype = torch.float32) -> Tensor:
    """By autograd in fp64, [rows, tokens] of the whole vocabulary, by the logits before the temperature."""
    block, targets, d_logprob, d_entropy = case
    logits = scaled(block.to(block_dtype), 1 / 0.6).requires_grad_()
    softmax = whole(logits, targets)
    loss = (softmax.logprob * d_logprob).sum()
    if entropy:
        loss = loss + (softmax.entropy * d_entropy).sum()
    return torch.autograd.grad(loss, logits)[0] / 0.6


@pytest.mark.parametrize("key", [key for key in keys("block_gradient") if key[1] in GRADIENT], ids=str)
def test_block_gradient(results: dict, key: tuple) -> None:
    _, name, part, entropy = key
    exact = exact_gradient(GRADIENT[name], entropy)
    near(results[key], exact[BLOCKS[part]], 1e-5, 1e-6)


@pytest.mark.parametrize("part", BLOCKS)
def test_gradient_keeps_its_digits_where_the_target_is_almost_sure(results: dict, part: str) -> None:
    """1 - p is about 1e-7 there: as a difference in fp32 it would be rounding alone."""
    name = "p near 1 at the target"
    exact = exact_gradient(GRADIENT[name], False)
    targets, columns = GRADIENT[name][1], torch.arange(20)
    mine = (targets < SPLIT) == (part == "first")
    first = BLOCKS[part].start or 0
    ours = results["block_gradient", name, part, False][targets[mine] - first, columns[mine]]
    assert mine.any() and (exact[targets, columns].abs() < 1e-4).all()
    near(ours, exact[targets[mine], columns[mine]], 1e-5, 0.0)


@pytest.mark.parametrize("block_dtype", [torch.float32, torch.bfloat16])
def test_gradient_in_bf16(results: dict, block_dtype: torch.dtype) -> None:
    ours = results["block_gradient", "to bf16", block_dtype]
    assert ours.dtype == torch.bfloat16
    near(ours, exact_gradient(GRADIENT["several programs"], True, block_dtype), 2**-7, 1e-6)


@pytest.fixture(scope="module")
def compilations(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    triton = Path(pytest.importorskip("triton").__file__).parent
    if not (triton / "backends" / "nvidia" / "bin" / "cuobjdump").exists():
        pytest.skip("this Triton comes without cuobjdump")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.unit.triton_aot"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=env, timeout=120)
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_kernels_compile_for_sm_90(compilations: list[dict]) -> None:
    for found in compilations:
        assert found["STACK"] == found["LOCAL"] == 0, f"spills: {found}"
        assert found["shared"] <= 227 * 1024, found
        assert found["atomics"] == 0, found
        if found["name"] != "linear_stats":
            assert found["fma"] == 0, f"multiplication and addition are fused: {found}"
            assert found["loop barriers"] == 0, f"threads exchange in the loop over the vocabulary: {found}"
    assert {found["name"].split()[0] for found in compilations} == {"block_stats", "block_gradient", "linear_stats"}


def test_linear_stats_uses_wgmma_and_tma(compilations: list[dict]) -> None:
    half = [found for found in compilations if found["name"] == "linear_stats" and found["dtype"] != "float32"]
    assert all(found["wgmma"] for found in half)
    assert {found["dtype"] for found in half if found["tma"]} == {"bfloat16", "float16"}
    assert all(
        not found["wgmma"] and found["fma"] for found in compilations if found["name"] == "linear_stats" and found not in half
    )
