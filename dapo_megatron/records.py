"""What flows through a step: Prompt -> Completion -> Group -> Sample -> MicroBatch.

Arrays are numpy, so that they cross process borders without torch. G is the number of samples per prompt, P a prompt's
and L a response's length in tokens.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One problem, tokenised. `index` is its position in the prompt stream: it never repeats within a run."""

    index: int
    uid: str  # identity of the problem in its data set: the same in every epoch
    token_ids: tuple[int, ...]  # [P]
    gold: str
    data_source: str = ""


@dataclass
class Completion:
    """One sampled response. An EOS that ended it is its last token and belongs to it.

    `finish_reason` is "stop" (EOS or a stop string), "length" (cut at the limit) or "abort" (interrupted, may be continued).
    """

    token_ids: np.ndarray  # int32 [L]
    logprobs: np.ndarray  # float32 [L], at the sampling temperature, by the weights that sampled the token
    versions: np.ndarray  # int32 [L], weight version that sampled each token
    finish_reason: str

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class Group:
    """All G responses to one prompt, scored. `correct` is the raw verdict, `reward` the shaped one that is trained on."""

    prompt: Prompt
    completions: list[Completion]
    texts: list[str]
    correct: np.ndarray  # bool [G]
    raw_reward: np.ndarray  # float32 [G], before any length shaping
    overlong_penalty: np.ndarray  # float32 [G], in [-factor, 0]
    extracted: list[str | None] = field(default_factory=list)  # the answers as the verifier read them
    num_errors: int = 0  # verdicts that failed (an exception, or a time limit) and count as incorrect
    reward_s: float = 0.0  # seconds that reward workers spent on it

    @property
    def reward(self) -> np.ndarray:
        return self.raw_reward + self.overlong_penalty

    @property
    def num_response_tokens(self) -> int:
        return sum(len(c) for c in self.completions)


@dataclass
class Sample:
    """One response as the loss sees it. Everything per token is over the L response tokens only."""

    token_ids: np.ndarray  # int32 [P + L]
    prompt_len: int
    rollout_logprobs: np.ndarray  # float32 [L]
    staleness: np.ndarray  # int32 [L], how many versions older than the step's the weights were that sampled the token
    mask: np.ndarray  # bool [L], False: neither loss nor denominator
    advantages: np.ndarray  # float32 [L]
    weights: np.ndarray  # float64 [L], the aggregation's weight w; sums to 1 over a mini-batch for `token`
    group: int  # number of its group in the rollout batch

    @property
    def stale(self) -> np.ndarray:
        """bool [L], True: sampled by older weights than the step's."""
        return self.staleness > 0

    @property
    def num_valid(self) -> int:
        return int(self.mask.sum())


@dataclass
class MicroBatch:
    """Trees of samples packed one after the other. T tokens, S trees, R response tokens.

    A tree is a trunk, the prompt, and behind it a branch for each response. A token sees the tokens of its tree that don't
    stand behind it and are in the trunk or in its own branch (algo.attention_plan.sees). A sample by itself is all trunk. A
    response's last token isn't packed: what it predicts is never trained.

    `targets[r]` is the r-th response token and `positions[r]` the place in `token_ids` of the token that predicts it: for the
    first one of every branch that is the trunk's last, so that places repeat.
    """

    token_ids: np.ndarray  # int32 [T]
    position_ids: np.ndarray  # int32 [T], place within the prompt and the token's own response
    branch: np.ndarray  # int32 [T], 0: trunk, 1 ...: number of the branch in its tree
    cu_seqlens: np.ndarray  # int32 [S + 1], where the trees begin and end
    positions: np.ndarray  # int64 [R]
    targets: np.ndarray  # int64 [R]
    rollout_logprobs: np.ndarray  # float32 [R]
    stale: np.ndarray  # bool [R], see Sample
    mask: np.ndarray  # bool [R]
    advantages: np.ndarray  # float32 [R]
    number: np.ndarray  # int64 [R], of the response token in the mini-batch, counted through its samples in their order
    weights: np.ndarray  # float32 [R], w * N with N = the mini-batch's valid tokens (Megatron divides by N)

    @property
    def num_valid(self) -> int:
        return int(self.mask.sum())
