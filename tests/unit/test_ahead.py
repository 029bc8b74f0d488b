"""Batches that are collected while the one before is trained on: what is in them, and what becomes of them when weights are
published, when something fails, and when the run is killed."""

import asyncio
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from dapo_megatron.config import Config
from dapo_megatron.evaluate import Evaluator
from dapo_megatron.records import Prompt
from dapo_megatron.rollout.ahead import Batches
from dapo_megatron.rollout.sampler import request_seed
from dapo_megatron.run_folder import _decode, _encode
from dapo_megatron.stopping import StopSignal
from tests.unit.scripted_engine import (
    Engine,
    Stream,
    check_accounts,
    content,
    make_sampler,
    mixed,
    released,
    response,
    settle,
    varied,
)


class Server(Engine):
    """Can be published to; new requests wait meanwhile. Of a response that a publish didn't interrupt, the first half was
    sampled before it."""

    paused = False

    async def generate(self, request):
        while self.paused:
            await asyncio.sleep(0)
        before = self.version
        if request.request_id.startswith(("eval", "greedy")):  # prompts go by number here
            request = replace(request, request_id=f"{request.token_ids[0]}.{request.request_id}")
        completion = await super().generate(request)
        if self.version != before and completion.finish_reason != "abort":
            completion.versions[: len(completion) // 2] = before
        return completion

    async def publish(self, version, pause):
        assert pause != "drain" or not self.waiting
        self.paused = True
        if pause == "abort":
            await self.abort(list(self.waiting))
            await settle()
        self.version, self.paused = version, False


def make_batches(engine, verdicts=varied, *, pause="drain", steps=5, max_staleness=1, **sampling):
    cfg = Config()
    cfg.run.steps, cfg.rollout.max_staleness, cfg.publish.pause = steps, max_staleness, pause
    return Batches(make_sampler(engine, verdicts, **sampling), cfg, StopSignal())


async def take_steps(batches, engine, steps, pause="drain", rank=lambda index: index):
    """Batches of these steps. While a step trains, one group of the next batch is done, at most."""
    taken = []
    for step in steps:
        taken.append(await released(batches.take(step - 1), engine, rank))
        await settle()
        if engine.groups():
            engine.release(min(engine.groups(), key=rank))
            await settle()
        await released(batches.before_publish(), engine, rank)
        await engine.publish(step, pause)
    return taken


def versions(batch):
    return {int(v) for group in batch.groups for completion in group.completions for v in completion.versions}


def told(batch, *untold):
    stats = {name: value for name, value in asdict(batch.stats).items() if name not in untold}
    return content(batch), [group.prompt.index for group in batch.filtered], stats, batch.position


def run_now(coroutine):
    """A hang is an error."""

    async def within_time():
        return await asyncio.wait_for(coroutine, timeout=5)

    return asyncio.run(within_time())


PAUSES = ["drain", "retract", "abort"]


@pytest.mark.parametrize("surplus", ["rewind", "carry"])
@pytest.mark.parametrize("pause", PAUSES)
def test_a_step_gets_what_the_weights_before_its_own_sampled(pause, surplus):
    engine = Server(partial=lambda missing: 0)  # nothing of a carried group is older than its batch
    taken = run_now(take_steps(make_batches(engine, pause=pause, surplus=surplus), engine, range(1, 6), pause))
    assert versions(taken[0]) == {0} and not engine.waiting
    for step, batch in enumerate(taken[1:], 2):
        assert versions(batch) <= {step - 2, step - 1} and (step - 1 in versions(batch)) == (pause != "drain")
    assert max(request.token_ids[0] for request in engine.requests) < taken[-1].position + 8  # none for a step after the last


@pytest.mark.parametrize("surplus", ["rewind", "carry"])
@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("seed", range(3))
def test_no_group_is_lost_or_comes_twice_and_every_token_has_a_fate(pause, surplus, seed):
    ranks = np.random.default_rng(seed).permutation(1000)
    engine = Server(max_inflight_groups=5)
    batches = make_batches(engine, pause=pause, surplus=surplus)
    taken = run_now(take_steps(batches, engine, range(1, 6), pause, lambda index: ranks[index]))
    resolved = [group.prompt.index for batch in taken for group in batch.groups + batch.filtered]
    assert sorted(resolved) == list(range(len(resolved)))
    for batch in taken:
        check_accounts(batch.stats)
    assert sum(batch.stats.tokens_generated for batch in taken) == engine.generated
    assert [batch.position for batch in taken] == sorted(batch.position for batch in taken)


@pytest.mark.parametrize("seed", range(4))
def test_finishing_order_changes_no_batch(seed):
    def run(rank, max_staleness):
        engine = Server()
        batches = make_batches(engine, max_staleness=max_staleness)
        taken = run_now(take_steps(batches, engine, range(1, 6), rank=rank))
        return [told(batch, "tokens_generated", "tokens_aborted") for batch in taken]

    ranks = np.random.default_rng(seed).permutation(1000)
    in_order = run(lambda index: index, max_staleness=0)
    assert run(lambda index: index, max_staleness=1) == in_order  # these responses don't depend on weights
    assert run(lambda index: ranks[index], max_staleness=1) == in_order


def saved(batches, stream):
    """What a checkpoint holds of them."""
    return json.loads(json.dumps(_encode({"batches": batches.state_dict(), "position": stream.position})))


@pytest.mark.parametrize("surplus", ["rewind", "carry"])
@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_a_resumed_run_goes_on_as_it_would_have(pause, surplus, after):
    """Whatever had been collected ahead is trained on and not sampled again."""

    async def run():
        engine, stream = Server(max_inflight_groups=4), Stream()
        batches = make_batches(engine, pause=pause, surplus=surplus, stream=stream)
        await take_steps(batches, engine, range(1, after + 1), pause)
        await released(batches.finish(), engine)
        state, seen = saved(batches, stream), len(engine.requests)
        rest = await take_steps(batches, engine, range(after + 1, 6), pause)
        other_engine, other_stream = Server(max_inflight_groups=4), Stream()
        other_engine.version, other_stream.position = after, state["position"]
        resumed = make_batches(other_engine, pause=pause, surplus=surplus, stream=other_stream)
        resumed.load_state_dict(_decode(state["batches"]))
        other_rest = await take_steps(resumed, other_engine, range(after + 1, 6), pause)
        assert [told(batch) for batch in other_rest] == [told(batch) for batch in rest]
        assert [versions(batch) for batch in other_rest] == [versions(batch) for batch in rest]
        assert other_engine.requests == engine.requests[seen:]
        assert saved(resumed, other_stream) == saved(batches, stream)

    run_now(run())


def test_a_batch_collected_ahead_is_not_trained_on_where_that_is_not_allowed():
    engine = Server()
    batches = make_batches(engine)
    run_now(take_steps(batches, engine, [1]))
    state = batches.state_dict()
    with pytest.raises(ValueError, match=r"rollout\.max_staleness: 0 came after 1.*Resume with 1 and run\.steps"):
        make_batches(engine, max_staleness=0).load_state_dict(state)
    run_now(take_steps(batches, engine, range(2, 6)))
    make_batches(engine, max_staleness=0).load_state_dict(batches.state_dict())  # nothing is ahead after the last step


def test_what_a_publish_interrupts_is_dropped_and_sampled_anew():
    async def run():
        batches = make_batches(engine, mixed, pause="abort", steps=2, prompts_per_step=2)
        await released(batches.take(0), engine)
        await settle()
        engine.release(2)  # the first of the batch ahead is done, the others are in flight
        await settle()
        cut = [request for request in engine.requests if request.request_id in engine.waiting]
        await engine.publish(1, "abort")
        await settle()
        again = engine.requests[-len(cut) :]
        batch = await released(batches.take(1), engine)
        return batch, cut, again

    engine = Server()  # hands over half of a response
    batch, cut, again = run_now(run())
    assert len(cut) >= 2 and [request.request_id for request in cut] == [request.request_id for request in again]
    assert all(a.token_ids == b.token_ids and a.params == b.params for a, b in zip(cut, again, strict=True))
    for request in again:
        sample = int(request.request_id.split("/")[1])
        assert request.seed == request_seed(7, request.token_ids[0], sample, dropped=1) != request_seed(7, 0, sample)
    assert len({request.seed for request in cut + again}) == 2 * len(cut)
    assert [group.prompt.index for group in batch.groups] == [2, 3]
    for group, version in zip(batch.groups, (0, 1), strict=True):
        for sample, completion in enumerate(group.completions):
            assert completion.token_ids.tolist() == response(group.prompt.index, sample)
            assert set(completion.versions.tolist()) == {version}
    check_accounts(batch.stats)
    dropped = sum(len(response(request.token_ids[0], int(request.request_id.split("/")[1]))) // 2 for request in cut)
    assert 0 < dropped <= batch.stats.tokens_aborted


def test_a_publish_that_interrupts_without_end_is_an_error():
    async def run():
        batches = make_batches(engine, pause="abort")
        await released(batches.take(0), engine)
        for _ in range(20):
            await settle()
            await engine.publish(1, "abort")
        await batches.finish()

    engine = Server()
    with pytest.raises(RuntimeError, match=r"interrupted request .* of its own accord"):
        run_now(run())
    assert not engine.waiting


@pytest.mark.parametrize("pause", ["drain", "retract", "in_place"])
def test_an_abort_that_nobody_asked_for_is_an_error(pause):
    async def run():
        position = (await released(batches.take(0), engine)).position
        await settle()
        await engine.publish(1, "abort")
        with pytest.raises(RuntimeError, match=r"interrupted request .* of its own accord"):
            await batches.take(1)
        assert batches._sampler.stream.position == position

    engine = Server()
    batches = make_batches(engine, pause=pause)
    run_now(run())
    assert not engine.waiting


@pytest.mark.parametrize("served", [2, 5])
def test_weights_out_of_the_range_are_an_error(served):
    """The batch that weights 3 sample while step 4 trains; 4 may be published meanwhile."""

    async def run():
        await released(batches.take(3), engine)
        engine.version = served
        await released(batches.finish(), engine)

    engine = Server()
    engine.version = 3
    batches = make_batches(engine, steps=9)
    with pytest.raises(RuntimeError, match=r"weight versions \[(2|2, 3|3, 5|5)\] instead of 3 to 4: a publish is missing"):
        run_now(run())


@pytest.mark.parametrize("where", ["before_publish", "finish", "take"])
def test_an_error_of_the_background_surfaces_where_the_batch_is_wanted(where):
    async def run():
        async with batches:
            position = (await released(batches.take(0), engine)).position
            await settle()
            engine.waiting[next(iter(engine.waiting))].set_exception(ConnectionError("server died"))
            await settle()  # training goes on
            assert not engine.waiting and batches._sampler.stream.position == position
            wanted = batches.take(1) if where == "take" else getattr(batches, where)()
            with pytest.raises(ConnectionError, match="server died"):
                await wanted
            await engine.publish(1, "drain")
            assert (await released(batches.take(1), engine)).position > position  # as good as new

    engine = Server()
    batches = make_batches(engine)
    run_now(run())
    assert not engine.waiting


def test_an_error_in_training_ends_what_is_in_flight():
    async def run():
        async with batches:
            positions.append((await released(batches.take(0), engine)).position)
            await settle()
            assert engine.waiting
            raise OSError("training failed")

    positions = []
    engine = Server()
    batches = make_batches(engine)
    with pytest.raises(OSError, match="training failed"):
        run_now(run())
    assert not engine.waiting and batches._sampler.stream.position == positions[0]


def test_cancelling_while_waiting_for_a_batch_ends_its_collect():
    async def run():
        async with batches:
            await released(batches.take(0), engine)
            waiting = asyncio.create_task(batches.take(1))
            await settle()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not engine.waiting and len(asyncio.all_tasks()) == 1

    engine = Server()
    batches = make_batches(engine)
    run_now(run())


@pytest.mark.parametrize("pause", ["retract", "drain"])
def test_evaluation_goes_on_beside_and_by_the_new_weights(pause):
    async def run():
        await released(batches.take(0), engine)
        await released(batches.before_publish(), engine)
        await engine.publish(1, pause)
        flying = len(engine.groups())
        values = await released(evaluator.evaluate(1), engine)
        with pytest.raises(RuntimeError, match=r"evaluation after step 2: the engine answered by weight versions \[1\]"):
            await released(evaluator.evaluate(2), engine)
        return flying, values, await released(batches.take(1), engine)

    engine = Server()
    batches = make_batches(engine, mixed, pause=pause)
    cfg = Config()
    cfg.eval.samples = 2
    prompts = [Prompt(900 + i, f"held out {i}", (900 + i,) * 3, "gold") for i in range(3)]
    evaluator = Evaluator(cfg, engine, batches._sampler.score, prompts, (2,))
    flying, values, batch = run_now(run())
    assert (flying > 0) == (pause == "retract") and values["eval/avg_at_k"] == 0.5
    assert [group.prompt.index for group in batch.groups] == [4, 5, 6, 7]
