"""The small batch that `dapo audit CONFIG` computes: the run's own prompts, answered with pieces of other prompts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dapo_megatron.config import Config
from dapo_megatron.data.stream import PromptStream
from dapo_megatron.records import Sample

GROUP_SIZE = 3


def audit_batch(cfg: Config, stream: PromptStream) -> list[Sample]:
    """audit.sequences samples of at most audit.max_tokens tokens, the same for every layout.

    Responses are as uneven as real ones: from one token up to as long as fits, one of them masked. What they say doesn't
    matter, but it is text that a model has some idea of. `rollout_logprobs` are noise around 0 at the stale half of the tokens,
    to be added to a policy's log-probs (with_old_logprobs), so that the ratio is not 1 and the clips act.
    """
    rng = np.random.default_rng(cfg.run.seed)
    limit = cfg.audit.max_tokens
    prompts = [np.array(stream.at(i).token_ids, np.int32)[-(limit // 2) :] for i in range(cfg.audit.sequences)]
    text = np.concatenate(prompts)
    lengths = np.geomspace(1, limit // 2, cfg.audit.sequences).round().astype(int)
    samples = []
    for i, prompt in enumerate(prompts):
        start = int(rng.integers(0, len(text)))
        length = int(lengths[i])
        samples.append(
            Sample(
                token_ids=np.concatenate([prompt, np.take(text, range(start, start + length), mode="wrap")]).astype(np.int32),
                prompt_len=len(prompt),
                rollout_logprobs=rng.normal(0, 0.5, length).astype(np.float32),
                stale=rng.random(length) < 0.5,
                mask=np.full(length, i != cfg.audit.sequences // 2),
                advantages=np.full(length, rng.normal(), np.float32),
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


def old_logprobs(samples: Sequence[Sample], logprobs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the ratio is taken against: the sampler's log-prob where a token is stale, else the policy's own [L]."""
    return [np.where(s.stale, s.rollout_logprobs, own) for s, own in zip(samples, logprobs, strict=True)]
