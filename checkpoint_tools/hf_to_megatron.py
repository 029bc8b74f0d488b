"""HF folder -> torch_dist checkpoint, parameter by parameter."""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools import UsageError
from checkpoint_tools.dtypes import cast, name_of
from checkpoint_tools.output import Output, check_new, fingerprint, say
from checkpoint_tools.parameters import Parameter, in_order
from checkpoint_tools.progress import ByteProgress
from checkpoint_tools.sources import hf_folder
from dapo_megatron.policy.torch_dist import CheckpointWriter, Piece, objects_beside
from dapo_megatron.weights.hf_folder import HFFolder, check_tied_head, copy_settings
from dapo_megatron.weights.mapping import (
    ModelShape,
    check_hf_names,
    check_tensor_parallel,
    expected_hf_shapes,
    stored_chunks,
    stored_keys,
    stored_place,
    stored_shape,
    to_megatron,
)
from dapo_megatron.weights.safetensors_io import FLOATS

PART_BYTES = 2 * 10**9  # what a killed conversion does again at most; a larger parameter has a part of its own


def run(args: argparse.Namespace) -> int:
    out = Path(args.out).absolute()
    check_new(out)
    source = hf_folder(args.source)
    if out.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{out}: lies within {source}, which is read; choose another output")
    folder = HFFolder(source)
    shape = checked_shape(folder)
    _check_layout(shape, args.tp, args.pp, args.ep)
    model = Import(folder, shape, args.tp, getattr(torch, args.dtype) if args.dtype else None)
    parts = model.parts(args.pp, args.ep)
    names = [file.name for file in source.iterdir() if file.is_file()]
    options = {"to": "torch_dist", "tp": args.tp, "pp": args.pp, "ep": args.ep, "dtype": args.dtype}
    with Output(out, {"source": fingerprint(source, names), **options}) as output:
        writer = CheckpointWriter(output.content, output.work)
        sizes = [sum(map(model.nbytes, part)) for part in parts]
        done = {number for number in range(len(parts)) if writer.has(number)}
        if done:
            say(f"going on with {output.out}: {len(done)} of {len(parts)} files are there")
        with ByteProgress("hf-to-megatron", sum(sizes), sum(sizes[n] for n in done)) as progress:
            for number, part in enumerate(parts):
                if number not in done:
                    objects = objects_beside(shape) if number == 0 else {}
                    pieces = [piece for parameter in part for piece in model.pieces(parameter)]
                    writer.write(number, pieces, model.tensors(part, progress), objects)
            writer.finish(len(parts))
            (output.content / "hf").mkdir(exist_ok=True)
            copy_settings(output.content / "hf", source, args.dtype)
            size = output.finish()
        print(f"{out}: torch_dist checkpoint, {len(parts)} files, {size / 1e9:.2f} GB, {progress.summary}")
    return 0


def checked_shape(folder: HFFolder) -> ModelShape:
    """ValueError, naming tensor or field, unless the folder holds the model that its config.json describes, unquantised. Looks
    at headers only, and at a head that should be the embedding."""
    if "quantization_config" in folder.config:
        raise ValueError(f"{folder.path}: config.json has a quantization_config: dequantise the model first")
    try:
        shape = ModelShape.from_hf(folder.config)
    except ValueError as error:
        raise ValueError(f"{folder.path}/config.json: {error}") from error
    check_hf_names(folder.names(), shape, str(folder.path))
    for name, expected in expected_hf_shapes(shape).items():
        file, entry = folder.path / folder.files[name], folder.entries[name]
        if entry.dtype not in FLOATS:
            raise ValueError(
                f"{file}: tensor {name} is {entry.dtype}, not one of {', '.join(FLOATS)}: dequantise the model first"
            )
        if entry.shape != expected:
            raise ValueError(f"{file}: tensor {name} has shape {entry.shape}, config.json says {expected}")
    check_tied_head(folder, shape.tied)
    return shape


def _check_layout(shape: ModelShape, tp: int, pp: int, ep: int) -> None:
    try:
        check_tensor_parallel(shape, tp)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    if pp > shape.num_layers:
        raise UsageError(f"--pp: {pp} stages for a model of {shape.num_layers} layers; use at most one a layer")
    if ep > 1 and not shape.num_experts:
        raise UsageError(f"--ep: {ep} with a model without experts; leave it out")
    if shape.num_experts and shape.num_experts % ep:
        raise UsageError(f"--ep: {ep} does not divide the model's experts ({shape.num_experts}); use a divisor")


class Import:
    """The model's parameters as they are written: cut for `tp` tensor-parallel ranks, converted to `dtype` if there is one."""

    def __init__(self, folder: HFFolder, shape: ModelShape, tp: int, dtype: torch.dtype | None) -> None:
        self._folder, self._shape, self._tp, self._dtype = folder, shape, tp, dtype
        self._dtypes: dict[str, torch.dtype] = {}  # of the stored tensors
        for parameter in in_order(shape):
            self._set_dtype(parameter)

    def _set_dtype(self, parameter: Parameter) -> None:
        """All parameters of a stored tensor, and all that a parameter is made of, must be of one dtype."""
        key = stored_keys(parameter.rule)[0]
        for name in parameter.hf_names:
            dtype = self._dtype or FLOATS[self._folder.entries[name].dtype]
            if self._dtypes.setdefault(key, dtype) != dtype:
                raise ValueError(
                    f"{self._folder.path / self._folder.files[name]}: tensor {name} is {name_of(dtype)}, others of {key} are "
                    f"{name_of(self._dtypes[key])}, and Megatron keeps them in one tensor; choose a dtype for all with --dtype"
                )

    def nbytes(self, parameter: Parameter) -> int:
        rule = parameter.rule
        return math.prod(stored_shape(rule, self._shape, self._tp)) * self._dtypes[stored_keys(rule)[0]].itemsize

    def parts(self, pp: int, ep: int) -> list[list[Parameter]]:
        """What goes into each file: of one pipeline stage, experts by expert-parallel rank, at most PART_BYTES."""
        groups: dict[tuple[int, int], list[list[Parameter]]] = {}
        sizes: dict[tuple[int, int], int] = {}
        for parameter in in_order(self._shape):
            layer, expert = parameter.index
            stage = (pp - 1) * parameter.at_end if layer is None else layer * pp // self._shape.num_layers
            group = (stage, -1 if expert is None else expert * ep // self._shape.num_experts)
            size = self.nbytes(parameter)
            if group not in groups or sizes[group] + size > PART_BYTES:
                groups.setdefault(group, []).append([])
                sizes[group] = 0
            groups[group][-1].append(parameter)
            sizes[group] += size
        return [part for group in sorted(groups) for part in groups[group]]

    def pieces(self, parameter: Parameter) -> list[Piece]:
        rule, shape = parameter.rule, self._shape
        key = stored_keys(rule)[0]
        leading, num_leading = stored_place(rule, parameter.index, shape)
        size = (*num_leading, *stored_shape(rule, shape, self._tp))
        return [
            Piece(key, size, (*leading, *offsets), (*(1 for _ in leading), *sizes), self._dtypes[key])
            for offsets, sizes in stored_chunks(rule, shape, self._tp)
        ]

    def tensors(self, part: Sequence[Parameter], progress: ByteProgress) -> Iterator[Tensor]:
        """The contents of the pieces of all parameters, in order."""
        for parameter in part:
            whole = self._whole(parameter)
            num_leading = len(stored_place(parameter.rule, parameter.index, self._shape)[0])
            for offsets, sizes in stored_chunks(parameter.rule, self._shape, self._tp):
                yield _cut(whole, offsets, sizes)[(None,) * num_leading]
            progress.advance(self.nbytes(parameter))

    def _whole(self, parameter: Parameter) -> Tensor:
        hf = [cast(name, self._folder.tensor(name), self._dtype) for name in parameter.hf_names]
        return to_megatron(parameter.rule, hf, self._shape, 0, 1)


def _cut(whole: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A chunk; rows beyond the tensor's (the padding of a vocabulary) are zero."""
    found = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
    missing = sizes[0] - found.shape[0]
    return torch.cat([found, found.new_zeros(missing, *found.shape[1:])]) if missing else found
