"""What benchmarks/gpu_check.py found."""

import subprocess
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Report:
    """What was checked: printed at once, collected for the summary."""

    def __init__(self, minutes: float) -> None:
        self.deadline = time.monotonic() + 60 * minutes
        self.lines: list[str] = []
        self.found: list[dict[str, Any]] = []
        self.failed = False

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def check(self, name: str, figure: float, limit: float) -> None:
        """Whether figure <= limit; nan isn't."""
        self._judge(name, figure <= limit, f"{figure:.2g} (at most {limit:.2g})", figure)

    def check_true(self, name: str, ok: bool) -> None:
        self._judge(name, ok, "", ok)

    def measured(self, name: str, figure: float, unit: str) -> None:
        self.say(f"        {name}: {figure:.4g} {unit}")
        self.found.append({"name": name, "figure": figure, "unit": unit})

    def _judge(self, name: str, ok: bool, text: str, figure: Any) -> None:
        self.failed |= not ok
        self.say(f"{'ok    ' if ok else 'FAILED'}  {name}  {text}".rstrip())
        self.found.append({"name": name, "ok": ok, "figure": figure})

    @contextmanager
    def going_on(self, name: str) -> Iterator[None]:
        """An exception inside is a failure of `name`, no more."""
        try:
            yield
        except subprocess.TimeoutExpired:
            self.say(f"left out  {name}: the time was up before its end")
        except Exception as e:
            traceback.print_exc()
            self._judge(name, False, f"{type(e).__name__}: {' '.join(str(e).split())[-200:]}", None)
