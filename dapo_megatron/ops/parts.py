"""Softmax statistics of a vocabulary in parts: of blocks of rows, and of the ranks that the rows are sharded over.

A part's statistics are fp32 (fp64 for fp64 input) [4, c] over its rows' logits l (after the temperature), for each of c tokens:

    0  max of l
    1  sum of exp(l - max)
    2  the target's l, 0 if the target isn't among these rows
    3  sum of (l - max) * exp(l - max)

Differences to the maximum, not l itself, keep logits of 1e4 from swallowing the digits of log-prob and entropy.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

NO_ROWS = -1e30  # the maximum over no rows; -inf would turn differences into nan


def merge_parts(parts: Tensor) -> Tensor:
    """[n, 4, c] -> [4, c]: the statistics of all rows together."""
    if len(parts) == 1:
        return parts[0]
    maxima, sums, target, weighted = parts.unbind(1)
    top = maxima.amax(0)
    below = maxima - top
    scale = below.exp()
    return torch.stack([top, (sums * scale).sum(0), target.sum(0), ((weighted + below * sums) * scale).sum(0)])


class Softmax(NamedTuple):
    """Each [c]. log softmax(l) = (l - top) - log_total."""

    logprob: Tensor  # of the target
    entropy: Tensor  # nats
    top: Tensor
    log_total: Tensor


def whole_softmax(shard: Tensor, group: dist.ProcessGroup | None) -> Softmax:
    """From this rank's statistics [4, c]: one all-gather, combined on every rank in the same way."""
    parts = [shard]
    if group is not None and group.size() > 1:
        parts = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(parts, shard.contiguous(), group=group)
    top, total, target, weighted = merge_parts(torch.stack(parts))
    log_total = total.log()
    return Softmax((target - top) - log_total, log_total - weighted / total, top, log_total)
