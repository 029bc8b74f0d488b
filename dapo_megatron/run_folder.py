"""A run's folder on disk: configuration, metrics, checkpoints that appear whole or not at all, and which one to resume from."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dapo_megatron.config import Config
from dapo_megatron.config_io import config_hash, resolved_yaml
from dapo_megatron.telemetry.metrics import MetricsWriter


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RunFolder:
    """`path`/config.yaml, metrics.jsonl, samples/, logs/, checkpoints/step_NNNNNN/{policy/, state.json}, hf/."""

    def __init__(self, cfg: Config, path: Path, checkpoint: Path | None) -> None:
        self.cfg, self.path, self.checkpoint = cfg, path, checkpoint
        self.resumed_step = _read_state(checkpoint)["step"] if checkpoint else 0

    @classmethod
    def open(cls, cfg: Config, resume: str) -> "RunFolder":
        """`resume`: auto (the run's last checkpoint, if any), never (an earlier run's folder is moved aside, not deleted) or a
        checkpoint's path. ValueError for a path that is no checkpoint."""
        path = Path(cfg.run.dir).expanduser() / cfg.run.name
        if resume == "never" and (path / "config.yaml").exists():
            path.rename(path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}"))
        path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path / "checkpoints" / ".partial", ignore_errors=True)
        checkpoint = None
        if resume == "auto":
            existing = _checkpoints(path)
            checkpoint = existing[-1] if existing else None
        elif resume != "never":
            checkpoint = Path(resume).expanduser()
            if not (checkpoint / "state.json").is_file():
                raise ValueError(f"--resume {resume}: no checkpoint there (state.json is missing); use a step_NNNNNN folder")
        folder = cls(cfg, path, checkpoint)
        (path / "config.yaml").write_text(resolved_yaml(cfg), encoding="utf-8")
        return folder

    @property
    def finished(self) -> bool:
        return self.resumed_step >= self.cfg.run.steps

    @contextmanager
    def metrics(self, next_step: int) -> Iterator[MetricsWriter]:
        writer = MetricsWriter(self.path, next_step if self.checkpoint else 0)
        try:
            yield writer
        finally:
            writer.close()

    def save_checkpoint(self, step: int, save_policy: Callable[[str], None], sampler: Stateful, stream: Stateful) -> None:
        """Everything that resuming after `step` needs. Older checkpoints past checkpoint.keep are removed."""
        partial = self.path.absolute() / "checkpoints" / ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "policy").mkdir(parents=True)
        save_policy(str(partial / "policy"))
        state = {
            "step": step,
            "config_hash": config_hash(self.cfg),
            "sampler": _encode(sampler.state_dict()),
            "stream": _encode(stream.state_dict()),
        }
        with (partial / "state.json").open("w", encoding="utf-8") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        final = partial.with_name(f"step_{step:06d}")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in _checkpoints(self.path)[: -self.cfg.checkpoint.keep]:
            shutil.rmtree(old)

    def load_checkpoint(self, load_policy: Callable[[str], None], sampler: Stateful, stream: Stateful) -> int:
        """Returns the first step to do: 1, or the one after the checkpoint's."""
        if self.checkpoint is None:
            return 1
        state = _read_state(self.checkpoint)
        load_policy(str(self.checkpoint.absolute() / "policy"))
        stream.load_state_dict(_decode(state["stream"]))
        sampler.load_state_dict(_decode(state["sampler"]))
        return int(state["step"]) + 1


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
