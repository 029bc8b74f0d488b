"""Models, layouts and places that can't be converted are refused in one line, before anything is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.hf_models import CONFIGS, write_model
from tests.unit.test_convert import assert_equal, tensors_of, to_hf, to_megatron


def truncated(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def missing_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    change(index["weight_map"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lacking_shard(folder: Path) -> None:
    change_index(folder, lambda files: files.update(another="model-00001-of-00002.safetensors"))


def unlisted(folder: Path) -> None:
    change_index(folder, lambda files: files.pop("model.norm.weight"))


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')


def index_of_numbers(folder: Path) -> None:
    change_index(folder, lambda files: files.update({"model.norm.weight": 3}))  # type: ignore[dict-item]


def other_sizes(folder: Path) -> None:
    change_config(folder, intermediate_size=43)


def quantised_config(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "fp8"})


def unknown_family(folder: Path) -> None:
    change_config(folder, model_type="mamba")


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = tensors_of(folder)
    change(tensors)
    for file in folder.glob("*safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")


def unknown_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.extra.weight": torch.ones(2)}))


def missing_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.q_norm.weight"))


def fp8(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}))


def integers(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}))


def only_pickled(folder: Path) -> None:
    for file in folder.glob("*safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "model-00002-of-00002.safetensors: unreadable safetensors file"),
        (missing_shard, "model.safetensors.index.json: names files that are not there: model-00002-of-00002.safetensors"),
        (lacking_shard, "model-00001-of-00002.safetensors: lacks another, which the index says is there"),
        (unlisted, "holds model.norm.weight, which the index does not say"),
        (broken_index, "model.safetensors.index.json: can't be read as JSON"),
        (index_of_numbers, "model.safetensors.index.json: has no weight_map of tensors' names"),
        (other_sizes, "tensor model.layers.0.mlp.gate_proj.weight has shape (42, 48), config.json says (43, 48)"),
        (quantised_config, "config.json has a quantization_config: dequantise the model first"),
        (unknown_family, "source/config.json: model_type: 'mamba' has no weight mapping"),
        (unknown_tensor, "tensors don't fit a qwen3 model: unknown model.layers.0.mlp.extra.weight"),
        (missing_tensor, "missing model.layers.1.self_attn.q_norm.weight"),
        (fp8, "tensor model.norm.weight is F8_E4M3, not one of BF16, F16, F32: dequantise the model first"),
        (integers, "tensor model.norm.weight is I8, not one of"),
        (only_pickled, "pickled weights, which are not read"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_models_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], message: str
) -> None:
    source = write_model(tmp_path / "source", CONFIGS["qwen3"], num_files=2)
    damage(source)
    assert to_megatron(source, tmp_path / "out") in (1, 2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("checkpoint_tools: ")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "4"), "--tp: 4 does not divide the model's attention heads (6); use a divisor"),
        (("--tp", "3"), "--tp: 3 does not divide the model's query groups (2)"),
        (("--pp", "4"), "--pp: 4 stages for a model of 3 layers"),
        (("--ep", "4"), "--ep: 4 does not divide the model's experts (6)"),
    ],
)
def test_wrong_layouts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    source = write_model(tmp_path / "source", CONFIGS["qwen3_moe"])
    assert to_megatron(source, tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_experts_of_a_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert to_megatron(write_model(tmp_path / "source", CONFIGS["llama3"]), tmp_path / "out", "--ep", "2") == 2
    assert "--ep: 2 with a model without experts" in capsys.readouterr().err


def test_places_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_model(tmp_path / "source", CONFIGS["qwen3"])
    assert to_megatron(source, tmp_path / "megatron") == 0
    (tmp_path / "file").write_text("")
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "important").write_text("")
    for out, message in {
        "megatron": "exists; remove it or choose another output",
        "source/out": "lies within",
        "file/out": "can't be made",
        "other": "is not what a conversion has left",
    }.items():
        assert to_megatron(source, tmp_path / out) == 2
        assert message in capsys.readouterr().err
    for out, message in {"source": "exists", "megatron/out": "lies within", "file/out": "can't be made"}.items():
        assert to_hf(tmp_path / "megatron", tmp_path / out) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "other.partial" / "important").exists()


def test_where_the_configuration_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From beside the weights, from the model of the run, or from --hf; never guessed."""
    source = write_model(tmp_path / "source", CONFIGS["qwen3"])
    run = tmp_path / "run"
    policy = run / "checkpoints" / "step_000003" / "policy"
    policy.parent.mkdir(parents=True)
    assert to_megatron(source, policy) == 0
    for place in (run, policy.parent, policy):
        (policy.parent / "state.json").write_text(json.dumps({"config": "model: {path: /absent, random_model: {}}"}))
        seal_anew(policy.parent)
        assert to_hf(place, tmp_path / f"out_{place.name}") == 0
        assert_equal(tensors_of(tmp_path / f"out_{place.name}"), tensors_of(source))
    for file in (policy / "hf").iterdir():
        file.unlink()
    seal_anew(policy.parent)
    assert to_hf(policy, tmp_path / "none") == 2
    assert (
        "has no hf/config.json, which says what model it is; give the model's folder with --hf DIR" in capsys.readouterr().err
    )
    assert to_hf(run, tmp_path / "none") == 2
    assert "the model of its run can't be found" in capsys.readouterr().err
    assert to_hf(run, tmp_path / "given", "--hf", str(source)) == 0
    assert_equal(tensors_of(tmp_path / "given"), tensors_of(source))
    settings = json.dumps({"config": f"model: {{path: {source}, random_model: {{}}}}"})
    (policy.parent / "state.json").write_text(settings)
    seal_anew(policy.parent)
    assert to_hf(run, tmp_path / "named") == 0
    assert_equal(tensors_of(tmp_path / "named"), tensors_of(source))
    next(policy.glob("*.distcp")).write_bytes(b"damage")
    assert to_hf(policy.parent, tmp_path / "none") == 1
    assert "the checkpoint is damaged: policy/__" in capsys.readouterr().err


def seal_anew(checkpoint: Path) -> None:
    from dapo_megatron.checkpoint_files import MANIFEST, seal

    (checkpoint / MANIFEST).unlink(missing_ok=True)
    seal(checkpoint)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is written."""
    source = write_model(tmp_path / "source", CONFIGS["qwen3"])
    other = write_model(tmp_path / "other", {**CONFIGS["qwen3"], "num_hidden_layers": 4})
    assert to_megatron(source, tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "out", "--hf", str(other)) == 1
    assert "has shape (3, 48), config.json says (4, 48)" in capsys.readouterr().err
    assert not (tmp_path / "out.partial").exists()


def test_a_checkpoint_that_is_cut_off_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is written, though the last layer's tensors are read last."""
    assert to_megatron(write_model(tmp_path / "source", CONFIGS["qwen3"]), tmp_path / "megatron", "--pp", "3") == 0
    last = tmp_path / "megatron" / "__2_0.distcp"
    last.write_bytes(last.read_bytes()[:-1])
    assert to_hf(tmp_path / "megatron", tmp_path / "out") == 1
    assert "__2_0.distcp: has " in capsys.readouterr().err
    assert not (tmp_path / "out.partial").exists()
