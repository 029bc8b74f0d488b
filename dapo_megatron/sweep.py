"""Sweeps: one run for each line of a file of overrides, and one table over all of them.

    python -m dapo_megatron.sweep check|train|table CONFIG SWEEP_FILE [key=value ...]

`check` judges every line's configuration. `train` is `dapo train` for one line, that of SLURM_ARRAY_TASK_ID (from 1). `table`
writes RUN_DIR/NAME_sweep.md, NAME being run.name. A line is `name: key=value ...`; its run is called NAME_name. Words are
split and quoted by the shell's rules, # starts a comment. The command line is for all runs: what it sets no line may set. Exit
codes are `dapo train`'s.
"""

import argparse
import fcntl
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dapo_megatron.config import Config
from dapo_megatron.config_io import ConfigError, Problem, load_config, read_config
from dapo_megatron.telemetry.report import read_run, report_table, write_text
from dapo_megatron.validation import load_valid_config

TASK = "SLURM_ARRAY_TASK_ID"
QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""")


@dataclass(frozen=True)
class SweepRun:
    """A line of a sweep file; `where` names the file and the line, for messages."""

    name: str
    overrides: list[str]
    where: str


def read_sweep(path: str | Path) -> list[SweepRun]:
    """The runs in the file's order; task i of a job array is the i-th, from 1. ConfigError with all that is wrong."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("sweep file", str(path), f"can't be read: {error}")]) from error
    runs: list[SweepRun] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            runs += _read_line(line, where)
        except ValueError as error:
            problems.append(Problem(where, line.strip(), str(error)))
    for name, count in Counter(run.name for run in runs).items():
        if count > 1:
            lines_of = ", ".join(run.where.rpartition(" ")[2] for run in runs if run.name == name)
            problems.append(Problem(str(path), name, f"is the name of lines {lines_of}; every run needs a folder of its own"))
    if not runs and not problems:
        problems.append(Problem("sweep file", str(path), "no run in it; a line is `name: key=value key=value ...`"))
    if problems:
        raise ConfigError(problems)
    return runs


def _read_line(line: str, where: str) -> list[SweepRun]:
    """[] for a blank line or a comment. ValueError for what can't be understood."""
    if re.match(r"[^#]*[^\s#]#", QUOTED.sub("_", line)):
        raise ValueError("a # starts a comment, and here it is part of a word: put a space before it, or the word in quotes")
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise ValueError(f"{error}; quotes are the shell's") from error
    if not words:
        return []
    name, colon, first = words[0].partition(":")
    if not colon or first or not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError("must begin with the run's name, a colon and a space; the name has letters, digits and . _ + - only")
    for word in words[1:]:
        if not re.match(r"\w[\w.]*=", word):  # options aren't
            raise ValueError(f"{word!r} is no key=value; a value with spaces needs quotes")
        if word.startswith("run.name="):
            raise ValueError("run.name comes from the line's name; leave it out (the command line's run.name is put before it)")
    return [SweepRun(name, words[1:], where)]


def arguments(config: str | Path, run: SweepRun, overrides: Sequence[str]) -> list[str]:
    """All overrides of a run: the line's, the command line's, its name."""
    base, _ = read_config(config, list(overrides))
    return [*run.overrides, *overrides, f"run.name={_name(base, run)}"]


def _name(base: Config, run: SweepRun) -> str:
    return f"{base.run.name}_{run.name}"


def clashes(runs: Sequence[SweepRun], overrides: Sequence[str]) -> list[Problem]:
    """What lines and command line both set: the command line's value would make such lines' runs the same."""
    given = {word.partition("=")[0] for word in overrides}
    message = "is set on the command line too, for all runs: leave it out there, or in the file"
    return [
        Problem(f"{run.where}: {key}", value, message)
        for run in runs
        for key, _, value in (word.partition("=") for word in run.overrides)
        if key in given
    ]


def check_sweep(config: str | Path, runs: Sequence[SweepRun], overrides: Sequence[str]) -> tuple[list[Config], list[Problem]]:
    """Every run's configuration, judged as a dry run's, and their warnings. ConfigError with all lines' errors.

    What holds for all lines alike is named once, without a line.
    """
    if faults := clashes(runs, overrides):
        raise ConfigError(faults)
    configs: list[Config] = []
    found: list[tuple[str, Problem]] = []
    for run in runs:
        try:
            loaded, problems = load_valid_config(config, arguments(config, run, overrides), dry_run=True)
            configs.append(loaded)
        except ConfigError as error:
            problems = error.problems
        found += [(run.where, problem) for problem in problems]
    if len({loaded.run.dir for loaded in configs}) > 1:
        found.append(("the lines", Problem("run.dir", None, "must be the same for all, as one table is: use the command line")))
    times = Counter(str(problem) for _, problem in found)
    named: dict[str, Problem] = {}
    for where, problem in found:
        if times[str(problem)] < len(runs) or len(runs) == 1:
            problem = replace(problem, field=f"{where}: {problem.field}")
        named[str(problem)] = problem
    if errors := [problem for problem in named.values() if problem.severity == "error"]:
        raise ConfigError(errors)
    return configs, list(named.values())


def chosen(runs: Sequence[SweepRun], task: str | None) -> SweepRun:
    """The run of a job array's task. ConfigError if there is none."""
    use = f"submit with sbatch --array=1-{len(runs)}"
    if task is None:
        raise ConfigError([Problem(TASK, None, f"isn't set: a sweep is a job array; {use}")])
    if not task.isdecimal() or not 1 <= int(task) <= len(runs):
        raise ConfigError([Problem(TASK, task, f"the file has {len(runs)} run(s), counted from 1; {use}")])
    return runs[int(task) - 1]


def refresh_table(config: str | Path, sweep_file: str | Path, overrides: Sequence[str]) -> Path:
    """Write the table over all runs as they are now. Tasks that end at the same time wait for each other before they read, so
    that the last one to write has seen what all others did. ConfigError if it can't be told where the table belongs."""
    runs = read_sweep(sweep_file)
    base = load_config(config, list(overrides))
    folders = [Path(base.run.dir).expanduser() / _name(base, run) for run in runs]
    path = Path(base.run.dir).expanduser() / f"{base.run.name}_sweep.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = report_table([read_run(folder) for folder in folders])
        changes = "\n".join(f"- {_name(base, run)}: `{shlex.join(run.overrides) or 'nothing'}`" for run in runs)
        write_text(path, f"# {sweep_file} on {config}\n\n{table}\nWhat each run changes:\n\n{changes}\n")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dapo_megatron.sweep", description="Runs by the lines of a sweep file.")
    parser.add_argument("action", choices=("check", "train", "table"))
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("sweep_file", metavar="SWEEP_FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args(argv)
    try:
        return {"check": _check, "train": _train, "table": _table}[args.action](args)
    except ConfigError as error:
        print(error.text(args.sweep_file), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 1


def _check(args: argparse.Namespace) -> int:
    runs = read_sweep(args.sweep_file)
    configs, warnings = check_sweep(args.config, runs, args.overrides)
    for problem in warnings:
        print(f"warning: {problem}", file=sys.stderr)
    for number, (config, run) in enumerate(zip(configs, runs, strict=True), start=1):
        print(f"{number:>3}  {config.run.name}  {shlex.join(run.overrides)}".rstrip())
    print(f"{len(runs)} run(s), all valid: sbatch --array=1-{len(runs)} ...")
    return 0


def _train(args: argparse.Namespace) -> int:
    from dapo_megatron.cli import main as dapo

    runs = read_sweep(args.sweep_file)
    run = chosen(runs, os.environ.get(TASK))
    if faults := clashes([run], args.overrides):
        raise ConfigError(faults)
    command = ["train", args.config, *arguments(args.config, run, args.overrides), "--resume", "auto"]
    print(f"{run.where}: dapo {shlex.join(command)}", flush=True)
    return dapo(command)


def _table(args: argparse.Namespace) -> int:
    print(f"table over all runs: {refresh_table(args.config, args.sweep_file, args.overrides)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
