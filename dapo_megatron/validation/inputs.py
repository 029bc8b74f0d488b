"""Prompt sources, their rendering, and the verifier."""

import functools
import math
from pathlib import Path

from dapo_megatron.config import SourceConfig
from dapo_megatron.validation.report import Report


def check_data(report: Report) -> None:
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


def _source(report: Report, name: str, source: SourceConfig) -> None:
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


def _generator(report: Report, field: str, source: SourceConfig) -> None:
    """Problems that are made cost little: make them now and see whether the arguments and the verifier fit."""
    from dapo_megatron.data.sources import load_rows
    from dapo_megatron.reward.verifiers import VERIFIERS, validate_gold

    verifier = report.config.reward.verifier
    try:
        load_rows(source, functools.partial(validate_gold, verifier) if verifier in VERIFIERS else None)
    except ValueError as error:
        report.add(field, str(error).removeprefix(f"data source {source.path}: "))


def _held_out(report: Report) -> None:
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


def check_reward(report: Report) -> None:
    from dapo_megatron.reward.overlong import MAX_REWARD
    from dapo_megatron.reward.verifiers import make_verifier

    reward = report.config.reward
    try:
        make_verifier(reward.verifier, reward.verifier_args)
    except ValueError as error:
        report.add("reward.verifier", str(error).removeprefix("reward.verifier: "))
    for name in ("reward.correct", "reward.incorrect", "reward.overlong.penalty_factor"):
        if MAX_REWARD < abs(report.value(name)) < math.inf:
            report.add(name, f"must be within +-{MAX_REWARD:g}")
