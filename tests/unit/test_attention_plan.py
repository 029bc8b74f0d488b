"""Attention over trees: the calls of the plan and FlexAttention's mask against the one rule, written out densely."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from dapo_megatron.algo.attention_plan import attention_plan, length_buckets, sees, tree_numbers
from dapo_megatron.algo.packing import pack_minibatch, zigzag_indices
from dapo_megatron.policy.attention import PackedTrees, _take, flex
from dapo_megatron.records import MicroBatch
from tests.unit.test_packing import draw_samples, group

HEADS, GROUPS, DIM = 4, 2, 16


def micro_batch(seed: int, cp: int = 1, share: bool = True) -> MicroBatch:
    samples = draw_samples(np.random.default_rng(seed), 14, max_len=40)
    return pack_minibatch(samples, 1, 10**6, 2 * cp, 2 * cp, share_prompts=share)[0][0]


def dense_rule(batch: MicroBatch) -> np.ndarray:
    """bool [T, T]: query, key."""
    places = np.arange(len(batch.token_ids))
    return sees(tree_numbers(batch.cu_seqlens), batch.branch, places[:, None], places)


def packed(batch: MicroBatch, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(len(batch.token_ids), heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    q, k, v = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes)
    return q, k, v


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[..., T, heads, dim], mask [..., Q, K]."""
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(-3, -2)


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_calls_follow_the_rule(seed: int, share: bool, cp: int) -> None:
    batch = micro_batch(seed, cp, share)
    assert batch.branch.any() == share
    q, k, v = packed(batch)
    want = sdpa(q, k, v, torch.from_numpy(dense_rule(batch)))
    for rank in range(cp):
        held = zigzag_indices(batch.cu_seqlens, cp, rank)
        plan = attention_plan(batch.cu_seqlens, batch.branch, held)
        results = []
        for call in plan.calls:
            num_queries, num_keys = call.queries.shape[1], call.keys.shape[1]
            assert call.last is not None or num_queries == num_keys
            last = np.arange(num_queries)[None] if call.last is None else call.last
            mask = torch.from_numpy(np.arange(num_keys) <= last[:, None, :, None])
            results.append(sdpa(q[held][call.queries], k[call.keys], v[call.keys], mask).flatten(0, 1))
        torch.testing.assert_close(torch.cat(results)[plan.order], want[held])


def test_few_calls_and_trunks_without_a_mask() -> None:
    batch = micro_batch(1)
    plan = attention_plan(batch.cu_seqlens, batch.branch, np.arange(len(batch.token_ids)))
    num_runs = sum(len(call.queries) for call in plan.calls)
    assert len(plan.calls) < num_runs / 3
    trunks = [call for call in plan.calls if call.last is None]
    assert sum(len(call.queries) for call in trunks) == len(batch.cu_seqlens) - 1


def test_length_buckets_by_hand() -> None:
    assert length_buckets([100, 3, 65, 40, 1]) == [[0, 2], [3], [1, 4]]  # 100 <= 1.25 x (65 + 16), but 100 > 1.25 x (40 + 16)
    assert length_buckets([]) == []


@pytest.mark.parametrize("cp", [1, 2])
def test_flex_attentions_mask_is_the_rule(cp: int) -> None:
    batch = micro_batch(2, cp)
    held = [zigzag_indices(batch.cu_seqlens, cp, rank) for rank in range(cp)]
    keys = np.concatenate(held)  # as they come from all ranks
    for rank in range(cp):
        mask_mod = PackedTrees(batch, cp, rank, "cpu").mask_mod()
        mask = create_mask(mask_mod, None, None, len(held[rank]), len(keys), device="cpu")[0, 0]
        assert np.array_equal(mask.numpy(), dense_rule(batch)[held[rank]][:, keys])


def test_flex_attention_is_sdpa() -> None:
    """Its eager form, forward only: what it is compiled to runs on GPUs."""
    batch = micro_batch(3)
    q, k, v = packed(batch, torch.float32)
    num_tokens = len(batch.token_ids)
    mask_mod: Any = PackedTrees(batch, 1, 0, "cpu").mask_mod()
    block_mask = create_block_mask(mask_mod, None, None, num_tokens, num_tokens, device="cpu")
    got = flex(q, k, v, block_mask, 0.3, compiled=False)
    want = sdpa(q * 0.3 * DIM**0.5, k, v, torch.from_numpy(dense_rule(batch)))
    torch.testing.assert_close(got, want.flatten(1), atol=1e-5, rtol=1e-5)


def test_gradients_of_shared_keys_repeat_bit_for_bit() -> None:
    """Every branch adds its own to them, on CPUs in a fixed order, however many threads there are."""
    batch = pack_minibatch(group(200, *[3] * 16), 1, 1000, share_prompts=True)[0][0]
    _, branches = PackedTrees(batch, 1, 0, "cpu").plan[0]
    rows = branches.keys
    key, upstream = packed(batch, torch.float32)[1], torch.randn(rows.shape[0], GROUPS, rows.shape[1], DIM)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = []
        for _ in range(20):
            leaf = key.clone().requires_grad_()
            _take(leaf, rows).backward(upstream)
            assert leaf.grad is not None
            found.append(leaf.grad)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], grad) for grad in found)
