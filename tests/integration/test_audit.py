"""`dapo audit` as a user calls it, before a run and after one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.integration.cli_run import CliRun


def audit(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "dapo_megatron.cli", "audit", *arguments]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_before_a_run(root: Path, tmp_path: Path) -> None:
    """TP2 with sequence parallelism over real processes, and with one of the model's two layers."""
    code, output = audit(str(root / "configs/tiny_cpu.yaml"), f"run.dir={tmp_path}", "audit.num_layers=1")
    assert code == 0 and "all equal (float32" in output, output
    report = json.loads((tmp_path / "tiny_cpu/audit/before.json").read_text())
    assert [c["ok"] for c in report["comparisons"]] == [True, True]
    assert report["comparisons"][0]["title"] == "layout tp 2 x pp 1 x dp 1, sequence parallel, prompts shared"
    names = {d["name"] for d in report["comparisons"][0]["differences"]}
    assert "model.layers.0.mlp.up_proj.weight" in names and not any("layers.1." in name for name in names)


@pytest.mark.slow
def test_after_a_run(root: Path, tmp_path: Path) -> None:
    """With the engine's log-probs as the old ones: the trainer's come from the update then."""
    settings = ("run.steps=2", "audit.save_every=2", "checkpoint.export_hf=false", "algorithm.old_logprobs=engine")
    run = CliRun(root, tmp_path, "rollout.engine=local", *settings)
    run.finish()
    assert [f.name for f in (run.folder / "audit").iterdir()] == ["step_000002"]
    # moved, resumed with other settings: a record stands by itself
    folder = run.folder.rename(tmp_path / "moved")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("temperature: 1.0", "temperature: 0.5"))
    code, output = audit(str(folder), "--step", "2")
    assert code == 0 and "all equal (float32" in output, output
    assert "as recorded, tp 2 x pp 1 x dp 1, sequence parallel" in output

    gradients = folder / "audit/step_000002/gradients/model.safetensors"
    tensors = load_file(gradients)
    tensors["model.norm.weight"] *= 1.01
    save_file(tensors, gradients)
    code, output = audit(str(folder), "--step", "2")
    assert code == 1 and "DIFFERENT" in output and "OFF model.norm.weight" in output, output
    code, output = audit(str(folder), "--step", "1")
    assert code == 2 and "--step = 1" in output and "recorded are 2" in output
