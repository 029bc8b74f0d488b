"""Soft overlong punishment."""

from collections.abc import Sequence

import numpy as np

# Of a reward's parts: rewards are float32, and a group's are added and squared before they become advantages.
MAX_REWARD = 1e9


def soft_overlong_penalty(
    lengths: Sequence[int] | np.ndarray, max_response_tokens: int, cache_tokens: int, factor: float = 1.0
) -> np.ndarray:
    """Equation 13 of arXiv 2503.14476, times `factor`: float32 of the shape of `lengths`, always in [-factor, 0].

    `lengths` are response lengths in tokens, EOS included, prompt excluded. Up to max_response_tokens - cache_tokens
    the penalty is 0, from there it falls linearly to -factor at max_response_tokens. ValueError for a cache that
    doesn't fit into the response or a negative factor.
    """
    if not 0 <= cache_tokens <= max_response_tokens:
        raise ValueError(
            f"reward.overlong.cache_tokens: {cache_tokens} must be between 0 and "
            f"rollout.max_response_tokens ({max_response_tokens}); lower it"
        )
    if not 0 <= factor <= MAX_REWARD:
        raise ValueError(
            f"reward.overlong.penalty_factor: {factor} must be from 0 to {MAX_REWARD:g}; 0 switches the punishment off"
        )
    excess = np.asarray(lengths, dtype=np.float64) - (max_response_tokens - cache_tokens)
    # without a cache the ramp is a step: only what is beyond the limit is punished
    share = excess / cache_tokens if cache_tokens else (excess > 0).astype(np.float64)
    # + 0.0 turns -0.0 into 0.0
    return (-factor * np.clip(share, 0.0, 1.0) + 0.0).astype(np.float32)
