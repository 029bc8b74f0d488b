"""`dapo train` as a user starts it, with all its processes, and what the tests of whole runs compare."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from dapo_megatron.telemetry.metrics import read_metrics

TIMINGS = ("time/", "throughput/", "memory/", "sync/publish_gb_per_s")
# The command, with Ctrl-C as on a terminal: whoever runs the tests in the background may have it ignored.
MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from dapo_megatron.cli import main
sys.exit(main())
"""


class CliRun:
    """One `dapo train` of configs/tiny_cpu.yaml. All its processes carry a mark in their environment. `before`: Python that the
    controller's process runs first."""

    def __init__(self, root: Path, folder: Path, *arguments: str, before: str = "", **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder / "tiny_cpu"
        command = [sys.executable, "-c", before + MAIN, "train", str(root / "configs/tiny_cpu.yaml")]
        self.process = subprocess.Popen(
            [*command, f"run.dir={folder}", *arguments],
            env={**os.environ, "PYTHONPATH": str(root), "DAPO_TEST_MARK": self.mark, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, code: int = 0) -> str:
        """The output, when it has ended with this exit code."""
        output, _ = self.process.communicate(timeout=400)
        assert self.process.returncode == code, output + self.logs()
        return output

    def logs(self) -> str:
        return "".join(f"--- {p}\n{p.read_text()[-3000:]}\n" for p in (self.folder / "logs").glob("*.log"))

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 300
        while not any(row["step"] >= step for row in read_metrics(self.folder / "metrics.jsonl")):
            assert self.process.poll() is None and time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL for the whole job."""
        kill_marked(self.mark)
        self.process.communicate(timeout=60)

    def survivors(self, within_s: float = 20.0) -> list[str]:
        """Command lines of processes of this run that are still there."""
        deadline = time.monotonic() + within_s
        while (alive := command_lines(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return alive


def marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get("DAPO_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def command_lines(mark: str) -> list[str]:
    found = []
    for process in marked(mark):
        try:
            found.append(" ".join(process.cmdline())[:100])
        except psutil.NoSuchProcess:
            continue
    return found


def kill_marked(mark: str) -> None:
    """SIGKILL for all that carry the mark, until there are none: they may be starting others. The caller goes last."""
    while others := [process for process in marked(mark) if process.pid != os.getpid()]:
        for process in others:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
    if os.environ.get("DAPO_TEST_MARK") == mark:
        os.kill(os.getpid(), signal.SIGKILL)


def without_timings(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(TIMINGS)}


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs' folders tell of the same run, bit for bit: metrics but for times, all samples, the exported policy."""
    rows = [[without_timings(row) for row in read_metrics(folder / "metrics.jsonl")] for folder in (one, other)]
    assert rows[0], f"{one} has no metrics"
    for a, b in zip(*rows, strict=True):
        different = {name: (a.get(name), b.get(name)) for name in sorted(a | b) if a.get(name) != b.get(name)}
        assert not different, f"step {a['step']} of {one} and {other}: {different}"
    for pattern in ("samples/*", "hf/*"):
        files = [sorted(folder.glob(pattern)) for folder in (one, other)]
        names = [[file.name for file in some] for some in files]
        assert names[0] and names[0] == names[1], f"{pattern} of {one} and {other}: {names}"
        for a, b in zip(*files, strict=True):
            assert a.read_bytes() == b.read_bytes(), f"{a} and {b} differ"
