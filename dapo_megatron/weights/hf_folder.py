"""Reading and writing HF model folders: safetensors, one tensor at a time. Pickled weights are refused, never unpickled."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dapo_megatron.weights.safetensors_io import Entry, read_header, read_tensor


class HFFolder:
    """A folder with config.json and *.safetensors (one file, or several with an index). ValueError, naming the file, if a file
    is damaged, or index and files don't agree."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.read_config(self.path)
        self.files: dict[str, str] = {}  # of each tensor
        self.entries: dict[str, Entry] = {}
        index = self.path / "model.safetensors.index.json"
        self._locate(_weight_map(index) if index.is_file() else None)

    @staticmethod
    def read_config(path: Path) -> dict[str, Any]:
        """config.json of a folder that may hold nothing else. ValueError if there is none."""
        if not (path / "config.json").is_file():
            raise ValueError(f"{path}: no config.json: not an HF model folder")
        return _read_json(path / "config.json")

    def _locate(self, index: dict[str, str] | None) -> None:
        names = {p.name for p in self.path.glob("*.safetensors")} if index is None else set(index.values())
        if not names:
            raise ValueError(f"{self.path}: no *.safetensors (pickled weights are not read: convert them first)")
        for file in sorted(names):
            for name, entry in read_header(self.path / file).items():
                if index is not None and index.get(name) != file:
                    raise ValueError(
                        f"{self.path / file}: holds {name}, which the index does not say; mend or remove the index"
                    )
                if name in self.files:
                    raise ValueError(f"{self.path}: both {self.files[name]} and {file} hold {name}; remove one of the files")
                self.files[name], self.entries[name] = file, entry
        lacking = sorted((index or {}).keys() - self.files.keys())
        if index and lacking:
            raise ValueError(
                f"{self.path / index[lacking[0]]}: lacks {lacking[0]}, which the index says is there; fetch the file anew"
            )

    def names(self) -> list[str]:
        return list(self.files)

    def tensor(self, name: str) -> Tensor:
        return read_tensor(self.path / self.files[name], name, self.entries[name])


def check_tied_head(folder: HFFolder, tied: bool) -> None:
    """A file may hold the second copy of a tied embedding. ValueError if that is another tensor: it would be lost."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if tied and head in folder.files and not folder.tensor(head).equal(folder.tensor(embedding)):
        raise ValueError(
            f"{folder.path}: config.json ties {head} to {embedding}, yet the files hold another one; set tie_word_embeddings "
            "to false if it is meant"
        )


def _weight_map(index: Path) -> dict[str, str]:
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index}: has no weight_map of tensors' names to files' names; fetch it anew")
    missing = sorted({f for f in files.values() if not (index.parent / f).is_file()})
    if missing:
        raise ValueError(f"{index}: names files that are not there: {', '.join(missing)}")
    return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: can't be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds no JSON object")
    return content


def start_folder(folder: Path, source: Path, dtype: str) -> None:
    """A new folder with the source's config, generation config and tokenizer; the config says `dtype`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy_settings(folder, source, dtype)


def copy_settings(folder: Path, source: Path, dtype: str) -> None:
    """All that a model's folder holds beside weights: config, generation config and tokenizer; the config says `dtype` unless
    that is empty."""
    for file in source.iterdir():
        if file.suffix in {".json", ".jinja", ".model", ".txt"} and "safetensors" not in file.name and file.is_file():
            shutil.copy(file, folder / file.name)
    if dtype:
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
