"""Pack a mini-batch into micro-batches: by token budget, balanced over data-parallel ranks, equal in number.

Which samples share a micro-batch, or a prompt, changes nothing in the loss: weights are data (see aggregation.py). So packing
is free to care for speed alone.
"""

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dapo_megatron.config import ParallelConfig
from dapo_megatron.records import MicroBatch, Sample

PAD_TOKEN = 0  # any valid id: nothing that counts sees padding, and it predicts nothing
_PER_TOKEN = ("token_ids", "position_ids", "branch")  # fields of MicroBatch


def pack_minibatch(
    samples: Sequence[Sample],
    dp: int,
    max_tokens_per_microbatch: int,
    pad_to_multiple: int = 1,
    pad_sequences_to: int = 1,
    num_multiple: int = 1,
    share_prompts: bool = False,
) -> list[list[MicroBatch]]:
    """Micro-batches of each of `dp` ranks: [dp][number of micro-batches, the same everywhere].

    Every sample is in exactly one micro-batch, whole: by itself, or with `share_prompts` in a tree with others of its group
    that have the same prompt. A micro-batch holds at most max_tokens_per_microbatch tokens, padding included, unless a single
    sample is longer: that one gets a micro-batch of its own. Every tree is padded at its end, where nothing that counts can
    see it, to a multiple of `pad_sequences_to`, and T is a multiple of `pad_to_multiple` (itself a multiple of that): a tail
    tree without response tokens fills it up. Ranks with fewer micro-batches get dummies of such a tree alone, since
    collectives want equal numbers, and the number is a multiple of `num_multiple`. What layouts need is in
    config.ParallelConfig. Deterministic. Raises ValueError for arguments below 1, for multiples that don't fit together and for
    a budget below pad_to_multiple.
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
    trees = _trees(samples, dp, budget, pad_sequences_to) if share_prompts else [[i] for i in range(len(samples))]
    lengths = _lengths(samples, trees, pad_sequences_to)
    # An over-long sample counts as a full micro-batch: nothing fits beside it.
    sizes = [min(length, budget) for length in lengths]
    ranks = _balance(range(len(trees)), lengths, dp)
    num_microbatches = max(1, *(len(_first_fit(rank, sizes, budget)) for rank in ranks))
    num_microbatches += -num_microbatches % num_multiple
    return [
        [
            concatenate(samples, [trees[t] for t in bin_], pad_to_multiple, pad_sequences_to)
            for bin_ in _fill(rank, sizes, budget, num_microbatches)
        ]
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
        parallel.share_prompts,
    )


def _trees(samples: Sequence[Sample], dp: int, budget: int, multiple: int) -> list[list[int]]:
    """Numbers of the samples that share a prompt: as many as fit the budget, but fewer where whole groups would leave
    data-parallel ranks idle. Of the ways tried, the longest tree cut in two one after the other, and every sample alone, it is
    the one that gives the fullest rank the fewest tokens."""

    def fullest(trees: list[list[int]]) -> int:
        lengths = _lengths(samples, trees, multiple)
        return max(sum(lengths[t] for t in rank) for rank in _balance(range(len(trees)), lengths, dp))

    ways = [_cut(samples, budget)]
    for _ in range(dp if dp > 1 else 0):
        ways.append(_halve_longest(samples, ways[-1]))
    return min((*ways, [[i] for i in range(len(samples))]), key=fullest)


def _halve_longest(samples: Sequence[Sample], trees: list[list[int]]) -> list[list[int]]:
    lengths = _lengths(samples, trees, 1)
    several = [t for t, tree in enumerate(trees) if len(tree) > 1]
    if not several:
        return trees
    longest = max(several, key=lambda t: lengths[t])
    halves = _balance(trees[longest], [len(sample.mask) + 1 for sample in samples], 2)
    return [*trees[:longest], *halves, *trees[longest + 1 :]]


def _cut(samples: Sequence[Sample], cap: int) -> list[list[int]]:
    """Every group's samples in trees of at most `cap` tokens; a sample that is longer is alone."""
    siblings: dict[tuple[int, bytes], list[int]] = {}
    for i, sample in enumerate(samples):
        siblings.setdefault((sample.group, sample.token_ids[: sample.prompt_len].tobytes()), []).append(i)
    sizes = [_num_branch_tokens(sample) for sample in samples]
    return [tree for same in siblings.values() for tree in _first_fit(same, sizes, cap - samples[same[0]].prompt_len)]


def _num_branch_tokens(sample: Sample) -> int:
    """Response tokens that predict another one."""
    return max(len(sample.mask) - 1, 0)


def _lengths(samples: Sequence[Sample], trees: Sequence[Sequence[int]], multiple: int) -> list[int]:
    """Tokens of every tree, padding to `multiple` included."""
    tokens = [samples[tree[0]].prompt_len + sum(_num_branch_tokens(samples[i]) for i in tree) for tree in trees]
    return [-(-n // multiple) * multiple for n in tokens]


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


def concatenate(
    minibatch: Sequence[Sample], chosen: Sequence[Sequence[int]], pad_to_multiple: int, pad_sequences_to: int
) -> MicroBatch:
    """The trees `chosen`, each the numbers of its samples in the mini-batch, one after the other. Weights become w * N, N the
    whole mini-batch's valid tokens."""
    num_valid = sum(sample.num_valid for sample in minibatch)
    first = np.cumsum([0, *(len(sample.mask) for sample in minibatch)])
    order = [i for tree in chosen for i in tree]
    samples = [minibatch[i] for i in order]
    trees = [_tree([minibatch[i] for i in tree], pad_sequences_to) for tree in chosen]
    used = sum(len(tree.token_ids) for tree in trees)
    if tail := -used % pad_to_multiple if trees else pad_to_multiple:
        trees.append(_filler(tail))
    starts = np.cumsum([0, *(len(tree.token_ids) for tree in trees)])
    return MicroBatch(
        token_ids=_join([tree.token_ids for tree in trees], np.int32),
        position_ids=_join([tree.position_ids for tree in trees], np.int32),
        branch=_join([tree.branch for tree in trees], np.int32),
        cu_seqlens=starts.astype(np.int32),
        positions=_join([start + tree.predictors for start, tree in zip(starts, trees, strict=False)], np.int64),
        targets=_join([sample.token_ids[sample.prompt_len :] for sample in samples], np.int64),
        rollout_logprobs=_join([sample.rollout_logprobs for sample in samples], np.float32),
        stale=_join([sample.stale for sample in samples], np.bool_),
        mask=_join([sample.mask for sample in samples], np.bool_),
        number=_join([np.arange(first[i], first[i + 1]) for i in order], np.int64),
        advantages=_join([sample.advantages for sample in samples], np.float32),
        weights=_join([sample.weights * num_valid for sample in samples], np.float32),
    )


class _Tree(NamedTuple):
    """N tokens, padding included, and the L response tokens of its samples (see MicroBatch)."""

    token_ids: np.ndarray  # [N]
    position_ids: np.ndarray  # [N]
    branch: np.ndarray  # [N]
    predictors: np.ndarray  # [L], places in the tree


def _tree(samples: Sequence[Sample], multiple: int) -> _Tree:
    """The samples' prompt, which is the same, and their responses."""
    prompt_len = samples[0].prompt_len
    assert prompt_len > 0, "the first response token needs a token that predicts it"
    parts = [samples[0].token_ids[:prompt_len]]
    parts += [sample.token_ids[prompt_len : prompt_len + _num_branch_tokens(sample)] for sample in samples]
    ends = np.cumsum([len(part) for part in parts])
    parts[-1] = np.pad(parts[-1], (0, -ends[-1] % multiple), constant_values=PAD_TOKEN)
    # The token at place p predicts the one behind it in its response: the prompt's last token predicts the responses' first.
    predictors = [
        np.array([prompt_len - 1, *range(start, end)])[: len(sample.mask)]
        for sample, start, end in zip(samples, ends, ends[1:], strict=False)
    ]
    branch = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    before = np.array([0, *(ends[:-1] - prompt_len)])  # tokens of other branches in front of each
    return _Tree(
        token_ids=np.concatenate(parts),
        position_ids=np.arange(len(branch)) - before[branch],
        branch=branch if len(samples) > 1 else np.zeros_like(branch),
        predictors=np.concatenate(predictors),
    )


def _filler(length: int) -> _Tree:
    return _Tree(np.full(length, PAD_TOKEN), np.arange(length), np.zeros(length), np.zeros(0, np.int64))


def _join(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def zigzag_indices(cu_seqlens: np.ndarray, cp: int, rank: int) -> np.ndarray:
    """Places in the packed tokens that context-parallel rank `rank` of `cp` holds, in its order: int64 [T / cp].

    Every tree is cut into 2 x cp equal pieces, of which a rank has number `rank` and, mirrored, 2 x cp - 1 - rank: under a
    causal mask all ranks then have the same work. The split is Transformer Engine's. Trees' lengths must be multiples of
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

    `positions` then count within the rank's own tokens; `cu_seqlens` still describe the whole trees.
    """
    if cp == 1:
        return batch
    held = zigzag_indices(batch.cu_seqlens, cp, rank)
    place = np.full(len(batch.token_ids), -1)
    place[held] = np.arange(len(held))
    mine = place[batch.positions] >= 0
    per_token = {name: getattr(batch, name)[held] for name in _PER_TOKEN}
    per_response_token = {
        f.name: getattr(batch, f.name)[mine] for f in fields(MicroBatch) if f.name not in (*_PER_TOKEN, "cu_seqlens")
    }
    per_response_token["positions"] = place[per_response_token["positions"]]
    return MicroBatch(cu_seqlens=batch.cu_seqlens, **per_token, **per_response_token)
