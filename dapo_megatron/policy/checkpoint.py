"""The sharded part of a checkpoint: model and optimizer in Megatron's torch_dist format, loadable on another layout."""

import os
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel

from dapo_megatron.policy import optimizer_fixes as fixes
from dapo_megatron.policy.checkpoint_errors import writing_errors
from dapo_megatron.policy.safe_unpickle import safe_unpickling

# fully_reshardable optimizer state loads on any TP x PP x DP
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def _state(chunks: Sequence[Any], optimizer: Any, is_loading: bool) -> dict[str, Any]:
    for part in fixes.distributed_optimizers(optimizer):
        fixes.allocate_moments(part)
        fixes.keep_bucket_padding(part)
        fixes.expect_step_tensor(part)
    weights = {f"chunk{i}": chunk.module.sharded_state_dict() for i, chunk in enumerate(chunks)}
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_METADATA),
    }


def save(folder: Path, chunks: Sequence[Any], optimizer: Any) -> None:
    """Collective. `folder` must exist and be empty; whoever calls gives the checkpoint its final name afterwards."""
    # Threads of this process write. For their results Megatron would start a process that imports everything once more.
    filesystem_async._results_queue = queue.Queue()
    with writing_errors():
        dist_checkpointing.save(_state(chunks, optimizer, is_loading=False), os.fspath(folder))


def load(folder: Path, chunks: Sequence[Any], optimizer: Any) -> None:
    """Collective. Replaces weights, master weights and Adam's moments. ValueError if a file asks for code to be run."""
    with safe_unpickling(folder):
        state = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), os.fspath(folder))
    for i, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state["model"][f"chunk{i}"])
    optimizer.load_state_dict(state["optimizer"])
    for part in fixes.distributed_optimizers(optimizer):
        fixes.unshare_step_tensors(part)


def load_weights(folder: Path, chunks: Sequence[GPTModel]) -> None:
    """Collective. The weights alone, of any torch_dist checkpoint, into models without an optimizer, whose dtype they take.
    ValueError as of `load`, and with Megatron's words if a parameter is missing or of another shape."""
    wanted = {f"chunk{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    try:
        with safe_unpickling(folder):
            state = dist_checkpointing.load(wanted, os.fspath(folder))
    except CheckpointingException as error:
        raise ValueError(f"{folder}: Megatron can't load it: {error}") from error
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"chunk{i}"])
