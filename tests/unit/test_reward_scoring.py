import pickle

import numpy as np
import pytest

from dapo_megatron.config import RewardConfig
from dapo_megatron.records import Completion, Prompt
from dapo_megatron.reward import verifiers
from dapo_megatron.reward.overlong import soft_overlong_penalty
from dapo_megatron.reward.scoring import Scorer

PROMPT = Prompt(0, "u", (1, 2, 3, 4, 5), "14")


def completion(length):
    zeros = np.zeros(length)
    return Completion(zeros.astype(np.int32), zeros.astype(np.float32), zeros.astype(np.int32), "stop")


def test_soft_overlong_at_between_and_beyond_its_corners():
    lengths = [0, 16384, 16385, 18432, 20479, 20480, 20481, 40000]
    penalty = soft_overlong_penalty(lengths, 20480, 4096)
    assert penalty.dtype == np.float32
    expected = [0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1, -1]
    np.testing.assert_allclose(penalty, expected, rtol=1e-6)
    assert not np.signbit(penalty[:2]).any()  # no -0.0


def test_soft_overlong_factor_and_empty_cache():
    np.testing.assert_allclose(soft_overlong_penalty([8, 10, 12, 99], 12, 4, 0.5), [0, -0.25, -0.5, -0.5])
    np.testing.assert_array_equal(soft_overlong_penalty([1, 12, 13], 12, 4, 0.0), [0, 0, 0])
    np.testing.assert_array_equal(soft_overlong_penalty([12, 13], 12, 0, 1.0), [0, -1])


@pytest.mark.parametrize(
    ("cache", "factor", "field"),
    [
        *((13, 1.0, "cache_tokens"), (-1, 1.0, "cache_tokens")),
        *((4, factor, "penalty_factor") for factor in (-1.0, float("nan"), float("inf"), 1e39)),
    ],
)
def test_soft_overlong_wrong_limits(cache, factor, field):
    with pytest.raises(ValueError, match=field):
        soft_overlong_penalty([1], 12, cache, factor)


def scorer(**kwargs):
    return Scorer("exact_answer", max_response_tokens=12, cache_tokens=4, penalty_factor=0.5, **kwargs)


def test_score_builds_the_group():
    texts = ["Answer: 14", "Answer: 13", "well", "Answer: 14"]
    group = scorer(correct=1.0, incorrect=-1.0).score(PROMPT, texts, [completion(n) for n in (5, 6, 12, 10)])
    assert group.prompt is PROMPT and group.texts == texts
    assert group.correct.dtype == bool and group.correct.tolist() == [True, False, False, True]
    assert group.raw_reward.dtype == np.float32 and group.raw_reward.tolist() == [1, -1, -1, 1]
    # from response lengths: the prompt's 5 tokens don't count
    assert group.overlong_penalty.tolist() == [0, 0, -0.5, -0.25]
    assert group.reward.tolist() == [1, -1, -1.5, 0.75]
    assert group.extracted == ["14", "13", None, "14"]


def test_from_config_reads_every_field():
    reward = RewardConfig(verifier="math_dapo", verifier_args={"strict": False}, correct=2.0, incorrect=0.0)
    reward.overlong.cache_tokens, reward.overlong.penalty_factor = 2, 3.0
    group = Scorer.from_config(reward, 4).score(PROMPT, [r"\boxed{14}", ""], [completion(3), completion(4)])
    assert group.raw_reward.tolist() == [2, 0] and group.overlong_penalty.tolist() == [-1.5, -3]


def test_an_exception_makes_a_response_incorrect_and_is_counted(monkeypatch):
    def fails(text, gold):
        raise RecursionError("too deep")

    monkeypatch.setitem(verifiers.VERIFIERS, "choice", fails)
    broken = Scorer("choice", max_response_tokens=8)
    group = broken.score(PROMPT, ["a", "b"], [completion(1), completion(1)])
    assert group.correct.tolist() == [False, False] and group.extracted == [None, None]
    assert group.num_errors == 2
    assert broken.verify("a", "b").error == "RecursionError: too deep"


@pytest.mark.parametrize(
    "answer", [True, 0.5, None, verifiers.Verdict(float("nan"), "a"), verifiers.Verdict(float("inf"), "a")]
)
def test_what_is_no_verdict_is_refused_with_source_and_problem(monkeypatch, answer):
    monkeypatch.setitem(verifiers.VERIFIERS, "choice", lambda text, gold: answer)
    prompt = Prompt(0, "4a5b", (1,), "14", "gsm8k")
    with pytest.raises(ValueError, match=r"data source gsm8k, problem 4a5b: verifier choice gave .*True or False"):
        Scorer("choice", max_response_tokens=8).score(prompt, ["a"], [completion(1)])


def test_verdicts_of_numpy_are_verdicts(monkeypatch):
    monkeypatch.setitem(verifiers.VERIFIERS, "choice", lambda text, gold: verifiers.Verdict(np.bool_(True), "a"))
    assert Scorer("choice", max_response_tokens=8).score(PROMPT, ["a"], [completion(1)]).correct.tolist() == [True]


def test_rewards_that_are_not_finite_are_refused_with_source_and_problem(monkeypatch):
    """Whatever they come from: here the penalty."""
    scoring = Scorer("choice", max_response_tokens=8)
    penalty = np.array([0, -np.inf], np.float32)
    monkeypatch.setattr("dapo_megatron.reward.scoring.soft_overlong_penalty", lambda *_: penalty)
    with pytest.raises(ValueError, match=r"data source gsm8k, problem u: .* rewards \[-1.0, -inf\]; they must be finite"):
        scoring.score(Prompt(0, "u", (1,), "1", "gsm8k"), ["a", "b"], [completion(1), completion(9)])


def test_scorer_can_be_pickled():
    copy = pickle.loads(pickle.dumps(scorer()))
    assert copy.verify("Answer: 14", "14").correct


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"reward.correct: 0.0 must be above reward.incorrect"):
        scorer(correct=0.0, incorrect=0.0)
    for values in ({"correct": float("inf")}, {"incorrect": -1e39}):
        with pytest.raises(ValueError, match=r"within \+-1e\+09"):
            scorer(**values)
    with pytest.raises(ValueError, match="cache_tokens"):
        Scorer("choice", max_response_tokens=4, cache_tokens=8)
