"""What the ratio is against, and how far the policy that is trained is from the one that sampled.

Three policies meet in a token: the one being updated, the trainer's before the step's first update, and the engine's that
sampled it. The last two differ by rounding and kernels, and by updates where a token is stale.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

# exp(300)^2, times any number of tokens, is a finite float64, and exp(-300)^2 isn't 0. Real differences are far smaller.
MAX_LOG_WEIGHT = 300.0


def old_policy(trainer: Tensor, engine: Tensor, stale: Tensor, importance_cap: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """Old log-probs and importance weights [R], by the log-probs of the trainer's policy before the step and of the engine's.

    Without a cap a stale token's old log-prob is the engine's, as the weights that sampled it are gone, all others are the
    trainer's, and there are no weights. With one all are the trainer's, and min(exp(trainer - engine), cap) makes up for the
    engine's having sampled.
    """
    if not importance_cap:
        return torch.where(stale, engine, trainer), None
    return trainer, (trainer - engine).exp().clamp(max=importance_cap)


def drift_stats(trainer: Tensor, engine: Tensor, stale: Tensor, importance_cap: float = 0.0) -> dict[str, Tensor]:
    """Float64 scalars about R valid tokens, to be added up by objective.merge_stats:

    - fresh_tokens, stale_tokens; diff_sum, stale_diff_sum: sums of |trainer - engine| over each; diff_max over fresh ones
    - weight_sum, weight_square_sum: of exp(trainer - engine) and its square, not truncated
    - with a cap, truncated: tokens whose weight it makes smaller
    """
    log_weight = trainer.double() - engine.double()
    fresh_diff, stale_diff = log_weight.abs().where(~stale, 0.0), log_weight.abs().where(stale, 0.0)
    weight = log_weight.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    sums = {
        "fresh_tokens": ~stale,
        "stale_tokens": stale,
        "diff_sum": fresh_diff,
        "stale_diff_sum": stale_diff,
        "weight_sum": weight,
        "weight_square_sum": weight.square(),
    }
    if importance_cap:
        sums["truncated"] = weight > importance_cap
    stats = {name: value.sum(dtype=torch.float64) for name, value in sums.items()}
    stats["diff_max"] = fresh_diff.max() if len(fresh_diff) else fresh_diff.sum()
    return stats


def effective_sample_size(stats: Mapping[str, float]) -> float:
    """(sum of w)^2 / (N * sum of w^2), as a share of the N tokens: 1 if all weigh the same, 1 / N if one counts alone."""
    num_tokens = stats["fresh_tokens"] + stats["stale_tokens"]
    return stats["weight_sum"] ** 2 / (num_tokens * stats["weight_square_sum"])
