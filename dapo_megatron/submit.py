"""`dapo submit`: checks a configuration's layout against the nodes that it shall get, and queues it by Slurm's sbatch.

Everything that can be wrong is said before the job waits in a queue. Loads neither torch nor ray.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dapo_megatron.config import Config
from dapo_megatron.config_io import ConfigError, Problem
from dapo_megatron.layout import RankPlace, ServerPlace, rank_places, rollout_text, server_places, sizes_text, spans
from dapo_megatron.sweep import SweepRun, check_sweep, read_sweep

# sbatch's options that may not be given by the user: who changes these gets around the checks, or loses DAPO_DIR.
INSTEAD = {
    "--nodes": "use --nodes of dapo submit",
    "-N": "use --nodes of dapo submit",
    "--gpus-per-node": "use --gpus-per-node of dapo submit",
    "--ntasks-per-node": "leave it out: the job starts one task a node, which starts all others",
    "--export": "leave it out: the job needs DAPO_DIR, and gets all variables that are set when it is submitted",
}


@dataclass(frozen=True)
class Allocation:
    """What a run needs: nodes of so many GPUs, or on CPU of so many trainer ranks."""

    nodes: int
    per_node: int
    on_gpus: bool

    def __str__(self) -> str:
        each = _count(self.per_node, "GPU") if self.on_gpus else f"up to {_count(self.per_node, 'rank')}"
        return f"{_count(self.nodes, 'node')} of {each}"


def submit(
    config: Config,
    config_path: str,
    overrides: Sequence[str],
    *,
    warn: Callable[[Sequence[Problem]], None],
    nodes: int | None = None,
    sweep: str | None = None,
    options: str = "",
    dry_run: bool = False,
) -> int:
    """Print where the run's parts will be and the sbatch command, and run it unless `dry_run`; returns the exit code.

    `config`: of `config_path` and `overrides`, valid. `nodes`: to ask for; None: as many as needed. `sweep`: a file whose lines
    become the tasks of a job array; `warn` is told of their warnings. `options`: more of sbatch's. Raises ConfigError for what
    would go wrong in the job.
    """
    extra = _checked_options(options)
    home = slurm_home(Path(__file__).parent)
    runs = read_sweep(sweep) if sweep else []
    layout = config
    if runs:
        configs, warnings = check_sweep(config_path, runs, overrides)
        warn([warning for warning in warnings if warning.field.startswith(f"{sweep}, line")])  # the others are known already
        layout = _layout_of_all(runs, configs)
    needed = allocation(layout)
    _check_nodes(layout, needed, nodes)
    if not dry_run and shutil.which("sbatch") is None:
        message = "there is no such program on this machine; submit where Slurm's is, or see the command with --dry-run"
        raise ConfigError([Problem("sbatch", None, message)])
    command = ["sbatch", f"--nodes={needed.nodes}", "--ntasks-per-node=1"]
    command += [f"--gpus-per-node={needed.per_node}"] * needed.on_gpus
    command += [f"--job-name={config.run.name}"] + [f"--array=1-{len(runs)}"] * bool(runs) + extra
    command += [str(home / "slurm" / ("sweep.sbatch" if sweep else "train.sbatch")), config_path]
    command += [*([sweep] if sweep else []), *overrides]
    print(placement_text(layout))
    variables = _variables(home)
    print(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(command)]), flush=True)
    return 0 if dry_run else _queue(command, variables, str(Path(config.run.dir) / config.run.name) + "_*" * bool(runs))


def slurm_home(package: Path) -> Path:
    """The folder that holds slurm/: the package's own where it was installed from a wheel, in a clone the one beside it."""
    for folder in (package, package.parent):
        if (folder / "slurm" / "train.sbatch").is_file():
            return folder
    message = "is neither in the package nor beside it; install dapo_megatron again, or run it from a clone"
    raise ConfigError([Problem("slurm/train.sbatch", str(package), message)])


def allocation(config: Config) -> Allocation:
    """What the configuration's layout needs. On CPU servers need no node of their own: they share cores with the ranks."""
    on_gpus = config.cluster.device != "cpu"
    places = [*rank_places(config), *(server_places(config) if on_gpus else ())]
    return Allocation(1 + max(place.node for place in places), config.cluster.gpus_per_node, on_gpus)


def placement_text(config: Config) -> str:
    """Which nodes do what, for people; `dapo train --dry-run` prints it rank by rank."""
    ranks, servers = rank_places(config), server_places(config)
    needed = allocation(config)
    lines = [f"Placement on {needed}:"]
    lines += [f"  trainer  {_nodes_text(ranks)}: {_count(len(ranks), 'rank')}, {sizes_text(config.parallel)}"]
    where = f"{_nodes_text(servers)}: " if servers and needed.on_gpus else ""
    lines += [f"  rollout  {where}{rollout_text(config)}"]
    used = {(rank.node, rank.gpu) for rank in ranks} | {(server.node, gpu) for server in servers for gpu in server.gpus}
    idle = needed.nodes * needed.per_node - len(used)
    if idle and needed.on_gpus:
        lines += [f"  idle     {_count(idle, 'GPU')}"]
    return "\n".join(lines)


def _nodes_text(places: Sequence[RankPlace | ServerPlace]) -> str:
    nodes = sorted({place.node for place in places})
    return f"node{'s' * (len(nodes) > 1)} {spans(nodes)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _check_nodes(config: Config, needed: Allocation, nodes: int | None) -> None:
    if nodes is None or nodes == needed.nodes:
        return
    servers = server_places(config)
    what = _count(config.world_size, "trainer rank")
    if servers and needed.on_gpus:
        what += f" and {_count(len(servers), 'server')} of tp {config.rollout.tp}"
    if nodes < needed.nodes:
        wrong, fix = "too few", "ask the configuration for less (parallel.*, rollout.num_servers)"
    else:
        wrong, fix = f"{nodes - needed.nodes} would stand idle", "give them work (parallel.dp, rollout.num_servers)"
    message = f"{wrong}: {what} take {needed} (cluster.gpus_per_node); use --nodes {needed.nodes}, or {fix}"
    raise ConfigError([Problem("--nodes", nodes, message)])


def _layout_of_all(runs: Sequence[SweepRun], configs: Sequence[Config]) -> Config:
    """One of the configurations, if all need the same nodes: the jobs of an array do all get the same."""
    lines: dict[Allocation, list[str]] = {}
    for run, config in zip(runs, configs, strict=True):
        lines.setdefault(allocation(config), []).append(run.name)
    if len(lines) > 1:
        each = "; ".join(f"{needed} for {', '.join(names)}" for needed, names in lines.items())
        message = (
            f"an array's jobs all get the same nodes, but the lines need {each}; make their layouts alike, or split the file"
        )
        raise ConfigError([Problem("--sweep", None, message)])
    return configs[0]


def _checked_options(options: str) -> list[str]:
    """sbatch's options as words. What is no option would be taken for the script."""
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise ConfigError([Problem("--sbatch", options, f"{error}; quote it as for a shell")]) from None
    if words and not words[0].startswith("-"):
        raise ConfigError([Problem("--sbatch", options, 'must be options, such as "--partition=gpu --time=12:00:00"')])
    names = [word[:2] if re.match(r"-\w", word) else word.partition("=")[0] for word in words]
    problems = [Problem("--sbatch", name, INSTEAD[name]) for name in names if name in INSTEAD]
    if problems:
        raise ConfigError(problems)
    return words


def _variables(home: Path) -> dict[str, str]:
    """What train.sbatch can't find by itself; an interpreter or container that the user has named for it comes first."""
    variables = {"DAPO_DIR": str(home)}
    named = os.environ.get("DAPO_PYTHON") or os.environ.get("DAPO_CONTAINER_IMAGE")
    if not named and Path(sys.executable) != home / ".venv" / "bin" / "python":
        variables["DAPO_PYTHON"] = sys.executable
    return variables


def _queue(command: Sequence[str], variables: dict[str, str], run_dir: str) -> int:
    """Run sbatch and say what came of it. Its failure is an exit code: the run, which hasn't begun, gets no error.log of it."""
    result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    sys.stderr.write(result.stderr)
    if result.returncode:
        print(f"dapo: sbatch refused the job (its exit code: {result.returncode})", file=sys.stderr)
        return 1
    job = re.search(r"\d+", result.stdout)
    if job is None:  # as with --test-only, which queues nothing
        print(result.stdout, end="")
        return 0
    print(f"Job {job[0]} is queued. Its output: {_output_of(job[0])}; metrics and logs: {run_dir}")
    return 0


def _output_of(job: str) -> str:
    """Where Slurm will write it, asked of Slurm: options, the script and variables have a say in that."""
    try:
        shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False).stdout
    except OSError:
        shown = ""
    path = re.search(r"^\s*StdOut=(.+)$", shown, re.MULTILINE)
    task = "4294967294"  # how Slurm writes an array's task that hasn't begun
    return path[1].replace(task, "*") if path else f"see `scontrol show job {job}`"
