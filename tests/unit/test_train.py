"""The pieces of the step that are plain functions: learning rate, packing over ranks, metrics."""

import asyncio
from pathlib import Path
from unittest.mock import ANY, AsyncMock, MagicMock, call

import numpy as np
import pytest

from dapo_megatron.algo.samples import build_samples, split_minibatches
from dapo_megatron.config import Config
from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.rollout.sampler import SampledBatch
from dapo_megatron.rollout.sampling_stats import SamplingStats
from dapo_megatron.telemetry.measure import measure_step
from dapo_megatron.telemetry.metrics import METRICS

# What a trainer rank tells of an update.
REPLICA = {
    "ratio_max": 1.5,
    "fresh_ratio_error_max": 0.0,
    "grad_norm_max": 2.0,
    "dual_clipped": 0.0,
    "loss_sum": 4.0,
    "num_tokens": 4.0,
    "clipped_high": 1.0,
    "clipped_low": 0.0,
    "entropy_sum": 8.0,
    "prob_sum": 2.0,
    "k1_sum": 0.4,
    "k3_sum": 0.2,
}
# What it tells of trainer and engine before the first one.
DRIFT = {
    "fresh_tokens": 4.0,
    "stale_tokens": 0.0,
    "diff_sum": 0.2,
    "stale_diff_sum": 0.0,
    "diff_max": 0.1,
    "weight_sum": 4.0,
    "weight_square_sum": 4.0,
}


def make_group(index: int, correct: tuple[bool, ...], lengths: tuple[int, ...], cut: bool = False) -> Group:
    completions = [
        Completion(
            np.arange(n, dtype=np.int32), np.full(n, -1, np.float32), np.full(n, 3, np.int32), "length" if cut else "stop"
        )
        for n in lengths
    ]
    raw = np.where(correct, 1.0, -1.0).astype(np.float32)
    penalty = np.array([-0.5] + [0.0] * (len(correct) - 1), np.float32)
    return Group(
        Prompt(index, str(index), (1, 2), "g"), completions, [""] * len(correct), np.array(correct), raw, penalty, [None, "g"]
    )


def test_learning_rate_counts_rollout_steps() -> None:
    from dapo_megatron.train import learning_rate

    cfg = Config()
    cfg.optimizer.lr, cfg.optimizer.warmup_steps = 1e-6, 4
    assert [learning_rate(cfg, step) for step in (1, 2, 4, 100)] == pytest.approx([2.5e-7, 5e-7, 1e-6, 1e-6])
    cfg.optimizer.warmup_steps = 0
    assert learning_rate(cfg, 1) == 1e-6


def test_pack_shares_every_sample_once_over_the_ranks() -> None:
    from dapo_megatron.train import pack

    cfg = Config()
    cfg.parallel.dp, cfg.parallel.max_tokens_per_microbatch, cfg.rollout.max_response_tokens = 2, 16, 8
    groups = [make_group(i, (True, False), (3, 5)) for i in range(5)]
    minibatches = split_minibatches(build_samples(groups, version=3), 2)
    shares = pack(cfg, minibatches)
    assert len(shares) == 2 and [len(share) for share in shares] == [3, 3]
    for number, minibatch in enumerate(minibatches):
        parts = [micro for share in shares for micro in share[number]]
        assert sum(part.num_valid for part in parts) == sum(s.num_valid for s in minibatch)
        total = sum(part.weights.sum() for part in parts)
        assert total == pytest.approx(sum(s.num_valid for s in minibatch))  # token: w * N is 1 for every valid token


def test_measure_step_by_hand() -> None:
    groups = [make_group(0, (True, False), (3, 5)), make_group(1, (True, False), (2, 4), cut=True)]
    samples = build_samples(groups, version=3, overlong_filter=True)
    other = {**REPLICA, "ratio_max": 3.0, "clipped_high": 3.0}
    drift = [DRIFT, {**DRIFT, "diff_sum": 0.6, "diff_max": 0.3}]
    sampled = SampledBatch(groups, [], SamplingStats(groups_kept=2, tokens_kept=14, accuracy=0.5))
    metrics = measure_step(sampled, samples, drift, [[REPLICA, other]], num_minibatches=2)
    assert metrics.keys() <= METRICS.keys()
    expected = {
        "reward/mean": -0.25,
        "reward/raw_mean": 0.0,
        "reward/overlong_min": -0.5,
        "reward/unparsed": 2,
        "tokens/kept": 14,
        "tokens/trained": 8,  # the second group was cut and filtered
        "tokens/cut": 6,
        "tokens/packed": 22,
        "policy/entropy": 2.0,
        "policy/clip_high_share": 0.5,
        "policy/ratio_max": 3.0,
        "policy/loss": 1.0,
        "optimizer/grad_norm": 2.0,
        "optimizer/updates": 1,
        "optimizer/updates_skipped": 1,
        "sync/logprob_diff_mean": 0.1,
        "sync/logprob_diff_max": 0.3,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def make_run(tmp_path: Path) -> MagicMock:
    """A run that writes down every call. A step gets three groups of weights 3, in three mini-batches."""
    groups = [make_group(i, (True, False), (3, 5)) for i in range(3)]
    run = MagicMock(cfg=Config())
    run.cfg.optimizer.lr, run.cfg.optimizer.warmup_steps, run.cfg.optimizer.prompts_per_minibatch = 1e-6, 8, 1
    run.folder.path = tmp_path
    run.prepared.decode.return_value = ""
    run.batches.take = AsyncMock(return_value=SampledBatch(groups, [], SamplingStats()))
    run.batches.before_publish = AsyncMock()
    run.publisher.publish = AsyncMock(return_value={})
    policy = run.cluster.policy
    policy.load_batch = AsyncMock()
    policy.old_logprobs = AsyncMock(return_value=[DRIFT])
    policy.update = AsyncMock(return_value=[{**REPLICA, **DRIFT, "diff_sum": 2.0}])
    return run


def test_a_step_updates_at_one_learning_rate_and_publishes_the_result(tmp_path: Path) -> None:
    from dapo_megatron.train import dapo_step

    run = make_run(tmp_path)
    metrics = asyncio.run(dapo_step(run, 4))
    asked = [c for c in run.mock_calls if c[0].startswith(("batches.", "cluster.policy.", "publisher."))]
    updates = [call.cluster.policy.update(index, 5e-7) for index in range(3)]  # rollout step 4 of a warm-up of 8
    prepared = [call.cluster.policy.load_batch(ANY), call.cluster.policy.old_logprobs()]
    turn, lock, no_error = call.publisher.training(), call.publisher.lock, (None, None, None)
    trained = [turn, turn.__aenter__(), *prepared, *updates, turn.__aexit__(*no_error)]
    published = [lock.__aenter__(), call.publisher.publish(version=4, texts=ANY), lock.__aexit__(*no_error)]
    assert asked == [call.batches.take(version=3), *trained, call.batches.before_publish(), *published]
    assert run.publisher.version == 4  # before it is published: what a server that comes back meanwhile gets
    assert metrics["optimizer/updates"] == 3 and metrics["optimizer/lr"] == 5e-7
    assert metrics["sync/logprob_diff_mean"] == pytest.approx(0.05)


def test_the_engines_log_probs_take_no_forward_pass(tmp_path: Path) -> None:
    from dapo_megatron.train import dapo_step

    run = make_run(tmp_path)
    run.cfg.algorithm.old_logprobs = "engine"
    metrics = asyncio.run(dapo_step(run, 4))
    run.cluster.policy.old_logprobs.assert_not_called()
    assert run.cluster.policy.update.await_count == 3
    assert metrics["sync/logprob_diff_mean"] == pytest.approx(0.5)  # as the first update says


def test_skipped_updates_are_counted_and_left_out() -> None:
    groups = [make_group(0, (True, False), (3, 5))]
    samples = build_samples(groups, version=3)
    keys = ("entropy_sum", "prob_sum", "clipped_high", "clipped_low", "dual_clipped", "k1_sum", "k3_sum")
    good = {**dict.fromkeys(keys, 1.0), "num_tokens": 4.0, "loss_sum": 8.0, "ratio_max": 1.0, "fresh_ratio_error_max": 0.0}
    good["grad_norm_max"] = 2.0
    bad = dict.fromkeys(good, float("nan"))
    drift = [DRIFT]
    sampled = SampledBatch(groups, [], SamplingStats())
    metrics = measure_step(sampled, samples, drift, [[bad], [good], [bad]], num_minibatches=4)
    counts = {name: metrics[f"optimizer/updates{name}"] for name in ("", "_nonfinite", "_skipped")}
    assert counts == {"": 1, "_nonfinite": 2, "_skipped": 1}
    assert (metrics["policy/loss"], metrics["policy/entropy"], metrics["optimizer/grad_norm"]) == (2.0, 0.25, 2.0)
    none = measure_step(sampled, samples, drift, [[bad]], num_minibatches=1)
    assert none["optimizer/updates"] == 0 and none["optimizer/updates_nonfinite"] == 1 and "policy/loss" not in none


def test_nothing_valid_is_no_update() -> None:
    groups = [make_group(0, (True, False), (3, 5), cut=True)]
    samples = build_samples(groups, version=3, overlong_filter=True)
    drift = [dict.fromkeys(DRIFT, 0.0)]
    metrics = measure_step(SampledBatch(groups, [], SamplingStats()), samples, drift, [], num_minibatches=1)
    assert metrics["optimizer/updates"] == 0 and metrics["optimizer/updates_skipped"] == 1
    assert "policy/loss" not in metrics and metrics["tokens/trained"] == 0
