"""Log-prob and entropy of given tokens from hidden states and the output weight, without ever holding all logits.

The vocabulary may be sharded over a tensor-parallel group. Tokens are worked off in chunks: one chunk's logits exist at a
time, in the forward and again (recomputed) in the backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _chunk_logits(hidden: Tensor, weight: Tensor, temperature: float, num_rows: int) -> Tensor:
    """fp32 (fp64 for fp64 input) [chunk, vocab/tp]; rows past the real vocabulary are padding and get -inf."""
    logits = (hidden @ weight.t()).to(_compute_dtype(hidden)).div_(temperature)
    if num_rows < logits.shape[1]:
        logits[:, num_rows:] = float("-inf")
    return logits


def _combine(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per-shard statistics [tp, 4, R] (max, sum of exp(l - max), target logit, sum of l * exp(l - max)) -> (log-sum-exp,
    target logit, entropy), each [R]."""
    maxima, sums, target, weighted = parts.unbind(1)
    top = maxima.amax(0)
    scale = torch.exp(maxima - top)
    total = (sums * scale).sum(0)
    lse = top + total.log()
    entropy = lse - (weighted * scale).sum(0) / total
    return lse, target.sum(0), entropy


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocab: tuple[int, int],
        group: dist.ProcessGroup | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        start, num_rows = vocab
        local = targets - start
        owned = (local >= 0) & (local < num_rows)
        index = local.clamp(0, max(num_rows - 1, 0))
        stats = torch.empty(4, len(targets), dtype=_compute_dtype(hidden), device=hidden.device)
        for lo in range(0, len(targets), chunk):
            rows = slice(lo, lo + chunk)
            logits = _chunk_logits(hidden[rows], weight, temperature, num_rows)
            top = logits.amax(1) if num_rows else logits.new_full((len(logits),), -1e30)
            exp = torch.exp(logits - top[:, None])
            stats[0, rows] = top
            stats[1, rows] = exp.sum(1)
            stats[2, rows] = torch.where(owned[rows], logits.gather(1, index[rows, None])[:, 0], 0.0)
            stats[3, rows] = (exp * logits.masked_fill_(logits == float("-inf"), 0.0)).sum(1)
        parts = [stats]
        if group is not None and group.size() > 1:
            parts = [torch.empty_like(stats) for _ in range(group.size())]
            dist.all_gather(parts, stats, group=group)
        lse, target, entropy = _combine(torch.stack(parts))
        ctx.save_for_backward(hidden, weight, index, owned, lse, entropy)
        ctx.static = (temperature, num_rows, chunk)
        ctx.set_materialize_grads(False)
        return target - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, index, owned, lse, entropy = ctx.saved_tensors
        temperature, num_rows, chunk = ctx.static
        d_logprob, d_entropy = grads
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=_compute_dtype(hidden))
        for lo in range(0, len(index), chunk):
            rows = slice(lo, lo + chunk)
            logits = _chunk_logits(hidden[rows], weight, temperature, num_rows)
            logp = logits.sub_(lse[rows, None])
            p = logp.exp()
            d_logits = torch.zeros_like(p)
            if d_logprob is not None:
                d_logits -= p * d_logprob[rows, None]
                d_logits.scatter_add_(1, index[rows, None], (d_logprob[rows] * owned[rows])[:, None])
            if d_entropy is not None:  # dH/dlogit = -p (log p + H); at p = 0 the product is 0
                finite = torch.where(p > 0, logp, 0.0)
                d_logits -= p * (finite + entropy[rows, None]) * d_entropy[rows, None]
            d_logits = d_logits.div_(temperature).to(hidden.dtype)
            d_hidden[rows] = d_logits @ weight
            d_weight += d_logits.t() @ hidden[rows]
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None, None


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[targets] and that distribution's entropy in nats.

    hidden [R, hidden], weight [vocab/tp, hidden] (this rank's rows), targets int64 [R] (ids of the whole vocabulary).
    Returns (logprob, entropy), fp32 [R]. Both can be differentiated; an entropy nobody differentiates costs nothing in the
    backward. `vocab_size` excludes padding rows. With a tp_group, hidden's gradient is this rank's part: the caller reduces it.
    """
    rank = tp_group.rank() if tp_group is not None else 0
    start = rank * weight.shape[0]
    total = vocab_size if vocab_size is not None else weight.shape[0] * (tp_group.size() if tp_group is not None else 1)
    num_rows = max(0, min(weight.shape[0], total - start))
    return _LinearLogprob.apply(hidden, weight, targets, temperature, (start, num_rows), tp_group, chunk_tokens)
