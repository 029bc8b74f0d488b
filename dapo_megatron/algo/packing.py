"""Pack a mini-batch into micro-batches: by token budget, balanced over data-parallel ranks, equal in number.

Which samples share a micro-batch changes nothing in the loss: weights are data (see aggregation.py). So packing is
free to care for speed alone.
"""

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

import numpy as np

from dapo_megatron.config import ParallelConfig
from dapo_megatron.records import MicroBatch, Sample

PAD_TOKEN = 0  # any valid id: padding is a sequence of its own and has no response tokens


def pack_minibatch(
    samples: Sequence[Sample],
    dp: int,
    max_tokens_per_microbatch: int,
    pad_to_multiple: int = 1,
    pad_sequences_to: int = 1,
    num_multiple: int = 1,
) -> list[list[MicroBatch]]:
    """Micro-batches of each of `dp` ranks: [dp][number of micro-batches, the same everywhere].

    Every sample is in exactly one micro-batch, whole. A micro-batch holds at most max_tokens_per_microbatch tokens,
    padding included, unless a single sample is longer: that one gets a micro-batch of its own. Every sequence is padded at
    its end, where nothing that counts can see it, to a multiple of `pad_sequences_to`, and T is a multiple of
    `pad_to_multiple` (itself a multiple of that): a tail sequence without response tokens fills it up. Ranks with fewer
    micro-batches get dummies of such a sequence alone, since collectives want equal numbers, and the number is a multiple of
    `num_multiple`. What layouts need is in config.ParallelConfig. Deterministic. Raises ValueError for arguments below 1, for
    multiples that don't fit together and for a budget below pad_to_multiple.
    """
    if min(dp, pad_to_multiple, pad_sequences_to, num_multiple) < 1 or pad_to_multiple % pad_sequences_to:
        raise ValueError(
            f"dp, pad_to_multiple, pad_sequences_to, num_multiple: {dp}, {pad_to_multiple}, {pad_sequences_to}, "
            f"{num_multiple}; all must be at least 1 and the second a multiple of the third"
        )
    budget = max_tokens_per_microbatch - max_tokens_per_microbatch % pad_to_multiple
    if budget < 1:
        raise ValueError(
            f"parallel.max_tokens_per_microbatch: {max_tokens_per_microbatch} has no room for a multiple of "
            f"{pad_to_multiple} tokens; raise it to a prompt and its response"
        )
    lengths = [-(-len(sample.token_ids) // pad_sequences_to) * pad_sequences_to for sample in samples]
    # An over-long sample counts as a full micro-batch: nothing fits beside it.
    sizes = [min(length, budget) for length in lengths]
    ranks = _balance(range(len(samples)), lengths, dp)
    num_microbatches = max(1, *(len(_first_fit(rank, sizes, budget)) for rank in ranks))
    num_microbatches += -num_microbatches % num_multiple
    return [
        [concatenate(samples, bin_, pad_to_multiple, pad_sequences_to) for bin_ in _fill(rank, sizes, budget, num_microbatches)]
        for rank in ranks
    ]


def pack_minibatch_for(parallel: ParallelConfig, minibatch: Sequence[Sample]) -> list[list[MicroBatch]]:
    """pack_minibatch as a layout needs it."""
    return pack_minibatch(
        minibatch,
        parallel.dp,
        parallel.max_tokens_per_microbatch,
        parallel.microbatch_multiple,
        parallel.sequence_multiple,
        parallel.num_microbatches_multiple,
    )


def _balance(indices: Sequence[int], sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Longest processing time first: the largest sample goes to the bin with the fewest tokens.

    Attention's cost, the sum of squared lengths, breaks ties. Bins keep the samples' order.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, 0)] * num_bins
    for i in sorted(indices, key=lambda i: (-sizes[i], i)):
        lightest = min(range(num_bins), key=lambda b: (loads[b], b))
        bins[lightest].append(i)
        tokens, squares = loads[lightest]
        loads[lightest] = (tokens + sizes[i], squares + sizes[i] ** 2)
    return [sorted(bin_) for bin_ in bins]


def _first_fit(indices: Sequence[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    """First fit decreasing: close to the smallest number of bins (at most 11/9 of it, plus 1)."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for i in sorted(indices, key=lambda i: (-sizes[i], i)):
        fitting = next((b for b, load in enumerate(loads) if load + sizes[i] <= budget), None)
        if fitting is None:
            bins.append([i])
            loads.append(sizes[i])
        else:
            bins[fitting].append(i)
            loads[fitting] += sizes[i]
    return [sorted(bin_) for bin_ in bins]


def _fill(indices: Sequence[int], sizes: Sequence[int], budget: int, num_bins: int) -> list[list[int]]:
    """`num_bins` bins within the budget: even ones, best for pipelines, if they fit, else tight and empty ones."""
    even = _balance(indices, sizes, num_bins)
    if all(sum(sizes[i] for i in bin_) <= budget for bin_ in even):
        return even
    tight = _first_fit(indices, sizes, budget)
    return tight + [[] for _ in range(num_bins - len(tight))]


def concatenate(minibatch: Sequence[Sample], chosen: Sequence[int], pad_to_multiple: int, pad_sequences_to: int) -> MicroBatch:
    """The mini-batch's samples `chosen`, one after the other. Weights become w * N, N the whole mini-batch's valid tokens."""
    num_valid = sum(sample.num_valid for sample in minibatch)
    first = np.cumsum([0, *(len(sample.mask) for sample in minibatch)])
    samples = [minibatch[i] for i in chosen]
    assert all(sample.prompt_len > 0 for sample in samples), "the first response token needs a token that predicts it"
    tokens = [_padded(sample.token_ids, pad_sequences_to) for sample in samples]
    used = sum(len(ids) for ids in tokens)
    tail = -used % pad_to_multiple if samples else pad_to_multiple
    if tail:
        tokens.append(np.full(tail, PAD_TOKEN, np.int32))
    starts = np.cumsum([0, *(len(ids) for ids in tokens)])
    # The token at place p predicts the one at p + 1: the prompt's last token predicts the response's first.
    positions = [
        np.arange(start + sample.prompt_len - 1, start + len(sample.token_ids) - 1)
        for start, sample in zip(starts, samples, strict=False)
    ]
    return MicroBatch(
        token_ids=np.concatenate(tokens).astype(np.int32),
        cu_seqlens=starts.astype(np.int32),
        positions=_join(positions, np.int64),
        targets=_join([sample.token_ids[sample.prompt_len :] for sample in samples], np.int64),
        rollout_logprobs=_join([sample.rollout_logprobs for sample in samples], np.float32),
        stale=_join([sample.stale for sample in samples], np.bool_),
        mask=_join([sample.mask for sample in samples], np.bool_),
        number=_join([np.arange(first[i], first[i + 1]) for i in chosen], np.int64),
        advantages=_join([sample.advantages for sample in samples], np.float32),
        weights=_join([sample.weights * num_valid for sample in samples], np.float32),
    )


def _padded(token_ids: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(token_ids, (0, -len(token_ids) % multiple), constant_values=PAD_TOKEN)


def _join(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def zigzag_indices(cu_seqlens: np.ndarray, cp: int, rank: int) -> np.ndarray:
    """Places in the packed tokens that context-parallel rank `rank` of `cp` holds, in its order: int64 [T / cp].

    Every sequence is cut into 2 x cp equal pieces, of which a rank has number `rank` and, mirrored, 2 x cp - 1 - rank: under a
    causal mask all ranks then have the same work. The split is Transformer Engine's. Sequences' lengths must be multiples of
    2 x cp.
    """
    if cp == 1:
        return np.arange(cu_seqlens[-1])
    parts = []
    for start, end in pairwise(cu_seqlens.tolist()):
        piece, rest = divmod(end - start, 2 * cp)
        assert rest == 0, f"a packed sequence of {end - start} tokens can't be cut into {2 * cp} equal pieces"
        for number in (rank, 2 * cp - 1 - rank):
            parts.append(np.arange(start + number * piece, start + (number + 1) * piece))
    return np.concatenate(parts)


def context_share(batch: MicroBatch, cp: int, rank: int) -> MicroBatch:
    """What context-parallel rank `rank` of `cp` has of a micro-batch: its tokens, and the response tokens that they predict.

    `positions` then count within the rank's own tokens; `cu_seqlens` still describe the whole sequences.
    """
    if cp == 1:
        return batch
    held = zigzag_indices(batch.cu_seqlens, cp, rank)
    place = np.full(len(batch.token_ids), -1)
    place[held] = np.arange(len(held))
    mine = place[batch.positions] >= 0
    per_response_token = {
        f.name: getattr(batch, f.name)[mine] for f in fields(MicroBatch) if f.name not in ("token_ids", "cu_seqlens")
    }
    per_response_token["positions"] = place[per_response_token["positions"]]
    return MicroBatch(token_ids=batch.token_ids[held], cu_seqlens=batch.cu_seqlens, **per_response_token)
