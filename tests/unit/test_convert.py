"""HF -> Megatron -> HF is the identity, whatever the dtype, the files and the layout; wrong input is refused in one line,
before anything is written."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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


# --- wrong input ---


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
