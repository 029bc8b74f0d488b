"""The `dapo` command. Exit codes: 0 done, 1 the run failed, 2 wrong use or configuration, 75 cut off (start it again to go on),
130 interrupted."""

import argparse
import errno
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dapo_megatron.config import Config
from dapo_megatron.config_io import ConfigError, Problem, config_hash, resolved_yaml
from dapo_megatron.layout import layout_text
from dapo_megatron.stopping import EXIT_CODE, CutOff
from dapo_megatron.validation import load_valid_config

NUM_SHOWN = 3  # prompts that `dapo data` prints


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code; errors meant for users are one line each, without a traceback."""
    args = _parse(argv)
    config: Config | None = None
    try:
        if args.run is _report:  # of runs, which have their configuration
            return _report(args)
        dry_run = getattr(args, "dry_run", False) or args.run is _submit  # a job runs on other machines
        if "step" in args:
            _check_overrides_of_audit(args)
            args.run_dir, args.config = Path(args.config), _config_of_audit(args.config, args.step)
        stands_alone = getattr(args, "step", None) is not None  # a recorded step has all that it needs, wherever it is now
        load = _load_for_eval if args.run is _eval else load_valid_config
        config, warnings = load(args.config, args.overrides, dry_run=dry_run or stands_alone)
        _print_warnings([] if stands_alone else warnings)
        _check_resume(getattr(args, "resume", "auto"), dry_run)
        return int(args.run(config, args))
    except ConfigError as error:
        print(error.text(args.config), file=sys.stderr)
        return 2
    except CutOff as error:
        print(f"dapo: {error}", file=sys.stderr)
        return EXIT_CODE
    except (ValueError, RuntimeError, OSError) as error:
        where = _keep_traceback(config, args) if config else ""
        print(f"dapo: {' '.join(str(error).split()) or type(error).__name__}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dapo: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        where = _keep_traceback(config, args)
        print(f"dapo: {what}; this is a fault of dapo_megatron, please report it{where}", file=sys.stderr)
        return 1


def _check_resume(resume: str, dry_run: bool) -> None:
    """ConfigError for a path that is no checkpoint, before model and data are read; a dry run may be for another machine."""
    if resume in ("auto", "never") or (Path(resume).expanduser() / "state.json").is_file():
        return
    message = "no checkpoint there (state.json is missing); give a step_NNNNNN folder, auto or never"
    problem = Problem("--resume", resume, message, "machine")
    if not dry_run:
        raise ConfigError([problem])
    _print_warnings([problem])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before, between and after options, which argparse alone doesn't allow within a subcommand."""
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if "--sbatch" in words[:-1]:  # argparse takes no value that looks like an option, unless it is joined to its name
        at = words.index("--sbatch")
        words[at : at + 2] = ["=".join(words[at : at + 2])]
    args, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown option {' '.join(unknown)}; see dapo --help")
    args.overrides += rest
    if getattr(args, "gpus_per_node", None) is not None:
        args.overrides.append(f"cluster.gpus_per_node={args.gpus_per_node}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dapo", description="Train language models with DAPO on Megatron-Core.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a model", description="Train a model as a configuration says.")
    train.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto (default): go on from the run's last checkpoint, if any; never: start anew; PATH: a checkpoint",
    )
    train.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the process layout, start nothing"
    )
    train.set_defaults(run=_train)
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a model",
        description="Measure model.path, such as RUN/hf, on data.eval: avg@k, pass@k, majority@k and greedy accuracy.",
    )
    evaluate.set_defaults(run=_eval)
    data = commands.add_parser("data", help="show prompts", description="Show the prompts that a run would train on.")
    data.set_defaults(run=_data)
    audit = commands.add_parser(
        "audit",
        help="check loss and gradients on this machine",
        description="Compute one mini-batch on the configured layout, on a single rank and by plain transformers in fp64, and "
        "print the largest differences. Exit code 1 if one is over its tolerance.",
    )
    audit.add_argument("--step", type=int, metavar="N", help="with a run's folder: the recorded step to compute again")
    audit.set_defaults(run=_audit)
    report = commands.add_parser(
        "report", help="compare runs", description="A markdown table over runs, finished or going on, by their metrics."
    )
    # Under this name _parse adds what stands behind an option.
    report.add_argument("overrides", nargs="+", metavar="RUN", help="a run's folder, such as runs/quickstart")
    report.add_argument("--out", type=Path, metavar="FILE.md", help="write the table there too")
    report.add_argument("--plot", type=Path, metavar="FILE.png", help="draw learning curves (.png, .pdf or .svg)")
    report.set_defaults(run=_report, config="dapo report")
    submit = commands.add_parser(
        "submit", help="queue a job by Slurm", description="Check the layout against the nodes, print sbatch's command, run it."
    )
    submit.add_argument("--nodes", type=int, metavar="N", help="nodes to ask for; by default as many as the layout needs")
    submit.add_argument("--gpus-per-node", metavar="G", help="the same as cluster.gpus_per_node=G")
    submit.add_argument("--sweep", metavar="FILE", help="a job array: one run for each line `name: key=value ...` of FILE")
    submit.add_argument("--sbatch", default="", metavar="OPTIONS", help='more of sbatch\'s, such as "-p gpu --time=12:00:00"')
    submit.add_argument("--dry-run", action="store_true", help="queue nothing")
    submit.set_defaults(run=_submit)
    for command in (train, evaluate, data, audit, submit):
        what = "a YAML file, such as configs/quickstart.yaml" + (", or a run's folder" if command is audit else "")
        command.add_argument("config", metavar="CONFIG", help=what)
        command.add_argument("overrides", nargs="*", metavar="key=value", help="changes, such as run.steps=5")
    return parser


def _train(config: Config, args: argparse.Namespace) -> int:
    if args.dry_run:
        print(f"# resolved configuration, hash {config_hash(config)}\n{resolved_yaml(config)}")
        print(layout_text(config))
        return 0
    from dapo_megatron.train import main as train

    return train(config, args.resume)


def _eval(config: Config, args: argparse.Namespace) -> int:
    from dapo_megatron.evaluate import main as evaluate

    return evaluate(config)


def _load_for_eval(path: str, overrides: list[str], *, dry_run: bool) -> tuple[Config, list[Problem]]:
    """load_valid_config, with what `dapo eval` asks besides. eval.every says when a run evaluates; this isn't one."""
    try:
        config, problems = load_valid_config(path, [*overrides, "eval.every=0"], dry_run=dry_run)
    except ConfigError as error:
        raise ConfigError([_of_eval(problem) for problem in error.problems]) from error
    if servers := config.rollout.servers:
        message = "servers of others hold who knows which weights; leave it out: servers are started with model.path's"
        raise ConfigError([Problem("rollout.servers", servers, message)])
    return config, problems


def _of_eval(problem: Problem) -> Problem:
    """The same problem with the way out that there is for an evaluation."""
    from dapo_megatron.checkpoint_files import checkpoints

    if problem.field == "data.eval.path":
        return replace(problem, message=problem.message.removesuffix(", or set eval.every=-1 to never evaluate"))
    folder = Path(str(problem.value)).expanduser()
    megatron = ((folder / ".metadata").is_file(), (folder / "state.json").is_file(), checkpoints(folder))
    if problem.field == "model.path" and problem.value and any(megatron):
        ways = [str(folder / "hf")] * any(folder.glob("hf/*.safetensors"))  # a run's export
        ways.append(f"OUT after python -m checkpoint_tools megatron-to-hf {folder} OUT")
        return replace(problem, message=f"holds a Megatron checkpoint, which no engine loads; give {', or '.join(ways)}")
    return problem


def _config_of_audit(path: str, step: int | None) -> str:
    """In a run's folder each recorded step has the configuration that it ran with."""
    if not Path(path).is_dir():
        if step is not None:
            raise ConfigError([Problem("--step", step, f"needs a run's folder, such as runs/quickstart; {path} is none")])
        return path
    names = (folder.name.removeprefix("step_") for folder in Path(path).glob("audit/step_*") if folder.is_dir())
    recorded = sorted(int(name) for name in names if name.isdigit())  # others are being written, or were when a run was killed
    there = f"recorded are {', '.join(map(str, recorded))}" if recorded else "none is recorded: set audit.save_every for a run"
    if step is None:
        raise ConfigError([Problem("--step", None, f"is required with a run's folder: which step? In {path} {there}")])
    if step not in recorded:
        raise ConfigError([Problem("--step", step, f"{path} has no record of it; {there}")])
    return str(Path(path) / "audit" / f"step_{step:06d}" / "config.yaml")


def _check_overrides_of_audit(args: argparse.Namespace) -> None:
    """A recorded step is computed with what it was computed with; only where that happens may be chosen."""
    odd = [override for override in args.overrides if not override.startswith("cluster.")]
    if args.step is not None and odd:
        raise ConfigError(
            [Problem(x.partition("=")[0], None, "can't be changed for a recorded step; leave it out") for x in odd]
        )


def _audit(config: Config, args: argparse.Namespace) -> int:
    from dapo_megatron.audit.run import audit_config, audit_step
    from dapo_megatron.setup import prepare

    if args.step is not None:
        return audit_step(config, args.run_dir, args.step)
    prepared = prepare(config)
    return audit_config(config, prepared.stream, prepared.decode)


def _data(config: Config, args: argparse.Namespace) -> int:
    from dapo_megatron.setup import prepare

    prepared = prepare(config)
    stream = prepared.stream
    for _ in range(NUM_SHOWN):
        prompt = stream.next()
        print(f"--- prompt {prompt.index}, uid {prompt.uid}, {len(prompt.token_ids)} tokens, gold {prompt.gold!r}")
        print(prepared.decode(prompt.token_ids))
    print(f"--- {stream.summary}")
    print(f"--- {len(stream)} prompts to train on, {len(prepared.eval_prompts)} held out")
    return 0


def _report(args: argparse.Namespace) -> int:
    from dapo_megatron.telemetry.report import PLOT_FORMATS, no_run, plot_runs, read_run, report_table, write_text

    folders = [Path(name).expanduser() for name in args.overrides]
    problems = [Problem("RUN", str(folder), reason) for folder in folders if (reason := no_run(folder))]
    if args.plot and args.plot.suffix not in PLOT_FORMATS:
        problems.append(Problem("--plot", str(args.plot), f"must end with one of {', '.join(PLOT_FORMATS)}"))
    if problems:
        raise ConfigError(problems)
    runs = [read_run(folder) for folder in folders]
    table = report_table(runs)
    print(table, end="")
    if args.out:
        write_text(args.out, table)
    if args.plot:
        plot_runs(runs, args.plot)
    unreadable = [run for run in runs if run.problem]
    for run in unreadable:
        print(f"dapo: {run.folder}: {run.problem}", file=sys.stderr)
    return 1 if unreadable else 0


def _submit(config: Config, args: argparse.Namespace) -> int:
    from dapo_megatron.submit import submit

    return submit(
        config,
        args.config,
        args.overrides,
        warn=_print_warnings,
        nodes=args.nodes,
        sweep=args.sweep,
        options=args.sbatch,
        dry_run=args.dry_run,
    )


def _print_warnings(problems: Sequence[Problem]) -> None:
    for problem in problems:
        where = "this machine: " if problem.severity == "machine" else ""
        print(f"warning: {where}{problem}", file=sys.stderr)


def _keep_traceback(config: Config | None, args: argparse.Namespace) -> str:
    """Write the current traceback into the run's folder; says where, or prints it if that can't be."""
    if config is None:
        traceback.print_exc()
        return ""
    folder = Path(config.run.dir).expanduser() / config.run.name
    if args.run is _audit:  # the run may go on meanwhile, or have been moved since it recorded the step
        folder = (folder if args.step is None else args.run_dir) / "audit"
    elif args.run is _eval:
        folder /= "eval"
    log = folder / "error.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError as failure:
        if failure.errno != errno.ENOSPC:  # of a full disk the message tells enough
            traceback.print_exc()
        return ""
    return f" (details: {log})"


if __name__ == "__main__":
    sys.exit(main())
