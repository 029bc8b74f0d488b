"""From responses to a scored group."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.reward.overlong import MAX_REWARD, soft_overlong_penalty
from dapo_megatron.reward.verifiers import Verdict, make_verifier


class Scorer:
    """Rule-based correctness plus soft overlong punishment. It can be pickled and used from several threads.

    `verify` may run elsewhere (a pool with time limits) and its verdicts be brought to `group`; `score` does both here.
    """

    def __init__(
        self,
        verifier: str,
        verifier_args: dict[str, Any] | None = None,
        *,
        correct: float = 1.0,
        incorrect: float = -1.0,
        max_response_tokens: int,
        cache_tokens: int = 0,
        penalty_factor: float = 0.0,
    ) -> None:
        if not correct > incorrect:
            raise ValueError(f"reward.correct: {correct} must be above reward.incorrect ({incorrect}); raise it")
        if not -MAX_REWARD <= incorrect < correct <= MAX_REWARD:
            raise ValueError(f"reward.correct: {correct} and reward.incorrect: {incorrect} must be within +-{MAX_REWARD:g}")
        self._verifier, self._name = make_verifier(verifier, verifier_args), verifier
        self._rewards = (incorrect, correct)
        self._overlong = (max_response_tokens, cache_tokens, penalty_factor)
        soft_overlong_penalty([], *self._overlong)  # a bad limit is found here, not at the first group

    @classmethod
    def from_config(cls, reward: Any, max_response_tokens: int) -> "Scorer":
        """From a RewardConfig (any object with its fields) and rollout.max_response_tokens."""
        return cls(
            reward.verifier,
            dict(reward.verifier_args),
            correct=reward.correct,
            incorrect=reward.incorrect,
            max_response_tokens=max_response_tokens,
            cache_tokens=reward.overlong.cache_tokens,
            penalty_factor=reward.overlong.penalty_factor,
        )

    def verify(self, text: str, gold: str) -> Verdict:
        """One response's verdict. Whatever a verifier raises makes the response incorrect and is kept in `error`."""
        try:
            return self._verifier(text, gold)
        except Exception as error:  # a response may hold anything, and parsers raise anything
            return Verdict(False, None, f"{type(error).__name__}: {error}")

    def group(
        self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion], verdicts: Sequence[Verdict]
    ) -> Group:
        """The scored group of G responses.

        ValueError, naming data source and problem, for what is no verdict (nan would count as correct) and for a reward
        that isn't finite: that is a fault of the reward function, whatever the response.
        """
        assert len(texts) == len(completions) == len(verdicts), (len(texts), len(completions), len(verdicts))
        where = f"data source {prompt.data_source}, problem {prompt.uid}: verifier {self._name}"
        for verdict in verdicts:
            if not isinstance(verdict, Verdict) or not isinstance(verdict.correct, bool | np.bool_):
                raise ValueError(f"{where} gave {verdict!r}; mend it: a Verdict whose `correct` is True or False is expected")
        correct = np.array([v.correct for v in verdicts], dtype=bool)
        incorrect_reward, correct_reward = self._rewards
        group = Group(
            prompt=prompt,
            completions=list(completions),
            texts=list(texts),
            correct=correct,
            raw_reward=np.where(correct, correct_reward, incorrect_reward).astype(np.float32),
            overlong_penalty=soft_overlong_penalty([len(c) for c in completions], *self._overlong),
            extracted=[v.extracted for v in verdicts],
            num_errors=sum(bool(v.error) for v in verdicts),
        )
        if not np.isfinite(group.reward).all():
            raise ValueError(f"{where} led to rewards {group.reward.tolist()}; they must be finite: mend reward.*")
        return group

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> Group:
        """Verify and group G responses in this thread."""
        return self.group(prompt, texts, completions, [self.verify(text, prompt.gold) for text in texts])
