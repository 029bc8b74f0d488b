"""The first layers of a model as a model of their own: what a layout does wrong shows with a few layers already."""

import json
import re
from pathlib import Path

from dapo_megatron.weights.hf_folder import HFFolder, finish_folder, start_folder, write_shards


def shortened(model_dir: Path, num_layers: int, out: Path) -> Path:
    """An HF folder `out` with the first `num_layers` layers. ValueError if the model has fewer."""
    source = HFFolder(model_dir)
    have = source.config["num_hidden_layers"]
    if num_layers > have:
        raise ValueError(f"audit.num_layers: {num_layers} is more than the model's {have}; use fewer, or 0 for all")
    dtype = source.config.get("dtype") or source.config.get("torch_dtype") or "float32"
    start_folder(out, model_dir, dtype)
    config = json.loads((out / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_layers]
    (out / "config.json").write_text(json.dumps(config, indent=2))
    kept = (name for name in source.names() if _layer(name) < num_layers)
    finish_folder(out, list(write_shards(out, "model", ((name, source.tensor(name)) for name in kept)).items()))
    return out


def _layer(name: str) -> int:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found.group(1)) if found else -1
