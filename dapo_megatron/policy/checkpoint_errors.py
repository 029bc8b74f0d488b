"""What Megatron-Core 0.19.2 and torch make of an error while a checkpoint is written or read, turned back into what it was."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from dapo_megatron.checkpoint_files import os_error_within


@contextmanager
def reading_errors() -> Iterator[None]:
    """Torch gathers errors in a BaseException, which `except Exception` lets through: raise the first of them."""
    try:
        yield
    except CheckpointException as error:
        raise _first(error) from error


@contextmanager
def writing_errors() -> Iterator[None]:
    """Collective. All ranks raise what went wrong on one of them, such as "No space left on device". By itself only rank 0
    would know, and of an error that a writer hands over Megatron keeps the type only: of one that is raised, the message."""
    write = FileSystemWriterAsync.write_preloaded_data

    def raising(*args: Any, **kwargs: Any) -> Any:
        output = write(*args, **kwargs)
        if kwargs.get("results_queue") is None and isinstance(output[1], Exception):  # not one of several threads
            raise os_error_within(output[1])
        return output

    try:
        with patch.object(FileSystemWriterAsync, "write_preloaded_data", staticmethod(raising)):
            yield
    except CheckpointException as error:
        told = [_first(error) if error.failures else None]
        dist.broadcast_object_list(told, src=0)
        raise told[0] or RuntimeError(str(error)) from error


def _first(error: CheckpointException) -> Exception:
    rank, (cause, _) = next(iter(error.failures.items()))
    if isinstance(cause, ValueError | OSError):
        return cause
    text = re.sub(r"^Worker failure: .* error: ", "", str(cause))  # Megatron's words around it
    return RuntimeError(f"rank {rank}: {text}")
