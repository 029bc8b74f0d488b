"""The command line: exit codes, messages without tracebacks, and that nothing starts on wrong use."""

import json
import string
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from dapo_megatron.cli import main
from dapo_megatron.config import Config
from dapo_megatron.config_io import load_config

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs" / "tiny_cpu.yaml")


def install_train(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int) -> list[tuple[Config, str]]:
    """Put a controller in place that ends as told; returns the calls it gets."""
    calls: list[tuple[Config, str]] = []

    def train(config: Config, resume: str) -> int:
        calls.append((config, resume))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = types.ModuleType("dapo_megatron.train")
    module.main = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dapo_megatron.train", module)
    return calls


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "configs").glob("*.yaml")))
def test_every_configuration_passes_a_dry_run(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = install_train(monkeypatch, 0)
    code = main(["train", str(ROOT / "configs" / name), "--dry-run", f"run.dir={tmp_path}"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert calls == [] and list(tmp_path.iterdir()) == []
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(out.partition("Trainer:")[0], encoding="utf-8")
    config = load_config(resolved)
    assert config.run.dir == str(tmp_path)
    assert f"Trainer: {config.world_size} Megatron ranks" in out


def test_the_published_run_carries_the_published_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "configs" / "qwen2.5_32b_dapo_math.yaml"
    c = load_config(path)
    assert (c.algorithm.clip_low, c.algorithm.clip_high, c.algorithm.aggregation) == (0.2, 0.28, "token")
    assert (c.rollout.max_response_tokens, c.reward.overlong.cache_tokens) == (16384 + 4096, 4096)
    assert (c.sampling.prompts_per_step, c.sampling.samples_per_prompt) == (512, 16)
    assert c.world_size + c.rollout.num_servers * c.rollout.tp == 128
    main(["train", str(path), "--dry-run"])
    assert "16 update(s) of 512 responses" in capsys.readouterr().out


def test_overrides_and_options_mix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = install_train(monkeypatch, 0)
    assert main(["train", TINY, f"run.dir={tmp_path}", "--resume", "never", "run.steps=3", "run.steps=4"]) == 0
    [(config, resume)] = calls
    assert (config.run.steps, resume) == (4, "never")


def test_configuration_errors_exit_2_all_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = install_train(monkeypatch, 0)
    assert main(["train", TINY, f"run.dir={tmp_path}", "run.stepz=3", "rollout.top_p=0.9", "rollout.engine=sglng"]) == 2
    err = capsys.readouterr().err
    assert "3 error(s), nothing was started" in err and "Traceback" not in err
    for field, remedy in (
        ("run.stepz", "run.steps"),
        ("rollout.top_p", "training needs 1"),
        ("rollout.engine", "sglang?"),
    ):
        assert any(field in line and remedy in line for line in err.splitlines())
    assert calls == [] and list(tmp_path.iterdir()) == []


def test_a_failed_run_exits_1_with_one_line_and_keeps_the_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_train(monkeypatch, RuntimeError("server 0\ndied"))
    assert main(["train", TINY, f"run.dir={tmp_path}"]) == 1
    err = capsys.readouterr().err
    log = tmp_path / "tiny_cpu" / "error.log"
    assert err == f"dapo: server 0 died (details: {log})\n"
    assert "Traceback" in log.read_text() and "RuntimeError" in log.read_text()


@pytest.mark.parametrize("error", [AssertionError("in\nvariant"), KeyError("in variant"), TypeError("in variant")])
def test_a_bug_is_one_line_and_keeps_its_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_train(monkeypatch, error)
    assert main(["train", TINY, f"run.dir={tmp_path}"]) == 1
    err = capsys.readouterr().err
    log = tmp_path / "tiny_cpu" / "error.log"
    assert err.count("\n") == 1 and f"{type(error).__name__}: " in err and "in variant" in err and str(log) in err
    assert "a fault of dapo_megatron, please report it" in err
    assert "Traceback" in log.read_text() and type(error).__name__ in log.read_text()


def test_resuming_from_what_is_no_checkpoint_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = install_train(monkeypatch, 0)
    folder = tmp_path / "step_000001"
    for resume in (str(folder), str(tmp_path), "atuo"):
        assert main(["train", TINY, f"run.dir={tmp_path}", "--resume", resume]) == 2
        err = capsys.readouterr().err
        assert f"--resume = {resume!r}: no checkpoint there" in err and "Traceback" not in err
    assert calls == [] and list(tmp_path.iterdir()) == []
    assert main(["train", TINY, f"run.dir={tmp_path}", "--resume", str(folder), "--dry-run"]) == 0
    assert "warning: this machine: --resume" in capsys.readouterr().err
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    assert main(["train", TINY, f"run.dir={tmp_path}", "--resume", str(folder)]) == 0
    assert [resume for _, resume in calls] == [str(folder)]


def test_interrupt_exits_130_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_train(monkeypatch, KeyboardInterrupt())
    assert main(["train", TINY, f"run.dir={tmp_path}"]) == 130
    assert capsys.readouterr().err == "dapo: interrupted\n"


def test_the_exit_code_of_the_controller_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_train(monkeypatch, 7)
    assert main(["train", TINY, f"run.dir={tmp_path}"]) == 7


ROW = {"question": "1 + 1", "answer": "2"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no problem in it (0 rows read"),
        (
            json.dumps(ROW) + "\n" + json.dumps({"question": "2 + 2", "answer": None}),
            "row 2, answer: None is no gold answer",
        ),
        (json.dumps(ROW) + "\n" + json.dumps({"question": "2 + 2"}), "row 2: no key 'answer'"),
        (json.dumps(ROW) + "\n" + json.dumps({"question": "2 + 2", "answer": "four"}), "'four'"),
    ],
    ids=["empty", "no gold answer", "no answer column", "gold answer that no response matches"],
)
def test_data_sets_that_cannot_be_used(content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text(content, encoding="utf-8")
    source = f"data.train={{path: {tmp_path}/train.jsonl, prompt_key: question, answer_key: answer}}"
    assert main(["data", TINY, source, "reward.verifier=exact_answer", f"run.dir={tmp_path}"]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_data_shows_prompts_as_the_model_sees_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", TINY, "data.train.args.num_rows=7", f"run.dir={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("--- prompt") for line in lines].count(True) == 3
    assert len(lines[1]) == 4 and lines[0].endswith(f"4 tokens, gold {string.ascii_lowercase!r}")
    assert lines[-2].startswith("--- 7 rows read, 7 problems kept; dropped: 0 duplicates")
    assert lines[-2].endswith("0 over the limit, 0 longer than 32 tokens") and lines[-1].startswith("--- 7 prompts")


def test_data_tells_what_became_of_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a", "1"), ("a", "1"), ("b", "1"), ("b", "2"), ("c", "3"), ("d", "4"), ("e" * 40, "5"), ("f", "6")]
    text = "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows)
    (tmp_path / "train.jsonl").write_text(text, encoding="utf-8")
    source = f"data.train={{path: {tmp_path}/train.jsonl, prompt_key: question, answer_key: answer, limit: 4}}"
    assert main(["data", TINY, source, f"run.dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    dropped = "8 rows read, 4 problems kept; dropped: 1 duplicates, 2 rows with conflicting golds, 1 over the limit"
    assert f"--- {dropped}, 1 longer than 32 tokens\n--- 3 prompts to train on" in out


def test_wrong_usage_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["fly"], ["train"], ["train", TINY, "--resume"], ["train", TINY, "--dryrun"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2


def test_help_is_quick() -> None:
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-m", "dapo_megatron.cli", "--help"], capture_output=True, text=True, timeout=60)
    seconds = time.monotonic() - start
    assert result.returncode == 0 and "train" in result.stdout
    assert seconds < 5  # well under one second on an idle machine; other tests may be running


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["configs/tiny_cpu.yaml", "--step", "3"], "--step = 3: needs a run's folder, such as runs/quickstart"),
        (["configs"], "--step: is required with a run's folder: which step? In configs none is recorded: set audit.save_every"),
        (["configs", "--step", "3", "optimizer.lr=1"], "optimizer.lr: can't be changed for a recorded step"),
        (["configs/tiny_cpu.yaml", "audit.num_layers=9"], "audit.num_layers = 9: the model has 2 layers"),
        (["configs/tiny_cpu.yaml", "audit.max_tokens=999"], "audit.max_tokens = 999: is more than the model's context of 256"),
        (["configs", "--step", "3"], "--step = 3: configs has no record of it; none is recorded: set audit.save_every"),
    ],
)
def test_audit_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, root: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(root)
    assert main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err


def recorded_run(folder: Path, *steps: int) -> Path:
    """A run's folder with records, and with one that a kill has cut short."""
    for step in steps:
        record = folder / "audit" / f"step_{step:06d}"
        record.mkdir(parents=True)
        (record / "config.yaml").write_text(f"base: {TINY}\nrun: {{dir: elsewhere}}\n", encoding="utf-8")
    (folder / "audit" / "step_000009.partial").mkdir(parents=True)
    return folder


def test_audit_names_the_steps_that_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded_run(tmp_path / "run", 2, 10)
    for arguments in ([str(run)], [str(run), "--step", "9"]):
        assert main(["audit", *arguments]) == 2
        assert "recorded are 2, 10" in capsys.readouterr().err


def test_a_failed_audit_of_a_step_writes_into_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not where the run was when it recorded the step."""
    run = recorded_run(tmp_path / "run", 2)
    monkeypatch.chdir(tmp_path)
    assert main(["audit", str(run), "--step", "2"]) == 1  # the record is empty
    err = capsys.readouterr().err
    log = run / "audit" / "error.log"
    assert "the record is damaged" in err and str(log) in err and err.count("\n") == 1 and log.is_file()
    assert not (tmp_path / "elsewhere").exists()
