"""benchmarks/gpu_check.py on a machine without a GPU: the same in small, the kernels under Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_report import Report

ROOT = Path(gpu_check.__file__).resolve().parents[1]


def run(folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """What it wrote with --json; it must end with 0."""
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--json", str(folder / "out.json"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())


def names(found: dict[str, Any]) -> set[str]:
    return {check["name"].split(",")[0] for check in found["checks"]}


def test_kernels_and_speed_under_the_interpreter(tmp_path: Path) -> None:
    found = run(tmp_path, "--parts", "kernels", "speed", TRITON_INTERPRET="1")
    assert found["ok"] and all(check.get("ok", True) for check in found["checks"])
    assert {"block_stats", "block_gradient", "linear_stats", "linear_loss", "linear_logprob", "hidden 72"} <= names(found)
    assert {check["unit"] for check in found["checks"] if "unit" in check} == {"TFLOP/s"}


def test_operator_on_torchs_kernels(tmp_path: Path) -> None:
    found = run(tmp_path, "--parts", "kernels")
    assert names(found) == {"linear_loss", "linear_logprob"}


@pytest.mark.slow
def test_layers_step_and_table(tmp_path: Path) -> None:
    found = run(tmp_path, "--parts", "layers", "step", "table", "--minutes", "15")
    checks = [check["name"] for check in found["checks"]]
    assert any("shared prompts" in name and "fp64" in name for name in checks)
    assert "a step of configs/tiny_cpu.yaml" in checks
    assert "fused_logprob.py, hidden 8" in checks and "failed" not in "".join(found["lines"])


def call(monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], *arguments: str) -> int:
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", *arguments])
    return gpu_check.main()


def broken(report: Report, device: str) -> None:
    raise RuntimeError("no such kernel")


def fine(report: Report, device: str) -> None:
    report.check("a figure", 1e-7, 1e-6)
    report.measured("a rate", 700.0, "TFLOP/s")


def test_a_failure_is_told_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    parts = {"first": (broken, (), 0.0), "second": (fine, (), 0.0)}
    assert call(monkeypatch, parts, "--json", str(tmp_path / "out.json")) == 1
    out, err = capsys.readouterr()
    before, summary = out.split("--- summary ---")
    assert "FAILED  first  RuntimeError: no such kernel" in before and "ok      a figure" in before
    assert "Traceback" in err
    assert "FAILED  first" in summary and "a rate: 700 TFLOP/s" in summary and "a figure" not in summary
    found = json.loads((tmp_path / "out.json").read_text())
    assert not found["ok"] and [check["name"] for check in found["checks"]] == ["first", "a figure", "a rate"]


def test_what_has_no_package_or_no_time_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    parts = {"one": (broken, ("no_such_package",), 0.0), "two": (broken, (), 100.0), "three": (fine, (), 0.0)}
    assert call(monkeypatch, parts, "--minutes", "1") == 0
    out = capsys.readouterr().out
    assert "left out  one: needs no_such_package" in out and "left out  two: no time is left" in out and "a figure" in out


def test_a_program_that_outlasts_the_time_is_left_out(capsys: pytest.CaptureFixture) -> None:
    report = Report(minutes=0.0)
    with report.going_on("the table"):
        gpu_check.child([sys.executable, "-c", "import threading; threading.Event().wait()"], report, "cpu")
    assert "left out  the table: the time was up" in capsys.readouterr().out and not report.failed


def test_a_program_that_fails_shows_its_end() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3:.*the reason"):
        gpu_check.child([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], Report(1.0), "cpu")


@pytest.mark.parametrize(("figure", "ok"), [(1e-6, True), (2e-6, False), (float("nan"), False)])
def test_limits(figure: float, ok: bool) -> None:
    report = Report(1.0)
    report.check("x", figure, 1e-6)
    assert report.failed is not ok


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main()
    assert stopped.value.code == 2 and "--device cpu" in capsys.readouterr().err
