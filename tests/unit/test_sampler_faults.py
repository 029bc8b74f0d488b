"""The dynamic sampler when something goes wrong: errors, cancelling, aborts that are late or lost."""

import asyncio
import pickle

import numpy as np
import pytest

import dapo_megatron.rollout.sampler as sampler_module
from dapo_megatron.records import Group
from dapo_megatron.rollout.engine import SamplingParams
from tests.unit.scripted_engine import (
    EOS,
    MAX_NEW_TOKENS,
    Engine,
    check_accounts,
    collect,
    drive,
    make_sampler,
    mixed,
    response,
    settle,
)


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
        asyncio.run(drive(sampler, engine, lambda index: index, version=1, served=0))
    assert pickle.dumps(sampler.carried) == before and sampler.stream.position == position


def test_other_weights_than_the_published_ones_are_an_error():
    engine = Engine()
    sampler = make_sampler(engine, mixed)
    with pytest.raises(RuntimeError, match=r"request 0\.0/0 was sampled by weight versions \[3\] instead of 4"):
        asyncio.run(drive(sampler, engine, lambda index: index, version=4, served=3))


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
