"""Checkpoints that appear whole or not at all; which one a run resumes from; state that comes back bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo_megatron.config import Config
from dapo_megatron.run_folder import RunFolder


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


def save_policy(folder: str) -> None:
    (Path(folder) / "weights").write_text("w")


def checkpoint(cfg: Config, step: int, value: Any = 1) -> RunFolder:
    folder = RunFolder.open(cfg, "auto")
    folder.save_checkpoint(step, save_policy, State(value), State({"position": step}))
    return folder


def names(cfg: Config) -> list[str]:
    return sorted(p.name for p in (Path(cfg.run.dir) / "run" / "checkpoints").iterdir())


def test_resume_from_the_last(cfg: Config) -> None:
    for step in (1, 2, 3):
        checkpoint(cfg, step)
    assert names(cfg) == ["step_000002", "step_000003"]  # checkpoint.keep
    folder = RunFolder.open(cfg, "auto")
    loaded: list[str] = []
    stream = State()
    assert folder.load_checkpoint(loaded.append, State(), stream) == 4
    assert Path(loaded[0]).parent.name == "step_000003" and stream.value == {"position": 3}
    assert not folder.finished and RunFolder.open(cfg, str(folder.checkpoint)).resumed_step == 3


def test_state_comes_back_bit_for_bit(cfg: Config) -> None:
    value = {
        "logprobs": np.array([-0.1, -1e-30, 1 / 3], np.float32),
        "ids": np.arange(3, dtype=np.int32),
        "list": [1, "a", None],
    }
    checkpoint(cfg, 1, value)
    sampler = State()
    RunFolder.open(cfg, "auto").load_checkpoint(lambda _: None, sampler, State())
    assert sampler.value["list"] == value["list"]
    for name in ("logprobs", "ids"):
        assert sampler.value[name].dtype == value[name].dtype and (sampler.value[name] == value[name]).all()


def test_a_failed_save_leaves_the_last_checkpoint(cfg: Config) -> None:
    folder = checkpoint(cfg, 1)

    def fail(path: str) -> None:
        save_policy(path)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        folder.save_checkpoint(2, fail, State(), State())
    assert RunFolder.open(cfg, "auto").resumed_step == 1
    assert names(cfg) == ["step_000001"]


def test_never_moves_the_old_run_aside(cfg: Config) -> None:
    checkpoint(cfg, 1)
    folder = RunFolder.open(cfg, "never")
    assert folder.resumed_step == 0 and not (folder.path / "checkpoints").exists()
    (aside,) = [p for p in Path(cfg.run.dir).iterdir() if p.name.startswith("run.")]
    assert (aside / "checkpoints" / "step_000001" / "policy" / "weights").exists()


def test_finished_run(cfg: Config) -> None:
    checkpoint(cfg, 5)
    assert RunFolder.open(cfg, "auto").finished


def test_path_that_is_no_checkpoint(cfg: Config, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--resume .*nowhere: no checkpoint there"):
        RunFolder.open(cfg, str(tmp_path / "nowhere"))
