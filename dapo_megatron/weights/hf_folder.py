"""Reading and writing HF model folders: safetensors, one tensor at a time. Pickled weights are refused, never unpickled."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


class HFFolder:
    """A folder with config.json and *.safetensors (one file, or several with an index)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        config = self.path / "config.json"
        if not config.is_file():
            raise ValueError(f"{self.path}: no config.json: not an HF model folder")
        self.config: dict[str, Any] = json.loads(config.read_text())
        self._files = self._locate()
        self._open: dict[str, Any] = {}

    def _locate(self) -> dict[str, str]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            missing = sorted({f for f in files.values() if not (self.path / f).is_file()})
            if missing:
                raise ValueError(f"{index}: names files that are not there: {', '.join(missing)}")
            return files
        names = sorted(p.name for p in self.path.glob("*.safetensors"))
        if not names:
            raise ValueError(f"{self.path}: no *.safetensors (pickled weights are not read: convert them first)")
        return {tensor: name for name in names for tensor in self._handle_of(name).keys()}  # noqa: SIM118 - not a dict

    def _handle_of(self, file: str) -> Any:
        try:
            return safe_open(self.path / file, framework="pt")
        except Exception as error:  # safetensors raises its own type for truncated headers
            raise ValueError(f"{self.path / file}: unreadable safetensors file ({error})") from error

    def names(self) -> list[str]:
        return list(self._files)

    def tensor(self, name: str) -> Tensor:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._handle_of(file)
        return self._open[file].get_tensor(name)


def start_folder(folder: Path, source: Path, dtype: str) -> None:
    """A new folder with the source's config, generation config and tokenizer; the config says `dtype`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix in {".json", ".jinja", ".model", ".txt"} and "safetensors" not in file.name:
            shutil.copy(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_shards(
    folder: Path, prefix: str, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int = 5 * 10**9
) -> dict[str, dict[str, int]]:
    """Stream tensors into files of at most max_shard_bytes (a larger tensor has one of its own).

    Returns for each file its tensors' names and bytes, for finish_folder.
    """
    shards: dict[str, dict[str, int]] = {}
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        file = f"{prefix}-{len(shards)}.part"
        try:
            save_file(pending, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"{folder / file} can't be written: {error}") from error
        shards[file] = {name: tensor.nbytes for name, tensor in pending.items()}
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
    if pending:
        flush()
    return shards


def finish_folder(folder: Path, shards: list[tuple[str, dict[str, int]]]) -> None:
    """Give the shards that write_shards wrote their final names, and write the index if there are several."""
    if len(shards) == 1:
        (folder / shards[0][0]).rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, (file, tensors) in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / file).rename(folder / final)
        weight_map.update(dict.fromkeys(tensors, final))
    total_bytes = sum(sum(tensors.values()) for _, tensors in shards)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
