"""Unpickling a torch_dist checkpoint's `.metadata`, wherever it comes from, without running what is in it. Needs no Megatron,
whose import takes seconds; safe_unpickle does the same for all that Megatron loads."""

import importlib
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint import filesystem

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # up to torch 2.2
# What `.metadata` is made of, besides torch's dtypes. Whatever they are called with, none runs code of the file's choice.
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *((_FILESYSTEM, name) for name in ("_StorageInfo", "_StoragePrefix")),
    *((_SHARDED, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
}


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not allowed")


@contextmanager
def safe_metadata() -> Iterator[None]:
    """While torch's FileSystemReader reads `.metadata`: ValueError, naming the file and what it asks for, if that is anything
    that no checkpoint needs, or if it can't be read."""

    def load(file: IO[bytes]) -> Any:
        with explaining(Path(file.name)):
            return MetadataUnpickler(file).load()

    with patch.object(filesystem, "pickle", SimpleNamespace(load=load, dump=pickle.dump)):
        yield


@contextmanager
def explaining(file: Path) -> Iterator[None]:
    """Turns what unpickling raises into a ValueError that says what is wrong with `file`."""
    try:
        yield
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError, TypeError, ValueError, ImportError) as error:
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{file}: not loaded, since it asks for {found.group(1)}, which no checkpoint needs and which could run "
                "code; use a checkpoint that Megatron or this program has written, from a source that you trust"
            ) from error
        raise ValueError(f"{file}: can't be read as a part of a checkpoint ({type(error).__name__}: {error})") from error
