"""Judges a configuration after all overrides: ranges, combinations, the model's sizes, what the machine must offer.

Every check adds to one list, so that a user sees all problems at once. Imports neither torch, ray nor megatron.
"""

import functools
import math
import os
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from dapo_megatron.config import Config, SourceConfig
from dapo_megatron.config_io import ConfigError, Problem, Severity, read_config
from dapo_megatron.machine import has_gpu, why_not_listenable, why_not_writable
from dapo_megatron.model_sizes import FAMILIES, ModelSizes, find_weights, read_sizes

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
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip_grad": 0,
    "optimizer.prompts_per_minibatch": 1,
    "parallel.tp": 1,
    "parallel.pp": 1,
    "parallel.dp": 1,
    "parallel.max_tokens_per_microbatch": 1,
    "parallel.logprob_chunk_tokens": 1,
    "cluster.gpus_per_node": 1,
    "publish.bucket_mb": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
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
    "reward.timeout_s": (0, math.inf),
    "algorithm.std_eps": (0, math.inf),
    "algorithm.clip_low": (0, 1),
    "algorithm.clip_high": (0, math.inf),
    "optimizer.lr": (0, math.inf),
    "optimizer.eps": (0, math.inf),
    "optimizer.beta1": (0, 1),
    "optimizer.beta2": (0, 1),
    "eval.temperature": (0, math.inf),
}
# Fields that checks of combinations divide by.
DIVISORS = ("optimizer.prompts_per_minibatch", "cluster.gpus_per_node", "parallel.tp", "parallel.pp", "rollout.tp")


class _Report:
    """The problems found so far; a field's value is looked up by its dotted name."""

    def __init__(self, config: Config):
        self.config = config
        self.problems: list[Problem] = []

    def value(self, field: str) -> Any:
        value: Any = self.config
        for part in field.split("."):
            value = getattr(value, part)
        return value

    def add(self, field: str, message: str, severity: Severity = "error") -> None:
        self.problems.append(Problem(field, self.value(field), message, severity))


def load_valid_config(path: str | Path, overrides: list[str], *, dry_run: bool = False) -> tuple[Config, list[Problem]]:
    """The configuration and its warnings. Raises ConfigError with every error of structure and of values.

    A dry run describes a job for some other machine: what only this one lacks is a warning then.
    """
    config, problems = read_config(path, overrides)
    problems = problems + validate(config)
    fatal = {"error"} if dry_run else {"error", "machine"}
    errors = [p for p in problems if p.severity in fatal]
    if errors:
        raise ConfigError(errors)
    return config, problems


def validate(config: Config) -> list[Problem]:
    """Everything wrong with a configuration of the right structure, warnings included."""
    report = _Report(config)
    _ranges(report)
    if all(report.value(name) >= 1 for name in DIVISORS):
        for check in (_sampling, _objective, _lengths, _layout):
            check(report)
    _model(report)
    _data(report)
    _reward(report)
    _run_folder(report)
    _ports(report)
    return report.problems


def _ranges(report: _Report) -> None:
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


def _sampling(report: _Report) -> None:
    c = report.config
    if c.sampling.samples_per_prompt < 2:
        report.add(
            "sampling.samples_per_prompt",
            "a group of one has no advantage (its reward is its mean) and is never informative; use 2 or more",
        )
    for name, off in (("rollout.top_p", 1.0), ("rollout.top_k", -1)):
        if report.value(name) != off:
            report.add(
                name,
                f"training needs {off:g}: truncation renormalises, so the trainer's log-probs would belong to another "
                "distribution than the one that was sampled and the ratio would be wrong (eval.top_p is free)",
            )
    if c.optimizer.prompts_per_minibatch > c.sampling.prompts_per_step:
        report.add(
            "optimizer.prompts_per_minibatch",
            f"must be at most sampling.prompts_per_step ({c.sampling.prompts_per_step}): there is no more to train on",
        )
    elif c.sampling.prompts_per_step % c.optimizer.prompts_per_minibatch:
        rest = c.sampling.prompts_per_step % c.optimizer.prompts_per_minibatch
        report.add(
            "optimizer.prompts_per_minibatch",
            f"doesn't divide sampling.prompts_per_step ({c.sampling.prompts_per_step}): the last update of a step sees "
            f"{rest} prompts only",
            "warning",
        )
    elif c.sampling.prompts_per_step == c.optimizer.prompts_per_minibatch:
        report.add(
            "optimizer.prompts_per_minibatch",
            "one update a rollout: the ratio is always 1, so neither clip ever acts",
            "warning",
        )


def _objective(report: _Report) -> None:
    a = report.config.algorithm
    if a.dual_clip != 0 and a.dual_clip <= 1:
        report.add("algorithm.dual_clip", "must be above 1 (10 in the published recipe), or 0 to switch it off")
    if a.clip_high < a.clip_low:
        report.add("algorithm.clip_high", f"below algorithm.clip_low ({a.clip_low:g}): the opposite of clip-higher", "warning")
    if a.aggregation == "constant" and a.advantage == "group_norm":
        report.add("algorithm.aggregation", "Dr. GRPO's constant normalisation goes with advantage=mean_only", "warning")
    r = report.config.reward
    if r.correct <= r.incorrect:
        report.add("reward.correct", f"must be above reward.incorrect ({r.incorrect:g})")


def _lengths(report: _Report) -> None:
    c = report.config
    longest = c.data.max_prompt_tokens + c.rollout.max_response_tokens
    overlong = c.reward.overlong
    if overlong.penalty_factor > 0 and overlong.cache_tokens >= c.rollout.max_response_tokens:
        report.add(
            "rollout.max_response_tokens",
            f"not above reward.overlong.cache_tokens ({overlong.cache_tokens}), so every response would be punished; "
            "raise the limit, shrink the cache, or set reward.overlong.penalty_factor=0",
        )
    if overlong.penalty_factor > 0 and overlong.cache_tokens == 0:
        report.add("reward.overlong.cache_tokens", "must be above 0, or set reward.overlong.penalty_factor=0")
    if c.parallel.max_tokens_per_microbatch < longest:
        report.add(
            "parallel.max_tokens_per_microbatch",
            f"below the longest sequence ({longest} = data.max_prompt_tokens + rollout.max_response_tokens): a longer "
            "sample gets a micro-batch of its own, and memory must suffice for it",
            "warning",
        )
    if c.rollout.engine == "sglang" and c.rollout.max_total_tokens < longest and not has_gpu():
        report.add(
            "rollout.max_total_tokens",
            f"the server's cache on CPU must hold one whole sequence: at least {longest} (data.max_prompt_tokens + "
            "rollout.max_response_tokens)",
            "machine",
        )


def _layout(report: _Report) -> None:
    c = report.config
    p, per_node = c.parallel, c.cluster.gpus_per_node
    if p.sequence_parallel and p.tp == 1:
        report.add("parallel.sequence_parallel", "needs parallel.tp > 1: it splits sequences over the tensor-parallel ranks")
    for name, tp in (("parallel.tp", p.tp), ("rollout.tp", c.rollout.tp)):
        if tp > per_node or (c.world_size > per_node and per_node % tp):
            report.add(name, f"must divide cluster.gpus_per_node ({per_node}): a tensor-parallel group stays within a node")
    if c.world_size > per_node and c.world_size % per_node:
        report.add(
            "parallel.dp",
            f"the world size tp x pp x dp = {p.tp} x {p.pp} x {p.dp} = {c.world_size} doesn't factor into whole nodes "
            f"of {per_node} (cluster.gpus_per_node); use a multiple of {per_node}",
        )
    if c.sampling.samples_per_prompt * c.optimizer.prompts_per_minibatch < p.dp:
        report.add("parallel.dp", "more data-parallel ranks than responses in a mini-batch; some would have nothing to do")
    servers = c.rollout.num_servers * c.rollout.tp
    if c.cluster.colocate and servers > c.world_size:
        report.add(
            "rollout.num_servers",
            f"the servers need {servers} GPUs (num_servers x rollout.tp), but cluster.colocate shares the trainer's "
            f"{c.world_size}; use fewer servers",
        )
    elif c.cluster.colocate and c.world_size > 1:
        report.add(
            "cluster.colocate",
            "sharing GPUs works with one GPU so far (one rank, one server); give the servers GPUs of their own: false",
        )
    if c.rollout.engine == "local":
        if servers > 1:
            report.add("rollout.num_servers", "the local engine is one process: num_servers and rollout.tp must be 1")
        if c.rollout.server_args:
            report.add("rollout.server_args", "the local engine has no server; remove them")


def _model(report: _Report) -> None:
    c = report.config
    if not c.model.path:
        report.add("model.path", "is required: an HF folder, a .gguf file, a hub id, package:NAME, or random")
        return
    if c.model.random_model and c.model.path != "random":
        report.add("model.random_model", "is only read with model.path=random; remove it")
    try:
        find_weights(c.model)
    except ValueError as error:
        report.add("model.path", str(error), "machine")
        return
    try:
        sizes = read_sizes(c.model)
    except (ValueError, OSError) as error:
        report.add("model.path", str(error))
        return
    if sizes is None:
        report.add("model.path", "taken for a hub id, as there is no such folder here; its sizes aren't checked", "warning")
        return
    if sizes.family not in FAMILIES:
        report.add("model.path", f"unknown model family {sizes.family!r}; the policy builds {', '.join(FAMILIES)}")
    elif all(report.value(name) >= 1 for name in DIVISORS):
        _model_fits(report, sizes)


def _model_fits(report: _Report, sizes: ModelSizes) -> None:
    c = report.config
    splits = (
        ("parallel.tp", "attention heads", sizes.num_heads),
        ("parallel.tp", "query groups (key-value heads)", sizes.num_query_groups),
        ("parallel.tp", "feed-forward rows", sizes.ffn_size),
        ("parallel.pp", "layers", sizes.num_layers),
        ("rollout.tp", "attention heads", sizes.num_heads),
    )
    for name, what, number in splits:
        if number % report.value(name):
            options = [str(n) for n in range(1, min(number, 64) + 1) if number % n == 0]
            report.add(name, f"doesn't divide the model's {number} {what}; possible: {', '.join(options)}")
    longest = c.data.max_prompt_tokens + c.rollout.max_response_tokens
    if 0 < sizes.max_positions < longest:
        report.add(
            "rollout.max_response_tokens",
            f"with data.max_prompt_tokens ({c.data.max_prompt_tokens}) a sequence can have {longest} tokens, but the "
            f"model's context is {sizes.max_positions}",
        )


def _data(report: _Report) -> None:
    d = report.config.data
    _source(report, "data.train", d.train)
    if report.config.eval.every >= 0:
        _source(report, "data.eval", d.eval)
        _held_out(report)
    if "{prompt}" not in d.template:
        report.add("data.template", "must contain {prompt}, where the problem's text goes")
    for turn in d.few_shot:
        if len(turn) != 2:
            report.add("data.few_shot", f"every example is a pair [question, reply]; {turn!r} has {len(turn)} parts")


def _source(report: _Report, name: str, source: SourceConfig) -> None:
    from dapo_megatron.data.sources import source_faults, source_kind

    field = f"{name}.path"
    if not source.path:
        hint = "" if name == "data.train" else ", or set eval.every=-1 to never evaluate"
        report.add(field, f"is required: a .jsonl, .jsonl.gz or .parquet file, a hub id, or generator:NAME{hint}")
        return
    faults, kind = source_faults(source), source_kind(source.path)
    for key, fault in faults.items():
        report.add(f"{name}.{key}", fault)
    if kind == "generator" and not faults:
        _generator(report, field, source)
    elif kind == "hub":
        report.add(field, "taken for a hub id, as there is no such file or folder here", "warning")
    elif kind in ("file", "folder") and "path" not in faults and not Path(source.path).expanduser().exists():
        report.add(field, f"there is no such {kind}; paths are relative to the folder you start from", "machine")


def _generator(report: _Report, field: str, source: SourceConfig) -> None:
    """Problems that are made cost little: make them now and see whether the arguments and the verifier fit."""
    from dapo_megatron.data.sources import load_rows
    from dapo_megatron.reward.verifiers import VERIFIERS, validate_gold

    verifier = report.config.reward.verifier
    try:
        load_rows(source, functools.partial(validate_gold, verifier) if verifier in VERIFIERS else None)
    except ValueError as error:
        report.add(field, str(error).removeprefix(f"data source {source.path}: "))


def _held_out(report: _Report) -> None:
    """Two sides of one generator are apart only if they are cut alike."""
    from dapo_megatron.data.generators import GENERATORS, split_args

    train, held_out = report.config.data.train, report.config.data.eval
    name = train.path.removeprefix("generator:")
    if train.path != held_out.path or name not in GENERATORS:
        return
    there = split_args(name, train.args)
    for key, value in split_args(name, held_out.args).items():
        if value != there[key]:
            report.add(
                "data.eval.args",
                f"{key} is {value!r} here and {there[key]!r} in data.train.args: the test split would hold problems that are "
                "trained on; use the same",
            )


def _reward(report: _Report) -> None:
    from dapo_megatron.reward.verifiers import make_verifier

    reward = report.config.reward
    try:
        make_verifier(reward.verifier, reward.verifier_args)
    except ValueError as error:
        report.add("reward.verifier", str(error).removeprefix("reward.verifier: "))


def _run_folder(report: _Report) -> None:
    run = report.config.run
    if not re.fullmatch(r"\w[\w.+-]*", run.name):
        report.add("run.name", "names a folder: letters, digits and . _ + - only")
        return
    reason = why_not_writable((Path(run.dir) / run.name).expanduser().absolute())
    if reason:
        report.add("run.dir", f"{reason}; choose another folder", "machine")


def _ports(report: _Report) -> None:
    rollout = report.config.rollout
    if rollout.engine != "sglang" or rollout.base_port <= 0 or os.environ.get("RAY_ADDRESS"):
        return  # on a cluster the servers' nodes are others
    ports = range(rollout.base_port, rollout.base_port + rollout.num_servers)
    if ports.stop > 65536:
        report.add("rollout.base_port", f"with {rollout.num_servers} servers the ports go over 65535; choose a lower one")
        return
    reason = why_not_listenable(ports)
    if reason:
        report.add("rollout.base_port", f"{reason}; choose another, or 0 for any", "machine")
