"""Buckets of weights: what is in them, and what is in memory when."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dapo_megatron.weights.buckets import buckets, packed

Named = list[tuple[str, Tensor]]


def some_tensors(*sizes: int) -> Named:
    generator = torch.Generator().manual_seed(1)
    return [(f"t{i}", torch.randn(size, generator=generator)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("bucket_bytes", [1, 40, 41, 200, 10**6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buckets_hold_everything_once_in_order_and_are_as_large_as_allowed(bucket_bytes: int, dtype: str) -> None:
    tensors = [(name, tensor.view(-1, 2)) for name, tensor in some_tensors(10, 2, 20, 8, 2, 60, 4)]
    wire = getattr(torch, dtype)
    seen: Named = []
    sizes = []
    for bucket in buckets(iter(tensors), bucket_bytes, "cpu", dtype):
        assert bucket.flat.dtype == wire and torch.equal(bucket.flat, torch.cat([t.flatten() for _, t in bucket]))
        assert len(bucket) == 1 or bucket.flat.nbytes <= bucket_bytes
        seen += [(name, tensor.clone()) for name, tensor in bucket]
        sizes.append(bucket.flat.nbytes)
    assert [name for name, _ in seen] == [name for name, _ in tensors]
    assert all(torch.equal(a, b.to(wire)) for (_, a), (_, b) in zip(seen, tensors, strict=True))
    assert all(a + b > bucket_bytes for a, b in pairwise(sizes))  # none could have been joined


def test_two_buffers_take_turns_and_nothing_is_filled_before_it_is_asked_for() -> None:
    tensors, taken = some_tensors(*[6] * 10), []

    def source() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            taken.append(name)
            yield name, tensor

    addresses, before = [], None
    for number, bucket in enumerate(buckets(source(), 48, "cpu", "float32"), start=1):  # two tensors each
        assert len(taken) == min(2 * number + 1, 10)
        addresses.append(bucket.flat.data_ptr())
        if before is not None:
            assert torch.equal(before.flat, torch.cat([tensor for _, tensor in tensors[2 * number - 4 : 2 * number - 2]]))
        before = bucket
    assert len(addresses) == 5 and len(set(addresses)) == 2 and addresses[0] == addresses[2] != addresses[1]


def test_a_tensor_larger_than_a_bucket_is_not_copied_unless_it_is_cast() -> None:
    tensors = some_tensors(3, 50, 3)
    own = tensors[1][1].data_ptr()
    assert [bucket.flat.data_ptr() == own for bucket in buckets(tensors, 48, "cpu", "float32")] == [False, True, False]
    assert not any(bucket.flat.data_ptr() == own for bucket in buckets(tensors, 48, "cpu", "bfloat16"))


def test_packed_leaves_a_bucket_as_it_is_and_makes_one_of_plain_tensors() -> None:
    tensors = some_tensors(3, 4)
    bucket = packed(tensors, "cpu", "bfloat16")
    assert torch.equal(bucket.flat, torch.cat([tensor for _, tensor in tensors]).bfloat16())
    assert packed(bucket, "cpu", "bfloat16") is bucket and packed(bucket, "cpu", "float32") is not bucket
