"""Checkpoints that appear whole or not at all; which one a run resumes from; state that comes back bit for bit."""

import asyncio
import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo_megatron.checkpoint_files import damage
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
    folder.__exit__(None, None, None)
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
    folder.__exit__(None, None, None)
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
        assert sampler.value[name].flags.writeable


def test_a_failed_save_leaves_the_last_checkpoint(cfg: Config) -> None:
    checkpoint(cfg, 1)
    folder = RunFolder.open(cfg, "auto")

    async def fail(path: str) -> None:
        await save_policy(path)
        raise OSError("no space left on device")

    with pytest.raises(
        RuntimeError, match=r"the checkpoint after step 2 can't be written: no space .*/step_000001 is complete"
    ):
        save(folder, 2, State(), State(), fail)
    folder.__exit__(None, None, None)
    assert RunFolder.open(cfg, "auto").resumed_step == 1
    assert names(cfg) == ["step_000001"]  # what was written of the other is gone: there may be no room for both


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


# --- damage: cut, changed and missing files ---


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def step_folder(cfg: Config, step: int) -> Path:
    return Path(cfg.run.dir) / "run" / "checkpoints" / f"step_{step:06d}"


@pytest.mark.parametrize("name", ["state.json", "policy/weights", "manifest.json"])
@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
def test_a_damaged_checkpoint_is_not_used(cfg: Config, name: str, harm: Any) -> None:
    """The one before it is, and this is said; the damaged one is kept under another name and counts no more."""
    for step in (1, 2, 3):
        checkpoint(cfg, step)
    harm(step_folder(cfg, 3) / name)
    with RunFolder.open(cfg, "auto") as folder:
        assert folder.resumed_step == 2
        assert re.match(rf"step_000003: .*{re.escape(name)}.*; not used, moved to .*/checkpoints/damaged", folder.damaged)
        assert [p.name for p in folder.path.glob("checkpoints/damaged.*/*")] == ["step_000003"]
    cfg.checkpoint.keep = 1
    checkpoint(cfg, 3)
    assert names(cfg)[1:] == ["step_000003"] and names(cfg)[0].startswith("damaged.")
    with RunFolder.open(cfg, "auto") as folder:
        assert folder.resumed_step == 3 and folder.damaged == ""


def test_damage_is_described(cfg: Config) -> None:
    checkpoint(cfg, 1)
    folder = step_folder(cfg, 1)
    assert damage(folder) == ""
    (folder / "notes.txt").write_text("not ours")
    assert damage(folder) == ""
    cut(folder / "state.json")
    (folder / "policy" / "weights").unlink()
    size = (folder / "state.json").stat().st_size
    assert damage(folder) == f"policy/weights is missing; state.json has {size} bytes instead of {size + 1}"


def test_a_damaged_checkpoint_that_was_asked_for(cfg: Config) -> None:
    checkpoint(cfg, 1)
    flip(step_folder(cfg, 1) / "policy" / "weights")
    with pytest.raises(ValueError, match=r"--resume .*step_000001: the checkpoint is damaged: .*policy/weights.*SHA-256"):
        RunFolder.open(cfg, str(step_folder(cfg, 1)))
    assert names(cfg) == ["step_000001"]


def test_all_checkpoints_damaged_is_no_start_from_nothing(cfg: Config) -> None:
    for step in (1, 2):
        checkpoint(cfg, step)
    for step in (1, 2):
        cut(step_folder(cfg, step) / "state.json")
    for _ in range(2):  # and not at the second try either
        with pytest.raises(
            ValueError, match=r"all checkpoints of .* are damaged \(step_000002: .*; step_000001: .*--resume never"
        ):
            RunFolder.open(cfg, "auto")
    assert names(cfg) == ["step_000001", "step_000002"]


def test_the_order_of_checkpoints_is_that_of_their_steps(cfg: Config) -> None:
    for step in (999_999, 1_000_000):
        checkpoint(cfg, step)
    assert RunFolder.open(cfg, "auto").resumed_step == 1_000_000


def test_everything_is_on_disk_before_a_checkpoint_gets_its_name(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the name is before an older checkpoint goes."""
    checkpoint(cfg, 1)
    cfg.checkpoint.keep = 1
    events: list[str] = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def record(kind: str, path: Path | str) -> None:
        events.append(f"{kind} {Path(path).relative_to(Path(cfg.run.dir) / 'run')}")

    def recording_fsync(descriptor: int) -> None:
        record("sync", Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def recording_rename(path: Path, target: Path) -> Path:
        record("rename", target)
        return rename(path, target)

    def recording_rmtree(path: Path, **options: Any) -> None:
        record("remove", path)
        rmtree(path, **options)

    with RunFolder.open(cfg, "auto") as folder:
        monkeypatch.setattr(os, "fsync", recording_fsync)
        monkeypatch.setattr(Path, "rename", recording_rename)
        monkeypatch.setattr(shutil, "rmtree", recording_rmtree)
        save(folder, 2, State(), State())
    named = events.index("rename checkpoints/step_000002")
    partial = "checkpoints/.partial"
    files = {f"{partial}/{name}" for name in ("policy/weights", "state.json", "manifest.json", "policy", "")}
    assert {f"sync {name.rstrip('/')}" for name in files} <= set(events[:named])
    assert "sync checkpoints" in events[named : events.index("remove checkpoints/step_000001")]


def test_a_full_disk_is_said(cfg: Config) -> None:
    checkpoint(cfg, 1)
    message = r"writing failed: .*No space left.*step_000001 is complete: .* once there is room on the disk"
    with pytest.raises(RuntimeError, match=message), RunFolder.open(cfg, "auto"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_export_of_earlier_weights_is_not_taken_for_the_final_one(cfg: Config) -> None:
    """All steps done and exported, then run.steps raised, then killed between the last checkpoint and the new export."""
    checkpoint(cfg, 5)
    hf = Path(cfg.run.dir) / "run" / "hf"
    hf.mkdir()
    cfg.run.steps = 6
    checkpoint(cfg, 6)
    folder = RunFolder.open(cfg, "auto")
    assert not folder.finished and len(list(hf.parent.glob("hf.*"))) == 1
