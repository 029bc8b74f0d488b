"""From scored groups to the mini-batches that the policy is updated with."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dapo_megatron.algo.advantages import group_advantages
from dapo_megatron.algo.aggregation import token_weights
from dapo_megatron.records import Completion, Group, Prompt, Sample


def build_samples(
    groups: Sequence[Group],
    *,
    version: int,
    advantage: str = "group_norm",
    std_eps: float = 1e-6,
    overlong_filter: bool = False,
) -> list[Sample]:
    """One sample for every response, group by group; `group` is the group's number in `groups`.

    `version` is that of the step's weights: a token's staleness is how many versions older those were that sampled it.

    A group's advantages come from the shaped rewards of all its responses, those cut at the limit included. With
    `overlong_filter` the cut ones get mask False afterwards: neither loss nor denominator. An EOS is part of its
    response and trained. The weights are 0 until `set_weights` has seen the whole mini-batch.
    """
    samples = []
    for number, group in enumerate(groups):
        advantages = group_advantages(group.reward, advantage, std_eps)
        for completion, value in zip(group.completions, advantages, strict=True):
            samples.append(_sample(group.prompt, completion, value, number, version, overlong_filter))
    return samples


def _sample(
    prompt: Prompt, completion: Completion, advantage: float, group: int, version: int, overlong_filter: bool
) -> Sample:
    assert completion.finish_reason in ("stop", "length"), f"unfinished response ({completion.finish_reason}) in a batch"
    assert (completion.versions <= version).all(), f"tokens of newer weights than version {version} in a batch"
    length = len(completion)
    cut = completion.finish_reason == "length"
    return Sample(
        token_ids=np.concatenate([np.asarray(prompt.token_ids, np.int32), completion.token_ids.astype(np.int32)]),
        prompt_len=len(prompt.token_ids),
        rollout_logprobs=completion.logprobs.astype(np.float32),
        staleness=(version - completion.versions).astype(np.int32),
        mask=np.full(length, not (overlong_filter and cut)),
        advantages=np.full(length, advantage, np.float32),
        weights=np.zeros(length, np.float64),
        group=group,
    )


def split_minibatches(samples: Sequence[Sample], prompts_per_minibatch: int) -> list[list[Sample]]:
    """Cut a rollout batch, in its order, into mini-batches of whole groups.

    There are ceil(groups / prompts_per_minibatch) of them, of nearly equal numbers of groups: 33 groups at 32 give 17
    + 16 rather than 32 + 1, as every mini-batch is one optimizer step of the same learning rate. No samples: no
    mini-batches. Raises ValueError unless prompts_per_minibatch is positive.
    """
    if prompts_per_minibatch < 1:
        raise ValueError(f"optimizer.prompts_per_minibatch: {prompts_per_minibatch} is too small; use at least 1")
    by_group: dict[int, list[Sample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group, []).append(sample)
    groups = list(by_group.values())
    num_minibatches = -(-len(groups) // prompts_per_minibatch)
    bounds = [len(groups) * i // num_minibatches for i in range(num_minibatches)] + [len(groups)]
    return [[sample for group in groups[start:end] for sample in group] for start, end in pairwise(bounds)]


def set_weights(minibatch: Sequence[Sample], aggregation: str, max_response_tokens: int) -> None:
    """Fill in every sample's weights: they depend on all of the mini-batch (formulas: aggregation.token_weights)."""
    masks = [sample.mask for sample in minibatch]
    groups = [sample.group for sample in minibatch]
    for sample, weights in zip(minibatch, token_weights(masks, groups, aggregation, max_response_tokens), strict=True):
        sample.weights = weights
