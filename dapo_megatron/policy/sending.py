"""A trainer rank's part of publishing: its pipeline stage's weights to all servers at the same time, bucket by bucket, the next
bucket being gathered while one is sent."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from dapo_megatron.policy.policy import Policy
from dapo_megatron.weights.buckets import Bucket, buckets

MAX_SERVERS = 1024


class Sending:
    """Senders (rollout.engine.WeightSender) by the servers' names. All ranks call the methods, in the same order, with the same
    arguments.

    Stage after stage, so that servers never wait for two at once; each stage's leader alone talks to them. A server that fails
    does not keep the others from getting theirs. In the end RuntimeError names those that failed, on every rank, and their
    senders are closed and forgotten.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._senders: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(MAX_SERVERS, "send", initializer=_use_device, initargs=(torch.cuda.current_device(),))

    def open(self, senders: Mapping[str, Any]) -> None:
        """Connect the leaders with the servers that they have no connection with; close those to servers not named any more."""
        self._forget(self._senders.keys() - senders.keys())
        new = {name: sender for name, sender in senders.items() if name not in self._senders}
        failed = self._connect(new)
        self._senders |= new
        self._end(failed, "no connection for weights to")

    def _connect(self, new: Mapping[str, Any]) -> dict[str, str]:
        """Open each, and say of those that failed why, on every rank the same."""
        failed: dict[str, str] = {}
        for stage in range(self._policy.num_stages):
            if stage == self._policy.stage and self._policy.is_stage_leader:
                for name in [name for name in new if name not in failed]:
                    try:
                        new[name].open(stage, self._policy.num_stages)
                    except Exception as error:
                        failed[name] = f"{type(error).__name__}: {error}"
            share(failed)
        return failed

    def send(self, version: int, servers: Collection[str], bucket_bytes: int) -> dict[str, int]:
        """Hand the present weights over. {"bytes": of one server's, "buckets": their number} of the stage on its leader; {} on
        other ranks."""
        failed = {name: "it isn't open" for name in servers if name not in self._senders}
        sent: dict[str, int] = {}
        for stage in range(self._policy.num_stages):
            there = [name for name in servers if name not in failed]
            if there and stage == self._policy.stage and self._policy.is_first_replica:
                sender = self._senders[there[0]]  # all of a run's servers want the same
                tensors = self._policy.stream_weights(getattr(torch, sender.dtype))
                if self._policy.is_stage_leader:
                    sent = self._hand_out(buckets(tensors, bucket_bytes, sender.device, sender.dtype), version, there, failed)
                else:
                    deque(tensors, maxlen=0)  # takes part in the gathering
            share(failed)
        self._end(failed, f"weights of version {version} did not reach")
        return sent

    def _hand_out(
        self, stream: Iterator[Bucket], version: int, servers: Collection[str], failed: dict[str, str]
    ) -> dict[str, int]:
        """All buckets to all servers, and what they come to. While one is out the next is made."""
        sent = {"bytes": 0, "buckets": 0}
        sending: dict[str, Future[None]] = {}
        for bucket in stream:
            _finish(sending, failed)
            sending = {
                name: self._pool.submit(self._senders[name].send, bucket, version) for name in servers if name not in failed
            }
            sent["bytes"] += bucket.flat.nbytes
            sent["buckets"] += 1
        _finish(sending, failed)
        return sent

    def checksums(self, servers: Collection[str]) -> dict[str, dict[str, str]]:
        """What each of the servers, which must be open, has to hold of this stage's weights; {} on ranks that don't lead one.
        Not collective over stages."""
        by_layout: dict[Any, dict[str, str]] = {}
        if self._policy.is_first_replica:
            for sender in (self._senders[name] for name in servers):
                if sender.layout in by_layout:
                    continue
                tensors = self._policy.stream_weights()
                if self._policy.is_stage_leader:
                    by_layout[sender.layout] = sender.checksums(tensors)
                else:
                    by_layout[sender.layout] = {}
                    deque(tensors, maxlen=0)
        return {name: by_layout[self._senders[name].layout] for name in servers} if self._policy.is_stage_leader else {}

    def close(self) -> None:
        """Not collective."""
        self._forget(list(self._senders))

    def _forget(self, names: Collection[str]) -> None:
        for name in names:
            if (sender := self._senders.pop(name, None)) is not None:
                sender.close()

    def _end(self, failed: dict[str, str], what: str) -> None:
        self._forget(failed)
        if failed:
            raise RuntimeError(f"{what} {', '.join(sorted(failed))}: " + "; ".join(sorted(set(failed.values()))))


def _finish(sending: dict[str, "Future[None]"], failed: dict[str, str]) -> None:
    for name, future in sending.items():
        if (error := future.exception()) is not None:
            failed[name] = f"{type(error).__name__}: {error}"


def share(failed: dict[str, str]) -> None:
    """Every rank learns of the servers that failed at any; also ends a stage's turn."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, failed)
    for found in everywhere:
        failed |= found


def _use_device(device: int) -> None:
    """CUDA's current device is a thread's own."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
