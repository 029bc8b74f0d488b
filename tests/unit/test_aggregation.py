import numpy as np
import pytest

from dapo_megatron.algo.aggregation import AGGREGATIONS, token_weights
from dapo_megatron.algo.samples import set_weights, split_minibatches
from dapo_megatron.records import Sample


def mask(*values):
    return np.array(values, dtype=bool)


def full(length):
    return np.ones(length, dtype=bool)


def sample(length, group, valid=True):
    return Sample(
        token_ids=np.arange(length + 1, dtype=np.int32),
        prompt_len=1,
        rollout_logprobs=np.zeros(length, np.float32),
        staleness=np.zeros(length, np.int32),
        mask=np.full(length, valid),
        advantages=np.zeros(length, np.float32),
        weights=np.zeros(length),
        group=group,
    )


def test_ten_tokens_in_two_responses():
    masks, groups = [full(2), full(8)], [0, 0]
    for aggregation, expected in {
        "token": (1 / 10, 1 / 10),
        "group_token": (1 / 10, 1 / 10),
        "sequence": (1 / 4, 1 / 16),
        "constant": (1 / 40, 1 / 40),
    }.items():
        short, long = token_weights(masks, groups, aggregation, max_response_tokens=20)
        np.testing.assert_allclose(short, np.full(2, expected[0]), rtol=1e-15)
        np.testing.assert_allclose(long, np.full(8, expected[1]), rtol=1e-15)
        assert short.dtype == np.float64


def test_masked_responses_in_all_aggregations():
    # group 0: 2 valid tokens and a masked response of 5; group 1: one valid of two, and 3; group 2: wholly masked
    masks = [full(2), ~full(5), mask(True, False), full(3), ~full(4)]
    groups = [0, 0, 1, 1, 2]
    expected = {
        "token": [1 / 6, 0, 1 / 6, 1 / 6, 0],
        "group_token": [1 / 2 / 2, 0, 1 / 2 / 4, 1 / 2 / 4, 0],
        "sequence": [1 / 3 / 2, 0, 1 / 3, 1 / 3 / 3, 0],
        "constant": [1 / 50, 0, 1 / 50, 1 / 50, 0],  # 5 responses of at most 10 tokens
    }
    for aggregation, scales in expected.items():
        weights = token_weights(masks, groups, aggregation, max_response_tokens=10)
        for weight, valid, scale in zip(weights, masks, scales, strict=True):
            np.testing.assert_allclose(weight, valid * scale, rtol=1e-15)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_valid_gives_zero(aggregation):
    for weights in token_weights([~full(3), ~full(2), full(0)], [0, 0, 1], aggregation, 10):
        assert weights.sum() == 0 and np.isfinite(weights).all()
    assert token_weights([], [], aggregation, 10) == []


@pytest.mark.parametrize("aggregation", ["token", "group_token", "sequence"])
def test_weights_of_a_mean_sum_to_one(aggregation):
    rng = np.random.default_rng(0)
    masks = [rng.random(rng.integers(0, 30)) < 0.7 for _ in range(40)]
    total = sum(w.sum() for w in token_weights(masks, [i // 4 for i in range(40)], aggregation, 30))
    assert total == pytest.approx(1, abs=1e-12)


def test_bad_input():
    with pytest.raises(ValueError, match=r"algorithm\.aggregation: 'tokens' is unknown; use one of token, group_token"):
        token_weights([full(1)], [0], "tokens", 10)
    with pytest.raises(ValueError, match="groups: 1 numbers for 2 responses"):
        token_weights([full(1), full(1)], [0], "token", 10)


def test_minibatches_hold_whole_groups_in_order():
    samples = [sample(3, group) for group in range(33) for _ in range(4)]
    minibatches = split_minibatches(samples, 32)
    assert [len({s.group for s in m}) for m in minibatches] == [16, 17]
    assert [id(s) for m in minibatches for s in m] == [id(s) for s in samples]
    assert [len(m) for m in split_minibatches(samples[:32], 4)] == [16, 16]
    assert split_minibatches([], 4) == []
    with pytest.raises(ValueError, match="prompts_per_minibatch"):
        split_minibatches(samples, 0)


def test_every_group_is_in_exactly_one_minibatch_of_nearly_equal_size():
    for num_groups in range(1, 40):
        samples = [sample(1, group) for group in range(num_groups) for _ in range(2)]
        for size in range(1, 12):
            counts = [len({s.group for s in m}) for m in split_minibatches(samples, size)]
            assert sum(counts) == num_groups and max(counts) <= size and max(counts) - min(counts) <= 1


def test_weights_count_the_minibatch_only():
    samples = [sample(2, 0), sample(8, 0), sample(5, 1), sample(5, 1, valid=False)]
    for minibatch in split_minibatches(samples, 1):
        set_weights(minibatch, "token", 10)
    assert [s.weights.sum() for s in samples] == pytest.approx([0.2, 0.8, 1, 0])
