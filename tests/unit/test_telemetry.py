import io
import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.rollout.sampling_stats import SamplingStats
from dapo_megatron.telemetry import metrics
from dapo_megatron.telemetry.console import PHASES, RunConsole, step_line
from dapo_megatron.telemetry.measure import _sampling
from dapo_megatron.telemetry.metrics import METRICS, MetricsWriter, make_row, read_metrics
from dapo_megatron.telemetry.samples import write_samples


def test_metrics_are_one_json_object_a_step(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"reward/mean": np.float32(0.5), "sampling/groups_kept": np.int64(3)})
    writer.write(2, {"reward/mean": -1})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "reward/mean": 0.5, "sampling/groups_kept": 3}, {"step": 2, "reward/mean": -1}]


def test_unknown_names_and_non_numbers_are_refused(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match="reward/meen"):
        writer.write(1, {"reward/meen": 1.0})
    with pytest.raises(ValueError, match="policy/loss"):
        writer.write(1, {"policy/loss": "low"})  # type: ignore[dict-item]
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_nonfinite_values_are_null_and_named() -> None:
    row = make_row(4, {"policy/loss": float("nan"), "policy/ratio_max": np.float64("inf"), "policy/k1": 0.0})
    assert row == {
        "step": 4,
        "policy/ratio_max": None,
        "policy/k1": 0.0,
        "policy/loss": None,
        "nonfinite": {"policy/ratio_max": "inf", "policy/loss": "nan"},
    }
    assert "NaN" not in json.dumps(row, allow_nan=False)


def test_steps_come_once_and_in_order(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(2, {})
    for step in (2, 1):
        with pytest.raises(ValueError, match="in order"):
            writer.write(step, {})


def test_resuming_drops_the_steps_that_come_again(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path)
    for step in (1, 2, 3, 4):
        first.write(step, {"reward/mean": step})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # killed while writing
    resumed = MetricsWriter(tmp_path, next_step=3)
    assert resumed.last_row == {"step": 2, "reward/mean": 2}
    resumed.write(3, {"reward/mean": 30})
    assert resumed.last_row == {"step": 3, "reward/mean": 30}
    assert [(r["step"], r["reward/mean"]) for r in read_metrics(resumed.path)] == [(1, 1), (2, 2), (3, 30)]
    assert MetricsWriter(tmp_path).last_step == -1  # a new run in the same folder starts empty
    assert read_metrics(resumed.path) == []


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_every_metric_has_a_group_a_unit_and_a_meaning() -> None:
    for name, metric in METRICS.items():
        assert name.count("/") == 1 and metric.unit and metric.meaning


def names_in_the_code() -> set[str]:
    """All text constants of the package that look like a metric's name, the table itself left out."""
    package = Path(metrics.__file__).parents[1]
    sections = "|".join({name.partition("/")[0] for name in METRICS})
    names = {f"time/{phase}_s" for phase in PHASES}  # these two are put together from parts
    names |= set(_sampling(asdict(SamplingStats())))
    for path in package.rglob("*.py"):
        if path != Path(metrics.__file__):
            text = path.read_text(encoding="utf-8")
            names |= set(re.findall(rf'"((?:{sections})/(?!s")[a-z0-9_]+)"', text))  # "tokens/s" is a unit
    return names


def test_the_table_documents_what_the_code_writes_and_nothing_else() -> None:
    assert names_in_the_code() == set(METRICS)


def make_group(index: int, correct: list[bool]) -> Group:
    completions = [
        Completion(np.arange(i + 1, dtype=np.int32), np.zeros(i + 1, np.float32), np.full(i + 1, 7, np.int32), "stop")
        for i in range(len(correct))
    ]
    raw = np.where(correct, 1.0, -1.0).astype(np.float32)
    penalty = np.array([-0.25 * i for i in range(len(correct))], np.float32)
    prompt = Prompt(index, f"p{index}", (1, 2), "14")
    return Group(
        prompt,
        completions,
        [f"Antwort ä{i}" for i in range(len(correct))],
        np.array(correct),
        raw,
        penalty,
        ["14", None],
    )


def test_samples_hold_every_response_in_prompt_order(tmp_path: Path) -> None:
    kept, filtered = [make_group(3, [True, False])], [make_group(1, [False, False]), make_group(2, [True, True])]
    path = write_samples(tmp_path, 12, kept, filtered, decode=lambda ids: " ".join(map(str, ids)))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert path.name == "step_000012.jsonl"
    assert [r["fate"] for r in rows] == ["filtered_wrong"] * 2 + ["filtered_correct"] * 2 + ["kept"] * 2
    assert rows[5] == {
        "step": 12,
        "fate": "kept",
        "index": 3,
        "uid": "p3",
        "sample": 1,
        "gold": "14",
        "extracted": None,
        "correct": False,
        "reward": -1.25,
        "raw_reward": -1.0,
        "overlong_penalty": -0.25,
        "length": 2,
        "finish_reason": "stop",
        "version": 7,
        "text": "Antwort ä1",
        "prompt": "1 2",
    }
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file stays


VALUES = {
    "reward/mean": 0.125,
    "reward/accuracy": 0.5,
    "sampling/groups_kept": 16,
    "sampling/groups_resolved": 22,
    "response/length_mean": 5.25,
    "time/step_s": 12.0,
    "time/rollout_s": 7.04,
    "time/eval_s": 0.0,
    "memory/peak_gb": 3.5,
}


def test_step_line_shows_what_there_is() -> None:
    line = step_line(3, VALUES)
    assert line == "step    3 | reward +0.125  acc 0.500  kept 16/22  len 5.2 | 12.0 s (rollout 7.0)"


def test_console_writes_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with RunConsole(num_steps=2, file=out) as console:
        console.header({"run": "runs/[x]", "model": "tiny"})
        console.evaluation(0, {"eval/avg_at_k": 0.32, "eval/k": 8, "eval/prompts": 48})
        console.phase("rollout", "3/16 groups")
        console.step(1, VALUES)
        console.step(2, VALUES)
        console.evaluation(2, {"eval/avg_at_k": 0.9, "eval/greedy": 0.95, "eval/k": 8, "eval/prompts": 48})
        console.summary()
    text = out.getvalue()
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "run    runs/[x]"  # no markup
    assert lines[2] == "eval after step 0: avg@8 0.320, on 48 prompts"
    assert [line.startswith("step ") for line in lines].count(True) == 2
    assert "14.1 s" in text and "7.04 s" in text and "3.50 GB" in text
    assert "accuracy before training" in text and "accuracy after step 2" in text and "greedy 0.950" in text


def test_a_failing_run_gets_its_error_through() -> None:
    with pytest.raises(RuntimeError, match="boom"), RunConsole(num_steps=1, file=io.StringIO()):
        raise RuntimeError("boom")
