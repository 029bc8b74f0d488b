"""A run's folder on disk: configuration, metrics, checkpoints that appear whole or not at all, and which one to resume from."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import yaml

from dapo_megatron.config import Config
from dapo_megatron.config_io import resolved_yaml
from dapo_megatron.telemetry.metrics import MetricsWriter


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


# What the weights and the optimizer's state depend on: changed, the checkpoint belongs to another run.
_FIXED = ("model.", "run.seed")  # the prompt stream looks after the data set itself


class RunFolder:
    """`path`/config.yaml, metrics.jsonl, samples/, logs/, checkpoints/step_NNNNNN/{policy/, state.json}, hf/.

    `changes` lists what the configuration has changed since the checkpoint that is resumed from.
    """

    def __init__(self, cfg: Config, path: Path, checkpoint: Path | None) -> None:
        self.cfg, self.path, self.checkpoint = cfg, path, checkpoint
        self._lock = _locked(path)
        state: dict[str, Any] = {"step": 0, "config": resolved_yaml(cfg), "row": None}
        if checkpoint:
            state = _read_state(checkpoint)
        self.resumed_step: int = state["step"]
        self._pending_row: dict[str, float] | None = state["row"]
        self.changes = _changes(state["config"], resolved_yaml(cfg))
        fixed = [change for change in self.changes if change.startswith(_FIXED)]
        if fixed:
            raise ValueError(
                f"{checkpoint} was made with other settings ({'; '.join(fixed)}): restore them, choose another run.name, or "
                "start anew with --resume never"
            )

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: Any) -> None:
        """Leave the folder to others."""
        self._lock.close()

    @classmethod
    def open(cls, cfg: Config, resume: str) -> "RunFolder":
        """`resume`: auto (the run's last checkpoint, if any), never (an earlier run's folder is moved aside, not deleted) or a
        checkpoint's path (later checkpoints of this run are moved aside). ValueError for a path that is no checkpoint, for a
        folder that another process is using, and for a checkpoint of other settings."""
        path = Path(cfg.run.dir).expanduser() / cfg.run.name
        path.mkdir(parents=True, exist_ok=True)
        if resume == "never" and (path / "config.yaml").exists():
            with _locked(path):
                path.rename(path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}"))
            path.mkdir()
        checkpoint = None
        if resume == "auto":
            existing = _checkpoints(path)
            checkpoint = existing[-1] if existing else None
        elif resume != "never":
            checkpoint = Path(resume).expanduser()
            if not (checkpoint / "state.json").is_file():
                raise ValueError(f"--resume {resume}: no checkpoint there (state.json is missing); use a step_NNNNNN folder")
        folder = cls(cfg, path, checkpoint)
        folder._move_later_checkpoints_aside()
        (path / "config.yaml").write_text(resolved_yaml(cfg), encoding="utf-8")
        return folder

    def _move_later_checkpoints_aside(self) -> None:
        later = [old for old in _checkpoints(self.path) if int(old.name.removeprefix("step_")) > self.resumed_step]
        if later:
            aside = self.path / "checkpoints" / f"abandoned.{time.strftime('%Y%m%d-%H%M%S')}"
            aside.mkdir()
            for old in later:
                old.rename(aside / old.name)

    @property
    def finished(self) -> bool:
        """All steps are done, and the export too if one is wanted."""
        exported = (self.path / "hf").exists() or not self.cfg.checkpoint.export_hf
        return self.resumed_step >= self.cfg.run.steps and exported

    @contextmanager
    def metrics(self) -> Iterator[MetricsWriter]:
        """Rows of steps that will be done again are dropped; one that the checkpoint's step didn't get to write is written."""
        writer = MetricsWriter(self.path, self.resumed_step + 1 if self.checkpoint else 0)
        if self._pending_row is not None and writer.last_step < self.resumed_step:
            writer.write(self.resumed_step, self._pending_row)
        try:
            yield writer
        finally:
            writer.close()

    async def save_checkpoint(
        self,
        step: int,
        row: dict[str, float],
        save_policy: Callable[[str], Awaitable[None]],
        sampler: Stateful,
        stream: Stateful,
    ) -> None:
        """Everything that resuming after `step` needs, its metrics among it, since they are written afterwards. Checkpoints
        past checkpoint.keep are removed."""
        partial = self.path.absolute() / "checkpoints" / ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "policy").mkdir(parents=True)
        await save_policy(str(partial / "policy"))
        state = {
            "step": step,
            "config": resolved_yaml(self.cfg),
            "row": row,
            "sampler": _encode(sampler.state_dict()),
            "stream": _encode(stream.state_dict()),
        }
        with (partial / "state.json").open("w", encoding="utf-8") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(partial.with_name(f"step_{step:06d}"))
        for old in _checkpoints(self.path)[: -self.cfg.checkpoint.keep]:
            shutil.rmtree(old)

    def load_state(self, name: str, target: Stateful) -> None:
        """Restore the `sampler` or the `stream` if the run resumes. ValueError if it belongs to another data set."""
        if self.checkpoint is not None:
            target.load_state_dict(_decode(_read_state(self.checkpoint)[name]))

    async def load_policy(self, load: Callable[[str], Awaitable[None]]) -> None:
        if self.checkpoint is not None:
            await load(str(self.checkpoint.absolute() / "policy"))


def _locked(path: Path) -> IO[str]:
    """The folder's lock, held until the file is closed or the process ends."""
    file = (path / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(f"run.name: {path} is in use by another process; wait for it or choose another name") from error
    return file


def _changes(before: str, now: str) -> list[str]:
    """`field: old -> new` for every field that differs between two resolved configurations."""
    old, new = (dict(_flat(yaml.safe_load(text))) for text in (before, now))
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in sorted(old | new) if old.get(name) != new.get(name)]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _checkpoints(path: Path) -> list[Path]:
    return sorted(folder for folder in (path / "checkpoints").glob("step_*") if (folder / "state.json").is_file())


def _read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))


def _encode(value: Any) -> Any:
    """JSON with numpy arrays as {"dtype", "values"}: floats are written so that they come back bit for bit."""
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"dtype", "values"}:
            return np.array(value["values"], dtype=value["dtype"])
        return {key: _decode(item) for key, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value
