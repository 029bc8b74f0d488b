"""Advantages inside one prompt's group (arXiv 2503.14476, equation 9; mean only: Dr. GRPO)."""

import numpy as np

MODES = ("group_norm", "mean_only")


def group_advantages(rewards: np.ndarray, mode: str = "group_norm", eps: float = 1e-6) -> np.ndarray:
    """Advantage of each of a group's G responses: rewards [G] -> float32 [G].

    `group_norm` is (R - mean) / (std + eps) with the unbiased std (ddof 1), `mean_only` is R - mean. `rewards` are
    the shaped ones, of all responses, those cut at the limit included. A group of one, or without spread, says
    nothing: exactly 0. Raises ValueError for an unknown mode and for rewards that aren't finite.
    """
    if mode not in MODES:
        raise ValueError(f"algorithm.advantage: {mode!r} is unknown; use one of {', '.join(MODES)}")
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards: {values.tolist()} holds a value that isn't finite; mend the reward function")
    # Tested on the values, not on the std: rounding in the mean would turn equal rewards into +-1e-17 / eps.
    if len(values) < 2 or values.min() == values.max():
        return np.zeros(len(values), np.float32)
    centred = values - values.mean()
    if mode == "group_norm":
        centred /= values.std(ddof=1) + eps
    return centred.astype(np.float32)
