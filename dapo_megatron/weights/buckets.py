"""Weights on their way to the engines: tensors packed into flat buckets, of which no more than two exist at a time."""

import contextlib
import mmap
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class Bucket(list[tuple[str, Tensor]]):
    """Named HF tensors (full, unsharded), which lie one behind the other in `flat` [sum of their sizes]. Views of it: whoever
    pickles one of them pickles all."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], flat: Tensor) -> None:
        super().__init__(tensors)
        self.flat = flat


def packed(tensors: list[tuple[str, Tensor]], device: str, dtype: str) -> Bucket:
    """The tensors as one bucket; itself if it is one. `dtype` is torch's name of it."""
    wire = getattr(torch, dtype)
    if isinstance(tensors, Bucket) and tensors.flat.dtype == wire and tensors.flat.device.type == device:
        return tensors
    (bucket,) = buckets(tensors, sum(tensor.numel() for _, tensor in tensors) * wire.itemsize, device, dtype)
    return bucket


def buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, device: str, dtype: str) -> Iterator[Bucket]:
    """The tensors, in their order, copied and cast once into buckets of at most `bucket_bytes`; a larger tensor has one of its
    own, and is that bucket itself where nothing has to be cast.

    Two buffers take turns: the next bucket is filled while the one before may still be read, and what is in a bucket is gone
    when the next but one is asked for.
    """
    wire = getattr(torch, dtype)
    limit = bucket_bytes // wire.itemsize
    nothing = torch.empty(0, dtype=wire, device=device)
    buffers = [nothing, nothing]
    turn, used = 0, 0
    named: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if named and used + tensor.numel() > limit:
            yield Bucket(named, buffers[turn][:used])
            turn, used, named = 1 - turn, 0, []
        if tensor.numel() > limit and tensor.dtype == wire and tensor.device.type == device and tensor.is_contiguous():
            yield Bucket([(name, tensor.detach())], tensor.detach().view(-1))
            continue
        if used + tensor.numel() > len(buffers[turn]):  # nothing is in it yet: buffers hold `limit` unless a tensor is larger
            buffers[turn] = nothing  # goes before the larger one comes
            buffers[turn] = _room(max(limit, tensor.numel()), wire, device)
        place = buffers[turn][used : used + tensor.numel()].view(tensor.shape)
        named.append((name, place.copy_(tensor.detach())))
        used += tensor.numel()
    if named:
        yield Bucket(named, buffers[turn][:used])


def _room(size: int, dtype: torch.dtype, device: str) -> Tensor:
    """[size], of huge pages on CPU where there are any: to come by fresh small ones takes longer than to send them."""
    if device != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
