"""The element-wise work on a block of logits in plain torch: for CPUs, and for any device without Triton.

A block is [rows, c], vocabulary-major, and small enough for a core's cache, so that going over it several times costs little:
what is slow is the memory, not the arithmetic. Exponentials are taken to base 2: torch's exp and log in fp32 are MKL's, several
times slower than exp2 on other makers' CPUs. ops/triton_kernels.py has the same two functions for GPUs.
"""

import math

import torch
from torch import Tensor

from dapo_megatron.ops.parts import Softmax

LOG2_E, LN_2 = math.log2(math.e), math.log(2)


def block_stats(block: Tensor, index: Tensor, inverse_temperature: float) -> Tensor:
    """Statistics [4, c] (ops.parts) of a block's logits before the temperature; the block is left as it is.

    index [c] is the row of every token's target, outside [0, rows) if it isn't in this block.
    """
    rows = block.shape[0]
    logits = block.to(torch.promote_types(block.dtype, torch.float32))
    owned = (index >= 0) & (index < rows)
    target = torch.where(owned, logits.gather(0, index.clamp(0, rows - 1)[None])[0], 0.0) * inverse_temperature
    top = logits.amax(0)
    below = logits - top if logits is block else logits.sub_(top)
    exp = torch.exp2(below.mul_(inverse_temperature * LOG2_E))
    return torch.stack([top * inverse_temperature, exp.sum(0), target, below.mul_(exp).sum(0) * LN_2])


def block_gradient(
    block: Tensor,
    softmax: Softmax,
    index: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor | None,
    inverse_temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """[rows, c] of `dtype`: the gradient of the logits before the temperature. `block` has those logits and may be
    overwritten.

    With p = softmax(l) and H its entropy: d l = d_logprob * (onehot - p) - d_entropy * p * (log p + H).
    """
    below = block.to(softmax.top.dtype)
    if inverse_temperature != 1.0:
        below.mul_(inverse_temperature)
    below.sub_(softmax.top)
    share = torch.exp(-softmax.log_total) * -inverse_temperature  # of exp(below) to -p, and the temperature's derivative
    if d_entropy is None:
        gradient = below.mul_(LOG2_E).exp2_().mul_(share * d_logprob)
    else:
        exp = torch.exp2(below * LOG2_E)
        factor = d_logprob + d_entropy * (softmax.entropy - softmax.log_total)
        gradient = torch.addcmul(share * factor, below, share * d_entropy, out=below).mul_(exp)
    owned = ((index >= 0) & (index < block.shape[0])).nonzero()[:, 0]
    if len(owned):
        logprob = softmax.logprob[owned]
        target = -torch.expm1(logprob) * d_logprob[owned]  # 1 - p would be all rounding where p is near 1
        if d_entropy is not None:
            target -= logprob.exp() * (logprob + softmax.entropy[owned]) * d_entropy[owned]
        gradient[index[owned], owned] = target * inverse_temperature
    return gradient.to(dtype)
