"""Checkpoints that appear whole or not at all; which one a run resumes from; state that comes back bit for bit."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo_megatron.config import Config
from dapo_megatron.run_folder import RunFolder
from dapo_megatron.telemetry.metrics import read_metrics


class State:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    cfg = Config()
    cfg.run.dir, cfg.run.name, cfg.run.steps = str(tmp_path), "run", 5
    return cfg


async def save_policy(folder: str) -> None:
    (Path(folder) / "weights").write_text("w")


def checkpoint(cfg: Config, step: int, value: Any = 1) -> None:
    with RunFolder.open(cfg, "auto") as folder:
        save(folder, step, State(value), State({"position": step}))


def save(folder: RunFolder, step: int, sampler: State, stream: State, policy: Any = None) -> None:
    asyncio.run(folder.save_checkpoint(step, {"data/position": float(step)}, policy or save_policy, sampler, stream))


def names(cfg: Config) -> list[str]:
    return sorted(p.name for p in (Path(cfg.run.dir) / "run" / "checkpoints").iterdir())


def test_resume_from_the_last(cfg: Config) -> None:
    for step in (1, 2, 3):
        checkpoint(cfg, step)
    assert names(cfg) == ["step_000002", "step_000003"]  # checkpoint.keep
    folder = RunFolder.open(cfg, "auto")
    loaded: list[str] = []
    stream = State()

    async def load(path: str) -> None:
        loaded.append(path)

    asyncio.run(folder.load_policy(load))
    folder.load_state("stream", stream)
    assert Path(loaded[0]).parent.name == "step_000003" and stream.value == {"position": 3}
    assert folder.resumed_step == 3 and not folder.finished


def test_resume_from_an_older_one_moves_the_later_aside(cfg: Config) -> None:
    cfg.checkpoint.keep = 9
    for step in (1, 2, 3):
        checkpoint(cfg, step)
    cfg.checkpoint.keep = 1
    folder = RunFolder.open(cfg, str(Path(cfg.run.dir) / "run" / "checkpoints" / "step_000001"))
    assert folder.resumed_step == 1
    save(folder, 2, State(), State())
    assert names(cfg)[1:] == ["step_000002"]
    assert sorted(p.name for p in folder.path.glob("checkpoints/abandoned.*/*")) == ["step_000002", "step_000003"]
    folder.__exit__()
    assert RunFolder.open(cfg, "auto").resumed_step == 2


def test_a_row_that_was_not_written_any_more_is_written_on_resume(cfg: Config) -> None:
    """Killed between checkpoint and metrics."""
    checkpoint(cfg, 1)
    for _ in range(2):
        with RunFolder.open(cfg, "auto").metrics():
            pass
        assert read_metrics(Path(cfg.run.dir) / "run" / "metrics.jsonl") == [{"step": 1, "data/position": 1.0}]


def test_folder_in_use(cfg: Config) -> None:
    folder = RunFolder.open(cfg, "auto")
    for resume in ("auto", "never"):
        with pytest.raises(ValueError, match=r"run\.name: .* in use by another process"):
            RunFolder.open(cfg, resume)
    folder.__exit__()
    RunFolder.open(cfg, "auto")


def test_changed_settings(cfg: Config) -> None:
    checkpoint(cfg, 1)
    cfg.optimizer.lr = 5e-6
    assert RunFolder.open(cfg, "auto").changes == ["optimizer.lr: 1e-06 -> 5e-06"]
    cfg.run.seed = 2
    with pytest.raises(ValueError, match=r"run\.seed: 1 -> 2.*--resume never"):
        RunFolder.open(cfg, "auto")


def test_state_comes_back_bit_for_bit(cfg: Config) -> None:
    value = {
        "logprobs": np.array([-0.1, -1e-30, 1 / 3], np.float32),
        "ids": np.arange(3, dtype=np.int32),
        "list": [1, "a", None],
    }
    checkpoint(cfg, 1, value)
    sampler = State()
    RunFolder.open(cfg, "auto").load_state("sampler", sampler)
    assert sampler.value["list"] == value["list"]
    for name in ("logprobs", "ids"):
        assert sampler.value[name].dtype == value[name].dtype and (sampler.value[name] == value[name]).all()


def test_a_failed_save_leaves_the_last_checkpoint(cfg: Config) -> None:
    checkpoint(cfg, 1)
    folder = RunFolder.open(cfg, "auto")

    async def fail(path: str) -> None:
        await save_policy(path)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        save(folder, 2, State(), State(), fail)
    folder.__exit__()
    assert RunFolder.open(cfg, "auto").resumed_step == 1
    assert "step_000002" not in names(cfg)


def test_never_moves_the_old_run_aside(cfg: Config) -> None:
    checkpoint(cfg, 1)
    folder = RunFolder.open(cfg, "never")
    assert folder.resumed_step == 0 and not (folder.path / "checkpoints").exists()
    (aside,) = [p for p in Path(cfg.run.dir).iterdir() if p.name.startswith("run.")]
    assert (aside / "checkpoints" / "step_000001" / "policy" / "weights").exists()


def test_finished_run(cfg: Config) -> None:
    checkpoint(cfg, 5)
    folder = RunFolder.open(cfg, "auto")
    assert not folder.finished  # killed before the export
    (folder.path / "hf").mkdir()
    assert folder.finished


def test_path_that_is_no_checkpoint(cfg: Config, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--resume .*nowhere: no checkpoint there"):
        RunFolder.open(cfg, str(tmp_path / "nowhere"))
