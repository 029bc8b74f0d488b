"""`inspect`: what lies at a path, from headers and metadata alone; no tensor is read.

With --json one object is printed (null where the kind of thing has no such value, or nothing tells it):

    path, kind          kind is hf, gguf, torch_dist, checkpoint (a run's) or run
    model               family, layers, hidden_size, ffn_size, heads, query_groups, head_dim, vocab_size, tied, experts, as
                        config.json (or the GGUF file) says; null if there is none
    parameters, tensors how many; a vocabulary's padding isn't counted, Megatron's stacked layers are one tensor
    dtypes              dtype -> {tensors, parameters, bytes}, of the weights
    optimizer_bytes     of the optimizer's tensors; null if there are none
    files, bytes        [{name, bytes}, ...] and their sum
    layout              {tp, num_writers, run}: tensor-parallel size by the chunks, how many ranks (or parts of a conversion)
                        have written, the parallel sizes of the run's configuration
    step                of a run's checkpoint
    versions            torch_dist, dcp (torch's metadata), transformers (of config.json)
    manifest            {ok, problem, read}: by sizes, or by content too (`read`) with --check
    problems            [text, ...]: where tensors and config.json don't agree, or what isn't whole
    checkpoints         of a run: [{name, step, bytes, manifest}, ...], oldest first; the rest tells of the last good one
"""

import argparse
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from checkpoint_tools import UsageError
from checkpoint_tools.locate import TITLES, Place, locate
from dapo_megatron.checkpoint_files import checkpoints, damage, step_of
from dapo_megatron.model_sizes import FAMILIES, read_gguf_header

_PARALLEL = ("tp", "pp", "vpp", "cp", "dp", "ep")
_MAX_FILES = 6  # that the text names


def run(args: argparse.Namespace) -> int:
    warnings.simplefilter("ignore")  # Megatron's, of a dozen things that aren't installed
    found = inspect(args.path, args.check)
    print(json.dumps(found, indent=2) if args.json else text_of(found))
    return 0


def inspect(name: str, check: bool = False) -> dict[str, Any]:
    """See above. UsageError if there is nothing there that is known, ValueError if it is damaged so that it can't be read."""
    place = locate(name)
    if place is None:
        raise UsageError(f"{name}: is not on this machine; if it is a hub id, download the model and give its folder")
    found: dict[str, Any] = dict.fromkeys(
        ("path", "kind", "model", "parameters", "tensors", "dtypes", "optimizer_bytes", "files", "bytes", "layout", "step")
    )
    found |= {"versions": {}, "manifest": None, "problems": [], "checkpoints": None}
    found |= {"path": str(place.path), "kind": place.kind}
    if place.kind == "run":
        saved = [_of_saved(folder, check) for folder in checkpoints(place.path)]
        good = [entry for entry in saved if entry["manifest"]["ok"]] or saved
        found["checkpoints"] = saved
        folder = place.weights / good[-1]["name"]
        place = Place("checkpoint", folder, folder / "policy")
    if place.kind == "hf":
        found |= _of_hf(place.path)
    elif place.kind == "gguf":
        found |= _of_gguf(place.weights)
    else:
        found |= _of_torch_dist(place)
    if place.kind == "checkpoint":
        found |= _of_checkpoint(place, found["layout"], check)
    return found


def _of_hf(folder: Path) -> dict[str, Any]:
    from checkpoint_tools.hf_to_megatron import checked_shape
    from dapo_megatron.weights.hf_folder import HFFolder
    from dapo_megatron.weights.safetensors_io import FLOATS

    model = HFFolder(folder)
    tensors = [
        (str(FLOATS.get(entry.dtype, entry.dtype)).removeprefix("torch."), math.prod(entry.shape), entry.nbytes)
        for entry in model.entries.values()
    ]
    problems = _problems(model.config, lambda _: checked_shape(model))
    return {**_weights(tensors), **_files(folder), **_of_config(model.config), "problems": problems}


def _problems(config: dict[str, Any], check: Callable[[Any], object]) -> list[str]:
    """What `check` has against the model of a config.json. Of one that isn't known here nothing can be said."""
    from dapo_megatron.weights.mapping import ModelShape

    if config.get("model_type") not in FAMILIES:
        return []
    try:
        check(ModelShape.from_hf(config))
    except ValueError as error:
        return [str(error)]
    return []


def _of_gguf(file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    keys = read_gguf_header(file)
    family = str(keys.get("general.architecture", ""))

    def size(name: str) -> Any:
        return keys.get(f"{family}.{name}")

    heads, hidden = size("attention.head_count"), size("embedding_length")
    tensors = GGUFReader(str(file)).tensors
    names = {str(tensor.name): tensor for tensor in tensors}
    embedding = names.get("token_embd.weight")
    model = {
        "family": family,
        "layers": size("block_count"),
        "hidden_size": hidden,
        "ffn_size": size("expert_feed_forward_length") or size("feed_forward_length"),
        "heads": heads,
        "query_groups": size("attention.head_count_kv") or heads,
        "head_dim": size("attention.key_length") or (hidden // heads if hidden and heads else None),
        "vocab_size": int(embedding.shape[-1]) if embedding is not None else None,
        "tied": "output.weight" not in names,
        "experts": size("expert_count") or 0,
    }
    weights = _weights((tensor.tensor_type.name, int(tensor.n_elements), int(tensor.n_bytes)) for tensor in tensors)
    return {**weights, "model": model, "files": [_file(file, file.name)], "bytes": file.stat().st_size}


def _of_torch_dist(place: Place) -> dict[str, Any]:
    from dapo_megatron.policy.torch_dist import CheckpointReader
    from dapo_megatron.weights.hf_folder import HFFolder

    folder, reader = place.weights, CheckpointReader(place.weights)
    config = HFFolder.read_config(place.hf) if place.hf else None
    vocab_size = config["vocab_size"] if config else None
    tensors = []
    for key, entry in reader.tensors.items():
        size = list(entry.size)
        if vocab_size and key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            size[0] = min(size[0], vocab_size)  # without padding
        tensors.append((str(entry.properties.dtype).removeprefix("torch."), math.prod(size), _stored_bytes(entry)))
    others = [entry for key, entry in reader.metadata.state_dict_metadata.items() if key not in reader.tensors]
    files = _files(folder)
    writers = {match[1] for file in files["files"] if (match := re.fullmatch(r"__(\d+)_\d+\.distcp", file["name"]))}
    found = _of_config(config) if config else {"model": None, "versions": {}}
    versions = {"torch_dist": _backend_version(folder), "dcp": getattr(reader.metadata, "version", None)}
    return {
        **_weights(tensors),
        **files,
        "model": found["model"],
        "optimizer_bytes": sum(map(_stored_bytes, others)) if reader.has_optimizer else None,
        "layout": {"tp": _tensor_parallel(reader.tensors), "num_writers": len(writers), "run": None},
        "versions": {**versions, **found["versions"]},
        "problems": _problems(config, reader.check) if config else [],
    }


def _stored_bytes(entry: Any) -> int:
    """Of a tensor; 0 of the other objects that a checkpoint holds."""
    return math.prod(entry.size) * entry.properties.dtype.itemsize if hasattr(entry, "properties") else 0


def _backend_version(folder: Path) -> Any:
    file = folder / "metadata.json"
    return json.loads(file.read_text(encoding="utf-8")).get("sharded_backend_version") if file.is_file() else None


def _tensor_parallel(tensors: dict[str, Any]) -> int | None:
    """In how many pieces the first layer's attention output is stored."""
    for key, entry in tensors.items():
        if re.fullmatch(r"decoder\.layers\.(0\.)?self_attention\.linear_proj\.weight", key):
            stacked = len(entry.size) > 2
            return sum(1 for chunk in entry.chunks if not stacked or chunk.offsets[0] == 0)
    return None


def _of_checkpoint(place: Place, layout: dict[str, Any], check: bool) -> dict[str, Any]:
    """What a run adds to a torch_dist folder."""
    state = place.state()
    parallel = state["config"].get("parallel") or {}
    return {
        **_files(place.path),
        "step": state.get("step"),
        "layout": {**layout, "run": {name: parallel[name] for name in _PARALLEL if name in parallel}},
        "manifest": _of_saved(place.path, check)["manifest"],
    }


def _of_saved(checkpoint: Path, check: bool) -> dict[str, Any]:
    problem = damage(checkpoint, read=check)
    manifest = {"ok": not problem, "problem": problem, "read": check}
    return {"name": checkpoint.name, "step": step_of(checkpoint), "bytes": _files(checkpoint)["bytes"], "manifest": manifest}


def _of_config(config: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    model = {
        "family": config.get("model_type"),
        "layers": config.get("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_size": config.get("moe_intermediate_size") if experts else config.get("intermediate_size"),
        "heads": heads,
        "query_groups": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or (hidden // heads if hidden and heads else None),
        "vocab_size": config.get("vocab_size"),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "experts": experts,
    }
    return {"model": model, "versions": {"transformers": config.get("transformers_version")}}


def _weights(tensors: Iterable[tuple[str, int, int]]) -> dict[str, Any]:
    """Of (dtype, parameters, bytes) each."""
    dtypes: dict[str, dict[str, int]] = {}
    for dtype, parameters, num_bytes in tensors:
        entry = dtypes.setdefault(dtype, {"tensors": 0, "parameters": 0, "bytes": 0})
        for name, value in (("tensors", 1), ("parameters", parameters), ("bytes", num_bytes)):
            entry[name] += value
    total = {name: sum(entry[name] for entry in dtypes.values()) for name in ("parameters", "tensors")}
    return {"dtypes": dict(sorted(dtypes.items())), **total}


def _files(folder: Path) -> dict[str, Any]:
    files = [_file(path, path.relative_to(folder).as_posix()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return {"files": files, "bytes": sum(file["bytes"] for file in files)}


def _file(path: Path, name: str) -> dict[str, Any]:
    return {"name": name, "bytes": path.stat().st_size}


# --- as text ---


def text_of(found: dict[str, Any]) -> str:
    """What `inspect` found, a line a fact."""
    lines = {"model": _model_text(found["model"])}
    if found["dtypes"]:
        tensors = "stacked tensors" if found["kind"] != "hf" and found["kind"] != "gguf" else "tensors"
        lines["parameters"] = f"{found['parameters']:,} in {found['tensors']:,} {tensors}"
        lines["dtypes"] = ", ".join(f"{dtype} {_bytes(entry['bytes'])}" for dtype, entry in found["dtypes"].items())
    if found["layout"]:
        lines["optimizer"] = _bytes(found["optimizer_bytes"]) if found["optimizer_bytes"] else "none"
        lines["layout"] = _layout_text(found["layout"])
    if found["step"] is not None:
        lines["step"] = str(found["step"])
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    lines["versions"] = versions or "not recorded"
    if found["manifest"]:
        lines["manifest"] = _manifest_text(found["manifest"])
    if found["files"]:
        largest = sorted(found["files"], key=lambda file: -file["bytes"])
        shown = ", ".join(f"{file['name']} {_bytes(file['bytes'])}" for file in largest[:_MAX_FILES])
        more = f" and {len(largest) - _MAX_FILES} more" if len(largest) > _MAX_FILES else ""
        lines["files"] = f"{len(largest)}, {_bytes(found['bytes'])}: {shown}{more}"
    for number, entry in enumerate(found["checkpoints"] or ()):
        lines[f"checkpoint {number + 1}"] = f"{entry['name']}, {_bytes(entry['bytes'])}, {_manifest_text(entry['manifest'])}"
    for number, problem in enumerate(found["problems"]):
        lines[f"PROBLEM {number + 1}"] = problem
    width = max(map(len, lines))
    head = f"{found['path']}: {TITLES[found['kind']]}"
    return "\n".join([head, *(f"  {name:<{width}}  {text}" for name, text in lines.items())])


def _model_text(model: dict[str, Any] | None) -> str:
    if model is None:
        return "unknown: there is no config.json (hf/ in the checkpoint)"
    parts = [
        f"{model['layers']} layers",
        f"hidden {model['hidden_size']}",
        f"{model['heads']} heads x {model['head_dim']} in {model['query_groups']} groups",
        f"{model['experts']} experts of {model['ffn_size']}" if model["experts"] else f"MLP {model['ffn_size']}",
        f"vocabulary {model['vocab_size']}, {'tied' if model['tied'] else 'untied'}",
    ]
    known = "" if model["family"] in FAMILIES else f" (not converted here; {', '.join(FAMILIES)} are)"
    return f"{model['family']}{known}: {', '.join(parts)}"


def _layout_text(layout: dict[str, Any]) -> str:
    tp = f"tp {layout['tp']} by its chunks" if layout["tp"] else "tp unknown"
    run = f"; the run's: {', '.join(f'{name} {size}' for name, size in layout['run'].items())}" if layout["run"] else ""
    return f"{tp}, written in {layout['num_writers']} part(s){run}; any layout can load it"


def _manifest_text(manifest: dict[str, Any]) -> str:
    how = "sizes and content" if manifest["read"] else "sizes only; --check reads the content too"
    return f"ok ({how})" if manifest["ok"] else f"DAMAGED: {manifest['problem']}"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} bytes"
