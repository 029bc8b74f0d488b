"""The element-wise work on a block of logits in plain torch: for CPUs, and for any device without Triton.

A block is [rows, c], vocabulary-major, and small enough for a core's cache, so that going over it several times costs little:
what is slow is the memory, not the arithmetic. ops/triton_kernels.py has the same two functions for GPUs.
"""

import torch
from torch import Tensor

from dapo_megatron.ops.parts import Softmax


def block_stats(block: Tensor, index: Tensor, inverse_temperature: float, keep: bool) -> Tensor:
    """Statistics [4, c] (ops.parts) of a block's logits before the temperature.

    index [c] is the row of every token's target, outside [0, rows) if it isn't in this block. With `keep` the block is
    overwritten with exp(l - max), which block_gradient wants.
    """
    rows = block.shape[0]
    logits = block.to(torch.promote_types(block.dtype, torch.float32))
    if inverse_temperature != 1.0:
        logits = logits * inverse_temperature
    top = logits.amax(0)
    owned = (index >= 0) & (index < rows)
    target = torch.where(owned, logits.gather(0, index.clamp(0, rows - 1)[None])[0], 0.0)
    below = logits.sub_(top) if logits is not block else logits - top
    exp = torch.exp(below)
    stats = torch.stack([top, exp.sum(0), target, below.mul_(exp).sum(0)])
    if keep:
        block.copy_(exp)
    return stats


def block_gradient(
    block: Tensor,
    block_max: Tensor,
    softmax: Softmax,
    index: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor | None,
    inverse_temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """[rows, c] of `dtype`: the gradient of the logits before the temperature. `block` is as block_stats left it (it is
    overwritten), block_max that function's maximum [c].

    With p = softmax(l) and H its entropy: d l = d_logprob * (onehot - p) - d_entropy * p * (log p + H).
    """
    scale = torch.exp((block_max - softmax.top) - softmax.log_total)  # of block_stats' exponentials to p
    exp = block.to(scale.dtype)
    if d_entropy is None:
        gradient = exp.mul_(scale * d_logprob * -inverse_temperature)
    else:
        p = exp.mul_(scale)
        logp = p.clamp(min=torch.finfo(p.dtype).tiny).log_()  # where p is 0 so is the product
        gradient = p.mul_(logp.add_(softmax.entropy).mul_(d_entropy).add_(d_logprob)).mul_(-inverse_temperature)
    owned = ((index >= 0) & (index < block.shape[0])).nonzero()[:, 0]
    if len(owned):
        logprob = softmax.logprob[owned]
        target = -torch.expm1(logprob) * d_logprob[owned]  # 1 - p would be all rounding where p is near 1
        if d_entropy is not None:
            target -= logprob.exp() * (logprob + softmax.entropy[owned]) * d_entropy[owned]
        gradient[index[owned], owned] = target * inverse_temperature
    return gradient.to(dtype)
