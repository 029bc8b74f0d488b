from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import MODELS, RankPool, make_model


@pytest.fixture(scope="package")  # no longer than these tests: threads that a process group left behind take time from others
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(name, root / name) for name in MODELS}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table of README: the worst differences that the invariance tests of this run have found."""
    from tests.distributed.test_invariance import worst

    if worst:
        columns = ("loss", "grads", "gradient norm", "weights")
        terminalreporter.section("largest differences from transformers in fp64, by layout")
        terminalreporter.write_line("| layout | " + " | ".join(columns) + " |\n|---" + "|---" * len(columns) + "|")
        for layout, found in worst.items():
            terminalreporter.write_line(f"| {layout} | " + " | ".join(f"{found[name]:.1e}" for name in columns) + " |")
