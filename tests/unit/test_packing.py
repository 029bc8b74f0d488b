from itertools import chain

import numpy as np
import pytest

from dapo_megatron.algo.packing import pack_minibatch
from dapo_megatron.algo.samples import set_weights
from dapo_megatron.records import Sample


def draw_samples(rng, num_samples, max_len=60):
    """Samples whose tokens are all different, so that each can be found again."""
    samples, next_token = [], 1
    for i in range(num_samples):
        prompt, response = rng.integers(1, 10), rng.integers(0, max_len)
        token_ids = np.arange(next_token, next_token + prompt + response, dtype=np.int32)
        next_token += len(token_ids)
        samples.append(
            Sample(
                token_ids=token_ids,
                prompt_len=int(prompt),
                rollout_logprobs=-rng.random(response).astype(np.float32),
                stale=rng.random(response) < 0.2,
                mask=rng.random(response) < 0.9 if rng.random() < 0.8 else np.zeros(response, bool),
                advantages=rng.standard_normal(response).astype(np.float32),
                weights=np.zeros(response),
                group=i // 4,
            )
        )
    return samples


def sequences(microbatch):
    return [microbatch.token_ids[a:b] for a, b in zip(microbatch.cu_seqlens, microbatch.cu_seqlens[1:], strict=False)]


def per_token(samples, field):
    """field of every response token by token id: tokens are unique."""
    return {
        int(token): value for s in samples for token, value in zip(s.token_ids[s.prompt_len :], getattr(s, field), strict=True)
    }


@pytest.mark.parametrize("seed", range(40))
def test_random_minibatches(seed):
    rng = np.random.default_rng(seed)
    samples = draw_samples(rng, int(rng.integers(0, 50)))
    aggregation = ["token", "group_token", "sequence", "constant"][seed % 4]
    set_weights(samples, aggregation, 60)
    dp, multiple = int(rng.integers(1, 5)), int(rng.choice([1, 2, 4, 8]))
    budget = int(rng.integers(30, 200))
    ranks = pack_minibatch(samples, dp, budget, multiple)

    assert len(ranks) == dp and len({len(rank) for rank in ranks}) == 1
    microbatches = [m for rank in ranks for m in rank]
    num_valid = sum(s.num_valid for s in samples)
    packed = [seq.tolist() for m in microbatches for seq in sequences(m) if seq.any()]  # padding is all 0
    assert sorted(packed) == sorted(s.token_ids.tolist() for s in samples)

    for m in microbatches:
        real = [seq for seq in sequences(m) if seq.any()]
        assert m.cu_seqlens[0] == 0 and m.cu_seqlens[-1] == len(m.token_ids) and (np.diff(m.cu_seqlens) > 0).all()
        assert len(m.token_ids) % multiple == 0 and len(m.token_ids) > 0
        assert len(m.token_ids) <= budget or len(real) == 1
        # each target stands right behind its predictor and in the same sequence
        np.testing.assert_array_equal(m.token_ids[m.positions + 1], m.targets)
        starts = np.searchsorted(m.cu_seqlens, m.positions, side="right")
        np.testing.assert_array_equal(starts, np.searchsorted(m.cu_seqlens, m.positions + 1, side="right"))
        lengths = {len(m.positions), len(m.targets), len(m.mask), len(m.stale), len(m.weights), len(m.advantages)}
        assert lengths == {len(m.rollout_logprobs)}

    for field in ("stale", "mask", "advantages", "rollout_logprobs", "weights"):
        expected = per_token(samples, field)
        scale = num_valid if field == "weights" else 1
        actual = {int(t): v for m in microbatches for t, v in zip(m.targets, getattr(m, field), strict=True)}
        assert actual.keys() == expected.keys()
        for token, value in actual.items():
            assert value == pytest.approx(expected[token] * scale, rel=1e-6)
    if num_valid:
        total = sum(m.weights.sum(dtype=np.float64) for m in microbatches) / num_valid
        assert total == pytest.approx(sum(s.weights.sum() for s in samples), rel=1e-6)
    assert sum(m.num_valid for m in microbatches) == num_valid


def test_deterministic():
    samples = draw_samples(np.random.default_rng(5), 30)
    first, second = (pack_minibatch(samples, 3, 100) for _ in range(2))
    for a, b in zip(chain(*first), chain(*second), strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_dtypes():
    microbatch = pack_minibatch(draw_samples(np.random.default_rng(0), 3), 1, 1000)[0][0]
    dtypes = {name: getattr(microbatch, name).dtype.name for name in vars(microbatch)}
    assert dtypes == {
        "token_ids": "int32",
        "cu_seqlens": "int32",
        "positions": "int64",
        "targets": "int64",
        "number": "int64",
        "rollout_logprobs": "float32",
        "stale": "bool",
        "mask": "bool",
        "advantages": "float32",
        "weights": "float32",
    }


def sized(*sizes):
    return [
        Sample(
            token_ids=np.arange(1, size + 1, dtype=np.int32),
            prompt_len=1,
            rollout_logprobs=np.zeros(size - 1, np.float32),
            stale=np.zeros(size - 1, bool),
            mask=np.ones(size - 1, bool),
            advantages=np.zeros(size - 1, np.float32),
            weights=np.zeros(size - 1),
            group=0,
        )
        for size in sizes
    ]


def test_an_overlong_sample_is_alone():
    (rank,) = pack_minibatch(sized(50, 3, 3), 1, 20)
    assert sorted(len(m.token_ids) for m in rank) == [6, 50]


def test_ranks_are_balanced_by_tokens():
    rng = np.random.default_rng(2)
    samples = sized(*rng.integers(2, 200, size=64))
    loads = [sum(len(m.token_ids) for m in rank) for rank in pack_minibatch(samples, 4, 512)]
    assert max(loads) - min(loads) <= 10


def test_microbatches_of_a_rank_are_even_where_they_fit():
    (rank,) = pack_minibatch(sized(*[10] * 12), 1, 100)  # first fit alone would give 100 and 20
    assert [len(m.token_ids) for m in rank] == [60, 60]


def test_an_overlong_sample_leaves_the_others_even():
    (rank,) = pack_minibatch(sized(150, *[10] * 12), 1, 100)
    assert sorted(len(m.token_ids) for m in rank) == [60, 60, 150]


def test_fewer_samples_than_ranks_gives_dummies_without_response():
    ranks = pack_minibatch(sized(9), 3, 20, pad_to_multiple=2)
    assert [len(rank) for rank in ranks] == [1, 1, 1]
    real, *dummies = [rank[0] for rank in ranks]
    assert real.cu_seqlens.tolist() == [0, 9, 10] and real.num_valid == 8  # padding is a sequence of its own
    for dummy in dummies:
        assert len(dummy.positions) == dummy.num_valid == 0 and dummy.cu_seqlens.tolist() == [0, 2]


def test_bad_input():
    with pytest.raises(ValueError, match=r"parallel\.max_tokens_per_microbatch: 3 has no room for a multiple of 4"):
        pack_minibatch(sized(2), 1, 3, pad_to_multiple=4)
    with pytest.raises(
        ValueError, match="dp, pad_to_multiple, pad_sequences_to, num_multiple: 0, 1, 1, 1; all must be at least 1"
    ):
        pack_minibatch(sized(2), 0, 100)
