"""What dynamic sampling counts, and its estimate of how many groups it needs."""

from dataclasses import dataclass


@dataclass
class SamplingStats:
    """What one collect did. Groups and tokens are accounted for without a rest:

    groups_sampled + groups_carried_in == groups_resolved + groups_cut + groups_carried_out
    tokens_generated + tokens_carried_in
        == tokens_kept + tokens_filtered_correct + tokens_filtered_wrong + tokens_aborted + tokens_carried_out
    """

    groups_sampled: int = 0  # taken from the prompt stream and started
    groups_carried_in: int = 0  # left over by the collect before
    groups_resolved: int = 0  # finished, scored and judged: kept or filtered
    groups_kept: int = 0
    groups_all_correct: int = 0  # resolved with every response correct (with dynamic off they are kept all the same)
    groups_all_wrong: int = 0  # resolved with no response correct
    groups_cut: int = 0  # started, then not needed: their prompts went back to the stream
    groups_carried_out: int = 0  # left over for the next collect, finished or not

    tokens_generated: int = 0  # by the engine, in this collect
    tokens_carried_in: int = 0
    tokens_kept: int = 0
    tokens_filtered_correct: int = 0  # in filtered groups with every response correct
    tokens_filtered_wrong: int = 0  # in all other filtered groups
    tokens_aborted: int = 0  # in cut groups, finished or partial; in responses that a publish interrupted, sampled anew
    tokens_carried_out: int = 0

    budget_used_up: bool = False  # the batch isn't full because no further group was allowed
    accuracy: float = 0.0  # share of correct responses in all resolved groups, filtered ones included
    response_length_mean: float = 0.0  # tokens, all resolved groups
    response_length_max: int = 0
    cut_share: float = 0.0  # share of responses in resolved groups that ended at the length limit
    acceptance_rate: float = 0.0  # estimated share of groups that are kept, for the next collect


@dataclass
class AcceptanceRate:
    """Share of groups that are kept: posterior mean under a uniform prior, older steps fading out."""

    kept: float = 0.0
    resolved: float = 0.0

    FADE = 0.7  # weight of what was known before, per step

    @property
    def estimate(self) -> float:
        return (self.kept + 1.0) / (self.resolved + 2.0)

    def update(self, kept: bool) -> None:
        self.kept += kept
        self.resolved += 1

    def fade(self) -> "AcceptanceRate":
        return AcceptanceRate(self.kept * self.FADE, self.resolved * self.FADE)
