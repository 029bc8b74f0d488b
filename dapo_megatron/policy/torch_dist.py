"""A torch_dist checkpoint's tensors one by one, without a model and without ranks: what conversion needs of the format.

Such a checkpoint is torch's own (torch.distributed.checkpoint): `.metadata` says of each global tensor, in which all layers
(and experts) are stacked, where its chunks lie in *.distcp. For which layout a parameter was cut shows in its chunks only.
"""

import io
import json
import math
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from dapo_megatron.checkpoint_files import os_error_within, sync
from dapo_megatron.policy.safe_metadata import safe_metadata
from dapo_megatron.weights.mapping import Index, ModelShape, Rule, rules_for, stored_keys, stored_place, stored_shape
from dapo_megatron.weights.safetensors_io import FLOATS

# What a checkpoint may hold besides weights.
_NO_WEIGHT = re.compile(
    r"(chained_\d+\.)?optimizer\.|opt_param_scheduler|rng_state|rerun_state_machine_state|common_state|.*\._extra_state"
)
_MAX_NAMED = 6  # names in a message


class CheckpointReader:
    """`tensors`: key -> what is known of each tensor of the model (size, dtype, chunks; torch's TensorStorageMetadata), as
    stored. ValueError if `folder` holds no torch_dist checkpoint, or one whose metadata can't be read or would run code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / ".metadata").is_file():
            raise ValueError(f"{folder}: no .metadata: not a torch_dist checkpoint (or one whose writing didn't end)")
        self._files = FileSystemReader(folder)
        try:
            with safe_metadata():
                self.metadata = self._files.read_metadata()
            self._files.set_up_storage_reader(self.metadata, is_coordinator=True)
            entries = self.metadata.state_dict_metadata
        except (AttributeError, AssertionError) as error:
            raise ValueError(f"{folder}/.metadata: is no checkpoint's metadata ({_reason(error)})") from error
        self.has_optimizer = any(re.match(r"(chained_\d+\.)?optimizer\.", key) for key in entries)
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and not _NO_WEIGHT.match(key)
        }
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def check(self, shape: ModelShape) -> None:
        """ValueError that names what is wrong unless the checkpoint holds every tensor of the model, whole and of the right
        shape, and none that no rule knows. Reads no tensor, but looks at the files' sizes."""
        used = set()
        for rule in rules_for(shape):
            for index in rule.indices(shape):
                key, _, items = self._items(rule, index, shape)
                used.add(key)
                self._check_files(key, items)
        unknown = sorted(self.tensors.keys() - used)
        if unknown:
            more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
            raise ValueError(
                f"{self.folder}: unknown tensors {', '.join(unknown[:_MAX_NAMED])}{more}: not the {shape.family} model of "
                "config.json"
            )

    def key(self, rule: Rule, index: Index, shape: ModelShape) -> str:
        """Under which name the parameter is stored, alone or with others. ValueError if it isn't."""
        return self._find(rule, index, shape)[0]

    def dtype(self, rule: Rule, index: Index, shape: ModelShape) -> torch.dtype:
        return self.tensors[self.key(rule, index, shape)].properties.dtype

    def parameter(self, rule: Rule, index: Index, shape: ModelShape) -> Tensor:
        """One parameter of the model as a single tensor-parallel rank would have it; a vocabulary may have rows beyond the
        model's. ValueError, naming key or file, if it is missing, not whole, of another shape, or can't be read."""
        key, wanted, items = self._items(rule, index, shape)
        stored = self.tensors[key]
        target = torch.empty(wanted.sizes, dtype=stored.properties.dtype)
        try:
            self._files.read_data(LoadPlan(items), _Into(target))
        except (OSError, RuntimeError, AssertionError, EOFError, ValueError, pickle.UnpicklingError) as error:
            files = ", ".join(sorted({str(self.folder / self._place(item).relative_path) for item in items}))
            raise ValueError(f"{files}: {key} can't be read ({_reason(error)}): the file is damaged; restore it") from error
        return target[(0,) * (target.ndim - len(stored_shape(rule, shape, 1)))]

    def _find(self, rule: Rule, index: Index, shape: ModelShape) -> tuple[str, tuple[int, ...]]:
        """The key, and the parameter's leading offsets in its tensor. Models whose layers differ aren't stacked."""
        offsets, sizes = stored_place(rule, index, shape)
        forms = [(key, offsets, sizes) for key in stored_keys(rule)]
        if index.layer is not None:
            layer = f"decoder.layers.{index.layer}."
            forms += [(k.replace("decoder.layers.", layer), offsets[1:], sizes[1:]) for k in stored_keys(rule)]
        found = [form for form in forms if form[0] in self.tensors]
        if not found:
            raise ValueError(f"{self.folder}: tensor {forms[0][0]} is missing, which a {shape.family} model needs")
        key, offsets, sizes = found[0]
        size, dtype = tuple(self.tensors[key].size), self.tensors[key].properties.dtype
        rest, expected = size[len(sizes) :], stored_shape(rule, shape, 1)
        fits = rest[1:] == expected[1:] and rest[0] >= expected[0] if rule.kind == "vocab" else rest == expected
        if size[: len(sizes)] != sizes or not fits:
            raise ValueError(f"{self.folder}: tensor {key} has shape {size}, config.json says {sizes + expected}")
        if dtype not in FLOATS.values():
            raise ValueError(f"{self.folder}: tensor {key} is {str(dtype)[6:]}: quantised weights have to be dequantised first")
        return key, offsets

    def _items(self, rule: Rule, index: Index, shape: ModelShape) -> tuple[str, ChunkStorageMetadata, list[ReadItem]]:
        """What has to be read of which chunks, so that it covers the parameter once."""
        key, leading = self._find(rule, index, shape)
        stored = self.tensors[key]
        rest = stored.size[len(leading) :]
        wanted = ChunkStorageMetadata(torch.Size((*leading, *(0 for _ in rest))), torch.Size((*(1 for _ in leading), *rest)))
        near = TensorStorageMetadata(stored.properties, stored.size, self._chunks_at(key, leading))
        items = create_read_items_for_chunk_list(key, near, [wanted])
        covered = sum(math.prod(item.lengths) for item in items)
        if covered != math.prod(rest) or any(_overlap(a, b) for a, b in combinations(items, 2)):
            where = f" at {leading}" if leading else ""
            raise ValueError(
                f"{self.folder}: tensor {key}{where}: the stored chunks hold {covered} of {math.prod(rest)} elements; the "
                "checkpoint isn't whole: restore it"
            )
        return key, wanted, items

    def _chunks_at(self, key: str, leading: tuple[int, ...]) -> list[ChunkStorageMetadata]:
        """The chunks by layer (and expert), since a large model has tens of thousands of them."""
        if key not in self._chunks:
            places: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
            for chunk in self.tensors[key].chunks:
                ranges = [range(chunk.offsets[i], chunk.offsets[i] + chunk.sizes[i]) for i in range(len(leading))]
                for place in product(*ranges):
                    places.setdefault(place, []).append(chunk)
            self._chunks[key] = places
        return self._chunks[key].get(leading, [])

    def _check_files(self, key: str, items: Sequence[ReadItem]) -> None:
        for item in items:
            if item.storage_index not in self._files.storage_data:
                raise ValueError(f"{self.folder}/.metadata: doesn't say where tensor {key} lies; the checkpoint isn't whole")
            place = self._place(item)
            file = self.folder / place.relative_path
            size = file.stat().st_size if file.is_file() else -1
            if size < place.offset + place.length:
                what = "is missing" if size < 0 else f"has {size} bytes, tensor {key} ends at {place.offset + place.length}"
                raise ValueError(f"{file}: {what}; the checkpoint isn't whole: restore it")

    def _place(self, item: ReadItem) -> _StorageInfo:
        return self._files.storage_data[item.storage_index]


class Piece(NamedTuple):
    """One chunk that is written: of which global tensor, and where in it."""

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


class CheckpointWriter:
    """Writes a checkpoint part by part, each a file that gets its name in `folder` when it is on the disk. `work`, another
    folder of the same file system, holds what isn't whole, and of each part a record, by which another writer can go on."""

    def __init__(self, folder: Path, work: Path) -> None:
        self._folder, self._work = folder, work

    def has(self, number: int) -> bool:
        """Part `number` is whole: it was written, perhaps by an earlier process."""
        record = self._record(number)
        if not record.is_file():
            return False
        entry = json.loads(record.read_text(encoding="utf-8"))
        file = self._folder / entry["file"]
        return file.is_file() and file.stat().st_size == entry["bytes"]

    def write(self, number: int, pieces: Sequence[Piece], tensors: Iterator[Tensor], objects: dict[str, Any]) -> None:
        """`tensors` gives the pieces' contents in their order, each when it is wanted. `objects` are saved under their names.
        OSError if the disk is full; nothing of the part is left then."""
        items = [_object_item(name) for name in objects] + [_tensor_item(piece) for piece in pieces]
        plan = SavePlan(items, storage_data=_StoragePrefix(f"__{number}_"))
        name = f"__{number}_0.distcp"
        try:
            results = FileSystemWriter(self._work).write_data(plan, _From(tensors, objects)).wait()
        except BaseException as error:
            (self._work / name).unlink(missing_ok=True)  # room, for what others write
            raise (os_error_within(error) if isinstance(error, RuntimeError) else error) from None
        (self._work / name).rename(self._folder / name)
        sync(self._folder)
        by_place = {(piece.key, piece.offsets): piece for piece in pieces}
        entries = []
        for result in results:
            index, place = result.index, result.storage_data
            piece = by_place.get((index.fqn, tuple(index.offset or ())))
            entries.append([index.fqn, place.offset, place.length, piece and [*piece[1:4], str(piece.dtype)[6:]]])
        self._keep_record(number, {"file": name, "bytes": (self._folder / name).stat().st_size, "items": entries})

    def finish(self, num_parts: int) -> None:
        """Write what makes the parts a checkpoint."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        results = []
        for number in range(num_parts):
            # From the records alone: so that it doesn't matter, to the byte, which process has written a part.
            record = json.loads(self._record(number).read_text(encoding="utf-8"))
            for key, offset, length, piece in record["items"]:
                info = _StorageInfo(record["file"], offset, length)
                if piece is None:
                    entries[key] = BytesStorageMetadata()
                    index = MetadataIndex(key)
                else:
                    size, offsets, sizes, dtype = piece
                    new = TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), torch.Size(size), [])
                    entry = entries.setdefault(key, new)
                    assert isinstance(entry, TensorStorageMetadata)
                    entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                    index = MetadataIndex(key, offsets, len(entry.chunks) - 1)
                results.append(WriteResult(index, length, info))
        (self._folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        _Anonymous(self._folder).finish(Metadata(entries), [results])

    def _record(self, number: int) -> Path:
        return self._work / f"part_{number}.json"

    def _keep_record(self, number: int, record: dict[str, Any]) -> None:
        new = self._work / "record.tmp"
        with new.open("w", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(self._record(number))
        sync(self._work)


def objects_beside(shape: ModelShape) -> dict[str, Any]:
    """What Megatron wants to load besides tensors, empty each: an `_extra_state` of the layers' modules, in which Transformer
    Engine keeps what FP8 needs (norms that it doesn't fuse have one too), and what is common to all ranks. Megatron refuses a
    checkpoint that lacks one, and takes no notice of one that the model has no use for."""
    found: dict[str, Any] = {"common_state/shard_0_1": [{}]}
    for rule in rules_for(shape):
        module, _, what = stored_keys(rule)[0].rpartition(".")
        if what != "weight" or not re.search(r"\.linear_\w+$|layernorm$", module):
            continue
        for index in rule.indices(shape):
            offsets, sizes = stored_place(rule, index, shape)
            shard = "_".join(".".join(map(str, numbers)) for numbers in (offsets or (0,), sizes or (1,)))
            found[f"{module}._extra_state/shard_{shard}"] = [None]
    return found


class _Into(DefaultLoadPlanner):
    """Reads into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return narrow_tensor_by_index(self._target, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _From(DefaultSavePlanner):
    """Hands over what is written, in the order of the plan."""

    def __init__(self, tensors: Iterator[Tensor], objects: dict[str, Any]) -> None:
        super().__init__()
        self._tensors, self._objects = tensors, objects

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._objects[write_item.index.fqn], stream)
            return stream
        tensor, data = next(self._tensors), write_item.tensor_data
        assert data and tensor.shape == data.chunk.sizes and tensor.dtype == data.properties.dtype, write_item.index
        return tensor.contiguous()


class _Anonymous(FileSystemWriter):
    """Leaves the folder, which is about to be renamed, and a random id out of the metadata."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def _tensor_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
    data = TensorWriteData(chunk, TensorProperties(piece.dtype), torch.Size(piece.size))
    return WriteItem(MetadataIndex(piece.key, piece.offsets), WriteItemType.SHARD, tensor_data=data)


def _object_item(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def _overlap(a: ReadItem, b: ReadItem) -> bool:
    sides = zip(a.dest_offsets, a.lengths, b.dest_offsets, b.lengths, strict=True)
    return all(x < y + n and y < x + m for x, m, y, n in sides)


def _reason(error: Exception) -> str:
    """Without torch's advice to unpickle without a check."""
    asked = re.search(r"GLOBAL (\S+)", str(error))
    text = f"asks for {asked[1]}" if asked else (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}" if asked or not isinstance(error, pickle.UnpicklingError) else type(error).__name__
