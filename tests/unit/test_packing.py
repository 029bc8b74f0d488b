from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from dapo_megatron.algo.attention_plan import sees, tree_numbers
from dapo_megatron.algo.packing import pack_minibatch
from dapo_megatron.algo.samples import set_weights
from dapo_megatron.records import Sample


def draw_samples(rng, num_samples, max_len=60):
    """Groups of four with one prompt, but for a few samples with another one. Otherwise all tokens are different, so that each
    can be found again."""
    samples, next_token, prompt = [], 1, np.zeros(0, np.int32)
    for i in range(num_samples):
        if i % 4 == 0 or rng.random() < 0.1:
            prompt = np.arange(next_token, next_token + rng.integers(1, 10), dtype=np.int32)
            next_token += len(prompt)
        response = rng.integers(0, max_len) if rng.random() < 0.8 else 1
        token_ids = np.concatenate([prompt, np.arange(next_token, next_token + response, dtype=np.int32)])
        next_token += response
        samples.append(
            Sample(
                token_ids=token_ids,
                prompt_len=len(prompt),
                rollout_logprobs=-rng.random(response).astype(np.float32),
                staleness=rng.integers(-8, 3, response).clip(0).astype(np.int32),
                mask=rng.random(response) < 0.9 if rng.random() < 0.8 else np.zeros(response, bool),
                advantages=rng.standard_normal(response).astype(np.float32),
                weights=np.zeros(response),
                group=i // 4,
            )
        )
    return samples


def packed_trees(microbatch):
    return [microbatch.token_ids[a:b] for a, b in zip(microbatch.cu_seqlens, microbatch.cu_seqlens[1:], strict=False)]


def num_inputs(sample):
    """The response's last token predicts nothing."""
    return sample.prompt_len + max(len(sample.mask) - 1, 0)


def per_token(samples, field):
    """field of every response token by token id: tokens are unique."""
    return {
        int(token): value for s in samples for token, value in zip(s.token_ids[s.prompt_len :], getattr(s, field), strict=True)
    }


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("share", [False, True])
def test_random_minibatches(seed, share):
    rng = np.random.default_rng(seed)
    samples = draw_samples(rng, int(rng.integers(0, 50)))
    aggregation = ["token", "group_token", "sequence", "constant"][seed % 4]
    set_weights(samples, aggregation, 60)
    dp, multiple = int(rng.integers(1, 5)), int(rng.choice([1, 2, 4, 8]))
    budget = int(rng.integers(30, 200))
    ranks = pack_minibatch(samples, dp, budget, multiple, pad_sequences_to=int(rng.choice([1, multiple])), share_prompts=share)

    assert len(ranks) == dp and len({len(rank) for rank in ranks}) == 1
    microbatches = [m for rank in ranks for m in rank]
    num_valid = sum(s.num_valid for s in samples)
    packed = [tree[tree > 0].tolist() for m in microbatches for tree in packed_trees(m) if tree.any()]  # padding is all 0
    if not share:
        assert sorted(packed) == sorted(s.token_ids[: num_inputs(s)].tolist() for s in samples)

    for m in microbatches:
        real = [tree for tree in packed_trees(m) if tree.any()]
        assert m.cu_seqlens[0] == 0 and m.cu_seqlens[-1] == len(m.token_ids) and (np.diff(m.cu_seqlens) > 0).all()
        assert len(m.token_ids) % multiple == 0 and len(m.token_ids) > 0
        assert len(m.token_ids) <= budget or (len(real) == 1 and not m.branch.any())
        lengths = {len(m.positions), len(m.targets), len(m.mask), len(m.stale), len(m.weights), len(m.advantages)}
        assert lengths == {len(m.rollout_logprobs)}
    check_what_is_seen(samples, microbatches)

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
    assert sorted(n for m in microbatches for n in m.number) == list(range(sum(len(s.mask) for s in samples)))


def check_what_is_seen(samples, microbatches):
    """The token that predicts a response token sees exactly what stands before that in its own sample, in order."""
    before = {int(s.token_ids[i]): s.token_ids[:i].tolist() for s in samples for i in range(s.prompt_len, len(s.token_ids))}
    for m in microbatches:
        tree, places = tree_numbers(m.cu_seqlens), np.arange(len(m.token_ids))
        for predictor, target in zip(m.positions, m.targets, strict=True):
            seen = sees(tree, m.branch, predictor, places)
            assert m.token_ids[seen].tolist() == before[int(target)]
            assert m.position_ids[seen].tolist() == list(range(seen.sum())), "positions continue from the prompt"


def test_a_group_is_one_prompt_and_its_branches():
    samples = sized(3, 1, 4)  # one-token responses have no branch of their own
    ((m,),) = pack_minibatch(samples, 1, 100, 4, 4, share_prompts=True)
    assert m.token_ids.tolist() == [1, 2, 3, 2, 3, 4, 0, 0] and m.cu_seqlens.tolist() == [0, 8]
    assert m.branch.tolist() == [0, 1, 1, 3, 3, 3, 3, 3]  # padding goes on with the last branch
    assert m.position_ids.tolist() == [0, 1, 2, 1, 2, 3, 4, 5]
    assert m.positions.tolist() == [0, 1, 2, 0, 0, 3, 4, 5]
    assert m.targets.tolist() == [2, 3, 4, 2, 2, 3, 4, 5]


def test_a_sample_by_itself_is_all_trunk():
    ((alone,),) = pack_minibatch(sized(5), 1, 100, share_prompts=True)
    assert alone.branch.tolist() == [0] * 5 and alone.position_ids.tolist() == list(range(5))


@pytest.mark.parametrize("seed", range(20))
def test_sharing_costs_no_rank_more_tokens(seed):
    rng = np.random.default_rng(seed)
    samples, dp = draw_samples(rng, int(rng.integers(1, 40))), int(rng.integers(1, 9))
    alone, shared = (
        max(sum(len(m.token_ids) for m in rank) for rank in pack_minibatch(samples, dp, 500, share_prompts=share))
        for share in (False, True)
    )
    assert shared <= alone


def group(prompt, *lengths, number=0):
    """Responses of so many tokens to one prompt."""
    return [
        replace(s, token_ids=np.concatenate([np.full(prompt - 1, 9, np.int32), s.token_ids]), prompt_len=prompt, group=number)
        for s in sized(*lengths)
    ]


def test_a_group_over_the_budget_is_cut():
    (rank,) = pack_minibatch(group(50, *[21] * 8), 1, 100, share_prompts=True)  # 50 + 2 x 20 fit, 50 + 3 x 20 don't
    assert [len(m.token_ids) for m in rank] == [90] * 4


@pytest.mark.parametrize(("num_groups", "dp", "most"), [(4, 2, 180), (1, 4, 60), (3, 2, 160)])
def test_groups_are_cut_where_ranks_would_be_idle(num_groups, dp, most):
    samples = [s for number in range(num_groups) for s in group(50, *[6] * 8, number=number)]
    loads = [sum(len(m.token_ids) for m in rank) for rank in pack_minibatch(samples, dp, 1000, share_prompts=True)]
    assert max(loads) <= most and min(loads) > 0


def test_deterministic():
    samples = draw_samples(np.random.default_rng(5), 30)
    for share in (False, True):
        first, second = (pack_minibatch(samples, 3, 100, share_prompts=share) for _ in range(2))
        for a, b in zip(chain(*first), chain(*second), strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_dtypes():
    microbatch = pack_minibatch(draw_samples(np.random.default_rng(0), 3), 1, 1000)[0][0]
    dtypes = {name: getattr(microbatch, name).dtype.name for name in vars(microbatch)}
    assert dtypes == {
        "token_ids": "int32",
        "position_ids": "int32",
        "branch": "int32",
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
    """Samples of so many packed tokens with a prompt of one, all of one group."""
    return [
        Sample(
            token_ids=np.arange(1, size + 2, dtype=np.int32),
            prompt_len=1,
            rollout_logprobs=np.zeros(size, np.float32),
            staleness=np.zeros(size, np.int32),
            mask=np.ones(size, bool),
            advantages=np.zeros(size, np.float32),
            weights=np.zeros(size),
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
    assert real.cu_seqlens.tolist() == [0, 9, 10] and real.num_valid == 9  # padding is a tree of its own
    for dummy in dummies:
        assert len(dummy.positions) == dummy.num_valid == 0 and dummy.cu_seqlens.tolist() == [0, 2]


def test_bad_input():
    with pytest.raises(ValueError, match=r"parallel\.max_tokens_per_microbatch: 3 has no room for a multiple of 4"):
        pack_minibatch(sized(2), 1, 3, pad_to_multiple=4)
    with pytest.raises(
        ValueError, match="dp, pad_to_multiple, pad_sequences_to, num_multiple: 0, 1, 1, 1; all must be at least 1"
    ):
        pack_minibatch(sized(2), 0, 100)
