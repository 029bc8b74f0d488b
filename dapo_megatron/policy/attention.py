"""Core attention, rotary embedding and norm of our own, for packed trees and sequence and context parallelism: attention for
machines without Transformer Engine, and everywhere where prompts are shared."""

from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from dapo_megatron.algo.attention_plan import attention_plan, sees, tree_numbers
from dapo_megatron.algo.packing import zigzag_indices
from dapo_megatron.records import MicroBatch

# On CPUs SDPA's backward in bf16 takes several times as long as in fp32 where there are few keys (with 64 of them 4.5 times,
# with 256 as long, with 1024 three quarters), so that up to so many keys it is computed in fp32.
MAX_WIDENED = 256


class RMSNorm(torch.nn.Module):
    """Megatron's wrapped torch norm refuses sequence parallelism; marking the weight is all that it needs."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class RotaryByPosition(torch.nn.Module):
    """Takes the place of Megatron's RotaryEmbedding in a GPTModel: angles by every token's own position, since in a tree they
    don't follow from its place. One angle for each packed token is what Megatron's unfused rotation takes as exact."""

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq  # [dim / 2]; not a buffer: no checkpoint has it

    def get_rotary_seq_len(self, *others: Any) -> Tensor:
        """What the model hands on to forward: not a length here, but the positions."""
        packed: PackedTrees = others[-1]
        return packed.position_ids

    def forward(self, position_ids: Tensor, **_: Any) -> Tensor:
        """[T] of the whole micro-batch, in packed order -> [T, 1, 1, dim]; Megatron takes a context-parallel rank's own."""
        freqs = torch.outer(position_ids.float(), self.inv_freq.to(position_ids.device))
        return torch.cat((freqs, freqs), dim=-1)[:, None, None]


class _Rows(NamedTuple):
    """Chosen rows of a packed tensor, [N, L] of them."""

    places: Tensor | None  # int64 [N * L]; None: all rows in their order
    shape: tuple[int, ...]


class _Call(NamedTuple):
    """algo.attention_plan.AttentionCall on the device."""

    queries: _Rows
    keys: _Rows
    last: Tensor | None  # int64 [N, Q]

    def mask(self) -> Tensor | None:
        """bool [N, 1, Q, K]. Made anew in every layer: kept for all micro-batches of a step, masks would take far more memory
        than everything else here."""
        if self.last is None:
            return None
        return torch.arange(self.keys.shape[1], device=self.last.device) <= self.last[:, None, :, None]


class PackedTrees(PackedSeqParams):
    """What Megatron hands through to rotary embedding and attention, also when it computes a layer again. The layout of a
    micro-batch's trees is the same in every layer: what attention needs of it is computed once, when first asked for."""

    def __init__(self, batch: MicroBatch, cp: int, cp_rank: int, device: Any) -> None:
        cu_seqlens = torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=device)
        longest = int(np.diff(batch.cu_seqlens).max())
        super().__init__(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        self.position_ids = torch.tensor(batch.position_ids, dtype=torch.int64, device=device)
        self.shares_prompts = bool(batch.branch.any())
        self._device = device
        # copies: what comes from the object store isn't to be kept from being freed
        self._cu_seqlens, self._branch = batch.cu_seqlens.copy(), batch.branch.copy()
        self._held = [zigzag_indices(batch.cu_seqlens, cp, rank) for rank in range(cp)]  # by every context-parallel rank
        self._own = self._held[cp_rank]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    @cached_property
    def plan(self) -> tuple[list[_Call], Tensor]:
        """SDPA's calls, and where in their results each own token's stands [T / cp]. Keys come in the order of _held."""
        plan = attention_plan(self._cu_seqlens, self._branch, self._own)
        gathered = np.argsort(np.concatenate(self._held))

        def rows(places: np.ndarray, total: int) -> _Rows:
            every = np.array_equal(places.ravel(), np.arange(total))
            return _Rows(None if every else self._tensor(places.ravel()), places.shape)

        calls = [
            _Call(
                rows(call.queries, len(self._own)),
                rows(gathered[call.keys], len(gathered)),
                None if call.last is None else self._tensor(call.last),
            )
            for call in plan.calls
        ]
        return calls, self._tensor(plan.order)

    def mask_mod(self) -> Any:
        """The one rule as FlexAttention wants it, for this rank's queries and all keys in the order of _held."""
        tree, branch = self._tensor(tree_numbers(self._cu_seqlens)), self._tensor(self._branch)
        query_places, key_places = self._tensor(self._own), self._tensor(np.concatenate(self._held))
        return lambda _batch, _head, query, key: sees(tree, branch, query_places[query], key_places[key])

    @cached_property
    def block_mask(self) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        # compiled, it never holds the mask of every query with every key
        make = _compiled(create_block_mask)
        return make(self.mask_mod(), None, None, len(self._own), len(self._branch), device=self._device)


class PackedAttention(torch.nn.Module):
    """Attention over packed (thd) trees by the rule of algo.attention_plan: torch's SDPA, or FlexAttention for shared prompts
    on a GPU.

    For SDPA trunks and branches of similar length go through one call, padded at their ends, where padding is invisible to
    them. With context parallelism a rank keeps its own queries, which are the pieces of every tree that zigzag_indices gives
    it, and gathers all ranks' keys and values; in the backward their gradients are summed up and scattered again.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedTrees, **__: Any) -> Tensor:
        """query [T/cp, heads, dim], key and value [T/cp, groups, dim] -> [T/cp, heads * dim]."""
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(t, group=group) for t in (key, value))
        if packed_seq_params.shares_prompts and query.is_cuda:
            return flex(query, key, value, packed_seq_params.block_mask, self.softmax_scale)
        calls, order = packed_seq_params.plan
        results = [self._sdpa(query, key, value, call) for call in calls]
        return torch.cat(results).index_select(0, order).flatten(1)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
        """[N * Q, heads, dim], padding included."""
        widened = query.device.type == "cpu" and call.keys.shape[1] <= MAX_WIDENED
        q, k, v = (
            _take(t, rows).to(torch.float32 if widened else t.dtype)
            for t, rows in ((query, call.queries), (key, call.keys), (value, call.keys))
        )
        result = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=call.mask(),
            is_causal=call.last is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return result.transpose(1, 2).flatten(0, 1).to(query.dtype)


def _take(packed: Tensor, rows: _Rows) -> Tensor:
    """[T, heads, dim] -> [N, heads, L, dim]. Keys of a trunk are taken by every branch: index_select adds their gradients up in
    a fixed order on CPUs, as indexing with [] doesn't."""
    chosen = packed if rows.places is None else packed.index_select(0, rows.places)
    return chosen.unflatten(0, rows.shape).transpose(1, 2)


def flex(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scale: float | None, compiled: bool = True) -> Tensor:
    """FlexAttention with packed tensors, as PackedAttention.forward has them after gathering."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    attention = _compiled(flex_attention) if compiled else flex_attention
    result = attention(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return result[0].transpose(0, 1).flatten(1)


@cache
def _compiled(function: Any) -> Any:
    """Micro-batches differ in length: compiled once for all of them."""
    return torch.compile(function, dynamic=True)
