"""`verify`: what differs between two models is found and named; what only looks different isn't taken for a difference."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint_tools import UsageError
from checkpoint_tools.cli import main
from checkpoint_tools.verify import compare_logprobs, difference, read_texts
from tests.small_models import change_tensors, make_small_model

GATE, UP = (f"model.layers.1.mlp.{x}_proj.weight" for x in ("gate", "up"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An HF folder, and Megatron checkpoints of it as it is and in bf16."""
    root = tmp_path_factory.mktemp("verify")
    found = {"hf": make_small_model("qwen2_tied", root / "hf"), "megatron": root / "megatron", "bf16": root / "bf16"}
    assert main(["hf-to-megatron", str(found["hf"]), str(found["megatron"]), "--tp", "3"]) == 0
    assert main(["hf-to-megatron", str(found["hf"]), str(found["bf16"]), "--dtype", "bfloat16"]) == 0
    return found


@pytest.fixture
def copy(models: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(models["hf"], tmp_path / "copy")


def tensors_of(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    return main(["verify", str(a), str(b), "--tensors-only"]), capsys.readouterr().out


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_equal_in_any_order(models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    hf, megatron = models["hf"], models["megatron"]
    for a, b in ((hf, megatron), (megatron, hf), (megatron, megatron), (hf, hf)):
        code, output = tensors_of(a, b, capsys)
        assert code == 0 and "38 compared bit by bit, all equal" in output and output.endswith("EQUAL\n")


@pytest.mark.parametrize("hf_first", [True, False])
def test_a_flipped_bit_is_found_and_named(
    models: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str], hf_first: bool
) -> None:
    name = "model.layers.2.self_attn.v_proj.weight"

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.int32)[3, 7] ^= 1

    change_tensors(copy, flip)
    sides = (copy, models["megatron"]) if hf_first else (models["megatron"], copy)
    code, output = tensors_of(*sides, capsys)
    assert code == 1 and "38 compared bit by bit, 1 differ" in output and output.endswith("DIFFERENT: tensors\n")
    assert f"{name} at [3, 7]: " in output and "1 of 1152 elements differ" in output
    assert "(Megatron: decoder.layers.self_attention.linear_qkv.weight, layer 2)" in output


def test_swapped_gate_and_up(models: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_tensors(copy, lambda tensors: tensors.update({GATE: tensors[UP], UP: tensors[GATE]}))
    code, output = tensors_of(copy, models["megatron"], capsys)
    assert code == 1 and "2 differ" in output and f"{GATE} at [0, 0]" in output and f"{UP} at [0, 0]" in output


def test_another_rope_theta_is_found(models: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In either of the places where a configuration may have it."""
    edit_config(copy, lambda config: config.update(rope_theta=20000.0))
    code, output = tensors_of(copy, models["megatron"], capsys)
    assert code == 1 and "rope_parameters" in output and "20000.0" in output and output.endswith("DIFFERENT: configuration\n")
    edit_config(copy, lambda config: (config.pop("rope_theta"), config["rope_parameters"].update(rope_theta=30000.0)))
    code, output = tensors_of(copy, models["megatron"], capsys)
    assert code == 1 and "30000.0" in output and output.endswith("DIFFERENT: configuration\n")


def test_another_spelling_is_no_difference(models: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def respell(config: dict[str, Any]) -> None:
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["torch_dtype"] = "float16"
        del config["dtype"], config["use_sliding_window"]

    edit_config(copy, respell)
    assert tensors_of(models["megatron"], copy, capsys)[0] == 0


def test_other_dtypes_are_compared_after_rounding(
    models: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def scale(factor: float) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors[GATE][2, 1] = tensors[GATE][2, 1].bfloat16().float() * factor

        return change

    for factor, expected in ((1 + 2**-12, 0), (1 + 2**-5, 1)):  # under and over half of bf16's last place
        change_tensors(copy, scale(factor))
        for sides in ((copy, models["bf16"]), (models["bf16"], copy)):
            code, output = tensors_of(*sides, capsys)
            assert code == expected and "compared as bfloat16" in output, output
    assert f"{GATE} at [2, 1]" in output


def test_what_is_missing_unknown_or_of_another_shape_is_named(
    models: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.extra"] = tensors.pop(GATE)

    change_tensors(copy, rename)
    code, output = tensors_of(models["megatron"], copy, capsys)
    assert code == 1 and f"missing {GATE}" in output and "unknown model.layers.0.extra" in output
    change_tensors(copy, lambda tensors: tensors.update({GATE: tensors.pop("model.layers.0.extra")[:-1].contiguous()}))
    code, output = tensors_of(models["megatron"], copy, capsys)
    assert code == 1 and f"tensor {GATE} has shape (83, 48), config.json says (84, 48)" in output
    edit_config(copy, lambda config: config.update(num_hidden_layers=2, layer_types=config["layer_types"][:2]))
    code, output = tensors_of(models["megatron"], copy, capsys)
    assert code == 1 and "num_hidden_layers: 3 in A, 2 in B" in output and "of different sizes" in output


def test_a_configuration_that_contradicts_itself(
    models: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(copy, lambda config: config.update(num_hidden_layers=2))
    assert main(["verify", str(models["megatron"]), str(copy), "--tensors-only"]) == 1
    assert f"{copy}/config.json: transformers refuses it" in capsys.readouterr().err


def test_a_head_that_is_tied_and_yet_another(models: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_tensors(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert tensors_of(copy, models["megatron"], capsys)[0] == 0
    change_tensors(copy, lambda t: t["lm_head.weight"].mul_(2))
    code, output = tensors_of(copy, models["megatron"], capsys)
    assert code == 1 and "config.json ties lm_head.weight" in output


def test_a_checkpoint_without_configuration_is_taken_for_the_others_model(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(models["megatron"], tmp_path / "bare")
    shutil.rmtree(bare / "hf")
    code, output = tensors_of(bare, models["hf"], capsys)
    assert code == 0 and f"taken from {models['hf']}" in output
    assert main(["verify", str(bare), str(bare), "--tensors-only"]) == 2
    assert "says what model it is" in capsys.readouterr().err


def test_difference_is_by_bits() -> None:
    nan, inf = torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])
    assert difference(nan, nan.clone()) == ("", torch.float32)
    assert difference(nan, inf)[0].startswith(" at [1]: nan in A, inf in B")
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0]))[0].startswith(" at [0]: 0 in A, -0 in B; 1 of 1")
    value = torch.tensor([1.0 + 2**-9])  # fp16 has it, bf16 hasn't: either may have been made of the other
    for a, b in ((value.half(), value.bfloat16()), (value.bfloat16(), value.half())):
        assert difference(a, b) == ("", torch.bfloat16)
    assert difference(torch.ones(2, 3), torch.ones(3, 2))[0] == ": shape (2, 3) in A, (3, 2) in B"


# --- log-probs (by real models in tests/distributed/test_scorer.py) ---


class Scored:
    """A side whose log-probs are known."""

    def __init__(self, values: list[list[float]], tokenizer: Path, order: list[str], is_megatron: bool = False) -> None:
        self.values, self.tokenizer, self.order, self.is_megatron = values, tokenizer, order, is_megatron

    def logprobs(self, texts: Any, dtype: Any) -> list[np.ndarray]:
        self.order.append("megatron" if self.is_megatron else "hf")
        return [np.array(value, np.float32) for value in self.values]


def compared(models: dict[str, Path], a: list[list[float]], b: list[list[float]]) -> Any:
    order: list[str] = []
    texts = [[9, 10, 11], [12, 13]]
    sides = Scored(a, models["hf"], order, is_megatron=True), Scored(b, models["hf"], order)
    outcome = compare_logprobs(*sides, texts, None)  # type: ignore[arg-type]
    assert order == ["hf", "megatron"]  # whichever is A: transformers can't be imported under what Megatron needs on a CPU
    return outcome


def test_the_first_token_that_differs_is_named(models: dict[str, Path]) -> None:
    assert not compared(models, [[-1.0, -2.0], [-3.0]], [[-1.0, -2.00005], [-3.0]]).problems
    outcome = compared(models, [[-1.0, -2.0], [-3.0]], [[-1.0, -2.5], [math.nan]])
    assert "differ by at most inf" in outcome.line
    assert outcome.problems[0].startswith("text 1, token 3 of 3 (") and "-2.000000 in A, -2.500000 in B" in outcome.problems[0]
    assert outcome.problems[1].startswith("text 2, token 2 of 2 (") and "nan in B" in outcome.problems[1]


def test_nan_on_both_sides_is_equal_and_said(models: dict[str, Path]) -> None:
    outcome = compared(models, [[-1.0, math.nan], [-3.0]], [[-1.0, math.nan], [-3.0]])
    assert not outcome.problems and "1 are NaN on both sides" in outcome.line


def test_texts_of_a_file(tmp_path: Path) -> None:
    plain, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one two\n\n{three}\n")
    assert read_texts(str(plain)) == ["one two", "{three}"]
    turns = [{"role": "user", "content": "three"}, {"role": "assistant", "content": "four"}]
    rows.write_text("\n".join(map(json.dumps, ({"prompt": "one"}, {"text": "two", "id": 1}, {"prompt": turns}))))
    assert read_texts(str(rows)) == ["one", "two", "three\nfour"]
    rows.write_text('{"text": "a"}\n{"question": "b"}\n')
    with pytest.raises(UsageError, match=r'a\.jsonl, line 2: has no text under "prompt" or "text"'):
        read_texts(str(rows))
    with pytest.raises(UsageError, match=r"nowhere\.txt: can't be read"):
        read_texts("nowhere.txt")


def test_log_probs_want_a_tokenizer_and_a_text(models: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = copy / "short.txt"
    prompts.write_text("a\n")
    assert main(["verify", str(copy), str(models["hf"]), "--prompts", str(prompts)]) == 2
    assert "no text has two tokens" in capsys.readouterr().err
    for file in copy.glob("tokenizer*"):
        file.unlink()
    assert main(["verify", str(copy), str(copy)]) == 2
    assert "neither side has a tokenizer" in capsys.readouterr().err


def test_two_folders_by_transformers(models: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With log-probs, of a text that is given."""
    prompts = copy / "prompts.txt"
    prompts.write_text("What is 12 + 345?\nThe quick brown fox\n")
    assert main(["verify", str(copy), str(models["hf"]), "--prompts", str(prompts)]) == 0
    assert "in 2 texts, in float32, differ by at most 0 " in capsys.readouterr().out
    change_tensors(copy, lambda tensors: tensors.update({GATE: tensors[UP], UP: tensors[GATE]}))
    assert main(["verify", str(copy), str(models["hf"]), "--prompts", str(prompts)]) == 1
    output = capsys.readouterr().out
    assert output.endswith("DIFFERENT: tensors, log-probs\n") and "text 1, token 2 of" in output
