"""The dynamic sampler: which groups make a batch, and what becomes of every token."""

import asyncio
import pickle

import numpy as np
import pytest

from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.rollout.engine import SamplingParams
from dapo_megatron.rollout.sampler import is_informative, request_seed
from tests.unit.scripted_engine import (
    EOS,
    MAX_NEW_TOKENS,
    Engine,
    Stream,
    check_accounts,
    collect,
    content,
    make_sampler,
    mixed,
    response,
    run_three_steps,
    settle,
    varied,
)


@pytest.mark.parametrize("seed", range(5))
def test_finishing_order_changes_no_batch_no_position_no_counter(seed):
    ranks = np.random.default_rng(seed).permutation(1000)
    in_order = run_three_steps(mixed, "rewind", lambda index: index)
    assert [stats["groups_kept"] for _, stats, _ in in_order] == [4, 4, 4]
    assert run_three_steps(mixed, "rewind", lambda index: -index) == in_order
    assert run_three_steps(mixed, "rewind", lambda index: ranks[index]) == in_order


@pytest.mark.parametrize("surplus", ["rewind", "carry"])
@pytest.mark.parametrize("seed", range(8))
def test_finishing_order_with_filtered_and_carried_groups(surplus, seed):
    """Here groups are submitted late. Whether the last ones reached the engine before the batch was full is a matter of
    timing, and so are their tokens. All else is equal."""

    def run(rank):
        results = run_three_steps(varied, surplus, rank)
        for _, stats, _ in results:
            for fate in ("generated", "aborted", "carried_in", "carried_out"):
                del stats[f"tokens_{fate}"]
        return results

    ranks = np.random.default_rng(seed).permutation(1000)
    in_order = run(lambda index: index)
    assert sum(stats["groups_resolved"] for _, stats, _ in in_order) > 12
    assert run(lambda index: -index) == in_order
    assert run(lambda index: ranks[index]) == in_order


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_engine_limit_is_kept_and_changes_no_batch(limit):
    def run(limit, rank):
        engine = Engine(limit)
        sampler = make_sampler(engine, varied)
        batches = []
        for version in range(3):
            batch = collect(sampler, engine, rank, version)
            check_accounts(batch.stats)
            batches.append((content(batch), sampler.stream.position))
        assert engine.most_groups <= limit
        return batches

    assert run(limit, lambda index: -index) == run(1000, lambda index: index)


def test_short_responses_are_not_preferred():
    engine = Engine()
    batch = collect(make_sampler(engine, mixed), engine, rank=lambda index: -index)  # the first prompt comes last
    assert [group.prompt.index for group in batch.groups] == [0, 1, 2, 3]


def test_three_groups_one_kept_three_counted():
    table = [(1, 1), (0, 0), (1, 0)]
    engine = Engine()
    sampler = make_sampler(engine, lambda index: table[index] if index < 3 else (1, 1), prompts_per_step=1)
    batch = collect(sampler, engine)
    assert [group.prompt.index for group in batch.groups] == [2]
    assert [group.prompt.index for group in batch.filtered] == [0, 1]
    stats = batch.stats
    assert (stats.groups_resolved, stats.groups_kept) == (3, 1)
    assert (stats.groups_all_correct, stats.groups_all_wrong) == (1, 1)
    assert stats.accuracy == 0.5
    lengths = [len(response(index, sample)) for index in range(3) for sample in range(2)]
    assert stats.tokens_filtered_correct == sum(lengths[:2])
    assert stats.tokens_filtered_wrong == sum(lengths[2:4])
    assert stats.tokens_kept == sum(lengths[4:])
    assert stats.response_length_mean == sum(lengths) / 6 and stats.response_length_max == max(lengths)
    assert sampler.stream.position == 3  # what was sampled beyond goes back to the stream
    check_accounts(stats)


def test_rewound_prompts_come_back_first_under_new_request_ids_and_the_same_seeds():
    engine = Engine()
    sampler = make_sampler(engine, mixed, prompts_per_step=2)
    first = collect(sampler, engine)
    assert first.stats.groups_cut > 0 and first.stats.tokens_aborted > 0
    second = collect(sampler, engine, version=1)
    assert [g.prompt.index for g in first.groups + second.groups] == [0, 1, 2, 3]
    ids = [request.request_id for request in engine.requests]
    assert len(set(ids)) == len(ids)
    seeds = {}
    for request in engine.requests:
        key = (request.token_ids[0], request.request_id.split("/")[1])
        assert seeds.setdefault(key, request.seed) == request.seed
    assert len(set(seeds.values())) == len(seeds)
    assert {request.group_size for request in engine.requests} == {2}


@pytest.mark.parametrize("surplus", ["rewind", "carry"])
@pytest.mark.parametrize("seed", range(6))
def test_every_token_is_accounted_for(surplus, seed):
    rng = np.random.default_rng(seed)
    engine = Engine(int(rng.integers(1, 12)), partial=lambda missing: int(rng.integers(0, missing + 1)))
    params = SamplingParams(max_new_tokens=12, stop_token_ids=(EOS,))
    sampler = make_sampler(engine, varied, surplus=surplus, params=params)
    carried = (0, 0)
    for version in range(6):
        before = engine.generated
        ranks = rng.permutation(1000)
        stats = collect(sampler, engine, lambda index, ranks=ranks: ranks[index], version).stats
        check_accounts(stats)
        assert stats.tokens_generated == engine.generated - before
        assert (stats.groups_carried_in, stats.tokens_carried_in) == carried
        carried = (stats.groups_carried_out, stats.tokens_carried_out)
        assert stats.groups_kept + stats.groups_all_correct + stats.groups_all_wrong == stats.groups_resolved
    unused = "tokens_aborted" if surplus == "carry" else "tokens_carried_out"
    assert getattr(stats, unused) == 0
    assert stats.response_length_max == 12 and stats.cut_share > 0


def test_carry_continues_partial_groups_and_survives_a_restart():
    def new_sampler(engine, stream):
        async def score(prompt, completions):
            scored.append(prompt.index)
            correct = np.array([True, False])
            return Group(prompt, completions, ["", ""], correct, correct.astype(np.float32), np.zeros(2))

        return make_sampler(engine, mixed, stream, surplus="carry", prompts_per_step=2, score=score)

    scored = []
    engine, stream = Engine(partial=lambda missing: 1 if missing > 1 else 0), Stream()
    sampler = new_sampler(engine, stream)
    # At the estimated rate of 1/2 four groups are in flight; the last one finishes first and is carried finished.
    first = collect(sampler, engine, rank=lambda index: -1 if index == 3 else index)
    assert [g.prompt.index for g in first.groups] == [0, 1] and stream.position == first.stats.groups_sampled
    assert first.stats.groups_carried_out == stream.position - 2 > 1
    assert first.stats.tokens_carried_out > 0 and first.stats.tokens_aborted == 0
    assert sampler.carried[1].group is not None and sampler.carried[0].group is None

    state = pickle.loads(pickle.dumps(sampler.state_dict()))
    for entry in state["carried"]:  # JSON knows no tuples
        entry["prompt"]["token_ids"] = list(entry["prompt"]["token_ids"])
    restored_engine, restored_stream = Engine(partial=engine.partial), Stream()
    restored_stream.position = stream.position
    restored = new_sampler(restored_engine, restored_stream)
    restored.load_state_dict(state)
    expected = collect(sampler, engine, version=1)
    scored.clear()
    batch = collect(restored, restored_engine, version=1)
    assert content(batch) == content(expected) and batch.stats == expected.stats
    assert restored_stream.position == stream.position
    assert [r.request_id for r in restored_engine.requests] == [r.request_id for r in engine.requests][
        -len(restored_engine.requests) :
    ]

    assert [g.prompt.index for g in batch.groups] == [2, 3]
    assert 2 in scored and 3 not in scored  # the finished group's verdict was kept
    for sample, completion in enumerate(batch.groups[0].completions):
        full = response(2, sample)
        assert completion.token_ids.tolist() == full
        np.testing.assert_allclose(completion.logprobs, np.array(full) / -1000, rtol=1e-6)
        old = 1 if len(full) > 1 else 0
        assert completion.versions.tolist() == [0] * old + [1] * (len(full) - old)
        request = next(
            r for r in restored_engine.requests if r.request_id.startswith("2.") and r.request_id.endswith(f"/{sample}")
        )
        assert request.token_ids == (2, 2, 2, *full[:old])
        assert request.params.max_new_tokens == MAX_NEW_TOKENS - old
        assert request.seed == request_seed(7, 2, sample, old)
        assert request.group_size == 1  # shares no more than the prompt with the others
    assert all(c.versions.tolist() == [0] * len(c) for c in batch.groups[1].completions)


def test_budget_smaller_batch():
    engine = Engine()
    sampler = make_sampler(engine, lambda index: (1, 0) if index in (3, 5) else (0, 0), max_groups_factor=2.3)
    assert sampler.max_groups == 9  # 2.3 * 4, rounded down
    batch = collect(sampler, engine)
    assert [g.prompt.index for g in batch.groups] == [3, 5]
    assert batch.stats.budget_used_up and batch.stats.groups_sampled == batch.stats.groups_resolved == 9
    assert sampler.stream.position == 9
    check_accounts(batch.stats)


@pytest.mark.parametrize(("on_budget", "kept"), [("stop", 1), ("smaller_batch", 0), ("stop", 0)])
def test_budget_error(on_budget, kept):
    engine = Engine()
    sampler = make_sampler(engine, lambda i: (1, 0) if i < kept else (i % 2,) * 2, on_budget=on_budget, max_groups_factor=2)
    with pytest.raises(RuntimeError) as error:
        collect(sampler, engine)
    message = str(error.value)
    assert f"kept {kept} of the 4 groups" in message and "of 8 groups 4 were all correct" in message
    assert f"{4 - kept} all wrong" in message and "sampling.max_groups_factor=2" in message
    assert sampler.stream.position == 0 and not engine.waiting


def test_not_dynamic_keeps_all_and_samples_no_more():
    engine = Engine()
    sampler = make_sampler(engine, lambda index: [(1, 1), (0, 0)][index % 2], dynamic=False)
    batch = collect(sampler, engine)
    stats = batch.stats
    assert [g.prompt.index for g in batch.groups] == [0, 1, 2, 3]
    assert stats.groups_sampled == stats.groups_kept == 4 and stats.groups_cut == 0
    assert (stats.groups_all_correct, stats.groups_all_wrong) == (2, 2)
    assert stats.tokens_kept == stats.tokens_generated and stats.acceptance_rate == 1
    check_accounts(stats)


def test_window_follows_the_acceptance_rate():
    engine = Engine()
    sampler = make_sampler(engine, lambda index: (1, 0) if index % 4 == 0 else (1, 1), max_groups_factor=100)

    async def first_window():
        task = asyncio.create_task(sampler.collect(0))
        await settle()
        count = len(engine.groups())
        task.cancel()
        await asyncio.wait([task])
        return count

    assert sampler.rate.estimate == 0.5 and asyncio.run(first_window()) == 8
    for version in range(6):
        batch = collect(sampler, engine, version=version)
    assert batch.stats.acceptance_rate == pytest.approx(0.25, abs=0.05)
    window = asyncio.run(first_window())
    assert window == int(np.ceil(4 / batch.stats.acceptance_rate)) > 12


def test_window_stays_within_the_budget():
    engine = Engine()
    sampler = make_sampler(engine, lambda index: (0, 0), max_groups_factor=1.5)
    with pytest.raises(RuntimeError):
        collect(sampler, engine)
    assert {request.token_ids[0] for request in engine.requests} == set(range(6))


def group_of(correct, raw, penalty):
    empty = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "stop")
    n = len(correct)
    return Group(Prompt(0, "", (1,), ""), [empty] * n, [""] * n, np.array(correct), np.array(raw), np.array(penalty))


def test_filter_looks_at_the_raw_verdict_never_at_the_shaped_reward():
    assert not is_informative(group_of([False, False], [-1.0, -1.0], [0.0, -0.5]))
    assert not is_informative(group_of([True, True], [1.0, 1.0], [0.0, -0.5]))
    # Rewards that the penalty happens to make equal
    assert is_informative(group_of([True, False], [1.0, 0.0], [-1.0, 0.0]))


def test_request_seeds_are_the_same_in_every_process():
    assert request_seed(1, 2, 3) == 2117897405416396857
    seeds = {request_seed(r, p, s, o) for r in range(3) for p in range(20) for s in range(8) for o in (0, 1)}
    assert len(seeds) == 3 * 20 * 8 * 2 and all(0 <= seed < 2**63 for seed in seeds)


def test_wrong_settings():
    with pytest.raises(ValueError, match=r"sampling\.surplus: 'keep' is unknown; use rewind or carry"):
        make_sampler(Engine(), mixed, surplus="keep")
    with pytest.raises(ValueError, match=r"sampling\.on_budget"):
        make_sampler(Engine(), mixed, on_budget="hang")
    with pytest.raises(ValueError, match=r"rollout\.max_inflight_groups: 0"):
        make_sampler(Engine(0), mixed)
