"""Weights for an SGLang server on the trainer's own devices: the server is told where a bucket lies and copies it from there.

On GPUs a bucket never leaves its device: each tensor-parallel rank of the server reads that of the trainer rank on the same
GPU. On CPU the bucket itself travels in the call. Nothing here imports SGLang, which costs twenty seconds.
"""

import base64
import pickle
import uuid
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from dapo_megatron.rollout.sglang_weights import ServerLayout, SGLangSender

_PATH = "/update_weights_from_tensor"


class ColocatedWeightSender(SGLangSender):
    """Implements WeightSender for one server. Picklable until `open`.

    Args:
        ranks: for each tensor-parallel rank of the server the trainer rank on the same GPU; all of these call every method, at
            the same time and with equal tensors. Empty, on CPU: one process alone sends, and all of the server's ranks read
            what it has.
        timeout_s: for one bucket.
        memory: of the device, see weights.devices; by default that of the server's.
    """

    def __init__(
        self, url: str, layout: ServerLayout, *, ranks: tuple[int, ...] = (), timeout_s: float = 300.0, memory: Any = None
    ):
        super().__init__(url, layout, timeout_s=timeout_s)
        if ranks and len(set(ranks)) != layout.tp:
            raise ValueError(f"ranks: {ranks} must be one trainer rank for each of the server's {layout.tp} GPUs")
        self.ranks = ranks
        self.device = layout.device
        self._memory = memory
        self._name = f"dapo-{uuid.uuid4().hex}"  # the same on all ranks, which get copies of this object
        self._meeting: _Meeting | None = None

    def open(self, sender: int, num_senders: int) -> None:
        """RuntimeError if the server does not answer."""
        from dapo_megatron.weights.devices import memory_of

        self._memory = self._memory or memory_of(self.device)
        self._meeting = _Meeting(self._name, self.ranks, self.layout.tp, self.timeout_s)
        self._meeting.hold("", lambda handles: self._connect())

    def send(self, bucket: list[tuple[str, Any]], version: int) -> None:
        """Returns when the server has copied the bucket, which may then be reused.

        Raises:
            ValueError: a name the server has no parameter for.
            RuntimeError: the server refused, died or took longer than timeout_s, or another rank did not come. The sender can
                then only be closed; the server may still be reading.
        """
        from dapo_megatron.weights.buckets import packed

        assert self._meeting is not None, "open comes first"
        kept = packed(bucket, self.device, self.dtype)  # the server reads its memory until the end

        def hand_over(handles: list[str]) -> None:
            self._check_names(kept)
            self._post(_PATH, self.send_body(handles, version))
            self._post(_PATH, self.fence_body(version))

        self._meeting.hold(self._serialized(kept), hand_over)

    def _serialized(self, bucket: Any) -> str:
        """What SGLang calls a flattened bucket. It reads nothing but these attributes of its metadata."""
        import torch

        from dapo_megatron.weights.devices import pickled

        metadata, start = [], 0
        for name, tensor in bucket:
            end = start + tensor.nbytes
            place = {"start_idx": start, "end_idx": end, "numel": tensor.nbytes}
            metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place))
            start = end
        flat = bucket.flat.view(torch.uint8)
        assert start == flat.numel(), "the tensors lie one behind the other"
        self._memory.synchronize()  # another process' stream doesn't wait for ours
        shared = {"flattened_tensor": self._memory.share(flat), "metadata": metadata}
        return base64.b64encode(pickled(shared)).decode()

    def send_body(self, handles: list[str], version: int) -> dict[str, Any]:
        return {
            "serialized_named_tensors": handles,
            "load_format": "flattened_bucket",
            "weight_version": str(version),
            "flush_cache": False,  # begin_update flushed, and nothing has run since
        }

    def fence_body(self, version: int) -> dict[str, Any]:
        """An update with no tensors, whose answer says that the one before has been copied.

        The answer to an update says no more than that all of the server's ranks have begun to copy. A rank lets go of a bucket
        at the end of the call, and torch makes it wait there until the copies are done. It takes calls in their order, and an
        update is answered when all ranks have come to its barrier.
        """
        nothing = base64.b64encode(pickle.dumps([])).decode()
        handles = [nothing] * self.layout.tp
        return {"serialized_named_tensors": handles, "weight_version": str(version), "flush_cache": False}

    def close(self) -> None:
        """Never raises: the server may be gone. Frees what it has let go of."""
        self._disconnect()
        if self._meeting is not None:
            self._memory.give_back()
            self._meeting = None


class _Meeting:
    """The trainer ranks under one server, of which the first talks to it. They meet in the store of the default process group:
    what they exchange is small, and other threads use the groups."""

    def __init__(self, name: str, ranks: tuple[int, ...], tp: int, timeout_s: float) -> None:
        self._ranks, self._tp, self._timeout = ranks, tp, timedelta(seconds=timeout_s)
        self._round = 0
        self._is_first = True
        if ranks:
            import torch.distributed as dist
            from torch.distributed.distributed_c10d import _get_default_store

            self._rank = dist.get_rank()
            self._is_first = self._rank == ranks[0]
            # A connection of its own: a store that one thread waits at is closed to the others.
            self._store = dist.PrefixStore(name, _get_default_store().clone())

    def hold(self, handle: str, work: Callable[[list[str]], None]) -> None:
        """Call `work` on the first rank, with the handles of all in the server's order, and return on each when it is done.
        What it raises is raised there, and as RuntimeError on the others."""
        self._round += 1
        if not self._is_first:
            self._store.set(self._key(self._rank), handle)
            if problem := self._take(self._key(f"outcome-{self._rank}")):
                raise RuntimeError(problem)
            return
        problem = "the first of the ranks under the server was interrupted"
        try:
            work([handle, *(self._take(self._key(rank)) for rank in self._ranks[1:])] * (1 if self._ranks else self._tp))
            problem = ""
        except Exception as e:
            problem = f"{type(e).__name__}: {e}"
            raise
        finally:
            for rank in self._ranks[1:]:
                self._store.set(self._key(f"outcome-{rank}"), problem)

    def _key(self, what: object) -> str:
        return f"{self._round}-{what}"

    def _take(self, key: str) -> str:
        self._store.wait([key], self._timeout)
        value = self._store.get(key).decode()
        self._store.delete_key(key)
        return value
