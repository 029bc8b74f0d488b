"""Core attention and norm for machines without Transformer Engine: plain torch, packed sequences, sequence and context
parallelism."""

from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from dapo_megatron.algo.packing import zigzag_indices


class RMSNorm(torch.nn.Module):
    """Megatron's wrapped torch norm refuses sequence parallelism; marking the weight is all that it needs."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def length_buckets(lengths: list[int], waste: float = 1.25) -> list[list[int]]:
    """Sequence numbers in groups of similar length: within a bucket no sequence is shorter than longest / waste."""
    buckets: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if buckets and lengths[buckets[-1][0]] <= waste * lengths[i]:
            buckets[-1].append(i)
        else:
            buckets.append([i])
    return buckets


class PackedAttention(torch.nn.Module):
    """Causal attention over packed (thd) sequences with torch's SDPA.

    Sequences of similar length go through one call, padded at their ends, where a causal mask makes padding invisible to them.
    With context parallelism a rank keeps its own queries, which are the pieces of every sequence that zigzag_indices gives it,
    and gathers all ranks' keys and values; in the backward their gradients are summed up and scattered again.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Tensor:
        """query [T/cp, heads, dim], key and value [T/cp, groups, dim] -> [T/cp, heads * dim]."""
        cu_seqlens = packed_seq_params.cu_seqlens_q.cpu().numpy()
        group = parallel_state.get_context_parallel_group()
        cp = group.size()
        held = zigzag_indices(cu_seqlens, cp, group.rank())
        if cp > 1:
            order = np.argsort(np.concatenate([zigzag_indices(cu_seqlens, cp, rank) for rank in range(cp)]))
            index = torch.from_numpy(order).to(key.device)
            key, value = (gather_from_sequence_parallel_region(t, group=group)[index] for t in (key, value))
        lengths = np.diff(cu_seqlens)
        out = torch.zeros_like(query)
        for bucket in length_buckets(lengths.tolist()):
            keys = _rows(cu_seqlens[:-1][bucket], lengths[bucket])
            own = _rows(cu_seqlens[:-1][bucket] // cp, lengths[bucket] // cp)
            q, (k, v) = _take(query, own.rows), (_take(t, keys.rows) for t in (key, value))
            mask = None
            if cp > 1:  # a query sees the keys up to its own place in the sequence
                places = held[own.rows] - cu_seqlens[:-1][bucket][:, None]
                visible = np.arange(keys.rows.shape[1]) <= places[:, :, None]
                mask = torch.from_numpy(visible[:, None]).to(query.device)
            result = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=cp == 1, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            rows = torch.from_numpy(own.rows[own.valid]).to(query.device)
            out = out.index_put((rows,), result.transpose(1, 2)[torch.from_numpy(own.valid).to(query.device)])
        return out.flatten(1)


class _Rows(NamedTuple):
    rows: np.ndarray  # int64 [sequences, longest]: places in the packed tokens; past its end a sequence's first place
    valid: np.ndarray  # bool [sequences, longest]


def _rows(starts: np.ndarray, lengths: np.ndarray) -> _Rows:
    offsets = np.arange(lengths.max())
    valid = offsets < lengths[:, None]
    return _Rows(np.where(valid, starts[:, None] + offsets, starts[:, None]).astype(np.int64), valid)


def _take(packed: Tensor, rows: np.ndarray) -> Tensor:
    """[T, heads, dim] -> [sequences, heads, longest, dim]."""
    return packed[torch.from_numpy(rows).to(packed.device)].transpose(1, 2)
