"""Publishing to servers on the trainer's own devices: each rank hands over to the server's rank that is on its device."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dapo_megatron.policy.policy import Policy
from dapo_megatron.policy.sending import Sending, share
from dapo_megatron.weights.buckets import Bucket, buckets
from dapo_megatron.weights.devices import memory_of


class SharedSending(Sending):
    """Sending whose senders name the trainer ranks (`ranks`) that they work on, together.

    Every rank gets every bucket: a stage's ranks gather it as ever, and those of the other stages get it from the one that
    differs from them in nothing but the stage.
    """

    def _connect(self, new: Mapping[str, Any]) -> dict[str, str]:
        failed: dict[str, str] = {}
        for name in self._mine(new):
            try:
                new[name].open(0, 1)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
        share(failed)
        return failed

    def send(self, version: int, servers: Collection[str], bucket_bytes: int) -> dict[str, int]:
        failed = {name: "it isn't open" for name in servers if name not in self._senders}
        there = {name: self._senders[name] for name in servers if name not in failed}
        sent: dict[str, int] = {}
        if there:
            any_of_them = next(iter(there.values()))  # all of a run's servers are alike
            device, dtype = any_of_them.device, any_of_them.dtype
            for stage in range(self._policy.num_stages):
                stream = stage_buckets(self._policy, stage, bucket_bytes, device, dtype)
                out = self._hand_out(stream, version, self._mine(there), failed)
                if stage == self._policy.stage and self._policy.is_stage_leader:
                    sent = out
            memory_of(device).give_back()  # to the servers, who take back what they keep keys and values in
        share(failed)
        self._end(failed, f"weights of version {version} did not reach")
        return sent

    def _mine(self, senders: Mapping[str, Any]) -> list[str]:
        return [name for name, sender in senders.items() if dist.get_rank() in sender.ranks]


def stage_buckets(policy: Policy, stage: int, bucket_bytes: int, device: str, dtype: str) -> Iterator[Bucket]:
    """A pipeline stage's weights on all ranks of all stages, which all call this. What is in a bucket is gone when the next but
    one is asked for."""
    group, wire = parallel_state.get_pipeline_model_parallel_group(), getattr(torch, dtype)
    own = stage == policy.stage
    stream = buckets(policy.stream_weights(wire) if own else iter(()), bucket_bytes, device, dtype)
    if group.size() == 1:
        yield from stream
        return
    source = dist.get_global_rank(group, stage)
    nothing = torch.empty(0, dtype=wire, device=device)
    buffers = [nothing, nothing]
    while True:
        bucket = next(stream, None)
        shapes: list[Any] = [bucket and [(name, tensor.shape) for name, tensor in bucket]]
        dist.broadcast_object_list(shapes, source, group=group)
        if shapes[0] is None:
            return
        if bucket is None:
            size = sum(shape.numel() for _, shape in shapes[0])
            if size > len(buffers[0]):
                buffers[0] = nothing  # goes before the larger one comes
                buffers[0] = torch.empty(size, dtype=wire, device=device)
            bucket = _views(shapes[0], buffers[0][:size])
            buffers.reverse()
        dist.broadcast(bucket.flat.view(torch.uint8), source, group=group)
        yield bucket


def _views(shapes: list[tuple[str, torch.Size]], flat: torch.Tensor) -> Bucket:
    parts = flat.split([shape.numel() for _, shape in shapes])
    return Bucket([(name, part.view(shape)) for (name, shape), part in zip(shapes, parts, strict=True)], flat)
