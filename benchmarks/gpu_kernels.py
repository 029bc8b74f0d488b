"""The parts of benchmarks/gpu_check.py that need torch and triton only: the Triton kernels and the operator built from them."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_report import Report
from dapo_megatron.ops import torch_kernels
from dapo_megatron.ops.linear_logprob import linear_logprob, linear_loss
from dapo_megatron.ops.parts import Softmax, whole_softmax

VOCAB = 151_936
TEMPERATURE = 0.6
BLOCK_LIMIT = 2e-5  # exponentials on a GPU are off by two units in the last place
LINEAR_LIMIT = 1e-4  # and sums of products in fp32 by 1e-5 or so
GRADIENT_LIMIT = {"fp32": 1e-4, "bf16": 2e-2}  # of the norm; the logits' gradient is rounded to the inputs' dtype
CPU_LOGITS = {"fp32": 1e-4, "bf16": 2e-2}  # a CPU's matmul rounds the logits too; cuBLAS gives them in fp32


def error(ours: Tensor, exact: Tensor) -> float:
    """The largest difference, against values of at least 1."""
    return float(((ours.double() - exact).abs() / exact.abs().clamp(min=1.0)).max()) if exact.numel() else 0.0


def norm_error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def numbers(*shape: int, seed: int, scale: float = 1.0, device: str) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(device)


def check_block(report: Report, name: str, block: Tensor) -> None:
    """block_stats and block_gradient of `block` [rows, c], the first half of a vocabulary."""
    from dapo_megatron.ops import triton_kernels

    (rows, tokens), device = block.shape, str(block.device)
    index = torch.randint(0, 2 * rows, (tokens,), generator=torch.Generator().manual_seed(1)).to(device)
    half = (block.float() * (1 / TEMPERATURE)).double()  # the product is defined in fp32
    exact = torch_kernels.block_stats(half, index, 1.0)
    ours = triton_kernels.block_stats(block, index, 1 / TEMPERATURE)
    report.check(f"block_stats, {name}", error(ours, exact), BLOCK_LIMIT)

    logits = torch.cat([half, numbers(rows, tokens, seed=2, device=device).double()]).requires_grad_()
    d = numbers(2, tokens, seed=3, device=device)
    logp = logits.log_softmax(0)
    of_targets, entropy = logp.gather(0, index[None])[0], -(logp.exp() * logp).sum(0)
    (wanted,) = torch.autograd.grad((of_targets * d[0] + entropy * d[1]).sum(), logits)
    top = logits.detach().amax(0)
    log_total = (logits.detach() - top).exp().sum(0).log()
    softmax = Softmax(*(x.detach().float() for x in (of_targets, entropy, top, log_total)))
    gradient = triton_kernels.block_gradient(block, softmax, index, d[0], d[1], 1 / TEMPERATURE, torch.float32)
    report.check(f"block_gradient, {name}", norm_error(gradient, wanted[:rows] / TEMPERATURE), BLOCK_LIMIT)


def check_linear_stats(report: Report, name: str, hidden: Tensor, weight: Tensor) -> None:
    from dapo_megatron.ops import triton_kernels

    generator = torch.Generator().manual_seed(1)
    index = torch.randint(-9, len(weight) + 9, (len(hidden),), generator=generator).to(hidden.device)
    exact = torch_kernels.block_stats(weight.double() @ hidden.double().t(), index, 1 / TEMPERATURE)
    ours, again = (triton_kernels.linear_stats(hidden, weight, index, 1 / TEMPERATURE) for _ in range(2))
    report.check(f"linear_stats, {name}", error(ours, exact), LINEAR_LIMIT)
    report.check_true(f"linear_stats, {name}: the same bits again", torch.equal(ours, again))


Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # hidden, weight, targets, d [2, R]: of log-probs and entropies


def operator(inputs: Inputs, implementation: Any, fused: bool, main_grad: float | None = None) -> list[Tensor]:
    """[log-probs, gradient of hidden, of the weight] by linear_loss (fused) or linear_logprob, in tiles of 64 tokens."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in inputs[:2])
    targets, (d_logprob, d_entropy) = inputs[2:]
    if main_grad is not None:
        weight.main_grad = torch.full(weight.shape, main_grad, device=weight.device)  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    settings = {"temperature": TEMPERATURE, "vocab_size": len(weight) - 3, "tile_tokens": 64, "implementation": implementation}
    if fused:

        def loss_fn(rows: slice, logprob: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
            return (logprob * d_logprob[rows]).sum() + (entropy * d_entropy[rows]).sum(), logprob.detach()

        loss, outputs = linear_loss(hidden, weight, targets, loss_fn, **settings)
        logprob = torch.cat(outputs)
    else:
        logprob, entropy = linear_logprob(hidden, weight, targets, **settings)
        loss = (logprob * d_logprob).sum() + (entropy * d_entropy).sum()
    loss.backward()
    gradient = weight.grad if main_grad is None else weight.main_grad - main_grad  # type: ignore[attr-defined]
    assert hidden.grad is not None and gradient is not None
    return [logprob.detach(), hidden.grad, gradient]


def check_operator(report: Report, implementation: str, dtype: str, inputs: Inputs) -> None:
    exact = operator((inputs[0].double(), inputs[1].double(), inputs[2], inputs[3].double()), "reference", False)
    limit = LINEAR_LIMIT if inputs[0].is_cuda else CPU_LOGITS[dtype]
    for fused in (False, True):
        for main_grad in (None, 1.0):
            name = f"{'linear_loss' if fused else 'linear_logprob'}, {dtype}{'' if main_grad is None else ', main_grad'}"
            with report.going_on(name):
                ours, again = (operator(inputs, implementation, fused, main_grad) for _ in range(2))
                report.check(f"{name}: log-probs", error(ours[0], exact[0]), limit)
                for what, mine, theirs in zip(("hidden", "weight"), ours[1:], exact[1:], strict=True):
                    report.check(f"{name}: gradient of {what}", norm_error(mine, theirs), GRADIENT_LIMIT[dtype])
                same = all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
                report.check_true(f"{name}: the same bits again", same)


def check_kernels(report: Report, device: str) -> None:
    """On a CPU the Triton kernels are checked under TRITON_INTERPRET=1; without it the operator alone, on torch's kernels."""
    with_triton = device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    rows, tokens, width = (19_001, 1037, 896) if device == "cuda" else (75, 37, 72)
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        weight = numbers(rows, width, seed=5, scale=2 / width**0.5, device=device).to(kind)
        hidden = numbers(tokens, width, seed=6, device=device).to(kind)
        if with_triton:
            for what, scale, c in (("many tokens", 3.0, tokens), ("one token", 3.0, 1), ("logits of 1e4", 1e4, tokens)):
                with report.going_on(f"blocks, {dtype}, {what}"):
                    block = numbers(rows, c, seed=4, scale=scale, device=device).to(kind)
                    check_block(report, f"{dtype}, {what}", block)
            for columns in (width, width - 3):
                with report.going_on(f"linear_stats, {dtype}, width {columns}"):
                    cut = (x[:, :columns].contiguous() for x in (hidden, weight))
                    check_linear_stats(report, f"{dtype}, width {columns}", *cut)
        targets = torch.randint(0, rows - 3, (tokens,), generator=torch.Generator().manual_seed(7)).to(device)
        inputs = hidden, weight, targets, numbers(2, tokens, seed=8, device=device)
        with report.going_on(f"operator, {dtype}"):
            check_operator(report, "triton" if with_triton else "torch", dtype, inputs)


# --- speed ---


def seconds(run: Callable[[], Any], device: str) -> float:
    """The fastest of three, after one that compiles."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def in_tiles(hidden: Tensor, weight: Tensor) -> None:
    for tile in hidden.split(2048):
        torch.mm(weight, tile.t())


@torch.no_grad()
def check_speed(report: Report, device: str) -> None:
    from dapo_megatron.ops import triton_kernels

    vocab, tokens, widths = (VOCAB, 8192, (896, 1536, 5120)) if device == "cuda" else (75, 37, (72,))
    for width in widths:
        with report.going_on(f"speed, hidden {width}"):
            weight = torch.randn(vocab, width, device=device, dtype=torch.bfloat16) / width**0.5
            hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
            targets = torch.randint(0, vocab, (tokens,), device=device)
            ways: dict[str, Callable[[], Any]] = {
                "cuBLAS + block_stats": partial(linear_logprob, hidden, weight, targets, implementation="triton"),
                "linear_stats": partial(triton_kernels.linear_stats, hidden, weight, targets, 1.0),
                "the matmul alone": partial(in_tiles, hidden, weight),
            }
            times = {name: seconds(run, device) for name, run in ways.items()}
            for name, taken in times.items():
                report.measured(f"hidden {width}, {name}", 2 * tokens * width * vocab / taken / 1e12, "TFLOP/s")
            fastest = min(list(times)[:2], key=times.__getitem__)
            report.say(f"        hidden {width}: faster for log-probs alone is {fastest}")
            one, other = whole_softmax(ways["linear_stats"](), None).logprob, ways["cuBLAS + block_stats"]()[0]
            limit = LINEAR_LIMIT if device == "cuda" else CPU_LOGITS["bf16"]
            report.check(f"hidden {width}: they agree", error(one, other.double()), limit)
