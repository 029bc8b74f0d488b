"""Proof that the tests see the faults that matter: with one of them put into a copy of the package, the suite turns red.

A mutation that no test notices fails here, and so does one that can't be applied any more: the table then has to follow.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
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


class Runner:
    """Runs pytest in a folder, see runner.py."""

    def __init__(self, root: Path) -> None:
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        command = [sys.executable, str(Path(__file__).with_name("runner.py")), str(TIMEOUT_S)]
        self._process = subprocess.Popen(command, cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, folder: Path, *arguments: str) -> tuple[int, str]:
        """Exit code and output."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps([str(folder), *arguments]), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        return code, (folder / "output.txt").read_text(encoding="utf-8")

    def end(self) -> None:
        self._process.communicate(timeout=TIMEOUT_S)


def failure(runner: Runner, copy: Path, test: str) -> str:
    """Runs one test of the copy, which has to fail in its own assertions: not when it is set up, collected or imported."""
    report = copy / "report.xml"
    code, output = runner(copy, test, "-q", "-x", "-m", "", "-p", "no:cacheprovider", f"--junitxml={report}")
    output = output[-5000:]
    assert code != 0, f"no test noticed: {test} is green\n{output}"
    assert code == 1, f"pytest ended with {code}, so {test} was not run: does it exist?\n{output}"
    found = ElementTree.parse(report).findall(".//testcase/failure")
    assert len(found) == 1, f"{test} was not run to its assertions\n{output}"
    # the failing statement and what pytest says of it, without the statements before it
    return "\n".join(line for line in (found[0].text or "").splitlines() if line.startswith((">", "E ")))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_table_is_up_to_date(root: Path, mutation: Mutation) -> None:
    compile(patched(root, mutation), mutation.file, "exec")
    path, name = mutation.test.split("[")[0].split("::")
    assert f"def {name}(" in (root / path).read_text(encoding="utf-8"), f"{path} has no {name}"


def told_of(root: Path, copy: Path, mutation: Mutation, runners: SimpleQueue[Runner]) -> str:
    """What a test says of a copy of the package with the mutation in it."""
    for name in ("dapo_megatron", "tests", "configs"):
        ignored = shutil.ignore_patterns("mutations", "*.pyc.*")  # the latter are being written
        shutil.copytree(root / name, copy / name, ignore=ignored)
    shutil.copy(root / "pyproject.toml", copy)
    (copy / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
    (copy / mutation.file).write_text(patched(root, mutation), encoding="utf-8")
    runner = runners.get()
    try:
        return failure(runner, copy, mutation.test)
    finally:
        runners.put(runner)


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[str]]]:
    """The running tests of all mutations that this session has chosen; two at a time."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == "test_turns_the_suite_red"]
    chosen = [item.callspec.params["mutation"] for item in items]  # type: ignore[attr-defined]
    runners: SimpleQueue[Runner] = SimpleQueue()
    started = [Runner(root) for _ in range(2)]
    for runner in started:
        runners.put(runner)
    pool = ThreadPoolExecutor(len(started))
    yield {one.name: pool.submit(told_of, root, tmp_path_factory.mktemp("mutation"), one, runners) for one in chosen}
    pool.shutdown(cancel_futures=True)
    for runner in started:
        runner.end()


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_turns_the_suite_red(told: dict[str, Future[str]], mutation: Mutation) -> None:
    said = told[mutation.name].result()
    assert mutation.says in said, f"{mutation.test} fails, but not as it should ({mutation.says!r}):\n{said}"
