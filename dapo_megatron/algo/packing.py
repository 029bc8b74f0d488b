"""Pack a mini-batch into micro-batches: by token budget, balanced over data-parallel ranks, equal in number.

Which samples share a micro-batch changes nothing in the loss: weights are data (see aggregation.py). So packing is
free to care for speed alone.
"""

from collections.abc import Sequence

import numpy as np

from dapo_megatron.records import MicroBatch, Sample

PAD_TOKEN = 0  # any valid id: padding is a sequence of its own and has no response tokens


def pack_minibatch(
    samples: Sequence[Sample], dp: int, max_tokens_per_microbatch: int, pad_to_multiple: int = 1
) -> list[list[MicroBatch]]:
    """Micro-batches of each of `dp` ranks: [dp][number of micro-batches, the same everywhere].

    Every sample is in exactly one micro-batch, whole. A micro-batch holds at most max_tokens_per_microbatch tokens,
    padding included, unless a single sample is longer: that one gets a micro-batch of its own. T is a multiple of
    `pad_to_multiple` (the tensor-parallel size under sequence parallelism): a tail sequence without response tokens
    fills it up. Ranks with fewer micro-batches get dummies of such a sequence alone, since collectives want equal
    numbers. Deterministic. Raises ValueError for arguments below 1 and for a budget below pad_to_multiple.
    """
    if dp < 1 or pad_to_multiple < 1:
        raise ValueError(f"dp, pad_to_multiple: {dp}, {pad_to_multiple}; both must be at least 1")
    budget = max_tokens_per_microbatch - max_tokens_per_microbatch % pad_to_multiple
    if budget < 1:
        raise ValueError(
            f"parallel.max_tokens_per_microbatch: {max_tokens_per_microbatch} has no room for a multiple of "
            f"{pad_to_multiple} tokens; raise it to a prompt and its response"
        )
    lengths = [len(sample.token_ids) for sample in samples]
    # An over-long sample counts as a full micro-batch: nothing fits beside it.
    sizes = [min(length, budget) for length in lengths]
    ranks = _balance(range(len(samples)), lengths, dp)
    num_microbatches = max(1, *(len(_first_fit(rank, sizes, budget)) for rank in ranks))
    num_valid = sum(sample.num_valid for sample in samples)
    return [
        [
            _concatenate([samples[i] for i in bin_], num_valid, pad_to_multiple)
            for bin_ in _fill(rank, sizes, budget, num_microbatches)
        ]
        for rank in ranks
    ]


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


def _concatenate(samples: Sequence[Sample], num_valid: int, pad_to_multiple: int) -> MicroBatch:
    """Samples one after the other. `num_valid` N is the mini-batch's; weights become w * N."""
    assert all(sample.prompt_len > 0 for sample in samples), "the first response token needs a token that predicts it"
    lengths = [len(sample.token_ids) for sample in samples]
    padding = -sum(lengths) % pad_to_multiple if samples else pad_to_multiple
    tokens = [sample.token_ids for sample in samples] + [np.full(padding, PAD_TOKEN, np.int32)]
    starts = np.cumsum([0, *lengths])
    # The token at place p predicts the one at p + 1: the prompt's last token predicts the response's first.
    positions = [
        np.arange(start + sample.prompt_len - 1, start + len(sample.token_ids) - 1)
        for start, sample in zip(starts, samples, strict=False)
    ]
    return MicroBatch(
        token_ids=np.concatenate(tokens).astype(np.int32),
        cu_seqlens=np.cumsum([0, *lengths, *([padding] if padding else [])]).astype(np.int32),
        positions=_join(positions, np.int64),
        targets=_join([sample.token_ids[sample.prompt_len :] for sample in samples], np.int64),
        rollout_logprobs=_join([sample.rollout_logprobs for sample in samples], np.float32),
        stale=_join([sample.stale for sample in samples], np.bool_),
        mask=_join([sample.mask for sample in samples], np.bool_),
        advantages=_join([sample.advantages for sample in samples], np.float32),
        weights=_join([sample.weights * num_valid for sample in samples], np.float32),
    )


def _join(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
