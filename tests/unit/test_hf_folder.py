"""Model folders on disk: shards, index, damage."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dapo_megatron.weights.hf_folder import HFFolder, check_tied_head, finish_folder, start_folder, write_shards


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float16"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


def write(source: Path, out: Path, tensors: dict[str, torch.Tensor], max_bytes: int) -> None:
    start_folder(out, source, "bfloat16")
    shards = write_shards(out, "stage0", tensors.items(), max_bytes)
    finish_folder(out, list(shards.items()))


@pytest.mark.parametrize(("max_bytes", "num_files"), [(10**9, 1), (48, 2), (1, 4)])
def test_round_trip(source: Path, tmp_path: Path, max_bytes: int, num_files: int) -> None:
    tensors = {f"t{i}": torch.randn(2, i + 1) for i in range(4)}  # 8, 16, 24, 32 bytes
    out = tmp_path / "out"
    write(source, out, tensors, max_bytes)
    folder = HFFolder(out)
    assert len(list(out.glob("*.safetensors"))) == num_files
    assert sorted(folder.names()) == sorted(tensors)
    assert all(torch.equal(folder.tensor(name), value) for name, value in tensors.items())
    assert folder.config == {"model_type": "llama", "dtype": "bfloat16"}
    assert (out / "tokenizer.json").exists() and not (out / "pytorch_model.bin").exists()
    if num_files > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 80


def test_missing_config_and_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        HFFolder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match="pickled weights are not read"):
        HFFolder(tmp_path)


def test_truncated_file_is_named(source: Path) -> None:
    save_file({"a": torch.ones(100)}, source / "model.safetensors")
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-40])
    with pytest.raises(ValueError, match=r"model\.safetensors: unreadable"):
        HFFolder(source)


def test_index_that_names_a_missing_file(source: Path) -> None:
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))
    with pytest.raises(ValueError, match=r"model-00001\.safetensors"):
        HFFolder(source)


def test_a_tied_model_with_another_head_is_refused(tmp_path: Path) -> None:
    """The head would be lost."""
    (tmp_path / "config.json").write_text("{}")
    embedding = torch.arange(6.0).reshape(3, 2)
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    check_tied_head(HFFolder(tmp_path), tied=True)
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    check_tied_head(HFFolder(tmp_path), tied=False)
    with pytest.raises(ValueError, match=r"ties lm_head.weight .* the files hold another one"):
        check_tied_head(HFFolder(tmp_path), tied=True)
