"""A run's folder on disk: configuration, metrics, checkpoints that appear whole or not at all, and which one to resume from."""

import base64
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import numpy as np
import yaml

from dapo_megatron.checkpoint_files import checkpoints, damage, seal, step_of, sync
from dapo_megatron.config import Config
from dapo_megatron.config_io import resolved_yaml
from dapo_megatron.telemetry.metrics import MetricsWriter


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


# What the weights and the optimizer's state depend on: changed, the checkpoint belongs to another run.
_FIXED = ("model.", "run.seed")  # the prompt stream looks after the data set itself


class RunFolder:
    """`path`/config.yaml, metrics.jsonl, samples/, logs/, checkpoints/step_NNNNNN/{policy/, state.json, manifest.json}, hf/.

    `changes` lists what the configuration has changed since the checkpoint that is resumed from; `damaged` says which
    checkpoints were found damaged, and what became of them.
    """

    def __init__(self, cfg: Config, path: Path, checkpoint: Path | None, lock: IO[str]) -> None:
        self.cfg, self.path, self.checkpoint, self._lock = cfg, path, checkpoint, lock
        self.damaged = ""
        state: dict[str, Any] = {"step": 0, "config": resolved_yaml(cfg), "row": None}
        if checkpoint:
            state = _read_state(checkpoint)
        self.resumed_step: int = state["step"]
        self.saved_step = self.resumed_step  # what a run that is started again goes on from
        self._writer: MetricsWriter | None = None
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the folder to others. A full disk gets a message of its own (RuntimeError), whatever was being written."""
        self._lock.close()
        if isinstance(error, OSError) and _is_disk_full(error):
            raise RuntimeError(f"{self.path}: writing failed: {error}; {self._what_remains(error)}") from error

    @classmethod
    def open(cls, cfg: Config, resume: str) -> "RunFolder":
        """`resume`: auto (the run's last good checkpoint, if it has any; damaged ones after it are moved aside), never (an
        earlier run's folder is moved aside, not deleted) or a checkpoint's path (later checkpoints of this run are moved
        aside). ValueError for a path that is no good checkpoint, if all of the run's checkpoints are damaged, for a folder
        that another process is using, and for a checkpoint of other settings."""
        path = Path(cfg.run.dir).expanduser() / cfg.run.name
        path.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
        try:
            if resume == "never" and (path / "config.yaml").exists():
                _move_aside(path)
                lock.close()
                path.mkdir(exist_ok=True)
                lock = _locked(path)
            checkpoint, damaged = _choose(path, resume)
            folder = cls(cfg, path, checkpoint, lock)
            folder._tidy(damaged)
            return folder
        except BaseException:
            lock.close()
            raise

    def _tidy(self, damaged: dict[Path, str]) -> None:
        """What the run has beyond the step that it goes on from is moved aside; the configuration is noted."""
        later = [old for old in checkpoints(self.path) if step_of(old) > self.resumed_step]
        bad, abandoned = [old for old in later if old in damaged], [old for old in later if old not in damaged]
        for old_ones, name in ((bad, "damaged"), (abandoned, "abandoned")):
            if old_ones:
                aside = self.path / "checkpoints" / f"{name}.{_timestamp()}"
                aside.mkdir(exist_ok=True)
                for old in old_ones:
                    old.rename(aside / old.name)
        if bad:
            self.damaged = f"{_list(damaged)}; not used, moved to {self.path / 'checkpoints'}/damaged.*"
        if self.resumed_step < self.cfg.run.steps and (self.path / "hf").exists():
            _move_aside(self.path / "hf")  # no longer the final policy
        new = self.path / "config.yaml.tmp"
        new.write_text(resolved_yaml(self.cfg), encoding="utf-8")
        new.replace(self.path / "config.yaml")

    @property
    def finished(self) -> bool:
        """All steps are done, and the export too if one is wanted."""
        exported = (self.path / "hf").exists() or not self.cfg.checkpoint.export_hf
        return self.resumed_step >= self.cfg.run.steps and exported

    @property
    def progressed(self) -> bool:
        """A step has been finished since the folder was opened."""
        return self._writer is not None and self._writer.last_step > self.resumed_step

    @contextmanager
    def metrics(self) -> Iterator[MetricsWriter]:
        """Rows of steps that will be done again are dropped; one that the checkpoint's step didn't get to write is written."""
        self._writer = writer = MetricsWriter(self.path, self.resumed_step + 1 if self.checkpoint else 0)
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
        state = {
            "step": step,
            "config": resolved_yaml(self.cfg),
            "row": row,
            "sampler": _encode(sampler.state_dict()),
            "stream": _encode(stream.state_dict()),
        }
        try:
            (partial / "policy").mkdir(parents=True)
            await save_policy(str(partial / "policy"))
            (partial / "state.json").write_text(json.dumps(state), encoding="utf-8")
            seal(partial)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk: room for the log of this error
            raise RuntimeError(
                f"the checkpoint after step {step} can't be written: {error}; {self._what_remains(error)}"
            ) from error
        partial.rename(partial.with_name(f"step_{step:06d}"))
        for directory in (partial.parent, self.path):
            sync(directory)  # before older ones go
        self.saved_step = step
        for old in checkpoints(self.path)[: -self.cfg.checkpoint.keep]:
            shutil.rmtree(old)

    def _what_remains(self, error: Exception) -> str:
        """After a failure, for its message."""
        good = checkpoints(self.path)
        remains = (
            f"{good[-1]} is complete: the run goes on from there" if good else "there is no checkpoint yet: it starts anew"
        )
        return f"{remains} when it is started again" + (", once there is room on the disk" if _is_disk_full(error) else "")

    def load_state(self, name: str, target: Stateful) -> None:
        """Restore the `sampler` or the `stream` if the run resumes. ValueError if it belongs to another data set."""
        if self.checkpoint is not None:
            target.load_state_dict(_decode(_read_state(self.checkpoint)[name]))

    async def load_policy(self, load: Callable[[str], Awaitable[None]]) -> None:
        if self.checkpoint is not None:
            await load(str(self.checkpoint.absolute() / "policy"))


def _choose(path: Path, resume: str) -> tuple[Path | None, dict[Path, str]]:
    """The checkpoint to resume from, and what is wrong with those that were looked at and can't be used."""
    if resume == "never":
        return None, {}
    if resume != "auto":
        checkpoint = Path(resume).expanduser()
        if not (checkpoint / "state.json").is_file():
            raise ValueError(f"--resume {resume}: no checkpoint there (state.json is missing); use a step_NNNNNN folder")
        if problem := damage(checkpoint):
            raise ValueError(
                f"--resume {resume}: the checkpoint is damaged: {problem}; give another one, or auto for the last good one"
            )
        return checkpoint, {}
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(checkpoints(path)):
        problem = damage(checkpoint)
        if not problem:
            return checkpoint, damaged
        damaged[checkpoint] = problem
    if damaged:
        raise ValueError(
            f"all checkpoints of {path} are damaged ({_list(damaged)}): restore one of them from a copy, or start anew with "
            "--resume never, which keeps this folder under another name"
        )
    return None, {}


def _list(damaged: dict[Path, str]) -> str:
    return "; ".join(f"{checkpoint.name}: {problem}" for checkpoint, problem in damaged.items())


def _timestamp() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def _move_aside(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.{_timestamp()}"))


def _is_disk_full(error: Exception) -> bool:
    """By its text: some libraries hand over nothing else."""
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


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


def _read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))


def _encode(value: Any) -> Any:
    """JSON with numpy arrays [n] as {"dtype", "base64"}: a batch of long responses has 100 million numbers."""
    if isinstance(value, np.ndarray):
        assert value.ndim == 1, value.shape
        return {"dtype": str(value.dtype), "base64": base64.b64encode(value.tobytes()).decode()}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"dtype", "base64"}:
            return np.frombuffer(base64.b64decode(value["base64"]), dtype=value["dtype"]).copy()
        if value.keys() == {"dtype", "values"}:  # of checkpoints from before there was base64
            return np.array(value["values"], dtype=value["dtype"])
        return {key: _decode(item) for key, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value
