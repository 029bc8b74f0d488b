import numpy as np
import pytest

from dapo_megatron.algo.advantages import group_advantages
from dapo_megatron.algo.samples import build_samples
from dapo_megatron.records import Completion, Group, Prompt


def make_group(rewards, penalties=None, reasons=None, lengths=None):
    n = len(rewards)
    reasons, lengths = reasons or ["stop"] * n, lengths or [3] * n
    completions = [
        Completion(np.arange(k, dtype=np.int32), np.full(k, -0.5, np.float32), np.zeros(k, np.int32), reason)
        for k, reason in zip(lengths, reasons, strict=True)
    ]
    return Group(
        prompt=Prompt(0, "p", (7, 8), "1"),
        completions=completions,
        texts=[""] * n,
        correct=np.array(rewards) > 0,
        raw_reward=np.array(rewards, np.float32),
        overlong_penalty=np.array(penalties or [0.0] * n, np.float32),
    )


def test_group_norm_by_hand():
    # mean 0, unbiased variance (4 * 1) / 3
    expected = np.array([1, 1, -1, -1]) / np.sqrt(4 / 3)
    advantages = group_advantages(np.array([1, 1, -1, -1], np.float32), "group_norm", 1e-6)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, expected, rtol=2e-6)


def test_eps_is_added_to_the_std():
    # mean 0.5, unbiased std sqrt(0.5)
    np.testing.assert_allclose(
        group_advantages(np.array([0.0, 1.0]), eps=0.5), np.array([-0.5, 0.5]) / (np.sqrt(0.5) + 0.5), rtol=1e-6
    )


def test_mean_only_by_hand():
    np.testing.assert_allclose(group_advantages(np.array([2.0, 0.0, 1.0, 1.0]), "mean_only"), [1, -1, 0, 0])


@pytest.mark.parametrize("mode", ["group_norm", "mean_only"])
@pytest.mark.parametrize("rewards", [[0.3], [0.1] * 3, [0.7] * 10, [-1.0] * 16])
def test_nothing_to_compare_gives_exactly_zero(mode, rewards):
    # 0.1 three times has a rounded mean: without care that is amplified by 1 / eps
    np.testing.assert_array_equal(group_advantages(np.array(rewards), mode, 1e-12), np.zeros(len(rewards)))


def test_bad_input():
    with pytest.raises(ValueError, match=r"algorithm\.advantage.*'zscore'.*group_norm, mean_only"):
        group_advantages(np.array([0.0, 1.0]), "zscore")
    with pytest.raises(ValueError, match="isn't finite"):
        group_advantages(np.array([0.0, np.nan]))


def test_advantages_use_the_shaped_reward_of_all_responses():
    group = make_group([1, 1, -1], penalties=[0, -0.5, -1], reasons=["stop", "stop", "length"])
    samples = build_samples([group], version=0, overlong_filter=True)
    expected = group_advantages(np.array([1, 0.5, -2]))
    np.testing.assert_array_equal([s.advantages[0] for s in samples], expected)
    assert [s.mask.tolist() for s in samples] == [[True] * 3, [True] * 3, [False] * 3]


def test_every_group_has_a_mean_and_a_spread_of_its_own():
    rewards = [[1, -1], [1, 1, 1, -1], [0.5, 0.25, 0.25]]
    samples = build_samples([make_group(r) for r in rewards], version=0)
    expected = np.concatenate([group_advantages(np.array(r, np.float32)) for r in rewards])
    np.testing.assert_array_equal([s.advantages[0] for s in samples], expected)


def test_sample_layout():
    group = make_group([1, -1], lengths=[4, 0], reasons=["stop", "length"])
    first, empty = build_samples([make_group([1, -1]), group], version=0)[2:]
    assert first.token_ids.tolist() == [7, 8, 0, 1, 2, 3] and first.token_ids.dtype == np.int32
    assert first.prompt_len == 2 and first.group == 1
    assert first.mask.tolist() == [True] * 4  # the last token, an EOS, is trained
    assert len(empty.mask) == 0 and empty.token_ids.tolist() == [7, 8]


def test_without_filter_cut_responses_are_trained():
    samples = build_samples([make_group([1, -1], reasons=["stop", "length"])], version=0)
    assert all(s.mask.all() for s in samples)


def test_staleness_counts_versions():
    group = make_group([1, -1])
    group.completions[1].versions[:] = [1, 1, 2]
    first, second = build_samples([group], version=2)
    assert first.staleness.tolist() == [2] * 3 and second.staleness.tolist() == [1, 1, 0]
    assert second.stale.tolist() == [True, True, False] and second.staleness.dtype == np.int32
    with pytest.raises(AssertionError, match="newer weights than version 1"):
        build_samples([group], version=1)
