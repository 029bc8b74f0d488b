"""How token losses become one number, as weights: a mini-batch's loss is sum over tokens of weight * loss.

As the weights are data, computed once from the whole mini-batch, no rank or micro-batch divides by a count of its own.
"""

from collections.abc import Sequence

import numpy as np

AGGREGATIONS = ("token", "group_token", "sequence", "constant")


def token_weights(
    masks: Sequence[np.ndarray], groups: Sequence[int], aggregation: str, max_response_tokens: int
) -> list[np.ndarray]:
    """Weights of a mini-batch of S responses: masks bool [L_i], group numbers [S] -> float64 [L_i], 0 where masked.

    With n_i the valid tokens of response i, a valid token of response i in group g weighs

    - `token`: 1 / sum of all n
    - `group_token`: 1 / (groups with a valid token * sum of n in g), equation 12 of arXiv 2503.14476 taken literally
    - `sequence`: 1 / (responses with a valid token * n_i)
    - `constant`: 1 / (S * max_response_tokens), S counting masked responses as well (Dr. GRPO)

    Where nothing is valid, all weights are 0. Raises ValueError for an unknown aggregation.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"algorithm.aggregation: {aggregation!r} is unknown; use one of {', '.join(AGGREGATIONS)}")
    if len(masks) != len(groups):
        raise ValueError(f"groups: {len(groups)} numbers for {len(masks)} responses; give one for each")
    num_valid = np.array([mask.sum() for mask in masks], dtype=np.int64)
    group_valid: dict[int, int] = {}
    for group, count in zip(groups, num_valid, strict=True):
        group_valid[group] = group_valid.get(group, 0) + int(count)

    if aggregation == "token":
        denominators = np.full(len(masks), num_valid.sum())
    elif aggregation == "group_token":
        num_groups = sum(count > 0 for count in group_valid.values())
        denominators = np.array([num_groups * group_valid[group] for group in groups])
    elif aggregation == "sequence":
        denominators = (num_valid > 0).sum() * num_valid
    else:
        denominators = np.full(len(masks), len(masks) * max_response_tokens)
    # Only responses without a valid token can meet a denominator of 0: their weights are 0 whatever stands there.
    scales = 1.0 / np.maximum(denominators, 1)
    return [mask * scale for mask, scale in zip(masks, scales, strict=True)]
