"""`dapo eval` of what a run has exported, by real engines: it finds what the run found by itself."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.telemetry.metrics import read_metrics
from tests.integration.cli_run import CliRun, command_lines
from tests.integration.solo import ONE_RANK

HELD_OUT = ("eval.prompts=16", "eval.samples=4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CliRun]:
    """A run that has evaluated itself before and after. Its folder stays locked, as if it went on."""
    root = Path(__file__).resolve().parents[2]
    settings = ("run.steps=3", "eval.every=0", "checkpoint.export_hf=true", *HELD_OUT, *ONE_RANK)
    run = CliRun(root, tmp_path_factory.mktemp("trained"), *settings)
    run.finish()
    with (run.folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield run


def own_metrics(run: CliRun) -> list[dict[str, Any]]:
    """`eval/*` before and after."""
    rows = read_metrics(run.folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k.startswith("eval/")} for row in (rows[0], rows[-1])]


def dapo_eval(run: CliRun, root: Path, *arguments: str) -> dict[str, Any]:
    """What the command has written; nothing of it is left running, and nothing else in the run's folder has changed."""
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if "eval" not in path.parts}
    command = [sys.executable, "-m", "dapo_megatron.cli", "eval", str(root / "configs/tiny_cpu.yaml")]
    done = subprocess.run(
        [*command, f"run.dir={run.folder.parent}", f"model.path={run.folder}/hf", "model.random_model={}", *arguments],
        env={**os.environ, "PYTHONPATH": str(root), "DAPO_TEST_MARK": f"{run.mark}-eval"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last = done.stdout.splitlines()
    assert last.startswith(f"written to {run.folder}/eval/") and command_lines(f"{run.mark}-eval") == []
    assert before == {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if "eval" not in path.parts}
    found: dict[str, Any] = json.loads(Path(last.removeprefix("written to ")).read_text())
    return found


def test_the_local_engine_finds_what_the_run_has_found_bit_for_bit(trained: CliRun, root: Path) -> None:
    before, after = own_metrics(trained)
    assert all(before[name] != after[name] for name in ("eval/avg_at_k", "eval/greedy", "eval/length_mean"))
    assert dapo_eval(trained, root, "rollout.engine=local", *HELD_OUT)["metrics"] == after


@pytest.mark.slow
def test_a_server_serves_the_weights_that_it_was_started_with(trained: CliRun, root: Path) -> None:
    """Its samples are others than the local engine's, its greedy responses are the same."""
    before, after = own_metrics(trained)
    found = dapo_eval(trained, root, *HELD_OUT)["metrics"]
    assert found["eval/greedy"] == after["eval/greedy"] != before["eval/greedy"]
    assert abs(found["eval/avg_at_k"] - after["eval/avg_at_k"]) < 0.3
