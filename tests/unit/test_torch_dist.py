"""Checkpoints read and written tensor by tensor: any cut is put together again, and whatever is wrong is named."""

import io
import json
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from dapo_megatron.policy.safe_unpickle import safe_unpickling
from dapo_megatron.policy.torch_dist import CheckpointReader, CheckpointWriter, Piece, objects_beside
from dapo_megatron.weights.mapping import (
    Index,
    ModelShape,
    Rule,
    rules_for,
    stored_chunks,
    stored_keys,
    stored_place,
    stored_shape,
)
from tests.small_disk import small_disk
from tests.unit.hf_models import CONFIGS

SHAPE = ModelShape.from_hf(CONFIGS["qwen3"])
MOE = ModelShape.from_hf(CONFIGS["qwen3_moe"])
Chunks = list[tuple[Piece, torch.Tensor]]


def value(rule: Rule, index: Index, shape: ModelShape, rows: int = 0) -> torch.Tensor:
    """A parameter's content, of its own; a vocabulary may have `rows` rows."""
    size = stored_shape(rule, shape, 1)
    generator = torch.Generator().manual_seed(zlib.crc32(repr((rule.megatron, index)).encode()))
    return torch.randn((rows if rows and rule.kind == "vocab" else size[0], *size[1:]), generator=generator)


def chunks_of(rule: Rule, index: Index, shape: ModelShape, tp: int = 1, unstacked: bool = False) -> Chunks:
    """As Megatron's ranks would save the parameter."""
    key, (leading, sizes) = stored_keys(rule)[-1], stored_place(rule, index, shape)
    if unstacked and index.layer is not None:
        key, leading, sizes = key.replace("layers.", f"layers.{index.layer}."), leading[1:], sizes[1:]
    whole = value(rule, index, shape, shape.padded_vocab(tp))
    found = []
    for offsets, lengths in stored_chunks(rule, shape, tp):
        part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        ones = (1,) * len(leading)
        piece = Piece(key, (*sizes, *whole.shape), (*leading, *offsets), (*ones, *lengths), whole.dtype)
        found.append((piece, part.reshape(piece.sizes)))
    return found


def model_chunks(shape: ModelShape, **options: Any) -> Chunks:
    return [c for rule in rules_for(shape) for index in rule.indices(shape) for c in chunks_of(rule, index, shape, **options)]


def write(folder: Path, chunks: Chunks, objects: dict[str, Any] | None = None) -> Path:
    """In three files, dealt out in turn."""
    for path in (folder, folder.with_name(f"{folder.name}.work")):
        path.mkdir()
    writer = CheckpointWriter(folder, folder.with_name(f"{folder.name}.work"))
    for number in range(3):
        part = chunks[number::3]
        writer.write(number, [p for p, _ in part], iter([t for _, t in part]), objects or {} if number == 0 else {})
        assert writer.has(number) and not writer.has(number + 1)
    writer.finish(3)
    return folder


def assert_same(reader: CheckpointReader, shape: ModelShape, tp: int = 1) -> None:
    for rule in rules_for(shape):
        for index in rule.indices(shape):
            assert torch.equal(reader.parameter(rule, index, shape), value(rule, index, shape, shape.padded_vocab(tp))), index


@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"unstacked": True}], ids=str)
def test_any_cut_is_put_together(tmp_path: Path, shape: ModelShape, options: dict[str, Any]) -> None:
    reader = CheckpointReader(write(tmp_path / "ck", model_chunks(shape, **options)))
    reader.check(shape)
    assert not reader.has_optimizer
    assert_same(reader, shape, options.get("tp", 1))


def test_what_lies_beside_the_weights_is_no_weight(tmp_path: Path) -> None:
    others = [
        (Piece(key, (4,), (0,), (4,), torch.float32), torch.ones(4))
        for key in ("optimizer.state.exp_avg.decoder.final_layernorm.weight", "chained_0.optimizer.x", "a._extra_state")
    ]
    reader = CheckpointReader(write(tmp_path / "ck", model_chunks(SHAPE) + others, {"rng_state/shard_0_1": [1]}))
    reader.check(SHAPE)
    assert reader.has_optimizer


def lacks(chunks: Chunks) -> Chunks:
    return [c for c in chunks if "q_layernorm" not in c[0].key]


def has_a_hole(chunks: Chunks) -> Chunks:
    gone = next(p for p, _ in chunks if p.key.endswith("linear_fc1.weight") and p.offsets[0] == 1)
    return [c for c in chunks if c[0] != gone]


def holds_twice(chunks: Chunks) -> Chunks:
    """As many elements as there should be, but half of them twice."""
    first, second = [(p, t) for p, t in chunks if p.key.endswith("linear_fc1.weight") and p.offsets[0] == 1]
    twice = (second[0]._replace(offsets=(1, 1, 0)), second[1])
    return [twice if c[0] == second[0] else c for c in chunks] if first else []


def is_unknown(chunks: Chunks) -> Chunks:
    return [*chunks, (Piece("decoder.layers.mlp.router.weight", (3, 2), (0, 0), (3, 2), torch.float32), torch.ones(3, 2))]


def is_wider(chunks: Chunks) -> Chunks:
    def wider(piece: Piece, tensor: torch.Tensor) -> tuple[Piece, torch.Tensor]:
        if not piece.key.endswith("final_layernorm.weight"):
            return piece, tensor
        return piece._replace(size=(49,), sizes=(49,)), torch.ones(49)

    return [wider(*c) for c in chunks]


def is_quantised(chunks: Chunks) -> Chunks:
    return [
        (p._replace(dtype=torch.int8), t.to(torch.int8)) if p.key.endswith("final_layernorm.weight") else (p, t)
        for p, t in chunks
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacks, r"ck: tensor decoder\.layers\.self_attention\.q_layernorm\.weight is missing"),
        (has_a_hole, r"linear_fc1\.weight at \(1,\): the stored chunks hold 2016 of 4032 elements"),
        (
            holds_twice,
            r"linear_fc1\.weight at \(1,\): the stored chunks hold 4032 of 4032 elements; the checkpoint isn't whole",
        ),
        (is_unknown, r"unknown tensors decoder\.layers\.mlp\.router\.weight: not the qwen3 model of config\.json"),
        (is_wider, r"final_layernorm\.weight has shape \(49,\), config\.json says \(48,\)"),
        (is_quantised, r"final_layernorm\.weight is int8: quantised weights have to be dequantised"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Callable[[Chunks], Chunks], message: str) -> None:
    reader = CheckpointReader(write(tmp_path / "ck", change(model_chunks(SHAPE))))
    with pytest.raises(ValueError, match=message):
        reader.check(SHAPE)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "ck", model_chunks(SHAPE))
    file = folder / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(
        ValueError, match=rf"__1_0\.distcp: has {len(content) - 100} bytes, tensor \S+ ends at {len(content)}; "
    ):
        CheckpointReader(folder).check(SHAPE)
    file.write_bytes(bytes(len(content)))
    reader = CheckpointReader(folder)
    reader.check(SHAPE)
    with pytest.raises(ValueError, match=r"__1_0\.distcp: \S+ can't be read \(.+\): the file is damaged; restore it"):
        assert_same(reader, SHAPE)
    file.unlink()
    with pytest.raises(ValueError, match=r"__1_0\.distcp: is missing"):
        CheckpointReader(folder).check(SHAPE)
    (folder / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"ck: no \.metadata: not a torch_dist checkpoint"):
        CheckpointReader(folder)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_metadata_is_not_run(tmp_path: Path) -> None:
    folder, marker = write(tmp_path / "ck", model_chunks(SHAPE)), tmp_path / "marker"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(ValueError, match=r"\.metadata: not loaded, since it asks for posix\.system"):
        CheckpointReader(folder)
    assert not marker.exists()
    for other in ({"a": 1}, None):
        (folder / ".metadata").write_bytes(pickle.dumps(other))
        with pytest.raises(ValueError, match=r"\.metadata: is no checkpoint's metadata"):
            CheckpointReader(folder)


def test_a_tensor_is_not_run(tmp_path: Path) -> None:
    """What lies in the place of a tensor."""
    folder, marker = write(tmp_path / "ck", model_chunks(SHAPE)), tmp_path / "marker"
    with safe_unpickling(folder):
        metadata = FileSystemReader(folder).read_metadata()
    evil = io.BytesIO()
    torch.save(Evil(marker), evil)
    (folder / "evil").write_bytes(evil.getvalue())
    for index, info in metadata.storage_data.items():
        if index.fqn == "decoder.final_layernorm.weight":
            info.relative_path, info.offset, info.length = "evil", 0, len(evil.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        ValueError, match=r"evil: decoder\.final_layernorm\.weight can't be read \(UnpicklingError: asks for posix\.system\)"
    ):
        assert_same(CheckpointReader(folder), SHAPE)
    assert not marker.exists()


@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "moe"])
def test_objects_are_those_of_megatron(tmp_path: Path, shape: ModelShape) -> None:
    """The modules that have a state beside their weights with Transformer Engine's layers, and with the local ones."""
    mlp = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2", "pre_mlp_layernorm")
    within = ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm")
    modules = [f"self_attention.{name}" for name in within]
    modules += mlp if shape.num_experts else ["mlp.linear_fc1", "mlp.linear_fc2"]
    objects = objects_beside(shape)
    names = {name.split("/")[0].removeprefix("decoder.layers.").removesuffix("._extra_state") for name in objects}
    assert names == {*modules, "decoder.final_layernorm", "common_state"}
    assert {"decoder.final_layernorm._extra_state/shard_0_1", "common_state/shard_0_1"} <= objects.keys()
    assert "decoder.layers.self_attention.linear_qkv._extra_state/shard_2_3" in objects
    if shape.num_experts:
        assert "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_2.5_3.6" in objects
    folder = write(tmp_path / "ck", model_chunks(shape), objects)
    with safe_unpickling(folder):
        metadata = FileSystemReader(folder).read_metadata()
    for index, info in metadata.storage_data.items():
        if index.fqn in objects:
            data = (folder / info.relative_path).read_bytes()[info.offset :][: info.length]
            assert torch.load(io.BytesIO(data), weights_only=True) == objects[index.fqn]
    assert json.loads((folder / "metadata.json").read_text()) == {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def test_a_part_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder, work = tmp_path / "ck", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    chunks = model_chunks(SHAPE)

    def tensors() -> Iterator[torch.Tensor]:
        yield chunks[0][1]
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        CheckpointWriter(folder, work).write(0, [piece for piece, _ in chunks[:2]], tensors(), {})
    assert not any(folder.iterdir()) and not any(work.iterdir())
    assert not CheckpointWriter(folder, work).has(0)


@pytest.mark.parametrize("kib", [16, 60])
def test_no_space_left(tmp_path: Path, kib: int) -> None:
    """Small tensors and large ones, of which torch's writer makes different errors."""
    tensors = [torch.ones(n) for n in (10, 3000, 20000)]
    pieces = [Piece(f"t{i}", (len(t),), (0,), (len(t),), t.dtype) for i, t in enumerate(tensors)]
    with small_disk(tmp_path / "disk", kib) as disk:
        (disk / "ck").mkdir()
        (disk / "work").mkdir()
        with pytest.raises(OSError, match="No space left on device"):
            CheckpointWriter(disk / "ck", disk / "work").write(0, pieces, iter(tensors), {"object": [None]})
        assert not any((disk / "ck").iterdir()) and not any((disk / "work").iterdir())
