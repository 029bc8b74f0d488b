"""`dapo report`: the table and the picture over runs' folders, of files as runs write them."""

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from dapo_megatron.cli import main
from dapo_megatron.config_io import load_config, resolved_yaml
from dapo_megatron.telemetry.metrics import METRICS, MetricsWriter
from dapo_megatron.telemetry.report import CURVES, read_run, replacing, report_table

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny_cpu.yaml"
STEP = {
    "reward/accuracy": 0.5,
    "response/length_mean": 20.0,
    "tokens/generated": 1000.0,
    "time/collect_s": 2.0,
    "time/step_s": 5.0,
    "memory/peak_gb": 3.0,
}


def write_run(folder: Path, rows: dict[int, dict[str, Any]], *overrides: str) -> Path:
    """A run's folder with these metrics, by step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(resolved_yaml(load_config(TINY, [f"run.name={folder.name}", *overrides])))
    writer = MetricsWriter(folder)
    for step, values in rows.items():
        writer.write(step, values)
    writer.close()
    return folder


def cells(table: str, run: str) -> dict[str, str]:
    """A run's row by column; the columns of accuracy over the steps are `last` and `best`."""
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines() if line[:1] == "|"]
    header = [re.sub(r"avg@\w+, (\w+) \(step\)", r"\1", name) for name in rows[0]]
    assert all(len(row) == len(header) for row in rows)
    [found] = [row for row in rows[2:] if row[0] == run]
    return dict(zip(header, found, strict=True))


def test_the_columns(tmp_path: Path) -> None:
    rows = {step: {**STEP, "reward/accuracy": step / 100} for step in range(1, 13)}
    rows[12] |= {"tokens/generated": 9000.0, "time/collect_s": 80.0, "time/step_s": 95.0, "response/length_mean": 31.0}
    rows[5]["memory/peak_gb"] = 4.5
    rows[1]["time/startup_s"] = rows[7]["time/startup_s"] = 60.0
    for step, accuracy in ((0, 0.25), (6, 0.75), (9, 0.75), (12, 0.5)):
        rows.setdefault(step, {}).update({"eval/avg_at_k": accuracy, "eval/k": 8.0})
    run = write_run(tmp_path / "whole", dict(sorted(rows.items())))
    table = report_table([read_run(run)])
    assert "avg@8, last (step)" in table
    assert cells(table, "whole") == {
        "run": "whole",
        "steps": "12 of 12",
        "state": "done",
        "last": "0.500 (12)",
        "best": "0.750 (6)",  # the first of equals
        "accuracy": "0.075",  # of steps 3 to 12
        "length": "21.1",
        "tokens/s": "184",  # (9 x 1000 + 9000) / (9 x 2 + 80), not the mean of the steps' rates
        "s/step": "14",
        "peak GB": "4.5",
        "starts": "2",
        "server restarts": "-",
    }


def test_states(tmp_path: Path) -> None:
    runs = {
        "not started": tmp_path / "absent",
        "unfinished": write_run(tmp_path / "first_step", {}),
        "done": write_run(tmp_path / "done", {12: STEP}),
        "not exported": write_run(tmp_path / "unexported", {12: STEP}, "checkpoint.export_hf=true"),
    }
    table = report_table([read_run(folder) for folder in runs.values()])
    for state, folder in runs.items():
        assert cells(table, folder.name)["state"] == state
    assert [cells(table, name)["steps"] for name in ("absent", "first_step", "done")] == ["-", "0 of 12", "12 of 12"]
    assert set(cells(table, "absent").values()) == {"absent", "not started", "-"}
    (tmp_path / "unexported" / "hf").mkdir()
    assert cells(report_table([read_run(runs["not exported"])]), "unexported")["state"] == "done"


def test_restarts_add_up_over_starts_of_the_run(tmp_path: Path) -> None:
    counts = enumerate((0, 2, 2, 3, 0, 1, 1), start=1)  # started again before step 5, where the counter is at 0 once more
    run = write_run(tmp_path / "run", {step: {"engine/restarts": float(count)} for step, count in counts})
    assert cells(report_table([read_run(run)]), "run")["server restarts"] == "4"


def test_what_is_missing_or_not_finite_is_left_out(tmp_path: Path) -> None:
    rows = {1: {**STEP, "reward/accuracy": float("nan")}, 2: STEP, 3: {"reward/accuracy": 0.25, "eval/avg_at_k": float("nan")}}
    found = cells(report_table([read_run(write_run(tmp_path / "run", rows))]), "run")
    assert (found["accuracy"], found["length"], found["tokens/s"], found["last"]) == ("0.375", "20", "500", "-")


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {1: STEP, 2: STEP})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert cells(report_table([read_run(run)]), "run")["steps"] == "2 of 12"


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    one, other, third = (write_run(tmp_path / name, {1: STEP}) for name in ("a/run", "b/run", "b/odd|name"))
    table = report_table([read_run(folder) for folder in (one, other, third)])
    assert cells(table, str(one)) and cells(table, str(other)) and cells(table, r"odd\|name")


def test_every_curve_is_of_a_metric() -> None:
    assert {curve.metric for curve in CURVES} | {curve.of for curve in CURVES if curve.of} <= set(METRICS)


def test_the_command_prints_and_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write_run(tmp_path / "one", {1: STEP}), write_run(tmp_path / "other", {12: STEP})
    out = tmp_path / "deep" / "table.md"
    assert main(["report", str(one), "--out", str(out), str(other)]) == 0
    printed = capsys.readouterr().out
    assert printed == out.read_text() and [path.name for path in out.parent.iterdir()] == ["table.md"]
    assert cells(printed, "one")["state"] == "unfinished" and cells(printed, "other")["state"] == "done"


def test_folders_that_are_no_run_are_all_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "runs" / "run", {1: STEP})
    argv = ["report", f"{tmp_path}/absent", str(run), str(tmp_path / "runs"), str(run / "config.yaml"), "--plot", "a.gif"]
    assert main([*argv, "--out", str(tmp_path / "table.md")]) == 2
    out, err = capsys.readouterr()
    for fault in (
        f"'{tmp_path}/absent': there is no such folder",
        f"'{tmp_path}/runs': is no run's folder: no config.yaml in it; runs within it: run",
        "config.yaml': is a file; give a run's folder",
        "--plot = 'a.gif': must end with one of .png, .pdf, .svg",
    ):
        assert fault in err
    assert out == "" and "Traceback" not in err and not (tmp_path / "table.md").exists()


def test_a_run_that_has_only_its_lock_has_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".lock").touch()
    assert main(["report", str(tmp_path)]) == 0
    assert cells(capsys.readouterr().out, tmp_path.name)["state"] == "not started"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"st\n{"step": 3}\n', "line 2"),
        ("config.yaml", "run: {", 'config.yaml", line 1'),
        ("config.yaml", "- 1", "sections"),
    ],
)
def test_damaged_files_spoil_one_row_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    good, bad = write_run(tmp_path / "good", {12: STEP}), write_run(tmp_path / "bad", {12: STEP})
    (bad / name).write_text(text)
    assert main(["report", str(good), str(bad)]) == 1
    out, err = capsys.readouterr()
    assert cells(out, "good")["state"] == "done" and cells(out, "bad")["state"] == "unreadable"
    assert f"dapo: {bad}: " in err and message in err and "Traceback" not in err


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = write_run(tmp_path / "bare", {})
    picture = tmp_path / "deep" / "curves.png"
    assert main(["report", str(bare), "--plot", str(picture)]) == 1
    out, err = capsys.readouterr()
    assert cells(out, "bare") and "no step is done yet in bare" in err and "Traceback" not in err and not picture.exists()
    rows = {step: {**STEP, "reward/accuracy": step / 12, "policy/entropy": 1 / step} for step in range(1, 13)}
    run = write_run(tmp_path / "run", rows)
    assert main(["report", str(bare), str(run), "--plot", str(picture)]) == 0
    pixels = image.imread(picture)
    height, width = pixels.shape[:2]
    curves, left = pixels[: height // 2], pixels[height * 6 // 10 : height * 9 // 10, width * 4 // 10 :]
    assert min(curves.shape[:2]) > 300 and curves[..., :3].std() > 0.02
    assert (left == 1).all()  # four curves leave two of six panels empty
    assert [path.name for path in picture.parent.iterdir()] == ["curves.png"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as new:
        new.write_text("half")
        assert path.read_text() == "old"
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
