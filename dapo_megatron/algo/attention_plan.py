"""Who sees whom in a packed micro-batch (records.MicroBatch), as one rule and as a few dense attention calls that follow it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np


def sees(tree: Any, branch: Any, query: Any, key: Any) -> Any:
    """The one rule, for places in the packed tokens (integers or arrays of them): True where `query` attends to `key`.

    `tree` [T] numbers each token's tree, `branch` [T] its branch in it, 0 for the trunk.
    """
    return (tree[query] == tree[key]) & (key <= query) & ((branch[key] == 0) | (branch[key] == branch[query]))


def tree_numbers(cu_seqlens: np.ndarray) -> np.ndarray:
    """int64 [T] for `sees`."""
    return np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))


class AttentionCall(NamedTuple):
    """N trunks or branches of similar length in one call; padded to its longest by places that come to nothing."""

    queries: np.ndarray  # int64 [N, Q], places among this rank's own tokens
    keys: np.ndarray  # int64 [N, K], places in the micro-batch's packed tokens
    last: np.ndarray | None  # int64 [N, Q]: each query sees `keys` up to here; None: causal, and Q == K


class AttentionPlan(NamedTuple):
    calls: list[AttentionCall]
    order: np.ndarray  # int64 [T / cp]: where in the calls' results, all [N, Q] one behind the other, each own token's stands


class _Run(NamedTuple):
    """A trunk's or a branch's own queries, and everything that the last of its tokens sees."""

    queries: np.ndarray  # places among this rank's own tokens
    keys: np.ndarray  # places in the packed tokens
    last: np.ndarray  # the place in `keys` of the last one that each query sees: itself


def attention_plan(cu_seqlens: np.ndarray, branch: np.ndarray, held: np.ndarray) -> AttentionPlan:
    """The calls for one micro-batch on a rank that holds the places `held` (zigzag_indices) and all keys."""
    runs = _runs(cu_seqlens, branch, held)
    causal = [run for run in runs if len(run.queries) == len(run.keys)]
    masked = [run for run in runs if len(run.queries) < len(run.keys)]
    calls, order, used = [], np.empty(len(held), np.int64), 0
    for kind in (causal, masked):
        for chosen in _buckets(kind):
            queries, keys, last = (_pad([run[i] for run in chosen]) for i in range(3))
            calls.append(AttentionCall(queries, keys, None if kind is causal else last))
            for row, run in enumerate(chosen):
                start = used + row * queries.shape[1]
                order[run.queries] = np.arange(start, start + len(run.queries))
            used += queries.size
    return AttentionPlan(calls, order)


def _runs(cu_seqlens: np.ndarray, branch: np.ndarray, held: np.ndarray) -> list[_Run]:
    own = np.full(len(branch), -1)
    own[held] = np.arange(len(held))
    runs = []
    for start, end in pairwise(cu_seqlens.tolist()):
        cuts = [start, *(start + 1 + np.flatnonzero(np.diff(branch[start:end]))), end]
        for first, last in pairwise(cuts):
            trunk = np.arange(start, cuts[1] if first > start else start)
            places = first + np.flatnonzero(own[first:last] >= 0)
            if len(places):
                keys = np.concatenate([trunk, np.arange(first, last)])
                runs.append(_Run(own[places], keys, places - first + len(trunk)))
    return runs


def _buckets(runs: Sequence[_Run]) -> list[list[_Run]]:
    """Runs with similar numbers of queries and of keys."""
    buckets = []
    for some in length_buckets([len(run.queries) for run in runs]):
        for similar in length_buckets([len(runs[i].keys) for i in some]):
            buckets.append([runs[some[i]] for i in similar])
    return buckets


def length_buckets(lengths: Sequence[int], waste: float = 1.25, slack: int = 16) -> list[list[int]]:
    """Numbers of the lengths in groups of similar ones: none is shorter than its group's longest / waste - slack. To pad so
    few tokens costs less than one more call."""
    buckets: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if buckets and lengths[buckets[-1][0]] <= waste * (lengths[i] + slack):
            buckets[-1].append(i)
        else:
            buckets.append([i])
    return buckets


def _pad(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[N, longest]: a shorter one goes on with its first number, so that a padded query sees something."""
    longest = max(map(len, rows))
    return np.stack([np.concatenate([row, np.full(longest - len(row), row[0])]) for row in rows])
