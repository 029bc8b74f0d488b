"""Reading a torch_dist checkpoint without running what is in it, wherever it comes from.

Megatron-Core 0.19.2 and torch 2.14 unpickle in three places: `.metadata` by pickle.load, objects within *.distcp by
torch.load(weights_only=False), and an older checkpoint's common.pt by torch.load with a default that the environment may
change. An unpickled file may call any function. Here each goes through a list of what such files need; Megatron adds its own
classes (argparse.Namespace of its arguments, OptimizerConfig ...) to torch's list when it is imported.
"""

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import torch
from megatron.core.dist_checkpointing import serialization
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, set_element

from dapo_megatron.policy.checkpoint_errors import reading_errors
from dapo_megatron.policy.safe_metadata import MetadataUnpickler, explaining


@contextmanager
def safe_unpickling(folder: Path) -> Iterator[None]:
    """While `folder` is loaded by Megatron or torch: ValueError, naming the file and what it asks for, if one of its files
    asks for anything that no checkpoint needs or can't be read. For the whole process; not for several threads at once."""
    reader = _Reader(folder)

    def load_bytes(planner: Any, read_item: Any, value: io.BytesIO) -> None:
        reader.load_bytes(planner, read_item, value)

    try:
        with (
            reading_errors(),
            patch.object(filesystem, "pickle", SimpleNamespace(load=reader.load_metadata, dump=pickle.dump)),
            patch.object(DefaultLoadPlanner, "load_bytes", load_bytes),
            patch.object(serialization, "load_common", reader.load_common),
        ):
            yield
    except Exception:
        if reader.refusals:  # torch goes on after some of them, and ends with an error of its own
            raise reader.refusals[0] from None
        raise


class _Reader:
    """Takes the place of what unpickles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refusals: list[ValueError] = []

    def load_metadata(self, file: IO[bytes]) -> Any:
        with self._explaining(Path(file.name)):
            return MetadataUnpickler(file).load()

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        path = Path(checkpoint_dir) / serialization.COMMON_STATE_FNAME
        with self._explaining(path):
            return torch.load(path, map_location="cpu", weights_only=True)

    def load_bytes(self, planner: Any, read_item: Any, value: io.BytesIO) -> None:
        """DefaultLoadPlanner.load_bytes: takes over an object that was saved beside the tensors."""
        name = read_item.dest_index.fqn
        file = self.folder / planner.metadata.storage_data[read_item.storage_index].relative_path
        with self._explaining(file):
            loaded = torch.load(value, weights_only=True)
        if "_extra_state" in name and any(_holds_data(item) for item in (loaded if isinstance(loaded, list) else [loaded])):
            raise ValueError(
                f"{file}: {name} holds the state of FP8 layers, which Transformer Engine unpickles without any check; FP8 "
                "checkpoints are not supported"
            )
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[name], loaded)
        else:
            planner.state_dict[name] = loaded

    @contextmanager
    def _explaining(self, file: Path) -> Iterator[None]:
        try:
            with explaining(file):
                yield
        except ValueError as error:
            self.refusals.append(error)
            raise


def _holds_data(item: Any) -> bool:
    if isinstance(item, io.BytesIO):
        return bool(item.getbuffer().nbytes)
    return isinstance(item, torch.Tensor) and item.numel() > 0
