"""How far a conversion is: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_LINE_EVERY_S = 10.0


class ByteProgress:
    """`total` bytes, of which `done` were dealt with earlier. Use as a context manager, so that the terminal is restored."""

    def __init__(self, what: str, total: int, done: int = 0, file: IO[str] | None = None) -> None:
        file = file or sys.stderr
        console = Console(file=file, highlight=False)
        self._file, self._what, self._total, self._done, self._earlier = file, what, total, done, done
        self._start = self._told = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, completed=done)

    def __enter__(self) -> "ByteProgress":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._bar.update(self._task, completed=self._done)
        now = time.monotonic()
        if self._bar.disable and now - self._told >= _LINE_EVERY_S:
            self._told = now
            rate = (self._done - self._earlier) / (now - self._start) / 1e9
            print(
                f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate:.2f} GB/s",
                file=self._file,
                flush=True,
            )

    @property
    def summary(self) -> str:
        """Seconds so far and GB/s of what was done in them."""
        seconds = time.monotonic() - self._start
        return f"{seconds:.1f} s, {(self._done - self._earlier) / max(seconds, 1e-9) / 1e9:.2f} GB/s"
