"""Ending a run before its last step so that it goes on when it is started again: because it was asked to, by SIGUSR1, as
Slurm does before a time limit or a preemption, or because one of its processes was lost."""

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: start it again


class CutOff(RuntimeError):
    """The run ended early by no fault of its own. Started again it goes on."""


class ProcessLost(RuntimeError):
    """One of the run's processes died, maybe with its node."""


class StopAsked(Exception):
    """Raised where the run stops when it was asked to."""


class StopSignal:
    """As a context, in the main thread: listens for SIGUSR1, which asks the run to stop as soon as nothing is lost by it."""

    def __init__(self) -> None:
        self.asked = False
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR1, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGUSR1, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def cut(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If stopping is asked for first, `work` is cancelled, and when that is through: StopAsked."""
        self._loop = asyncio.get_running_loop()
        if self.asked:
            work.close()
            raise StopAsked
        task, asked = asyncio.create_task(work), asyncio.create_task(self._event.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise StopAsked
        finally:
            asked.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
