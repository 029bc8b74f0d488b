"""One whole DAPO step (rollout, rewards, old log-probs, update, publish) on the quickstart's model and task, beside a step of
TRL's GRPOTrainer: same model, prompts, samples, lengths, reward, learning rate, clips, cores and dtype, in one run.

    uv run python benchmarks/step.py [--steps 3] [--dtype float32] [--override parallel.pp=1] [--only ours]

Ours is `dapo train configs/quickstart.yaml` without dynamic sampling (so that both train on all groups), evaluation and
checkpoints, read from its metrics.jsonl. TRL generates with transformers, in an environment of its own, made once by

    uv venv --no-project --python 3.12 ~/.cache/dapo_megatron/trl
    uv pip install --python ~/.cache/dapo_megatron/trl/bin/python trl==1.16.0 torch==2.14.1 transformers==5.19.0

In bf16 TRL's weights and Adam's moments are bf16, its fastest way, though the quickstart's learning rate is less than half a
bf16 step of every weight above 0.004; ours keep fp32 beside the bf16 weights. With --trl-fp32-weights TRL's are fp32, autocast
to bf16. The first step of both isn't counted; each phase's median over the others is. With fewer idle cores than threads OpenMP
gets several times slower: let nothing else run meanwhile.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from dapo_megatron.config import Config
from dapo_megatron.telemetry.metrics import read_metrics
from dapo_megatron.weights.source import default_cache_dir

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
# Metrics of a run by the names that trl_step.py gives its own.
OURS = {
    "rollout": "time/rollout_s",
    "old_logprobs": "time/old_logprobs_s",
    "update": "time/update_s",
    "publish": "time/publish_s",
    "step": "time/step_s",
    "reply_tokens": "tokens/trained",
    "generated_tokens": "tokens/generated",
    "sequence_tokens": "tokens/packed",
    "accuracy": "reward/kept_accuracy",
}
PHASES = {
    "rollout": "rollout with rewards",
    "old_logprobs": "old log-probs",
    "update": "update",
    "publish": "publish",
    "step": "whole step",
}
Step = dict[str, float]


def run_ours(cfg: Config, overrides: list[str], steps: int, cores: int) -> tuple[list[Step], dict[str, float]]:
    """(The measured steps, peak memory in GB by kind of process.) The run is interrupted after its last measured step: the end
    of a run would add a checkpoint."""
    folder = Path(cfg.run.dir) / cfg.run.name
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["OMP_NUM_THREADS"] = str(max(1, cores // cfg.world_size))
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        process = psutil.Popen(
            [sys.executable, "-m", "dapo_megatron.cli", "train", str(CONFIG), *overrides],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while len(rows := read_metrics(folder / "metrics.jsonl")) < steps + 1:
                if process.poll() is not None:
                    sys.exit(f"dapo train ended with exit code {process.returncode}:\n{log.read_text()[-4000:]}")
                time.sleep(0.2)
            memory = peak_memory(process)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
    return our_steps(rows), memory


def our_steps(rows: Sequence[Mapping[str, Any]]) -> list[Step]:
    """A run's metrics but for its first step's; rows of evaluations before the first step are left out."""
    steps = [{name: float(row.get(metric, 0.0)) for name, metric in OURS.items()} for row in rows if row["step"] > 0]
    return steps[1:]


def peak_memory(job: psutil.Process) -> dict[str, float]:
    """Peak resident memory in 10^9 bytes, summed over a job's trainer ranks, its engine's processes, and the others. What a
    process shares with others now (libraries; a fork's pages) is divided between them."""
    kinds: dict[int, str] = {job.pid: "others"}
    for process in job.children(recursive=True):
        name = " ".join(process.cmdline())
        if name.startswith("ray::TrainerRank"):
            kinds[process.pid] = "trainers"
        elif name.startswith("ray::LocalEngineHost"):
            kinds[process.pid] = "engine"
        elif name.startswith("ray::ServerOwner"):
            kinds |= {child.pid: "engine" for child in process.children(recursive=True)}
        kinds.setdefault(process.pid, "others")
    total = {"trainers": 0.0, "engine": 0.0, "others": 0.0}
    for pid, kind in kinds.items():
        peak, now = _kilobytes(pid, "status"), _kilobytes(pid, "smaps_rollup")
        total[kind] += (peak["VmHWM"] - now["Rss"] + now["Pss"]) * 1024 / 1e9
    return total


def _kilobytes(pid: int, file: str) -> dict[str, int]:
    lines = (line.split() for line in Path(f"/proc/{pid}/{file}").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}


def trl_job(cfg: Config, steps: int, microbatch: int, cores: int, fp32_weights: bool = False) -> dict[str, Any]:
    """What trl_step.py needs for the same steps: the prompts are those of the run, in its order."""
    from dapo_megatron.setup import prepare

    prepared = prepare(cfg)
    num_prompts = cfg.sampling.prompts_per_step
    prompts = [prepared.stream.at(position) for position in range((steps + 1) * num_prompts)]
    return {
        "model_dir": str(prepared.model_dir),
        "dtype": cfg.model.dtype,
        "weights": "float32" if fp32_weights else cfg.model.dtype,
        "threads": cores,
        "seed": cfg.run.seed,
        "steps": steps + 1,
        "updates": num_prompts // cfg.optimizer.prompts_per_minibatch,
        "prompts": num_prompts,
        "samples": cfg.sampling.samples_per_prompt,
        "microbatch": microbatch,
        "max_response_tokens": cfg.rollout.max_response_tokens,
        "temperature": cfg.rollout.temperature,
        "eos_ids": list(prepared.eos_ids),
        "prompt_ids": [list(prompt.token_ids) for prompt in prompts],
        "golds": [prompt.gold for prompt in prompts],
        "reward": asdict(cfg.reward),
        "algorithm": asdict(cfg.algorithm),
        "optimizer": asdict(cfg.optimizer),
    }


def run_trl(python: str, job: dict[str, Any], folder: Path) -> tuple[list[Step], float]:
    """(The measured steps, peak memory in GB.)"""
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [python, str(ROOT / "benchmarks" / "trl_step.py"), str(folder / "job.json"), str(folder / "result.json")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        sys.exit(f"TRL's steps failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    result = json.loads((folder / "result.json").read_text())
    return result["steps"][1:], result["peak_gb"]


def check_trl(python: str) -> str:
    """TRL's version in that environment. Ends the program with what to do if there is none."""
    try:
        done = subprocess.run(
            [python, "-c", "from importlib.metadata import version; print(version('trl'))"], capture_output=True, text=True
        )
    except OSError as error:
        done = subprocess.CompletedProcess([], 1, "", str(error))
    if done.returncode:
        commands = "\n".join(line for line in (__doc__ or "").splitlines() if line.startswith(("    uv venv", "    uv pip")))
        reason = done.stderr.strip().splitlines()[-1]
        sys.exit(f"--trl-python {python}: no TRL there ({reason}). Make its environment, or use --only ours:\n{commands}")
    return done.stdout.strip()


def median(steps: Sequence[Step], name: str) -> float:
    return statistics.median(step.get(name, 0.0) for step in steps)


def rate(steps: Sequence[Step], tokens: str, seconds: str) -> float:
    return statistics.median(step[tokens] / step[seconds] for step in steps)


def table(results: Mapping[str, tuple[Sequence[Step], float]]) -> str:
    """Markdown: a column for each of `results` (name -> measured steps, peak memory in GB), and how often ours goes into the
    other if there are two."""
    ratio = len(results) == 2

    def line(what: str, values: list[float], digits: int, inverse: bool = False) -> str:
        cells = [f"{value:,.{digits}f}" if value else "-" for value in values]
        if ratio:
            ours, theirs = reversed(values) if inverse else values
            cells.append(f"{theirs / ours:.1f}" if ours and theirs else "")
        return f"| {what} | {' | '.join(cells)} |"

    columns = [steps for steps, _ in results.values()]
    lines = [
        f"| | {' | '.join(results)} |{' ratio |' if ratio else ''}",
        "|---" * (1 + len(results) + ratio) + "|",
        *(line(f"{label}, s", [median(steps, name) for steps in columns], 2) for name, label in PHASES.items()),
        line("generated tokens/s", [rate(steps, "generated_tokens", "rollout") for steps in columns], 0, inverse=True),
        line("reply tokens trained/s", [rate(steps, "reply_tokens", "update") for steps in columns], 0, inverse=True),
        line("peak memory, GB", [memory for _, memory in results.values()], 1),
        line("reply tokens of a step", [median(steps, "reply_tokens") for steps in columns], 0),
        line("prompt and reply tokens of a step", [median(steps, "sequence_tokens") for steps in columns], 0),
    ]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that isn't")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps in a step; a divisor of its prompts")
    parser.add_argument("--cores", type=int, default=2, help="that each of the two may use")
    parser.add_argument("--override", action="append", default=[], metavar="key=value", help="of our configuration; repeatable")
    parser.add_argument("--only", choices=("ours", "trl"))
    parser.add_argument("--trl-python", default=str(default_cache_dir() / "trl" / "bin" / "python"), metavar="PATH")
    parser.add_argument("--trl-microbatch", type=int, default=32, help="responses in one of TRL's backward passes")
    parser.add_argument("--trl-fp32-weights", action="store_true", help="fp32 weights in TRL also when computing in bf16")
    return parser.parse_args()


def main() -> None:
    from dapo_megatron.validation import load_valid_config

    args = parse()
    version = "" if args.only == "ours" else check_trl(args.trl_python)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children would ignore the interrupt
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    results: dict[str, tuple[Sequence[Step], float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        num_prompts = 16
        overrides = [
            *(f"run.dir={temporary}", f"run.steps={args.steps + 2}", f"model.dtype={args.dtype}"),
            *("eval.every=-1", "checkpoint.every=0", "checkpoint.export_hf=false", "sampling.dynamic=false"),
            *(f"sampling.prompts_per_step={num_prompts}", f"optimizer.prompts_per_minibatch={num_prompts // args.updates}"),
            *("optimizer.warmup_steps=0", *args.override),
        ]
        cfg, _ = load_valid_config(CONFIG, overrides)
        if args.only != "trl":
            steps, memory = run_ours(cfg, overrides, args.steps, args.cores)
            results["ours"] = (steps, memory["trainers"] + memory["engine"])
            by_kind = ", ".join(f"{kind} {gb:.1f} GB" for kind, gb in memory.items())
            print(f"ours: {by_kind}; accuracy by step {' '.join(f'{step["accuracy"]:.2f}' for step in steps)}", flush=True)
        if args.only != "ours":
            job = trl_job(cfg, args.steps, args.trl_microbatch, args.cores, args.trl_fp32_weights)
            steps, peak_gb = run_trl(args.trl_python, job, Path(temporary))
            results[f"TRL {version}"] = (steps, peak_gb)
            print(f"TRL: accuracy by step {' '.join(f'{step["accuracy"]:.2f}' for step in steps)}", flush=True)
    print(f"\n{args.dtype}, {args.cores} cores, {args.updates} update(s) a step, median of {args.steps} steps\n")
    print(table(results))


if __name__ == "__main__":
    main()
