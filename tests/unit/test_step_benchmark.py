"""benchmarks/step.py, without TRL and without a run."""

import subprocess
import sys

import psutil
import pytest

from benchmarks import step
from dapo_megatron.telemetry.metrics import METRICS


def row(number: int, update_s: float) -> dict[str, float]:
    return {
        "step": number,
        "time/rollout_s": 2.0,
        "time/update_s": update_s,
        "tokens/trained": 100.0,
        "tokens/generated": 120.0,
    }


def test_a_runs_rows_become_steps() -> None:
    """Neither the evaluation before the first step nor the first step, which warms up, is one of them."""
    steps = step.our_steps([{"step": 0, "eval/avg_at_k": 0.5}, row(1, 9.0), row(2, 4.0), row(3, 5.0)])
    assert [s["update"] for s in steps] == [4.0, 5.0]
    assert steps[0]["rollout"] == 2.0 and steps[0]["reply_tokens"] == 100.0
    assert set(step.OURS.values()) <= set(METRICS)


def test_table_compares_medians() -> None:
    ours = step.our_steps([row(i, seconds) for i, seconds in enumerate([50.0, 4.0, 99.0, 5.0], start=1)])
    theirs = [{**one, "update": 20.0, "step": 30.0} for one in ours]
    lines = step.table({"ours": (ours, 3.0), "TRL 1": (theirs, 6.0)}).splitlines()
    assert lines[0].startswith("| | ours | TRL 1 | ratio |")
    assert "| update, s | 5.00 | 20.00 | 4.0 |" in lines
    assert "| whole step, s | - | 30.00 |  |" in lines  # not measured: no ratio
    assert "| reply tokens trained/s | 20 | 5 | 4.0 |" in lines  # how many times as fast ours is, as with seconds
    assert "| peak memory, GB | 3.0 | 6.0 | 2.0 |" in lines
    assert len({line.count("|") for line in lines}) == 1
    assert "ratio" not in step.table({"ours": (ours, 3.0)})


@pytest.mark.parametrize("python", [sys.executable, "/nowhere/python"])
def test_missing_trl_is_said_with_the_remedy(python: str) -> None:
    with pytest.raises(SystemExit) as failure:
        step.check_trl(python)
    assert f"--trl-python {python}" in str(failure.value)
    assert "uv venv" in str(failure.value) and "trl==" in str(failure.value) and "--only ours" in str(failure.value)


def test_peak_memory_is_a_process_own_peak() -> None:
    """A trainer rank that held 300 MB and let them go; a server is what its owner has started."""
    code = "import sys; x = b'1' * 300_000_000; del x; print('done', flush=True); sys.stdin.read()"
    owner = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {code!r}])"

    def start(name: str, program: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [name, "-c", program], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        return process

    processes = [start("ray::TrainerRank.call", code), start("ray::ServerOwner", owner)]
    try:
        memory = step.peak_memory(psutil.Process())
    finally:
        for process in processes:
            process.communicate()
    assert 0.3 < memory["trainers"] < 0.4
    assert 0.3 < memory["engine"] < 0.4
    assert memory["others"] > 0.01
