"""Wrong use that shows only when model and data are read: `dapo train` as a user starts it, ended before any process starts."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dapo_megatron import train
from dapo_megatron.cli import main
from dapo_megatron.config import ModelConfig
from dapo_megatron.config_io import load_config
from dapo_megatron.run_folder import RunFolder
from dapo_megatron.setup import prepare
from dapo_megatron.weights.source import resolve_model

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny_cpu.yaml"


STARTED = "processes would start now"


class Started(RuntimeError):
    """The run got as far as starting processes."""


@pytest.fixture
def dapo_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `dapo train` on the tiny configuration; its output, which ends with STARTED if nothing was wrong."""

    def start(*_: object) -> None:
        raise Started(STARTED)

    monkeypatch.setattr(train, "start_cluster", start)

    def run(*overrides: str) -> str:
        assert main(["train", str(TINY), f"run.dir={tmp_path}/runs", *overrides]) == 1
        out, err = capsys.readouterr()
        assert "Traceback" not in err and err.count("\n") == 1, err
        return out + err

    return run


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may spoil."""
    return shutil.copytree(
        resolve_model(ModelConfig("random", "float32", load_config(TINY).model.random_model)), tmp_path / "m"
    )


def without(file: Path, key: str) -> None:
    content = json.loads(file.read_text())
    content.pop(key, None)
    file.write_text(json.dumps(content))


def test_a_tokenizer_without_eos(dapo_train: Callable[..., str], model_dir: Path) -> None:
    model = (f"model.path={model_dir}", "model.random_model={}")
    for name in ("config.json", "generation_config.json"):
        without(model_dir / name, "eos_token_id")
    assert STARTED in dapo_train(*model)  # the tokenizer's is enough
    without(model_dir / "tokenizer_config.json", "eos_token")
    output = dapo_train(*model)
    assert "no EOS token in config.json, generation_config.json or the tokenizer; add eos_token_id" in output
    assert STARTED not in output


def test_a_chat_template_that_leaves_the_users_turn_open(dapo_train: Callable[..., str], model_dir: Path) -> None:
    chat = (f"model.path={model_dir}", "model.random_model={}", "data.format=chat")
    assert STARTED in dapo_train(*chat)
    template = model_dir / "chat_template.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    output = dapo_train(*chat)
    assert "would go on with the user's turn" in output and "or set data.format=plain" in output and STARTED not in output
    template.unlink()
    output = dapo_train(*chat)
    assert "the model's has none; set data.format=plain" in output and STARTED not in output


def source(tmp_path: Path, *rows: dict[str, str], key: str = "train") -> str:
    path = tmp_path / f"{key}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"data.{key}={{path: {path}, prompt_key: question, answer_key: answer}}"


def test_duplicates_are_said_and_clashing_ids_refused(dapo_train: Callable[..., str], tmp_path: Path) -> None:
    one, other = {"question": "a", "answer": "x", "id": "7"}, {"question": "b", "answer": "x", "id": "7"}
    held_out = ("eval.every=0", source(tmp_path, {"question": "c", "answer": "x"}, key="eval"))
    output = dapo_train(source(tmp_path, one, one), *held_out)
    assert "2 rows read, 1 problems kept; dropped: 1 duplicates" in output and "held out  1 prompts\n" in output
    assert "sharing   1 tokens of a prompt are packed once for up to 8 responses: 44% fewer tokens" in output
    twice = source(tmp_path, *[{"question": "c", "answer": "x"}] * 2, key="eval")
    output = dapo_train(source(tmp_path, one), "eval.every=0", twice)
    assert "held out  1 prompts (2 rows read, 1 problems kept; dropped: 1 duplicates" in output
    output = dapo_train(source(tmp_path, one, other))
    assert "row 2, id: '7' is the id of another problem in row 1: 'a' there, 'b' here" in output and STARTED not in output


async def save_policy(folder: str) -> None:
    (Path(folder) / "weights").write_text("w")


def test_data_changed_under_a_resumed_run(dapo_train: Callable[..., str], tmp_path: Path) -> None:
    rows = [{"question": q, "answer": "x"} for q in "abc"]
    before = source(tmp_path, *rows)
    cfg = load_config(TINY, [f"run.dir={tmp_path}/runs", before])
    with RunFolder.open(cfg, "auto") as folder:
        stream = prepare(cfg).stream
        stream.position = 2
        asyncio.run(folder.save_checkpoint(1, {}, save_policy, stream, stream))
    output = dapo_train(before)
    assert "resuming after step 1" in output and "since the checkpoint" not in output and STARTED in output
    rows[0]["answer"] = "y"
    after = source(tmp_path, *rows)  # the same settings, another file
    output = dapo_train(after)
    assert "the training prompts aren't those that the run was started with: their fingerprint was" in output
    assert "set data.on_change=continue to go on at the saved position" in output and STARTED not in output
    output = dapo_train(after, "data.on_change=continue")
    assert "changed since the checkpoint (fingerprint was" in output and "going on at prompt 2, epoch 0" in output
    assert STARTED in output
