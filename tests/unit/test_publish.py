"""The publisher's order of calls, its recoveries, servers that come back, and the comparison of checksums."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import numpy as np
import pytest

from dapo_megatron.weights.publish import Publisher


class Calls:
    """Trainer and engine note their calls here; `failures` are how often each call fails first."""

    def __init__(self, **failures: int) -> None:
        self.names: list[str] = []
        self.failures = failures

    async def __call__(self, name: str) -> None:
        self.names.append(name)
        key = name.partition(" ")[0]
        if self.failures.get(key, 0) > 0:
            self.failures[key] -= 1
            raise RuntimeError(f"{key} failed")


class Trainer:
    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    async def open_senders(self, senders: dict[str, Any]) -> None:
        await self.calls(f"open {','.join(senders)}")

    async def close_senders(self) -> None:
        await self.calls("close")

    async def send_weights(self, version: int, servers: list[str]) -> dict[str, float]:
        await self.calls(f"send {version} {','.join(servers)}")
        return {"bytes": 4e9, "buckets": 2}

    async def checksums(self, servers: list[str]) -> dict[str, dict[str, str]]:
        await self.calls("compare")
        return {name: {"x": "1"} for name in servers}

    async def score(self, sequences: list[tuple[int, ...]]) -> list[np.ndarray]:
        return [np.full(len(ids) - 1, -1.0, np.float32) for ids in sequences]


class Engine:
    """`up`: servers by name, and whether they have weights. `lost_at_failure`: those that a failure turns out to have cost."""

    def __init__(self, calls: Calls, held: dict[str, str], lost_at_failure: list[str]) -> None:
        self.calls, self.held, self.lost_at_failure = calls, held, lost_at_failure
        self.up = {"a": False, "b": False}
        self.logprob_of_b = -1.0
        self.change = asyncio.Event()

    async def open(self) -> None:
        await self.calls("engine opened")

    async def aclose(self) -> None:
        await self.calls("engine closed")

    async def weight_senders(self) -> dict[str, Any]:
        return dict.fromkeys(self.up)

    def waiting(self) -> list[str]:
        return [name for name, has in self.up.items() if not has]

    async def joined(self) -> None:
        while not self.waiting():
            self.change.clear()
            await self.change.wait()

    async def drop_lost(self, failed: Collection[str] = ()) -> list[str]:
        lost = [*self.lost_at_failure, *failed]
        for name in lost:
            del self.up[name]
        self.lost_at_failure = []
        return lost

    async def begin_update(self, version: int, servers: Collection[str]) -> None:
        await self.calls(f"begin {','.join(servers)}")

    async def end_update(self, version: int, servers: Collection[str]) -> None:
        await self.calls("end")
        self.up |= dict.fromkeys(servers, True)

    async def checksums(self, servers: Collection[str]) -> dict[str, dict[str, str]]:
        return dict.fromkeys(servers, self.held)

    async def prompt_logprobs(self, token_ids: tuple[int, ...], server: str = "") -> np.ndarray:
        return np.full(len(token_ids) - 1, -1.0 if server == "a" else self.logprob_of_b, np.float32)

    def join(self, name: str) -> None:
        self.up[name] = False
        self.change.set()


def make(calls: Calls, held: dict[str, str] | None = None, lost: list[str] | None = None, check_every: int = 1) -> Publisher:
    return Publisher(Trainer(calls), Engine(calls, held or {"x": "1"}, lost or []), check_every, tolerance=0.1)


def run(publisher: Publisher, work: Callable[[], Awaitable[Any]]) -> Any:
    async def inside() -> Any:
        async with publisher:
            return await asyncio.wait_for(work(), 10)

    return asyncio.run(inside())


ONCE = ["begin a,b", "open a,b", "send 3 a,b", "end"]


def test_order() -> None:
    calls = Calls()
    publisher = make(calls)
    metrics = run(publisher, lambda: publisher.publish(3))
    assert publisher.version == 3
    assert calls.names == ["engine opened", *ONCE, "open a,b", "compare", "engine closed"]
    assert metrics["sync/publish_buckets"] == 2 and metrics["sync/publish_gb_per_s"] > 0


@pytest.mark.parametrize("step", ["open", "begin", "send", "end"])
def test_a_failure_starts_over_with_new_connections(step: str) -> None:
    calls = Calls(**{step: 1})
    publisher = make(calls, check_every=0)
    run(publisher, lambda: publisher.publish(3))
    first = next(i for i, name in enumerate(ONCE) if name.startswith(step)) + 1
    assert calls.names[1:-1] == [*ONCE[:first], "close", *ONCE]


def test_a_second_failure_is_raised() -> None:
    publisher = make(Calls(send=2))
    with pytest.raises(RuntimeError, match="send failed"):
        run(publisher, lambda: publisher.publish(3))
    assert publisher.version == -1


def test_the_loss_of_a_server_is_no_failure_and_the_others_get_the_version() -> None:
    calls = Calls(send=2)  # the first by the loss, the second by itself
    publisher = make(calls, lost=["a"], check_every=0)
    run(publisher, lambda: publisher.publish(3))
    assert [name for name in calls.names if name.startswith(("begin", "end"))] == ["begin a,b", "begin b", "begin b", "end"]


def test_a_server_that_comes_back_gets_the_present_weights_but_never_those_that_are_being_changed() -> None:
    calls = Calls()
    publisher = make(calls, check_every=0)
    engine: Any = publisher._engine

    async def work() -> None:
        await publisher.publish(3)
        async with publisher.lock:  # an update of the trainer's weights
            engine.join("a.1")
            for _ in range(20):
                await asyncio.sleep(0)
            assert "begin a.1" not in calls.names
        while engine.waiting():
            await asyncio.sleep(0.001)
        async with publisher.lock:
            engine.join("b.1")
            await publisher.publish(4)  # comes first
        for _ in range(20):
            await asyncio.sleep(0)

    run(publisher, work)
    begun = [name for name in calls.names if name.startswith(("begin", "send"))]
    assert begun == ["begin a,b", "send 3 a,b", "begin a.1", "send 3 a.1", "begin a,b,a.1,b.1", "send 4 a,b,a.1,b.1"]


def test_a_server_that_comes_back_and_can_t_take_the_weights_is_lost_again() -> None:
    calls = Calls()
    publisher = make(calls, check_every=0)
    engine: Any = publisher._engine

    async def work() -> None:
        await publisher.publish(3)
        calls.failures["send"] = 1
        engine.join("a.1")
        while "a.1" in engine.up:
            await asyncio.sleep(0.001)
        await publisher.publish(4)

    run(publisher, work)
    assert calls.names[-5:-1] == ["begin a,b", "open a,b", "send 4 a,b", "end"]


def test_an_error_in_the_background_ends_the_next_publish() -> None:
    publisher = make(Calls(), check_every=0)
    engine: Any = publisher._engine

    async def work() -> None:
        await publisher.publish(3)

        async def broken(version: int, servers: Collection[str]) -> None:
            raise ValueError("weight 'w' is unknown")

        engine.begin_update = broken
        engine.join("a.1")
        await asyncio.sleep(0.01)
        await publisher.publish(4)

    with pytest.raises(ValueError, match="weight 'w' is unknown"):
        run(publisher, work)


@pytest.mark.parametrize("held", [{"x": "2"}, {"y": "1"}])
def test_different_weights_are_found_at_every_second_publish(held: dict[str, str]) -> None:
    publisher = make(Calls(), held, check_every=2)

    async def work() -> None:
        await publisher.publish(3)
        with pytest.raises(RuntimeError, match=r"publish\.check: a does not hold version 4: .*'[xy]'"):
            await publisher.publish(4)

    run(publisher, work)


@pytest.mark.parametrize("logprob", [-1.05, -1.2, float("nan")])
@pytest.mark.parametrize("held", [{"x": "1"}, {}], ids=["right weights", "can't tell"])
def test_a_server_that_computes_with_something_else_is_found(held: dict[str, str], logprob: float) -> None:
    publisher = Publisher(Trainer(Calls()), engine := Engine(Calls(), held, []), 1, tolerance=0.1)
    engine.logprob_of_b = logprob
    if logprob == -1.05:
        run(publisher, lambda: publisher.publish(3, [(1, 2, 3), (4,)]))
        return
    with pytest.raises(
        RuntimeError, match=r"publish\.check: b computes with other weights than version 3.*2 tokens are (0\.2|nan)"
    ):
        run(publisher, lambda: publisher.publish(3, [(1, 2, 3), (4,)]))
