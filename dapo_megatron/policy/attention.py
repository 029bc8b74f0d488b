"""Core attention and norm for machines without Transformer Engine: plain torch, packed sequences, sequence parallelism."""

import itertools
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional


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
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Tensor:
        """query [T, heads, dim], key and value [T, groups, dim] -> [T, heads * dim]."""
        cu_seqlens = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [b - a for a, b in itertools.pairwise(cu_seqlens)]
        out = torch.zeros_like(query)
        for bucket in length_buckets(lengths):
            longest = lengths[bucket[0]]
            starts = torch.tensor([cu_seqlens[i] for i in bucket], device=query.device)
            limits = torch.tensor([lengths[i] for i in bucket], device=query.device)
            offsets = torch.arange(longest, device=query.device)
            valid = offsets < limits[:, None]  # [bucket, longest]
            rows = torch.where(valid, starts[:, None] + offsets, starts[:, None])
            q, k, v = (t[rows].transpose(1, 2) for t in (query, key, value))  # [bucket, heads, longest, dim]
            result = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            out = out.index_put((rows[valid],), result.transpose(1, 2)[valid])
        return out.flatten(1)
