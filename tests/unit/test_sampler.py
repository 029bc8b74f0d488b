"""The dynamic sampler against a scripted engine: each test decides which group finishes when."""

import asyncio
import pickle
from dataclasses import asdict

import numpy as np
import pytest

import dapo_megatron.rollout.sampler as sampler_module
from dapo_megatron.config import SamplingConfig
from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.rollout.engine import SamplingParams
from dapo_megatron.rollout.sampler import DynamicSampler, is_informative, request_seed

PROMPT_LEN = 3
MAX_NEW_TOKENS = 40
EOS = 2


class Stream:
    """Prompt i has index i; its tokens name it."""

    def __init__(self):
        self.position = 0

    def next(self):
        index = self.position
        self.position += 1
        return Prompt(index, f"p{index}", (index,) * PROMPT_LEN, "gold")


def response(index, sample):
    """All tokens of a prompt's sample: between 1 and 17, EOS last, a pure function of both numbers."""
    length = int(np.random.default_rng([index, sample]).integers(1, 18))
    return [100 * index + 20 * sample + k + 3 for k in range(length - 1)] + [EOS]


class Engine:
    """Requests wait until `release` or `abort`. An aborted one hands over `partial(missing tokens)` of them."""

    def __init__(self, max_inflight_groups=1000, partial=lambda missing: missing // 2):
        self.max_inflight_groups, self.partial = max_inflight_groups, partial
        self.version = 0
        self.requests = []  # all ever seen
        self.waiting = {}  # request id -> future that becomes the finish reason
        self.most_groups = 0
        self.generated = 0
        self.ignored_aborts = 0

    async def generate(self, request):
        self.requests.append(request)
        future = self.waiting[request.request_id] = asyncio.get_running_loop().create_future()
        self.most_groups = max(self.most_groups, len(self.groups()))
        try:
            reason = await future
        finally:
            del self.waiting[request.request_id]
        group, sample = request.request_id.split("/")
        tokens = response(int(group.split(".")[0]), int(sample))[len(request.token_ids) - PROMPT_LEN :]
        if reason == "abort":
            tokens = tokens[: self.partial(len(tokens))]
        elif len(tokens) > request.params.max_new_tokens:
            tokens, reason = tokens[: request.params.max_new_tokens], "length"
        self.generated += len(tokens)
        return Completion(
            np.array(tokens, np.int32),
            np.array(tokens, np.float32) / -1000,
            np.full(len(tokens), self.version, np.int32),
            reason,
        )

    async def abort(self, request_ids):
        if self.ignored_aborts:
            self.ignored_aborts -= 1
            return
        for request_id in request_ids:
            self._end(request_id, "abort")

    def _end(self, request_id, reason):
        future = self.waiting.get(request_id)
        if future is not None and not future.done():
            future.set_result(reason)

    def groups(self):
        """Numbers of the prompts in flight."""
        return {int(request_id.split(".")[0]) for request_id, f in self.waiting.items() if not f.done()}

    def release(self, index):
        for request_id in list(self.waiting):
            if request_id.startswith(f"{index}."):
                self._end(request_id, "stop")


async def settle():
    for _ in range(30):
        await asyncio.sleep(0)


def make_sampler(engine, verdicts, stream=None, seed=7, params=None, score=None, **config):
    """`verdicts(index)` is the correctness of a prompt's responses."""

    async def score_now(prompt, completions):
        correct = np.array(verdicts(prompt.index), bool)
        return Group(prompt, completions, [""] * len(completions), correct, correct.astype(np.float32), np.zeros(len(correct)))

    return DynamicSampler(
        SamplingConfig(**{"prompts_per_step": 4, "samples_per_prompt": 2, **config}),
        stream or Stream(),
        engine,
        score or score_now,
        params or SamplingParams(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(EOS,)),
        seed,
    )


def mixed(index):
    return (1, 0)


def varied(index):
    """About half of the groups are mixed."""
    return np.random.default_rng(index + 1000).permutation([(1, 0), (0, 1), (1, 1), (0, 0)])[0]


async def drive(sampler, engine, rank, version=0):
    """Collect while always releasing the group in flight with the smallest rank(prompt index)."""
    engine.version = version
    task = asyncio.create_task(sampler.collect(version))
    while True:
        await settle()
        if task.done():
            assert not engine.waiting
            return task.result()
        if engine.groups():
            engine.release(min(engine.groups(), key=rank))
        else:
            await asyncio.sleep(0.001)


def collect(sampler, engine, rank=lambda index: index, version=0):
    return asyncio.run(drive(sampler, engine, rank, version))


def content(batch):
    return [(g.prompt.index, [(c.token_ids.tolist(), c.logprobs.tolist()) for c in g.completions]) for g in batch.groups]


def check_accounts(stats):
    s = stats
    assert s.groups_sampled + s.groups_carried_in == s.groups_resolved + s.groups_cut + s.groups_carried_out
    fates = s.tokens_kept + s.tokens_filtered_correct + s.tokens_filtered_wrong + s.tokens_aborted
    assert s.tokens_generated + s.tokens_carried_in == fates + s.tokens_carried_out


def run_three_steps(verdicts, surplus, rank):
    # An abort that finds every token sampled: how far a group had got is then no question of timing.
    engine = Engine(partial=lambda missing: missing)
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    sampler = make_sampler(engine, verdicts, surplus=surplus, params=params, max_groups_factor=20)
    results = []
    for version in range(3):
        batch = collect(sampler, engine, rank, version)
        check_accounts(batch.stats)
        results.append((content(batch), asdict(batch.stats), sampler.stream.position))
    return results


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


def test_engine_error_cancels_everything_and_surfaces():
    async def run():
        task = asyncio.create_task(sampler.collect(0))
        await settle()
        broken = next(iter(engine.waiting))
        assert len(engine.waiting) > 4
        engine.waiting[broken].set_exception(ConnectionError("server died"))
        await settle()
        assert not engine.waiting
        leftover = asyncio.all_tasks() - {asyncio.current_task(), task}
        assert not leftover
        await task

    engine = Engine()
    engine.ignored_aborts = 1  # a dead server doesn't listen
    sampler = make_sampler(engine, mixed)
    with pytest.raises(ConnectionError, match="server died"):
        asyncio.run(run())
    assert sampler.stream.position == 0 and engine.ignored_aborts == 0
    batch = collect(sampler, engine)  # the sampler is as good as new
    assert [g.prompt.index for g in batch.groups] == [0, 1, 2, 3]


def test_scorer_error_surfaces():
    async def score(prompt, completions):
        raise OSError("no verifier")

    engine = Engine()
    with pytest.raises(OSError, match="no verifier"):
        collect(make_sampler(engine, mixed, score=score), engine)
    assert not engine.waiting


def test_an_error_keeps_carried_groups():
    engine = Engine()
    sampler = make_sampler(engine, mixed, surplus="carry", prompts_per_step=2)
    collect(sampler, engine)
    before, position = pickle.dumps(sampler.carried), sampler.stream.position
    with pytest.raises(RuntimeError, match="weight version"):
        # The engine still serves version 0.
        asyncio.run(_with_version(sampler, engine, served=0, expected=1))
    assert pickle.dumps(sampler.carried) == before and sampler.stream.position == position


async def _with_version(sampler, engine, served, expected):
    engine.version = served
    task = asyncio.create_task(sampler.collect(expected))
    await settle()
    engine.release(min(engine.groups()))
    return await task


def test_other_weights_than_the_published_ones_are_an_error():
    engine = Engine()
    with pytest.raises(RuntimeError, match=r"request 0\.0/0 was sampled by weight versions \[3\] instead of 4"):
        asyncio.run(_with_version(make_sampler(engine, mixed), engine, served=3, expected=4))


def test_an_abort_that_nobody_asked_for_is_an_error():
    async def run():
        task = asyncio.create_task(sampler.collect(0))
        await settle()
        await engine.abort(["0.0/0"])
        await asyncio.wait_for(task, timeout=5)

    engine = Engine(partial=lambda missing: 0)
    sampler = make_sampler(engine, mixed)
    with pytest.raises(RuntimeError, match=r"interrupted request 0\.0/0 of its own accord after 0 tokens"):
        asyncio.run(run())
    assert not engine.waiting


def test_cancelling_a_collect_leaves_nothing_in_flight():
    async def run():
        task = asyncio.create_task(sampler.collect(0))
        await settle()
        assert engine.waiting
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.waiting and len(asyncio.all_tasks()) == 1

    engine = Engine()
    sampler = make_sampler(engine, mixed)
    asyncio.run(run())


def test_an_abort_that_got_lost_is_repeated(monkeypatch):
    monkeypatch.setattr(sampler_module, "ABORT_RETRY_S", 0.01)

    async def run():
        task = asyncio.create_task(sampler.collect(0))
        await settle()
        for index in range(4):
            engine.release(index)
        return await asyncio.wait_for(task, timeout=5)

    engine = Engine()
    engine.ignored_aborts = 2
    sampler = make_sampler(engine, mixed)
    assert len(asyncio.run(run()).groups) == 4
    assert engine.ignored_aborts == 0 and not engine.waiting


@pytest.mark.parametrize("surplus", ["rewind", "carry"])
def test_a_full_batch_does_not_wait_for_verdicts_that_are_not_needed(surplus):
    slow = asyncio.Event()  # never set in the first collect

    async def score(prompt, completions):
        if prompt.index >= 2:
            await slow.wait()
        correct = np.array([True, False])
        return Group(prompt, completions, ["", ""], correct, correct.astype(np.float32), np.zeros(2))

    async def run():
        first = await asyncio.wait_for(drive(sampler, engine, lambda index: -index), timeout=5)
        slow.set()
        return first, await drive(sampler, engine, lambda index: index, version=1)

    engine = Engine()
    sampler = make_sampler(engine, mixed, score=score, surplus=surplus, prompts_per_step=2)
    first, second = asyncio.run(run())
    finished = sum(len(response(index, sample)) for index in (2, 3) for sample in range(2))
    assert first.stats.tokens_aborted + first.stats.tokens_carried_out >= finished
    assert [g.prompt.index for g in second.groups] == [2, 3]
    sampled_again = [r for r in engine.requests if r.token_ids[0] == 2]
    assert len(sampled_again) == (2 if surplus == "carry" else 4)
    check_accounts(second.stats)


def test_groups_that_end_while_being_aborted_are_not_scored():
    async def score(prompt, completions):
        assert prompt.index < 4, "not needed"
        correct = np.array([True, False])
        return Group(prompt, completions, ["", ""], correct, correct.astype(np.float32), np.zeros(2))

    engine = Engine(partial=lambda missing: missing)
    sampler = make_sampler(engine, mixed, score=score, surplus="carry")
    collect(sampler, engine)
    assert sampler.carried[0].finished and sampler.carried[0].group is None


@pytest.mark.parametrize("last", ["eos", "limit"])
def test_an_abort_after_the_last_token_interrupted_nothing(last):
    limit = MAX_NEW_TOKENS if last == "eos" else 1
    engine = Engine(partial=lambda missing: min(missing, limit))
    params = SamplingParams(max_new_tokens=limit, stop_token_ids=(EOS,))
    sampler = make_sampler(engine, mixed, surplus="carry", params=params)
    collect(sampler, engine)
    assert sampler.carried
    for entry in sampler.carried:
        for completion in entry.completions:
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] == EOS else "length")
    seen = len(engine.requests)
    batch = collect(sampler, engine, version=1)
    carried = {entry.prompt.index for entry in sampler.carried}
    assert [g.prompt.index for g in batch.groups] == [4, 5, 6, 7]
    assert all(request.token_ids[0] > 7 or request.token_ids[0] in carried for request in engine.requests[seen:])


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
