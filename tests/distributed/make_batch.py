"""Writes invariance_batch.npz: python -m tests.distributed.make_batch. The batch is fixed; this says how it came to be."""

from pathlib import Path

import numpy as np

from dapo_megatron.records import Sample
from dapo_megatron.samples_file import save_samples

BATCH = Path(__file__).with_name("invariance_batch.npz")
VOCAB = 67
# (response tokens, valid?, share of stale tokens, advantage) of each group's responses. One response is longer than all others
# together, from one token up; the second longest is masked, so that one of four data-parallel ranks has no valid token at all.
GROUPS = (
    ((100, True, 0.5, -0.8), (1, True, 1.0, 0.3), (7, True, 0.0, 1.1)),
    ((2, True, 1.0, -0.5), (30, False, 0.0, 1.4), (5, True, 0.0, -0.9)),
    ((3, True, 1.0, 0.7), (1, True, 0.0, -1.2), (9, False, 1.0, 0.4), (6, True, 1.0, 1.3)),
)


def main() -> None:
    rng = np.random.default_rng(20)
    samples = []
    for number, group in enumerate(GROUPS):
        prompt = rng.integers(0, VOCAB, (3, 8, 2)[number])
        for length, valid, stale_share, advantage in group:
            samples.append(
                Sample(
                    token_ids=np.concatenate([prompt, rng.integers(0, VOCAB, length)]).astype(np.int32),
                    prompt_len=len(prompt),
                    # old minus new log-prob, where stale: every kind of clip acts. The harness adds the model's log-probs.
                    rollout_logprobs=rng.normal(0, 1.0, length).astype(np.float32),
                    staleness=(rng.random(length) < stale_share).astype(np.int32),
                    mask=np.full(length, valid),
                    advantages=np.full(length, advantage, np.float32),
                    weights=np.zeros(length),
                    group=number,
                )
            )
    save_samples(BATCH, samples)


if __name__ == "__main__":
    main()
