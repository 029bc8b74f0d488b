"""What a path holds: the kinds of places in which a model's weights may lie, told apart by their files. None is loaded."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from checkpoint_tools import UsageError
from dapo_megatron.checkpoint_files import checkpoints, damage
from dapo_megatron.config import ModelConfig
from dapo_megatron.model_sizes import find_weights

Kind = Literal["hf", "gguf", "torch_dist", "checkpoint", "run"]
TITLES: dict[Kind, str] = {
    "hf": "HF folder",
    "gguf": "GGUF file",
    "torch_dist": "torch_dist checkpoint",
    "checkpoint": "a run's checkpoint",
    "run": "a run's folder",
}
EXPECTED = (
    "expected an HF folder (config.json and *.safetensors), a .gguf file, a torch_dist checkpoint (.metadata and *.distcp), "
    "a run's checkpoint (state.json and policy/) or a run's folder (checkpoints/step_NNNNNN)"
)


@dataclass(frozen=True)
class Place:
    """`path` as found on this machine; `weights` is the HF folder, the .gguf file or the torch_dist folder; for a run's folder,
    which may have several, see last_good."""

    kind: Kind
    path: Path
    weights: Path

    @property
    def title(self) -> str:
        return f"{TITLES[self.kind]} {self.path}"

    @property
    def is_megatron(self) -> bool:
        return self.kind in ("torch_dist", "checkpoint", "run")

    @property
    def hf(self) -> Path | None:
        """The folder with the model's config.json and tokenizer that lies with the weights."""
        folder = self.weights / "hf" if self.is_megatron else self.weights
        return folder if (folder / "config.json").is_file() else None

    def state(self) -> dict[str, Any]:
        """state.json of a run's checkpoint. ValueError if it can't be read."""
        file = self.path / "state.json"
        try:
            state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return {**state, "config": yaml.safe_load(state["config"])}
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            raise ValueError(f"{file}: is not what a run writes ({type(error).__name__}: {error}); restore it") from error


def locate(name: str) -> Place | None:
    """None for a hub id, which isn't on this machine. UsageError, saying what was expected, if it is no model."""
    try:
        path = find_weights(ModelConfig(path=name))
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error
    if path is None:
        return None
    if path.is_file():
        if path.suffix == ".gguf":
            return Place("gguf", path, path)
        raise UsageError(f"{path}: is a file, but no .gguf; {EXPECTED}")
    if (path / "state.json").is_file():
        return Place("checkpoint", path, path / "policy")
    if (path / ".metadata").is_file():
        return Place("torch_dist", path, path)
    if checkpoints(path):
        return Place("run", path, path / "checkpoints")
    if (path / "config.json").is_file() and any(path.glob("*.safetensors*")):
        return Place("hf", path, path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return Place("gguf", path, ggufs[0])
    raise UsageError(f"{path}: {_instead(path, ggufs)}; {EXPECTED}")


def _instead(path: Path, ggufs: list[Path]) -> str:
    if ggufs:
        return f"holds several GGUF files ({', '.join(file.name for file in ggufs)}): name one"
    if any(path.glob("*.distcp")):
        return "holds *.distcp without .metadata: a torch_dist checkpoint whose writing didn't end"
    if steps := sorted(path.glob("iter_*/.metadata")):
        return f"holds Megatron-LM's checkpoints: name one of them, such as {steps[-1].parent.name}"
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        return "holds pickled weights, which are not read, since they may run code: save the model as safetensors first"
    if (path / "checkpoints").is_dir():
        return "is a run's folder without a checkpoint"
    if (path / "config.json").is_file():
        return "holds a config.json but no *.safetensors"
    return "holds no model"


def last_good(run: Place) -> Place:
    """The last checkpoint of a run's folder whose files are as their manifest says (reads all of it). ValueError if there is
    none."""
    problems = []
    for folder in reversed(checkpoints(run.path)):
        problem = damage(folder)
        if not problem:
            return Place("checkpoint", folder, folder / "policy")
        problems.append(f"{folder.name}: {problem}")
        print(f"passing over {folder}: damaged: {problem}", file=sys.stderr, flush=True)
    raise ValueError(f"{run.path}: all of its checkpoints are damaged ({'; '.join(problems)}): restore one of them from a copy")
