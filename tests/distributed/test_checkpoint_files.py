"""Nothing in a checkpoint is run when it is loaded; what is wrong with it, or with writing it, is said in its own words."""

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.harness import RankPool, make_config
from tests.distributed.test_state import worker_for
from tests.small_disk import small_disk as disk_of


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def save(rank: int, model_dir: str, cfg: Any, folders: list[str]) -> list[str]:
    worker = worker_for(rank, cfg, model_dir)
    return [_message(worker.save, folder) for folder in folders]


def load(rank: int, model_dir: str, cfg: Any, folders: list[str]) -> list[str]:
    worker = worker_for(rank, cfg, model_dir)
    return [_message(worker.load, folder) for folder in folders]


def _message(action: Any, folder: str) -> str:
    """The error's type and text; "" if there is none."""
    try:
        action(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def checkpoint(ranks: RankPool, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    assert ranks.run(save, 1, str(models["llama_tied"]), make_config(), [str(folder)]) == [[""]]
    return folder


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def replace_object(folder: Path, name: str, content: bytes) -> None:
    """Put other bytes in place of an object that is saved beside the tensors."""
    metadata = metadata_of(folder)
    (index,) = [index for index in metadata.storage_data if index.fqn == name]
    (folder / "other.distcp").write_bytes(content)
    info = metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "other.distcp", 0, len(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def torch_bytes(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def test_a_malicious_checkpoint_runs_nothing(
    ranks: RankPool, models: dict[str, Path], checkpoint: Path, tmp_path: Path
) -> None:
    """Every file that is unpickled, each as the file itself and hidden within a good one."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    marker, evil = tmp_path / "marker", Evil(tmp_path / "marker")
    cases: dict[Path, str] = {}  # folder -> the file that must be named

    def case(name: str, file: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(checkpoint, folder)
        cases[folder] = file
        return folder

    (case("metadata", ".metadata") / ".metadata").write_bytes(pickle.dumps(evil))
    folder = case("within_metadata", ".metadata")
    metadata = metadata_of(folder)
    metadata.planner_data = {"a": [evil]}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    # an attribute of an allowed module, reached by a dotted name
    dotted = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93\x8c" + (
        bytes([len(f"touch {marker}")]) + f"touch {marker}".encode() + b"\x85R."
    )
    (case("dotted", ".metadata") / ".metadata").write_bytes(dotted)
    torch.save({"args": evil}, case("common", "common.pt") / "common.pt")
    objects = [name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    assert any(name.startswith("common_state") for name in objects) and len(objects) > 1
    for number, name in enumerate(objects):
        replace_object(case(f"object{number}", "other.distcp"), name, torch_bytes([evil]))
    old_format = torch_bytes([evil], _use_new_zipfile_serialization=False)
    replace_object(case("old_format", "other.distcp"), objects[0], old_format)

    folders = [str(folder) for folder in cases]
    (messages,) = ranks.run(load, 1, str(models["llama_tied"]), make_config(), folders)
    assert not marker.exists()
    for (folder, file), message in zip(cases.items(), messages, strict=True):
        asked = "torch.distributed.checkpoint.metadata.os.system" if folder.name == "dotted" else "posix.system"
        assert message.startswith(f"ValueError: {folder / file}: not loaded, since it asks for {asked}"), message
    pickle.loads((tmp_path / "metadata" / ".metadata").read_bytes())
    assert marker.exists()  # the file does what it is here for


def test_the_state_of_fp8_layers_is_not_unpickled(checkpoint: Path) -> None:
    """Transformer Engine would, from a tensor of bytes. Without FP8 the tensor is empty."""
    from dapo_megatron.policy.safe_unpickle import _Reader

    metadata, name = metadata_of(checkpoint), "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_1"
    planner = SimpleNamespace(flatten_state_dict=False, state_dict={}, metadata=metadata)
    item = SimpleNamespace(storage_index=next(iter(metadata.storage_data)), dest_index=SimpleNamespace(fqn=name))
    reader = _Reader(checkpoint)
    reader.load_bytes(planner, item, io.BytesIO(torch_bytes([torch.zeros(0, dtype=torch.uint8)])))
    assert list(planner.state_dict) == [name]
    for state in (torch.ones(3, dtype=torch.uint8), io.BytesIO(b"abc")):
        with pytest.raises(ValueError, match=r"linear_qkv\._extra_state.* FP8 checkpoints are not supported"):
            reader.load_bytes(planner, item, io.BytesIO(torch_bytes([state])))


def test_what_megatron_itself_puts_into_a_common_file_is_read(
    ranks: RankPool, models: dict[str, Path], checkpoint: Path, tmp_path: Path
) -> None:
    (messages,) = ranks.run(load_common, 1, str(models["llama_tied"]), make_config(), str(tmp_path))
    assert messages == "bf16 torch.bfloat16 flash"


def load_common(rank: int, model_dir: str, cfg: Any, folder: str) -> str:
    """Arguments as Megatron-LM saves them."""
    from argparse import Namespace

    from megatron.core.dist_checkpointing import serialization
    from megatron.core.transformer.enums import AttnBackend

    from dapo_megatron.policy.safe_unpickle import safe_unpickling

    arguments = Namespace(name="bf16", params_dtype=torch.bfloat16, attention_backend=AttnBackend.flash, path=Path("x"))
    torch.save({"args": arguments, "iteration": 3, "checkpoint_version": 3.0}, Path(folder) / "common.pt")
    with safe_unpickling(Path(folder)):
        loaded = serialization.load_common(folder)["args"]
    return f"{loaded.name} {loaded.params_dtype} {loaded.attention_backend.name}"


def test_a_broken_checkpoint_is_said(ranks: RankPool, models: dict[str, Path], checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(checkpoint, folder)
    (folder / ".metadata").write_bytes((checkpoint / ".metadata").read_bytes()[:100])
    (messages,) = ranks.run(load, 1, str(models["llama_tied"]), make_config(), [str(folder)])
    assert messages[0].startswith(f"ValueError: {folder / '.metadata'}: can't be read as a part of a checkpoint")


def test_a_checkpoint_says_what_model_it_is(ranks: RankPool, models: dict[str, Path], checkpoint: Path, tmp_path: Path) -> None:
    """And one that doesn't, as they were written before, still loads."""
    config = json.loads((checkpoint / "hf" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "float32")
    assert sorted(p.name for p in (checkpoint / "hf").iterdir()) == ["config.json", "generation_config.json"]
    old = shutil.copytree(checkpoint, tmp_path / "old")
    shutil.rmtree(old / "hf")
    assert ranks.run(load, 1, str(models["llama_tied"]), make_config(), [str(old)]) == [[""]]


@pytest.fixture(params=[16, 128])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of so many KiB: it is full within another tensor, and torch's writer fails in another way."""
    with disk_of(tmp_path / "small", request.param) as folder:
        yield folder


@pytest.mark.parametrize("world", [1, 2])
def test_no_space_left(ranks: RankPool, models: dict[str, Path], small_disk: Path, world: int) -> None:
    """Every rank says the same, since any of them may be heard first."""
    messages = ranks.run(save, world, str(models["llama_tied"]), make_config(dp=world), [str(small_disk)])
    assert messages[0] == messages[-1]
    assert re.fullmatch(r"RuntimeError: rank [01]: \[Errno 28\] No space left on device", messages[0][0])
