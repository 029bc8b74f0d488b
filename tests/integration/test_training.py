"""Whole runs of the tiny configuration through the command line: Ray, Megatron ranks, a rollout engine, files."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dapo_megatron.telemetry.metrics import METRICS, read_metrics
from tests.integration.cli_run import CliRun, command_lines


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> CliRun:
    """The configuration as it is, with SGLang; checks of every publish, evaluation and an export besides."""
    root = Path(__file__).resolve().parents[2]
    settings = ("publish.check=1", "checkpoint.export_hf=true", "eval.every=0", "eval.prompts=16", "eval.samples=4")
    run = CliRun(root, tmp_path_factory.mktemp("learned"), *settings)
    run.output = run.finish()  # type: ignore[attr-defined]
    return run


def test_reward_rises(learned: CliRun) -> None:
    """Mean reward of the last third above that of the first third by three standard errors."""
    rewards = np.array([row["reward/mean"] for row in read_metrics(learned.folder / "metrics.jsonl") if row["step"] > 0])
    first, last = np.array_split(rewards, 3)[0], np.array_split(rewards, 3)[-1]
    error = np.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    assert last.mean() - first.mean() > 3 * error, rewards


def test_metrics_are_complete_and_consistent(learned: CliRun) -> None:
    rows = [row for row in read_metrics(learned.folder / "metrics.jsonl") if row["step"] > 0]
    elsewhere = ("time/startup_s", "time/eval_s", "time/checkpoint_s", "sync/stale_logprob_diff_mean", "sync/truncated_share")
    optional = {name for name in METRICS if name.startswith("eval/") or name in elsewhere}
    for number, row in enumerate(rows, 1):
        assert row["step"] == number and METRICS.keys() - optional - row.keys() == set()
        assert ("time/startup_s" in row) == (number == 1)
        fates = ("kept", "filtered_correct", "filtered_wrong", "aborted", "carried_out")
        assert row["tokens/generated"] + row["tokens/carried_in"] == sum(row[f"tokens/{fate}"] for fate in fates)
        assert row["policy/first_ratio_error_max"] <= 1e-5
        assert row["optimizer/updates"] == 2 and row["sync/version"] == number
        assert row["sync/logprob_diff_max"] <= 1e-4  # fp32: the server samples from the trainer's own distribution
    assert max(row["policy/clip_high_share"] for row in rows) > 0
    assert sum(row["sampling/groups_all_correct"] + row["sampling/groups_all_wrong"] for row in rows) > 0
    assert min(row["reward/overlong_min"] for row in rows) < 0


def test_held_out_accuracy_rises(learned: CliRun) -> None:
    rows = read_metrics(learned.folder / "metrics.jsonl")
    before, after = rows[0], rows[-1]
    assert before["step"] == 0 and before["eval/k"] == 4 and before["eval/prompts"] == 16
    assert after["eval/avg_at_k"] > before["eval/avg_at_k"] + 0.1
    assert after["time/eval_s"] > 0 and 0 <= after["eval/greedy"] <= 1


def test_samples_are_written(learned: CliRun) -> None:
    row = read_metrics(learned.folder / "metrics.jsonl")[-1]
    lines = [json.loads(line) for line in (learned.folder / "samples" / f"step_{row['step']:06d}.jsonl").open()]
    kept = [line for line in lines if line["fate"] == "kept"]
    assert len(kept) == 8 * row["sampling/groups_kept"] and len(lines) == 8 * row["sampling/groups_resolved"]
    assert sum(line["length"] for line in kept) == row["tokens/kept"]
    assert np.mean([line["reward"] for line in kept]) == pytest.approx(row["reward/mean"], abs=1e-6)


def test_exported_policy_loads_and_has_learned(learned: CliRun) -> None:
    """(That it gives the trainer's log-probs is shown in test_publish.) It answers as it was trained to, the start doesn't."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = learned.folder / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [json.loads(line) for line in (learned.folder / "samples" / "step_000001.jsonl").open()]
    ids = torch.tensor(tokenizer(lines[0]["prompt"], add_special_tokens=False)["input_ids"])[None]
    accepted = torch.tensor(tokenizer(list(lines[0]["gold"]), add_special_tokens=False)["input_ids"])[:, 0]
    with torch.no_grad():
        share = model(ids).logits[0, -1].softmax(-1)[accepted].sum()
    first = read_metrics(learned.folder / "metrics.jsonl")[1]["reward/accuracy"]
    assert share > first + 0.1


def test_checkpoint_tools_on_a_runs_checkpoint(learned: CliRun, root: Path, tmp_path: Path) -> None:
    """By the command line, from the run's folder alone: it is known for what it is, becomes the exported policy, and Megatron
    and transformers score texts alike by it."""

    def tool(*arguments: str | Path) -> str:
        result = subprocess.run(
            [sys.executable, "-m", "checkpoint_tools", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    run, out = tmp_path / "moved", tmp_path / "out"
    shutil.copytree(learned.folder, run)
    found = json.loads(tool("inspect", run, "--json"))
    assert (found["kind"], found["step"], found["layout"]["tp"], found["model"]["family"]) == ("run", 12, 2, "llama")
    assert found["optimizer_bytes"] > 2 * sum(entry["bytes"] for entry in found["dtypes"].values()) and found["manifest"]["ok"]
    tool("megatron-to-hf", run, out)
    exported, converted = (load_file(folder / "model.safetensors") for folder in (learned.folder / "hf", out))
    assert exported.keys() == converted.keys() and all(torch.equal(exported[name], converted[name]) for name in exported)
    assert tool("verify", run, out).endswith("EQUAL\n")


def test_nothing_is_left_running(learned: CliRun) -> None:
    assert learned.survivors() == []


@pytest.mark.slow
def test_the_next_batch_is_sampled_while_this_one_trains(root: Path, tmp_path: Path) -> None:
    """Each step but the first trains on what the weights before its own sampled, and learns all the same."""
    run = CliRun(root, tmp_path, "rollout.max_staleness=1", "eval.every=4", "eval.prompts=4", "eval.samples=2")
    run.finish()
    evaluation, *rows = read_metrics(run.folder / "metrics.jsonl")
    assert evaluation["step"] == 0 and [row["step"] for row in rows] == list(range(1, 13))
    assert [row["sync/staleness_0"] for row in rows] == [1] + 11 * [0]
    assert [row["sync/staleness_1"] for row in rows] == [0] + 11 * [1]
    for row in rows:
        fates = ("kept", "filtered_correct", "filtered_wrong", "aborted", "carried_out")
        assert row["tokens/generated"] + row["tokens/carried_in"] == sum(row[f"tokens/{fate}"] for fate in fates)
        assert row["throughput/generated_tokens_per_s"] == pytest.approx(row["tokens/generated"] / row["time/collect_s"])
        assert row["optimizer/updates"] == 2 and row["sync/version"] == row["step"]
    lines = [json.loads(line) for path in sorted(run.folder.glob("samples/*")) for line in path.open()]
    assert len(lines) == 8 * sum(row["sampling/groups_resolved"] for row in rows)
    rewards = [row["reward/mean"] for row in rows]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4])
    assert run.survivors() == []


@pytest.mark.slow
def test_interrupt_leaves_nothing_running(root: Path, tmp_path: Path) -> None:
    run = CliRun(root, tmp_path, "rollout.engine=local", "run.steps=1000")
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGINT)
    assert run.finish(130).strip().endswith("dapo: interrupted")
    assert run.survivors() == []


@pytest.mark.slow
def test_interrupt_while_the_server_starts_leaves_nothing_running(root: Path, tmp_path: Path) -> None:
    run = CliRun(root, tmp_path)
    deadline = time.monotonic() + 120
    while not (run.folder / "logs" / "server_0.log").exists():  # its process has just been started
        assert run.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(2)
    run.process.send_signal(signal.SIGINT)
    assert run.finish(130).strip().endswith("dapo: interrupted")
    assert run.survivors() == []


@pytest.fixture
def ray_cluster() -> Iterator[tuple[str, str]]:
    """A Ray cluster that someone else started: its address, and the mark that its processes carry."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mark = uuid.uuid4().hex
    arguments = [
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        "--num-cpus=2",
        "--include-dashboard=false",
    ]
    head = subprocess.Popen(
        [str(Path(sys.executable).with_name("ray")), "start", *arguments, "--object-store-memory=200000000"],
        env={**os.environ, "DAPO_TEST_MARK": mark, "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", mark
    finally:
        head.terminate()
        head.wait(timeout=60)


@pytest.mark.slow
def test_joins_a_cluster_and_leaves_it_running(root: Path, tmp_path: Path, ray_cluster: tuple[str, str]) -> None:
    address, mark = ray_cluster
    settings = ("rollout.engine=local", "run.steps=1", "checkpoint.every=0", "checkpoint.export_hf=false")
    run = CliRun(root, tmp_path, *settings, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
    run.finish()
    assert len(read_metrics(run.folder / "metrics.jsonl")) == 1
    deadline = time.monotonic() + 20
    ours = ("TrainerRank", "RewardWorker", "LocalEngineHost")
    while (left := [p for p in command_lines(mark) if any(name in p for name in ours)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == [] and any("raylet" in p for p in command_lines(mark))
