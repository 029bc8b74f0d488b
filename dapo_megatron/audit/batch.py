"""The small batch that `dapo audit CONFIG` computes: pieces of the run's own prompts, their ends taken for responses."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dapo_megatron.config import AlgorithmConfig, Config
from dapo_megatron.data.stream import PromptStream
from dapo_megatron.records import Sample

GROUP_SIZE = 3
# Old minus new log-prob of stale tokens: within the clips, and far outside on both sides. Nothing is near a clip's edge, where
# rounding would decide whether a token has a gradient at all.
STALENESS = (-1.5, -0.1, 0.1, 1.5)


def audit_batch(cfg: Config, stream: PromptStream) -> list[Sample]:
    """audit.sequences samples of at most audit.max_tokens tokens, the same for every layout.

    A sequence is its group's prompt, continued with later ones where it is short, and its last tokens are the response: text
    that a model finds likely, so that bf16 rounds it little. Responses are as uneven as real ones, from one token up to half of
    max_tokens, one of them masked. `rollout_logprobs` are STALENESS at the stale quarter of the tokens, to be added to a
    policy's log-probs (with_old_logprobs), so that the clips act.
    """
    rng = np.random.default_rng(cfg.run.seed)
    half = cfg.audit.max_tokens // 2
    samples = []
    for i, length in enumerate(np.geomspace(1, half, cfg.audit.sequences).round().astype(int).tolist()):
        tokens = list(stream.at(i - i % GROUP_SIZE).token_ids)
        prompt_len = min(len(tokens), half)
        following = i
        while len(tokens) < prompt_len + length:
            following += 1
            tokens += stream.at(following).token_ids
        samples.append(
            Sample(
                token_ids=np.array(tokens[: prompt_len + length], np.int32),
                prompt_len=prompt_len,
                rollout_logprobs=rng.choice(STALENESS, length).astype(np.float32),
                staleness=(rng.random(length) < 0.25).astype(np.int32),
                mask=np.full(length, i != cfg.audit.sequences // 2),
                advantages=np.full(length, rng.uniform(0.5, 1.5) * (-0.5 if i % 4 == 3 else 1.0), np.float32),
                weights=np.zeros(length),
                group=i // GROUP_SIZE,
            )
        )
    return samples


def with_old_logprobs(samples: Sequence[Sample], logprobs: Sequence[np.ndarray]) -> list[Sample]:
    """The noise of audit_batch on top of a policy's log-probs [L] of each response."""
    return [
        replace(sample, rollout_logprobs=(own + sample.rollout_logprobs).astype(np.float32))
        for sample, own in zip(samples, logprobs, strict=True)
    ]


def old_logprobs(samples: Sequence[Sample], logprobs: Sequence[np.ndarray], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    """What the ratio is taken against: the policy's own log-prob [L] or, of stale tokens or of all, the sampler's."""
    if algorithm.old_logprobs == "engine":
        return [sample.rollout_logprobs for sample in samples]
    if algorithm.importance_cap:
        return list(logprobs)
    return [np.where(s.stale, s.rollout_logprobs, own) for s, own in zip(samples, logprobs, strict=True)]
