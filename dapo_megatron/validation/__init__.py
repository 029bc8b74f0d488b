"""Judges a configuration after all overrides: ranges, combinations, the model's sizes, what the machine must offer.

Every check adds to one list, so that a user sees all problems at once. Imports neither torch, ray nor megatron.
"""

from pathlib import Path

from dapo_megatron.config import Config
from dapo_megatron.config_io import ConfigError, Problem, read_config
from dapo_megatron.validation.inputs import check_data, check_reward
from dapo_megatron.validation.layout import check_layout, check_model
from dapo_megatron.validation.machine import check_ports, check_run_folder
from dapo_megatron.validation.ranges import AT_LEAST, BETWEEN, DIVISORS, check_ranges
from dapo_megatron.validation.recipe import check_lengths, check_objective, check_sampling
from dapo_megatron.validation.report import Report
from dapo_megatron.validation.rollout import check_rollout

__all__ = ["AT_LEAST", "BETWEEN", "load_valid_config", "validate"]


def load_valid_config(path: str | Path, overrides: list[str], *, dry_run: bool = False) -> tuple[Config, list[Problem]]:
    """The configuration and its warnings. Raises ConfigError with every error of structure and of values.

    A dry run describes a job for some other machine: what only this one lacks is a warning then.
    """
    config, problems = read_config(path, overrides)
    if not any(p.field == "configuration file" for p in problems):  # what an unread file doesn't set would be called missing
        problems = problems + validate(config)
    fatal = {"error"} if dry_run else {"error", "machine"}
    errors = [p for p in problems if p.severity in fatal]
    if errors:
        raise ConfigError(errors)
    return config, problems


def validate(config: Config) -> list[Problem]:
    """Everything wrong with a configuration of the right structure, warnings included."""
    report = Report(config)
    check_ranges(report)
    if all(report.value(name) >= 1 for name in DIVISORS):
        for check in (check_sampling, check_objective, check_lengths, check_layout, check_rollout):
            check(report)
    check_model(report)
    check_data(report)
    check_reward(report)
    check_run_folder(report)
    check_ports(report)
    return report.problems
