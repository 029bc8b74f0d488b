"""Sweeps: reading and judging their files, which line a task runs, the table, and slurm/sweep.sbatch."""

import fcntl
import os
import re
import shlex
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dapo_megatron import sweep
from dapo_megatron.config import Config
from dapo_megatron.config_io import ConfigError, load_config
from dapo_megatron.layout import rank_places, server_places
from dapo_megatron.sweep import SweepRun, arguments, check_sweep, main, read_sweep, refresh_table
from dapo_megatron.validation import load_valid_config
from tests.unit.test_cli import install_train
from tests.unit.test_report import STEP, TINY, cells, write_run

ROOT = TINY.parents[1]
PUBLISHED = ROOT / "configs" / "qwen2.5_32b_dapo_math.yaml"
SWEEPS = sorted((ROOT / "configs" / "sweeps").iterdir())
LINES = "low: optimizer.lr=1e-4\nhigh: optimizer.lr=1e-2 run.steps=3\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rates.txt"
    path.write_text(LINES)
    return path


def faults(path: Path, text: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_sweep(path)
    return [str(problem) for problem in caught.value.problems]


# Reading ------------------------------------------------------------------------------------------------------------


def test_lines_are_read_by_the_shells_rules(tmp_path: Path) -> None:
    path = tmp_path / "sweep.txt"
    path.write_text(
        """# a comment that isn't quoted: it's ignored

  base:
a.b-1:  run.steps=3   'data.template=say "{prompt}" # please'  # don't
\tlast: data.train.answer_pattern='#### (.*)' data.train.args="{tasks: [{max_operand: 9}]}" optimizer.lr=1e-5"""
    )
    assert read_sweep(path) == [
        SweepRun("base", [], f"{path}, line 3"),
        SweepRun("a.b-1", ["run.steps=3", 'data.template=say "{prompt}" # please'], f"{path}, line 4"),
        SweepRun(
            "last",
            ["data.train.answer_pattern=#### (.*)", "data.train.args={tasks: [{max_operand: 9}]}", "optimizer.lr=1e-5"],
            f"{path}, line 5",
        ),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run.steps=3", "must begin with the run's name"),
        ("a:run.steps=3", "must begin with the run's name, a colon and a space"),
        ("a b: run.steps=3", "must begin with the run's name"),
        ("a/b: run.steps=3", "letters, digits"),
        (": run.steps=3", "must begin with the run's name"),
        ("a: run.steps", "'run.steps' is no key=value"),
        ("a: =3", "'=3' is no key=value"),
        ("a: --resume=never", "'--resume=never' is no key=value"),
        ("a: model.path='x", "No closing quotation"),
        ("a: data.template=x#y", "a # starts a comment"),
        ("a: run.name=b", "run.name comes from the line's name"),
    ],
)
def test_lines_that_are_refused(file: Path, line: str, message: str) -> None:
    [fault] = faults(file, f"{LINES}{line}\n")
    assert fault.startswith(f"{file}, line 3") and message in fault


def test_all_faults_of_a_file_are_named_at_once(file: Path) -> None:
    found = faults(file, f"{LINES}x: run.steps\nlow: run.steps=4\n/: a=b\n")
    assert len(found) == 3 and "line 3" in found[0] and "line 5" in found[1]
    assert "'low': is the name of lines 1, 4" in found[2]
    assert faults(file, "# nothing\n") == [f"sweep file = '{file}': no run in it; a line is `name: key=value key=value ...`"]
    with pytest.raises(ConfigError, match=r"absent\.txt': can't be read"):
        read_sweep(file.with_name("absent.txt"))


# Judging ------------------------------------------------------------------------------------------------------------


def test_every_line_is_judged_before_anything_is_queued(file: Path, tmp_path: Path) -> None:
    file.write_text(f"{LINES}typo: optimizer.lrr=1\nwrong: rollout.top_p=0.5\n")
    with pytest.raises(ConfigError) as caught:
        check_sweep(TINY, read_sweep(file), [f"run.dir={tmp_path}"])
    first, second = map(str, caught.value.problems)
    assert first.startswith(f"{file}, line 3: optimizer.lrr = 1: unknown key") and "did you mean optimizer.lr?" in first
    assert second.startswith(f"{file}, line 4: rollout.top_p = 0.5: training needs 1")


def test_what_holds_for_all_lines_is_said_once(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sweep(
            TINY, read_sweep(file), ["run.stepz=1", f"run.dir={tmp_path}", "data.train.args=[1]", "data.eval.path=absent.jsonl"]
        )
    assert [problem.field for problem in caught.value.problems] == ["run.stepz", "data.train.args"]
    configs, warnings = check_sweep(
        TINY,
        read_sweep(file),
        [f"run.dir={tmp_path}", "algorithm.clip_high=0.1", "data.eval.path=absent.jsonl", "eval.every=1"],
    )
    assert [config.run.name for config in configs] == ["tiny_cpu_low", "tiny_cpu_high"]
    fields = [(problem.field, problem.severity) for problem in warnings]
    assert fields.count(("algorithm.clip_high", "warning")) == 1
    assert fields.count(("data.eval.path", "machine")) == 1  # the job runs on another


def test_lines_may_not_scatter_the_runs(file: Path, tmp_path: Path) -> None:
    file.write_text(f"a: run.steps=3\nb: run={{dir:\\ {tmp_path}/b}}\n")
    with pytest.raises(ConfigError, match=r"run\.dir: must be the same for all"):
        check_sweep(TINY, read_sweep(file), [])


def test_a_run_has_the_lines_settings_and_the_command_lines(file: Path) -> None:
    low, high = read_sweep(file)
    words = arguments(TINY, high, ["run.name=trial", "run.seed=5"])
    assert words == ["optimizer.lr=1e-2", "run.steps=3", "run.name=trial", "run.seed=5", "run.name=trial_high"]
    config = load_config(TINY, words)
    assert (config.run.name, config.run.steps, config.run.seed, config.optimizer.lr) == ("trial_high", 3, 5, 0.01)
    assert load_config(TINY, arguments(TINY, low, [])).run.name == "tiny_cpu_low"


def test_the_command_line_may_not_make_lines_the_same(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sweep(TINY, read_sweep(file), ["run.seed=5", "optimizer.lr=1e-3", "run.steps=2"])
    fields = [(problem.field, problem.value) for problem in caught.value.problems]
    assert fields == [
        (f"{file}, line 1: optimizer.lr", "1e-4"),
        (f"{file}, line 2: optimizer.lr", "1e-2"),
        (f"{file}, line 2: run.steps", "3"),
    ]
    calls = install_train(monkeypatch, 0)
    monkeypatch.setenv(sweep.TASK, "2")
    assert main(["train", str(TINY), str(file), "run.steps=2"]) == 2 and calls == []
    assert "run.steps = '3': is set on the command line too" in capsys.readouterr().err


# Commands -----------------------------------------------------------------------------------------------------------


def test_a_task_trains_its_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = install_train(monkeypatch, 75)
    monkeypatch.setenv(sweep.TASK, "2")
    assert main(["train", str(TINY), str(file), f"run.dir={tmp_path}"]) == 75
    [(config, resume)] = calls
    assert (config.run.name, config.optimizer.lr, config.run.steps, resume) == ("tiny_cpu_high", 0.01, 3, "auto")
    assert f"{file}, line 2: dapo train {TINY} optimizer.lr=1e-2 run.steps=3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "message"),
    [(None, "isn't set: a sweep is a job array"), ("0", "counted from 1"), ("3", "2 run(s)"), ("-1", "= '-1'"), ("x", "= 'x'")],
)
def test_a_task_without_a_line(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str | None, message: str
) -> None:
    calls = install_train(monkeypatch, 0)
    monkeypatch.delenv(sweep.TASK, raising=False)
    if task is not None:
        monkeypatch.setenv(sweep.TASK, task)
    assert main(["train", str(TINY), str(file)]) == 2
    err = capsys.readouterr().err
    assert sweep.TASK in err and message in err and "sbatch --array=1-2" in err and calls == []


def test_check_lists_the_runs(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(TINY), str(file), f"run.dir={tmp_path}"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1] == "  2  tiny_cpu_high  optimizer.lr=1e-2 run.steps=3" and "sbatch --array=1-2" in out[2]


def test_wrong_use_leaves_nothing_behind(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    for argv in (["check", "absent.yaml", file.name], ["table", "absent.yaml", file.name], ["table", str(TINY), "absent.txt"]):
        assert main(argv) == 2
        assert "1 error(s), nothing was started" in capsys.readouterr().err
    assert list(file.parent.iterdir()) == [file]


# The table ----------------------------------------------------------------------------------------------------------


def test_the_table_is_over_all_runs(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "trial_high", {3: STEP}, "run.steps=3")
    assert main(["table", str(TINY), str(file), f"run.dir={tmp_path}/runs", "run.name=trial"]) == 0
    path = tmp_path / "runs" / "trial_sweep.md"
    assert str(path) in capsys.readouterr().out
    text = path.read_text()
    assert cells(text, "trial_low")["state"] == "not started" and cells(text, "trial_high")["steps"] == "3 of 3"
    assert "- trial_high: `optimizer.lr=1e-2 run.steps=3`" in text


def test_a_task_that_waits_for_another_sees_what_it_has_done(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads before its turn has come would be older than what the other one writes."""
    overrides = [f"run.dir={tmp_path}", "run.name=trial"]
    waits, lock = threading.Event(), fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        waits.set()
        lock(descriptor, operation)

    path = refresh_table(TINY, file, overrides)
    monkeypatch.setattr(fcntl, "flock", flock)
    with path.with_name(f".{path.name}.lock").open("w") as held, ThreadPoolExecutor(1) as pool:
        lock(held.fileno(), fcntl.LOCK_EX)
        task = pool.submit(refresh_table, TINY, file, overrides)
        assert waits.wait(60)
        write_run(tmp_path / "trial_low", {12: STEP})
        assert not task.done() and cells(path.read_text(), "trial_low")["state"] == "not started"
        lock(held.fileno(), fcntl.LOCK_UN)
        assert task.result(60) == path
    assert cells(path.read_text(), "trial_low")["state"] == "done"


def test_the_last_of_many_tasks_leaves_the_whole_table(tmp_path: Path) -> None:
    file, overrides = tmp_path / "sweep.txt", [f"run.dir={tmp_path}", "run.name=trial"]
    names = [f"run_{number}" for number in range(8)]
    file.write_text("".join(f"{name}: run.steps=12\n" for name in names))
    path = refresh_table(TINY, file, overrides)
    start = threading.Barrier(len(names))

    def task(name: str) -> None:
        start.wait(60)
        write_run(tmp_path / f"trial_{name}", {12: STEP})
        refresh_table(TINY, file, overrides)
        assert cells(path.read_text(), f"trial_{name}")["state"] == "done"

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(task, names))
    assert {cells(path.read_text(), f"trial_{name}")["state"] for name in names} == {"done"}


# Files that come along ----------------------------------------------------------------------------------------------


def loaded(path: Path, tmp_path: Path) -> dict[str, Config]:
    """Every line's configuration by its name, as `dapo train --dry-run` judges it."""
    overrides = [f"run.dir={tmp_path}"]
    runs = read_sweep(path)
    return {run.name: load_valid_config(PUBLISHED, arguments(PUBLISHED, run, overrides), dry_run=True)[0] for run in runs}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_line_passes_a_dry_run_on_the_same_nodes(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dapo_megatron.cli import main as dapo

    nodes = set()
    for run in read_sweep(path):
        words = [*arguments(PUBLISHED, run, [f"run.dir={tmp_path}"]), "--dry-run"]
        assert dapo(["train", str(PUBLISHED), *words]) == 0
        out, err = capsys.readouterr()
        assert "max_tokens_per_microbatch" not in err and "share_prompts" not in err
        nodes.add(re.search(r"^Nodes: .*", out, re.MULTILINE)[0])  # type: ignore[index]
    assert nodes == {"Nodes: 16 with 8 GPUs each; without GPUs all run on one machine's cores"}
    start = re.search(r"^# Start: (dapo submit .*)", path.read_text(), re.MULTILINE)[1]  # type: ignore[index]
    config, named = (shlex.split(start)[i] for i in (2, 4))
    assert (ROOT / config, ROOT / named) == (PUBLISHED, path)


def test_the_ladder_of_lengths(tmp_path: Path) -> None:
    configs = loaded(ROOT / "configs" / "sweeps" / "long_context.txt", tmp_path)
    limits = {name: (c.rollout.max_response_tokens, c.reward.overlong.cache_tokens) for name, c in configs.items()}
    assert limits == {"4k": (4096, 1024), "8k": (8192, 2048), "16k_4k": (16384 + 4096, 4096), "32k": (32768, 4096)}
    published = load_config(PUBLISHED)
    for c in configs.values():
        assert (len(rank_places(c)), len(server_places(c))) == (64, 16)
        assert c.parallel.max_tokens_per_microbatch >= c.data.max_prompt_tokens + c.rollout.max_response_tokens
        assert c.parallel.max_tokens_per_microbatch // c.parallel.cp == published.parallel.max_tokens_per_microbatch


def test_the_ablation_is_the_papers_chain(tmp_path: Path) -> None:
    chain = loaded(ROOT / "configs" / "sweeps" / "ablation.txt", tmp_path)
    settings = {
        name: (
            c.reward.overlong.filter,
            c.algorithm.clip_high,
            c.reward.overlong.penalty_factor,
            c.algorithm.aggregation,
            c.sampling.dynamic,
        )
        for name, c in chain.items()
    }
    assert settings == {
        "grpo": (False, 0.2, 0.0, "sequence", False),
        "overlong_filtering": (True, 0.2, 0.0, "sequence", False),
        "clip_higher": (True, 0.28, 0.0, "sequence", False),
        "soft_overlong": (False, 0.28, 1.0, "sequence", False),
        "token_loss": (False, 0.28, 1.0, "token", False),
        "dapo": (False, 0.28, 1.0, "token", True),
    }
    published = load_config(PUBLISHED)
    published.run = chain["dapo"].run
    assert chain["dapo"] == published


# slurm/sweep.sbatch --------------------------------------------------------------------------------------------------

# What stands in train.sbatch is tested with it, on a real Slurm.
TRAIN_SBATCH = """
run_on_ray() { echo "run_on_ray $*"; return "$CODE"; }
on_first_node() { echo "on_first_node $*"; return "$TABLE_CODE"; }
say() { echo "$*"; }
finish() { echo "finish $*"; exit "$1"; }
"""


@pytest.mark.parametrize(("code", "table_code"), [(0, 0), (75, 0), (2, 1)])
def test_the_job_trains_then_refreshes_the_table_then_ends_as_the_run_did(tmp_path: Path, code: int, table_code: int) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "train.sbatch").write_text(TRAIN_SBATCH)
    environment = {**os.environ, "DAPO_DIR": str(tmp_path), "CODE": str(code), "TABLE_CODE": str(table_code)}
    command = ["bash", ROOT / "slurm" / "sweep.sbatch", "c.yaml", "s.txt", "a=b c"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == code
    assert result.stdout.splitlines() == [
        "run_on_ray python -m dapo_megatron.sweep train c.yaml s.txt a=b c",
        "on_first_node python -m dapo_megatron.sweep table c.yaml s.txt a=b c",
        *["the table over all runs wasn't written"] * table_code,
        f"finish {code}",
    ]
