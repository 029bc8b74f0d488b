"""SIGUSR1 as the run hears it."""

import asyncio
import os
import signal

import pytest

from dapo_megatron.stopping import StopAsked, StopSignal


def test_work_that_nobody_disturbs_gives_its_result_or_error() -> None:
    async def work(stop: StopSignal) -> None:
        assert await stop.cut(asyncio.sleep(0, result=3)) == 3
        with pytest.raises(ZeroDivisionError):
            await stop.cut(failing())

    async def failing() -> None:
        raise ZeroDivisionError

    with StopSignal() as stop:
        asyncio.run(work(stop))
    assert not stop.asked


def test_work_is_ended_by_the_signal_and_cleans_up() -> None:
    seen: list[str] = []

    async def endless() -> None:
        try:
            seen.append("begun")
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    with StopSignal() as stop:
        with pytest.raises(StopAsked):
            asyncio.run(stop.cut(endless()))
        assert seen == ["begun", "cleaned up"] and stop.asked
        with pytest.raises(StopAsked):  # from then on nothing is begun
            asyncio.run(stop.cut(endless()))
    assert seen == ["begun", "cleaned up"]


def test_the_signal_is_heard_only_within_the_context() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignal():
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before
