"""torch_dist checkpoint of any layout -> HF folder, parameter by parameter."""

import argparse
import json
import math
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import torch

from checkpoint_tools import UsageError
from checkpoint_tools.dtypes import cast, name_of
from checkpoint_tools.output import Output, check_new, fingerprint, say
from checkpoint_tools.parameters import in_order
from checkpoint_tools.progress import ByteProgress
from checkpoint_tools.sources import checkpoint, settings_of
from dapo_megatron.checkpoint_files import sync
from dapo_megatron.policy.torch_dist import CheckpointReader
from dapo_megatron.weights.hf_folder import HFFolder, copy_settings
from dapo_megatron.weights.mapping import ModelShape, to_hf
from dapo_megatron.weights.safetensors_io import StreamedFile

Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def run(args: argparse.Namespace) -> int:
    out = Path(args.out).absolute()
    check_new(out)
    place = checkpoint(args.source)
    settings = settings_of(place, args.hf)
    for folder in (place.path, settings):
        if out.resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"{out}: lies within {folder}, which is read; choose another output")
    config = (settings / "config.json").read_bytes()
    shape = ModelShape.from_hf(HFFolder.read_config(settings))
    reader = CheckpointReader(place.weights)
    reader.check(shape)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    tensors = _tensors(reader, shape, dtype)
    shards = plan_shards(tensors, args.max_shard_size)
    files = [path.name for path in place.weights.iterdir() if path.is_file()]
    made_of = fingerprint(place.weights, files, (place.weights / ".metadata").read_bytes(), config)
    options = {"to": "hf", "max_shard_size": args.max_shard_size, "dtype": args.dtype, "settings": str(settings.resolve())}
    with Output(out, {"source": made_of, **options}) as output:
        sizes = {file: sum(_nbytes(tensors[name]) for name in names) for file, names in shards.items()}
        done = {file for file in shards if (output.content / file).is_file()}
        if done:
            say(f"going on with {output.out}: {len(done)} of {len(shards)} files are there")
        with ByteProgress("megatron-to-hf", sum(sizes.values()), sum(sizes[file] for file in done)) as progress:
            left = {file: {name: tensors[name] for name in names} for file, names in shards.items() if file not in done}
            _write(output, reader, shape, dtype, left, progress)
            if len(shards) > 1:
                index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": _weight_map(shards)}
                (output.content / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
            copy_settings(output.content, settings, _main_dtype(tensors))
            size = output.finish()
        print(f"{out}: HF folder, {len(shards)} *.safetensors, {size / 1e9:.2f} GB, {progress.summary}")
    return 0


def _tensors(reader: CheckpointReader, shape: ModelShape, dtype: torch.dtype | None) -> Sizes:
    """What is written, in this order."""
    return {
        name: (dtype or reader.dtype(parameter.rule, parameter.index, shape), size)
        for parameter in in_order(shape)
        for name, size in zip(parameter.hf_names, parameter.rule.hf_shapes(shape), strict=True)
    }


def plan_shards(tensors: Sizes, max_shard_bytes: int) -> dict[str, list[str]]:
    """Which tensors go into which file, as on the hub: one after the other, at most max_shard_bytes in each unless a single
    tensor is larger."""
    shards: list[list[str]] = []
    size = 0
    for name, tensor in tensors.items():
        if not shards or size + _nbytes(tensor) > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _nbytes(tensor)
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards)}


def _weight_map(shards: dict[str, list[str]]) -> dict[str, str]:
    return {name: file for file, names in shards.items() for name in names}


def _write(
    output: Output,
    reader: CheckpointReader,
    shape: ModelShape,
    dtype: torch.dtype | None,
    shards: dict[str, Sizes],
    progress: ByteProgress,
) -> None:
    """Each file gets its name when it is whole. A parameter may become tensors of two files."""
    left = {name: file for file, tensors in shards.items() for name in tensors}
    with ExitStack() as stack:
        current: StreamedFile | None = None
        for parameter in in_order(shape):
            if left.keys().isdisjoint(parameter.hf_names):
                continue
            whole = reader.parameter(parameter.rule, parameter.index, shape)
            for name, tensor in zip(parameter.hf_names, to_hf(parameter.rule, [whole], shape), strict=True):
                file = left.pop(name, "")
                if not file:
                    continue
                if current is None:
                    current = stack.enter_context(StreamedFile(output.work / file, shards[file]))
                current.write(name, cast(name, tensor, dtype))
                progress.advance(_nbytes(shards[file][name]))
                if file not in left.values():
                    stack.close()
                    (output.work / file).rename(output.content / file)
                    sync(output.content)
                    current = None


def _nbytes(tensor: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return tensor[0].itemsize * math.prod(tensor[1])


def _main_dtype(tensors: Sizes) -> str:
    """The one that most of the model has."""
    count: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        count[tensor[0]] += math.prod(tensor[1])
    return name_of(count.most_common(1)[0][0])
