"""The publisher's order of calls, its one recovery, and the comparison of checksums."""

import asyncio
from typing import Any

import pytest

from dapo_megatron.weights.publish import Publisher


class Calls:
    """Trainer and engine note their calls here; `failures` are how often each call fails first."""

    def __init__(self, **failures: int) -> None:
        self.names: list[str] = []
        self.failures = failures

    async def __call__(self, name: str) -> None:
        self.names.append(name)
        if self.failures.get(name, 0) > 0:
            self.failures[name] -= 1
            raise RuntimeError(f"{name} failed")


class Trainer:
    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    async def open_senders(self, senders: list[Any]) -> None:
        await self.calls("open")

    async def close_senders(self) -> None:
        await self.calls("close")

    async def send_weights(self, version: int) -> None:
        await self.calls("send")

    async def checksums(self) -> list[dict[str, str]]:
        return [{"a": "1"}]


class Engine:
    def __init__(self, calls: Calls, held: dict[str, str]) -> None:
        self.calls, self.held = calls, held

    def weight_senders(self) -> list[Any]:
        return []

    async def begin_update(self, version: int) -> None:
        await self.calls("begin")

    async def end_update(self, version: int) -> None:
        await self.calls("end")

    async def checksums(self) -> list[dict[str, str]]:
        return [self.held]


def make(calls: Calls, held: dict[str, str] | None = None) -> Publisher:
    return Publisher(Trainer(calls), Engine(calls, held or {"a": "1"}), check=True)


def test_order() -> None:
    calls = Calls()
    publisher = make(calls)
    asyncio.run(publisher.publish(3))
    assert publisher.version == 3 and calls.names == ["begin", "send", "end"]


@pytest.mark.parametrize("step", ["begin", "send", "end"])
def test_a_failure_starts_over_with_new_connections(step: str) -> None:
    calls = Calls(**{step: 1})
    asyncio.run(make(calls).publish(3))
    first = ["begin", "send", "end"]
    assert calls.names == [*first[: first.index(step) + 1], "close", "open", "begin", "send", "end"]


def test_a_second_failure_is_raised() -> None:
    publisher = make(Calls(send=2))
    with pytest.raises(RuntimeError, match="send failed"):
        asyncio.run(publisher.publish(3))
    assert publisher.version == -1


@pytest.mark.parametrize("held", [{"a": "2"}, {"b": "1"}])
def test_different_weights_are_found(held: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match=r"publish\.check: engine 0 does not hold version 3"):
        asyncio.run(make(Calls(), held).publish(3))
