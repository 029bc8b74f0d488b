"""Triton kernels of the fused log-prob operator, for Hopper GPUs (sm_90).

block_stats and block_gradient do the element-wise work on a block of logits that cuBLAS has made: the same functions as in
ops.torch_kernels. linear_stats is the form without gradient in one kernel: its logits never leave the registers. Which is
faster for old log-probs, linear_stats or cuBLAS with block_stats, isn't known before it is measured on a GPU:
benchmarks/gpu_check.py does both.

No atomics and no autotuning: tiles and splits of the vocabulary follow from shapes and dtypes alone, so that the same call
always adds in the same order. Everything is upcast to fp32 before arithmetic. Multiplications and additions aren't fused:
l - max must be exactly 0 at the maximum, which an fma that skips the rounding of l = logit / temperature breaks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dapo_megatron.ops.parts import NO_ROWS, Softmax, merge_parts

EMPTY = tl.constexpr(NO_ROWS)
PROGRAMS = 4 * 132  # about as many as a launch should have: four for each multiprocessor of an H100 or H200

# Launch parameters. tests/unit/test_triton_kernels.py compiles with these for sm_90 and asserts that nothing spills.
# By bytes of an element: 256 threads with 16 bytes each cover LANES rows of TOKENS tokens. The next STACK - 1 times as many
# rows are the same threads', so that the loop over the vocabulary needs no exchange between threads.
STATS = {
    size: {"STACK": 4, "LANES": 32 // size, "TOKENS": 128, "num_warps": 8, "enable_fp_fusion": False} for size in (2, 4)
}  # fmt: skip
GRADIENT = {"ROWS": 16, "STEPS": 8, "TOKENS": 128, "num_warps": 8, "enable_fp_fusion": False}
# Two warp groups of 64 tokens x 256 rows: the widest wgmma, and the fewest bytes from L2 per multiplication.
TMA_TILE = {"TOKENS": 128, "ROWS": 256, "DEPTH": 64, "num_warps": 8, "num_stages": 4, "enable_fp_fusion": False}
# For what TMA doesn't take (rows that aren't multiples of 16 bytes) and for fp32, which tensor cores would round to tf32.
PLAIN_TILE = {"TOKENS": 64, "ROWS": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
GROUP = 16  # token blocks that go through the vocabulary side by side: their hidden states and the weight's tiles share L2


@triton.jit
def _online(top, total, weighted, logits, AXIS: tl.constexpr):
    """Statistics (rows 0, 1 and 3 of ops.parts) extended by more logits along AXIS."""
    new = tl.maximum(top, tl.max(logits, AXIS))
    below = logits - tl.expand_dims(new, AXIS)
    exp = tl.exp(below)
    rise = top - new
    scale = tl.exp(rise)
    weighted = (weighted + rise * total) * scale + tl.sum(below * exp, AXIS)
    return new, total * scale + tl.sum(exp, AXIS), weighted


@triton.jit
def _load(column, token, tokens):
    """[TOKENS] of a vector with one element a token."""
    return tl.load(column + token, mask=token < tokens, other=0)


@triton.jit
def _store_part(parts, split, token, tokens, top, total, target, weighted):
    """One split's statistics [TOKENS] into parts [splits, 4, tokens]."""
    place = parts + split.to(tl.int64) * 4 * tokens + token
    tl.store(place, top, mask=token < tokens)
    tl.store(place + tokens, total, mask=token < tokens)
    tl.store(place + 2 * tokens, target, mask=token < tokens)
    tl.store(place + 3 * tokens, weighted, mask=token < tokens)


@triton.jit
def block_stats_kernel(
    block, index, parts, rows, tokens, stride, steps, inverse_temperature,
    STACK: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): tokens i * TOKENS on, `steps` steps of STACK * LANES rows from the j-th split on."""
    flat = tl.arange(0, LANES * TOKENS)  # the lanes one after the other
    split = tl.program_id(1)
    token = (tl.program_id(0) * TOKENS + flat % TOKENS)[None, :]
    lane = tl.arange(0, STACK)[:, None] * LANES + (flat // TOKENS)[None, :]
    first = split * steps * STACK * LANES
    top = tl.full((LANES * TOKENS,), EMPTY, tl.float32)
    total = tl.zeros((LANES * TOKENS,), tl.float32)
    weighted = tl.zeros((LANES * TOKENS,), tl.float32)
    place = block + first.to(tl.int64) * stride + lane * stride + token
    for row in range(first, min(first + steps * STACK * LANES, rows), STACK * LANES):
        mask = (row + lane < rows) & (token < tokens)
        logits = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        logits = tl.where(mask, logits * inverse_temperature, EMPTY)
        place += STACK * LANES * stride
        top, total, weighted = _online(top, total, weighted, logits, 0)

    top, total, weighted = top.reshape(LANES, TOKENS), total.reshape(LANES, TOKENS), weighted.reshape(LANES, TOKENS)
    best = tl.max(top, 0)
    rise = top - best[None, :]
    scale = tl.exp(rise)
    weighted = tl.sum((weighted + rise * total) * scale, 0)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # The target's row is known: one program of the token loads it, nobody searches for it.
    row = _load(index, token, tokens)
    owned = (token < tokens) & (row >= 0) & (row < rows) & (split == 0)
    target = tl.load(block + row * stride + token, mask=owned, other=0.0).to(tl.float32) * inverse_temperature
    _store_part(parts, split, token, tokens, best, tl.sum(total * scale, 0), target, weighted)


@triton.jit
def block_gradient_kernel(
    block, out, top, log_total, entropy, at_target, index, d_logprob, d_entropy, rows, tokens, stride, inverse_temperature,
    ROWS: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): STEPS * ROWS rows of TOKENS tokens. `at_target` is p - 1 at every token's target; out is contiguous."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1) * STEPS * ROWS
    top = _load(top, token, tokens)[None, :]
    log_total = _load(log_total, token, tokens)[None, :]
    at_target = _load(at_target, token, tokens)[None, :]
    goal = _load(index, token, tokens).to(tl.int32)[None, :]
    d_logprob = (_load(d_logprob, token, tokens) * inverse_temperature)[None, :]
    if d_entropy is not None:
        entropy = _load(entropy, token, tokens)[None, :]
        d_entropy = (_load(d_entropy, token, tokens) * inverse_temperature)[None, :]
    for start in range(first, min(first + STEPS * ROWS, rows), ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (token < tokens)[None, :]
        logits = tl.load(block + row.to(tl.int64) * stride + token[None, :], mask=mask, other=0.0).to(tl.float32)
        logp = (logits * inverse_temperature - top) - log_total
        p = tl.exp(logp)
        gradient = tl.where(row == goal, at_target, p) * -d_logprob
        if d_entropy is not None:
            gradient -= p * (logp + entropy) * d_entropy
        tl.store(out + row.to(tl.int64) * tokens + token[None, :], gradient.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _tile(
    source, first, k, rows, depth, stride,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """[ROWS, DEPTH] of a [rows, depth] matrix from (first, k) on, zeros outside it. source: its descriptor (TMA) or pointer."""
    if TMA:
        tile = source.load([first, k])
    else:
        row = first + tl.arange(0, ROWS)[:, None]
        column = k + tl.arange(0, DEPTH)[None, :]
        tile = tl.load(source + row.to(tl.int64) * stride + column, mask=(row < rows) & (column < depth), other=0.0)
    return tile.to(tl.float32) if UPCAST else tile


@triton.jit
def linear_stats_kernel(
    hidden, weight, index, parts, tokens, rows, depth, hidden_stride, weight_stride, steps, splits, inverse_temperature,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens through one split, `steps` tiles of ROWS vocabulary rows, with online statistics.

    Programs that run at the same time should share what they read: GROUP token blocks, then the next split of the same.
    """
    group = tl.program_id(0) // (GROUP * splits)
    within = tl.program_id(0) % (GROUP * splits)
    members = min(tl.cdiv(tokens, TOKENS) - group * GROUP, GROUP)
    split = within // members
    first_token = (group * GROUP + within % members) * TOKENS
    token = first_token + tl.arange(0, TOKENS)
    goal = _load(index, token, tokens).to(tl.int32)
    goal = tl.where(goal < rows, goal, -1)[:, None]  # a tile may reach beyond the rows
    top = tl.full((TOKENS,), EMPTY, tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    target = tl.zeros((TOKENS,), tl.float32)
    weighted = tl.zeros((TOKENS,), tl.float32)
    first = split * steps * ROWS
    for start in tl.range(first, min(first + steps * ROWS, rows), ROWS, flatten=True):
        logits = tl.zeros((TOKENS, ROWS), tl.float32)
        for k in range(0, depth, DEPTH):
            a = _tile(hidden, first_token, k, tokens, depth, hidden_stride, TOKENS, DEPTH, TMA, UPCAST)
            b = _tile(weight, start, k, rows, depth, weight_stride, ROWS, DEPTH, TMA, UPCAST)
            logits = tl.dot(a, b.T, logits, input_precision="ieee")
        row = start + tl.arange(0, ROWS)[None, :]
        logits = tl.where(row < rows, logits * inverse_temperature, EMPTY)
        target += tl.sum(tl.where(row == goal, logits, 0.0), 1)
        top, total, weighted = _online(top, total, weighted, logits, 1)
    _store_part(parts, split, token, tokens, top, total, target, weighted)


def _splits(rows: int, step_rows: int, token_blocks: int) -> tuple[int, int]:
    """(splits, steps per split) of the vocabulary: about PROGRAMS programs, none without a step."""
    steps = max(1, triton.cdiv(rows, step_rows))
    per_split = triton.cdiv(steps, max(1, PROGRAMS // max(1, token_blocks)))
    return triton.cdiv(steps, per_split), per_split


def block_stats(block: Tensor, index: Tensor, inverse_temperature: float) -> Tensor:
    """Statistics fp32 [4, c] (ops.parts) of a block's logits before the temperature; the block is left as it is.

    block [rows, c] fp32, bf16 or fp16, with stride(1) == 1. index int64 [c] is the row of every token's target, outside
    [0, rows) if it isn't in this block.
    """
    rows, tokens = block.shape
    assert block.stride(1) == 1 or tokens <= 1
    config = STATS[block.element_size()]
    token_blocks = triton.cdiv(tokens, config["TOKENS"])
    splits, steps = _splits(rows, config["STACK"] * config["LANES"], token_blocks)
    parts = torch.empty(splits, 4, tokens, dtype=torch.float32, device=block.device)
    args = (block, index, parts, rows, tokens, block.stride(0), steps, inverse_temperature)
    block_stats_kernel[(token_blocks, splits)](*args, **config)
    return merge_parts(parts)


def block_gradient(
    block: Tensor,
    softmax: Softmax,
    index: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor | None,
    inverse_temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """[rows, c] of `dtype`: the gradient of the logits before the temperature; see ops.torch_kernels.

    block and index as for block_stats; softmax fp32 over the whole vocabulary. A contiguous block of
    that dtype is overwritten and returned.
    """
    rows, tokens = block.shape
    assert block.stride(1) == 1 or tokens <= 1
    out = block if block.dtype == dtype and block.is_contiguous() else block.new_empty(rows, tokens, dtype=dtype)
    at_target = torch.expm1(softmax.logprob)  # p - 1 would be all rounding where p is near 1
    columns = (softmax.top, softmax.log_total, softmax.entropy, at_target, index, d_logprob, d_entropy)
    args = (*(None if x is None else x.contiguous() for x in columns), rows, tokens, block.stride(0), inverse_temperature)
    grid = (triton.cdiv(tokens, GRADIENT["TOKENS"]), triton.cdiv(rows, GRADIENT["STEPS"] * GRADIENT["ROWS"]))
    block_gradient_kernel[grid](block, out, *args, **GRADIENT)
    return out


def _tma_takes(x: Tensor) -> bool:
    """TMA reads matrices of 2-byte elements whose rows begin at multiples of 16 bytes."""
    return x.element_size() == 2 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def linear_stats(hidden: Tensor, weight: Tensor, index: Tensor, inverse_temperature: float) -> Tensor:
    """block_stats of weight @ hidden.T, fp32 [4, c], without the logits in memory: for log-probs that need no gradient.

    hidden [c, width], weight [rows, width], both bf16, fp16 or fp32 (multiplied in fp32, not tf32); index as for block_stats.
    """
    (tokens, depth), rows = hidden.shape, weight.shape[0]
    if not tokens or not rows:
        stats = hidden.new_zeros(4, tokens, dtype=torch.float32)
        stats[0] = NO_ROWS
        return stats
    hidden, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, weight))
    tma = _tma_takes(hidden) and _tma_takes(weight)
    config = TMA_TILE if tma else PLAIN_TILE
    token_blocks = triton.cdiv(tokens, config["TOKENS"])
    splits, steps = _splits(rows, config["ROWS"], token_blocks)
    parts = torch.empty(splits, 4, tokens, dtype=torch.float32, device=hidden.device)
    sources: tuple = (hidden, weight)
    if tma:
        tiles = ([config[side], config["DEPTH"]] for side in ("TOKENS", "ROWS"))
        sources = tuple(TensorDescriptor.from_tensor(x, tile) for x, tile in zip(sources, tiles, strict=True))
    args = (*sources, index, parts, tokens, rows, depth, hidden.stride(0), weight.stride(0), steps, splits, inverse_temperature)
    upcast = triton.knobs.runtime.interpret  # the interpreter's dot takes the bits of bf16 for integers
    linear_stats_kernel[(token_blocks * splits,)](*args, GROUP=GROUP, TMA=tma, UPCAST=upcast, **config)
    return merge_parts(parts)
