"""Something that happens at a chosen moment of a run, such as its death: hooks for SoloRun."""

import importlib
import inspect
import itertools
from collections.abc import Callable
from functools import wraps
from typing import Any

from tests.integration.solo import die


def at(target: str, moment: str, count: int = 1, action: Callable[[], None] = die) -> None:
    """Patch `module:name` of the package to call `action` before or after its count-th call."""
    module, _, path = (target if target.startswith("megatron.") else f"dapo_megatron.{target}").partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), itertools.count(1)

    def reached(now: str, number: int) -> None:
        if (now, number) == (moment, count):
            action()

    @wraps(original)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        reached("before", number)
        result = await original(*args, **kwargs)
        reached("after", number)
        return result

    @wraps(original)  # Megatron looks at signatures
    def called(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        reached("before", number)
        result = original(*args, **kwargs)
        reached("after", number)
        return result

    setattr(owner, name, awaited if inspect.iscoroutinefunction(original) else called)


def half_a_row(count: int = 1) -> None:
    """Killed while the count-th row of metrics is being written."""
    from dapo_megatron.telemetry import metrics

    original, calls = metrics.MetricsWriter.write, itertools.count(1)

    def write(self: Any, step: int, values: Any) -> None:
        if next(calls) == count:
            line = metrics._line(metrics.make_row(step, values))
            self._file.write(line[: len(line) // 2])
            self._file.flush()
            die()
        original(self, step, values)

    metrics.MetricsWriter.write = write  # type: ignore[method-assign]
