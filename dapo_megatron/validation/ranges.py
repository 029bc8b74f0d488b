"""What each number may be by itself."""

import math
from dataclasses import fields, is_dataclass
from typing import Any

from dapo_megatron.validation.report import Report

# Inclusive lower bounds.
AT_LEAST: dict[str, float] = {
    "run.steps": 1,
    "run.seed": 0,
    "data.train.limit": 0,
    "data.eval.limit": 0,
    "data.max_prompt_tokens": 1,
    "rollout.num_servers": 1,
    "rollout.tp": 1,
    "rollout.max_response_tokens": 1,
    "rollout.max_total_tokens": 1,
    "rollout.base_port": 0,
    "rollout.max_inflight_groups": 1,
    "sampling.prompts_per_step": 1,
    "sampling.max_groups_factor": 1,
    "reward.num_workers": 1,
    "reward.overlong.cache_tokens": 0,
    "reward.overlong.penalty_factor": 0,
    "algorithm.entropy_coef": 0,
    "algorithm.importance_cap": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip_grad": 0,
    "optimizer.max_skipped_updates": 0,
    "optimizer.prompts_per_minibatch": 1,
    "parallel.tp": 1,
    "parallel.pp": 1,
    "parallel.vpp": 1,
    "parallel.cp": 1,
    "parallel.dp": 1,
    "parallel.ep": 1,
    "parallel.max_tokens_per_microbatch": 1,
    "parallel.logprob_chunk_tokens": 0,
    "cluster.gpus_per_node": 1,
    "publish.bucket_mb": 1,
    "publish.check": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "audit.save_every": 0,
    "audit.num_layers": 0,
    "audit.sequences": 4,
    "audit.max_tokens": 8,
    "eval.every": -1,
    "eval.prompts": 0,
    "eval.samples": 1,
}
# Exclusive bounds (low, high).
BETWEEN: dict[str, tuple[float, float]] = {
    "rollout.temperature": (0, math.inf),
    "rollout.mem_fraction": (0, 1),
    "rollout.request_timeout_s": (0, math.inf),
    "rollout.startup_timeout_s": (0, math.inf),
    "rollout.health_interval_s": (0, math.inf),
    "rollout.health_timeout_s": (0, math.inf),
    "reward.timeout_s": (0, math.inf),
    "publish.timeout_s": (0, math.inf),
    "algorithm.std_eps": (0, math.inf),
    "algorithm.clip_low": (0, 1),
    "algorithm.clip_high": (0, math.inf),
    "optimizer.lr": (0, math.inf),
    "optimizer.eps": (1e-37, math.inf),  # below, it is 0 in float32, and Adam divides 0 by 0
    "optimizer.beta1": (0, 1),
    "optimizer.beta2": (0, 1),
    "eval.temperature": (0, math.inf),
}
# Fields that checks of combinations divide by.
DIVISORS = (
    "optimizer.prompts_per_minibatch",
    "cluster.gpus_per_node",
    "parallel.tp",
    "parallel.pp",
    "parallel.vpp",
    "parallel.cp",
    "parallel.ep",
    "rollout.tp",
)


def check_ranges(report: Report) -> None:
    for name in _float_fields(report.config, ""):
        if not math.isfinite(report.value(name)):
            report.add(name, "must be a finite number")
    for name, low in AT_LEAST.items():
        if report.value(name) < low:
            report.add(name, f"must be at least {low:g}")
    for name, (low, high) in BETWEEN.items():
        if not low < report.value(name) < high:
            bound = f"above {low:g}" if high == math.inf else f"between {low:g} and {high:g}, both excluded"
            report.add(name, f"must be {bound}")
    if not 0 < report.config.eval.top_p <= 1:
        report.add("eval.top_p", "must be above 0 and at most 1")


def _float_fields(section: Any, prefix: str) -> list[str]:
    names = []
    for f in fields(section):
        value = getattr(section, f.name)
        if is_dataclass(value):
            names += _float_fields(value, f"{prefix}{f.name}.")
        elif isinstance(value, float):
            names.append(f"{prefix}{f.name}")
    return names
