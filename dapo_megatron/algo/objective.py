"""DAPO's objective on the tokens of one micro-batch (arXiv 2503.14476, equations 8 and 10), and its statistics."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# exp(20) is about 5e8. A larger ratio has been clipped long ago for A > 0; for A < 0 such a token would drown all
# others, so its term is capped and its gradient is 0. Without a cap exp overflows and 0 * inf turns the gradient into
# nan.
MAX_LOG_RATIO = 20.0


def dapo_objective(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    importance: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (to be minimised) of R response tokens:
    sum of weight * -(importance * min(rho A, clip(rho) A) + entropy_coef * entropy).

    All tensors are [R]; `mask` is bool and what stands at masked places, inf and nan included, has no influence.
    `weights` carry the whole normalisation (aggregation.token_weights). With `dual_clip` c > 1 the term of a token
    with A < 0 is at least c * A; 0 switches that off. `importance` (off_policy.old_policy; without it 1) is a constant: no
    gradient goes into it.

    Returns the loss, a float32 scalar that stays connected to `logprobs` even when nothing is valid, and detached
    float64 scalars over the valid tokens, to be added up by `merge_stats`:

    - num_tokens; loss_sum: sum of weight * loss
    - clipped_high (A > 0 and rho > 1 + clip_high), clipped_low (A < 0 and rho < 1 - clip_low), dual_clipped (A < 0
      and rho > c): number of tokens without gradient
    - ratio_max
    - k1_sum (old - new), k3_sum (exp(d) - 1 - d with d = new - old): estimates of KL(old || new)
    - entropy_sum (0 without `entropy`), prob_sum: probability of the token
    """
    # Masked values are replaced before any arithmetic: 0 * nan would be nan, in the loss or in the gradient.
    zero = torch.zeros((), dtype=torch.float32, device=logprobs.device)
    new = torch.where(mask, logprobs.float(), zero)
    old = torch.where(mask, old_logprobs.float(), zero)
    advantage = torch.where(mask, advantages.float(), zero)
    log_ratio = (new - old).clamp(max=MAX_LOG_RATIO)
    ratio = log_ratio.exp()

    term = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage)
    if dual_clip:
        term = torch.where(advantage < 0, torch.maximum(term, dual_clip * advantage), term)
    if importance is not None:
        term = torch.where(mask, importance.detach().float(), zero) * term
    masked_entropy = zero.expand_as(new) if entropy is None else torch.where(mask, entropy.float(), zero)
    if entropy_coef:  # at 0 no gradient is sent into the entropy: its backward costs a pass over the vocabulary
        term = term + entropy_coef * masked_entropy
    loss_sum = -(torch.where(mask, weights.float(), zero) * term).sum()

    with torch.no_grad():
        positive, negative = mask & (advantage > 0), mask & (advantage < 0)
        sums = {
            "num_tokens": mask,
            "clipped_high": positive & (ratio > 1.0 + clip_high),
            "clipped_low": negative & (ratio < 1.0 - clip_low),
            "dual_clipped": negative & (ratio > (dual_clip or float("inf"))),
            "k1_sum": old - new,
            "k3_sum": torch.expm1(log_ratio) - log_ratio,
            "entropy_sum": masked_entropy,
            "prob_sum": torch.where(mask, new.exp(), zero),
        }
        stats = {name: value.sum(dtype=torch.float64) for name, value in sums.items()}
        stats["loss_sum"] = loss_sum.detach().double()
        stats["ratio_max"] = _max(torch.where(mask, ratio, zero))
    return loss_sum, stats


def _max(values: Tensor) -> Tensor:
    """Largest of non-negative values [R], 0 if there are none."""
    return (values.max() if values.numel() else values.sum()).double()


def merge_stats(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of several micro-batches or ranks as one: names ending in `_max` take the maximum, others add up.

    Works for tensors and plain numbers alike. Raises ValueError if there are no parts or if their names differ.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        if not merged:
            merged = dict(part)
            continue
        if part.keys() != merged.keys():
            odd = sorted(part.keys() ^ merged.keys())
            raise ValueError(f"stats: {odd} not in every part; merge only results of dapo_objective")
        for name, value in part.items():
            merged[name] = max(merged[name], value) if name.endswith("_max") else merged[name] + value
    if not merged:
        raise ValueError("stats: nothing to merge; a mini-batch has at least one micro-batch")
    return merged
