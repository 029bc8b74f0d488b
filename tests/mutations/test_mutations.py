"""Proof that the tests see the faults that matter: with one of them put into a copy of the package, the suite turns red.

A mutation that no test notices fails here, and so does one that can't be applied any more: the table then has to follow.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.mutations import data, loss
from tests.mutations.mutation import Mutation

# The installed package is the one under test, so what is imported is checked: an unpatched copy would prove nothing.
_CONFTEST = """
from pathlib import Path
import dapo_megatron
assert Path(dapo_megatron.__file__).resolve().is_relative_to(Path(__file__).resolve().parent), dapo_megatron.__file__
"""
TIMEOUT_S = 240  # longer than the ranks of a distributed test wait for each other

MUTATIONS = [*loss.MUTATIONS, *data.MUTATIONS]


def patched(root: Path, mutation: Mutation) -> str:
    """The mutated file's text. AssertionError unless the old text is there exactly once."""
    text = (root / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times, not once"
    return text.replace(mutation.old, mutation.new)


def failure(copy: Path, test: str) -> str:
    """Runs one test of the copy, which has to fail in its own assertions: not when it is set up, collected or imported."""
    report = copy / "report.xml"
    options = ["-q", "-x", "-m", "", "-p", "no:cacheprovider", f"--junitxml={report}"]
    env = {**os.environ, "PYTHONPATH": str(copy)}  # for the processes that the test starts
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", test, *options], cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    output = done.stdout[-5000:] + done.stderr[-2000:]
    assert done.returncode != 0, f"no test noticed: {test} is green\n{output}"
    assert done.returncode == 1, f"pytest ended with {done.returncode}, so {test} was not run: does it exist?\n{output}"
    found = ElementTree.parse(report).findall(".//testcase/failure")
    assert len(found) == 1, f"{test} was not run to its assertions\n{output}"
    # the failing statement and what pytest says of it, without the statements before it
    return "\n".join(line for line in (found[0].text or "").splitlines() if line.startswith((">", "E ")))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_table_is_up_to_date(root: Path, mutation: Mutation) -> None:
    compile(patched(root, mutation), mutation.file, "exec")
    path, name = mutation.test.split("[")[0].split("::")
    assert f"def {name}(" in (root / path).read_text(encoding="utf-8"), f"{path} has no {name}"


def told_of(root: Path, copy: Path, mutation: Mutation) -> str:
    """What a test says of a copy of the package with the mutation in it."""
    for name in ("dapo_megatron", "tests", "configs"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "mutations"))
    shutil.copy(root / "pyproject.toml", copy)
    (copy / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
    (copy / mutation.file).write_text(patched(root, mutation), encoding="utf-8")
    return failure(copy, mutation.test)


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[str]]]:
    """The running tests of all mutations that this session has chosen; two at a time, since most wait for imports."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == "test_turns_the_suite_red"]
    chosen = [item.callspec.params["mutation"] for item in items]  # type: ignore[attr-defined]
    pool = ThreadPoolExecutor(2)
    yield {one.name: pool.submit(told_of, root, tmp_path_factory.mktemp("mutation"), one) for one in chosen}
    pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_turns_the_suite_red(told: dict[str, Future[str]], mutation: Mutation) -> None:
    said = told[mutation.name].result()
    assert mutation.says in said, f"{mutation.test} fails, but not as it should ({mutation.says!r}):\n{said}"
