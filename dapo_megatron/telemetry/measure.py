"""From what a step produced to its metrics (names and meanings: metrics.METRICS)."""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import psutil

from dapo_megatron.algo.objective import merge_stats
from dapo_megatron.algo.off_policy import effective_sample_size
from dapo_megatron.records import Group, Sample
from dapo_megatron.telemetry.console import PHASES, RunConsole

Stats = dict[str, float]


JOB_STARTED = "DAPO_JOB_STARTED"  # when the Slurm job began, in seconds since 1970: its script sets this


def seconds_since_start() -> float:
    """Of the Slurm job, or else of this process."""
    return time.time() - float(os.environ.get(JOB_STARTED) or psutil.Process().create_time())


class Phases:
    """Names the phase on the console and adds up the seconds of each within a step."""

    def __init__(self, console: RunConsole) -> None:
        self._console = console
        self._startup: dict[str, float] | None = None
        self._begin_clock()

    def begin_step(self) -> None:
        if self._startup is None:
            self._startup = {"time/startup_s": seconds_since_start()}
        self._begin_clock()

    def _begin_clock(self) -> None:
        self._seconds: dict[str, float] = {}
        self._begin = time.monotonic()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        assert name in PHASES, name
        self._console.phase(name)
        begin = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begin

    def seconds(self) -> dict[str, float]:
        """Of each phase of the step so far, and of the step."""
        phases = {f"time/{name}_s": value for name, value in self._seconds.items()}
        return {**phases, "time/step_s": time.monotonic() - self._begin}

    def metrics(self, values: Mapping[str, float], stream: Any, peak_memory_gb: float) -> dict[str, float]:
        """Times and rates of the step so far, and the state of the prompt stream. `values`: the step's other metrics."""
        seconds = self._seconds
        startup, self._startup = self._startup or {}, {}  # in the first step's metrics only
        rates = {
            "throughput/generated_tokens_per_s": values["tokens/generated"] / max(values["time/collect_s"], 1e-9),
            "throughput/trained_tokens_per_s": values["tokens/packed"] / max(seconds.get("update", 0.0), 1e-9),
        }
        return {
            **startup,
            **self.seconds(),
            **rates,
            "memory/peak_gb": peak_memory_gb,
            "data/epoch": float(values["data/position"] // len(stream)),
            "data/skipped_too_long": float(stream.num_skipped_too_long),
        }


def measure_step(
    sampled: Any, samples: Sequence[Sample], drift: list[Stats], updates: list[list[Stats]], num_minibatches: int
) -> dict[str, float]:
    """Metrics of sampling, rewards, objective and trainer-engine drift.

    `sampled` is the sampler's batch; `drift` and each of `updates` hold the statistics of every model replica. Without `drift`,
    where old log-probs weren't computed again, the first update that was done tells it.
    """
    first = next((update for update in updates if not was_skipped(update)), [])
    return {
        **_sampling(asdict(sampled.stats)),
        **_rewards(sampled.groups, [*sampled.groups, *sampled.filtered]),
        **_objective(updates, num_minibatches),
        **_drift(drift or first),
        **_staleness(samples),
        "tokens/trained": float(sum(sample.num_valid for sample in samples)),
        "tokens/packed": float(sum(len(sample.token_ids) for sample in samples)),
        "time/collect_s": sampled.seconds,
        "data/position": float(sampled.position),
    }


def _sampling(stats: dict[str, Any]) -> dict[str, float]:
    named = {
        "accuracy": "reward/accuracy",
        "response_length_mean": "response/length_mean",
        "response_length_max": "response/length_max",
        "cut_share": "response/cut_share",
    }
    metrics = {}
    for key, value in stats.items():
        section = "tokens/" + key.removeprefix("tokens_") if key.startswith("tokens_") else f"sampling/{key}"
        metrics[named.get(key, section)] = float(value)
    return metrics


def _rewards(groups: Sequence[Group], resolved: Sequence[Group]) -> dict[str, float]:
    reward = np.concatenate([group.reward for group in groups])
    penalty = np.concatenate([group.overlong_penalty for group in groups])
    completions = [completion for group in groups for completion in group.completions]
    return {
        "reward/mean": float(reward.mean()),
        "reward/raw_mean": float(np.concatenate([group.raw_reward for group in groups]).mean()),
        "reward/kept_accuracy": float(np.concatenate([group.correct for group in groups]).mean()),
        "reward/overlong_mean": float(penalty.mean()),
        "reward/overlong_min": float(penalty.min()),
        "reward/unparsed": float(sum(answer is None for group in groups for answer in group.extracted)),
        "reward/verifier_errors": float(sum(group.num_errors for group in resolved)),
        "time/reward_s": sum(group.reward_s for group in resolved),
        "tokens/cut": float(sum(len(c) for c in completions if c.finish_reason == "length")),
    }


def was_skipped(update: list[Stats]) -> bool:
    """Whether the policy left everything as it was, given an update's statistics of every model replica."""
    return not all(math.isfinite(replica["grad_norm_max"]) for replica in update)


def _objective(updates: list[list[Stats]], num_minibatches: int) -> dict[str, float]:
    done = [update for update in updates if not was_skipped(update)]
    metrics = {
        "optimizer/updates": float(len(done)),
        "optimizer/updates_skipped": float(num_minibatches - len(updates)),
        "optimizer/updates_nonfinite": float(len(updates) - len(done)),
    }
    if not done:
        return metrics
    per_update = [merge_stats(replicas) for replicas in done]
    total = {key: float(value) for key, value in merge_stats(per_update).items()}
    tokens = total["num_tokens"]
    shares = {
        "policy/entropy": "entropy_sum",
        "policy/prob_mean": "prob_sum",
        "policy/clip_high_share": "clipped_high",
        "policy/clip_low_share": "clipped_low",
        "policy/dual_clip_share": "dual_clipped",
        "policy/k1": "k1_sum",
        "policy/k3": "k3_sum",
    }
    return {
        **metrics,
        **{name: total[key] / tokens for name, key in shares.items()},
        "policy/ratio_max": total["ratio_max"],
        "policy/first_ratio_error_max": float(per_update[0]["fresh_ratio_error_max"]),
        "policy/loss": float(np.mean([float(u["loss_sum"]) / float(u["num_tokens"]) for u in per_update])),
        "optimizer/grad_norm": float(np.mean([float(u["grad_norm_max"]) for u in per_update])),
    }


def _drift(drift: list[Stats]) -> dict[str, float]:
    total = merge_stats(drift) if drift else {"fresh_tokens": 0.0, "stale_tokens": 0.0}
    fresh, stale = total["fresh_tokens"], total["stale_tokens"]
    metrics = {}
    if fresh:
        metrics["sync/logprob_diff_mean"] = total["diff_sum"] / fresh
        metrics["sync/logprob_diff_max"] = total["diff_max"]
    if stale:
        metrics["sync/stale_logprob_diff_mean"] = total["stale_diff_sum"] / stale
    if fresh + stale:
        metrics["sync/effective_sample_size"] = effective_sample_size(total)
    if fresh + stale and "truncated" in total:
        metrics["sync/truncated_share"] = total["truncated"] / (fresh + stale)
    return metrics


def _staleness(samples: Sequence[Sample]) -> dict[str, float]:
    trained = np.concatenate([sample.staleness[sample.mask] for sample in samples])
    if not len(trained):
        return {}
    return {
        "sync/staleness_0": float((trained == 0).mean()),
        "sync/staleness_1": float((trained == 1).mean()),
        "sync/staleness_2_or_more": float((trained > 1).mean()),
    }
