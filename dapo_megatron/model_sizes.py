"""The few sizes of a model that a configuration must fit, read without transformers: from an HF config.json, a GGUF
file's header, or the dictionary of a random model."""

import importlib.util
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dapo_megatron.config import ModelConfig

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")  # that the policy builds


@dataclass(frozen=True)
class ModelSizes:
    family: str
    num_layers: int
    num_heads: int
    num_query_groups: int
    ffn_size: int
    max_positions: int  # tokens of context; 0: unknown
    num_experts: int = 0  # 0: a dense model


def find_weights(model: ModelConfig) -> Path | None:
    """Where the model lies on this machine (folder or .gguf file), None for `random` and hub ids.

    Raises ValueError if the path names a local place or a package that isn't there.
    """
    name = model.path
    if name == "random":
        return None
    if name.startswith("package:"):
        spec = importlib.util.find_spec(name.removeprefix("package:"))  # finds, doesn't import
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"no such package is installed; install {name.removeprefix('package:')} or change the path")
        return Path(spec.submodule_search_locations[0])
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.startswith(("/", ".", "~")) or path.suffix == ".gguf" or name.count("/") != 1:
        raise ValueError("there is no such file or folder; give an HF folder, a .gguf file, a hub id or package:NAME")
    return None


def read_sizes(model: ModelConfig) -> ModelSizes | None:
    """The model's sizes, or None if it isn't on this machine yet (a hub id). Raises ValueError if unreadable."""
    if model.path == "random":
        return _from_hf(model.random_model, "model.random_model")
    path = find_weights(model)
    if path is None:
        return None
    if path.is_file():
        return _from_gguf(path)
    if (path / "config.json").is_file():
        return _from_hf(json.loads((path / "config.json").read_text(encoding="utf-8")), str(path / "config.json"))
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"expected a config.json or exactly one .gguf file in the folder, found {len(files)} .gguf files")
    return _from_gguf(files[0])


def _from_hf(config: dict[str, Any], source: str) -> ModelSizes:
    needed = ("model_type", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    missing = [key for key in needed if key not in config]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}")
    heads = int(config["num_attention_heads"])
    return ModelSizes(
        family=str(config["model_type"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_query_groups=int(config.get("num_key_value_heads") or heads),
        ffn_size=int(config["intermediate_size"]),
        max_positions=int(config.get("max_position_embeddings") or 0),
        num_experts=int(config.get("num_experts") or config.get("num_local_experts") or 0),
    )


def _from_gguf(path: Path) -> ModelSizes:
    keys = read_gguf_header(path)
    family = str(keys.get("general.architecture", ""))
    try:
        heads = int(keys[f"{family}.attention.head_count"])
        return ModelSizes(
            family=family,
            num_layers=int(keys[f"{family}.block_count"]),
            num_heads=heads,
            num_query_groups=int(keys.get(f"{family}.attention.head_count_kv", heads)),
            ffn_size=int(keys[f"{family}.feed_forward_length"]),
            max_positions=int(keys.get(f"{family}.context_length", 0)),
        )
    except KeyError as error:
        raise ValueError(f"{path.name} has no metadata {error}; is it a language model's GGUF file?") from None


# GGUF value types of fixed size, by their number in the format's specification; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf_header(path: Path) -> dict[str, Any]:
    """The scalar and text metadata of a GGUF file (version 2 or 3) up to its tokenizer, which only holds long lists."""
    with path.open("rb") as file:
        try:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path.name} is not a GGUF file")
            version, _, count = _unpack(file, "I"), _unpack(file, "Q"), _unpack(file, "Q")
            if version not in (2, 3):
                raise ValueError(f"{path.name} is GGUF version {version}; 2 and 3 are known")
            keys: dict[str, Any] = {}
            for _ in range(count):
                key = _string(file)
                if key.startswith("tokenizer."):
                    break
                keys[key] = _value(file, _unpack(file, "I"))
        except struct.error:
            raise ValueError(f"{path.name} ends within its header; it is damaged") from None
    return keys


def _unpack(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]


def _string(file: BinaryIO) -> str:
    return file.read(_unpack(file, "Q")).decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _string(file)
    if kind == 9:
        item, length = _unpack(file, "I"), _unpack(file, "Q")
        return [_value(file, item) for _ in range(length)]
    if kind not in _SCALARS:
        raise ValueError(f"unknown GGUF value type {kind}; the file is damaged")
    return _unpack(file, _SCALARS[kind])
