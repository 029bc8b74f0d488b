"""The HF <-> Megatron rule table: inverse on every tensor-parallel size, layouts by hand, unknown and missing names."""

import dataclasses

import pytest
import torch

from dapo_megatron.weights.mapping import (
    ModelShape,
    check_hf_names,
    expected_hf_names,
    rule_of,
    rules_for,
    to_hf,
    to_megatron,
)

# 4 query groups of 2 heads; a vocabulary that no tp divides
SHAPE = ModelShape("qwen2", num_layers=3, num_heads=8, num_query_groups=4, head_dim=4, vocab_size=13, tied=False)
SIZES = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "gate_proj": 24, "up_proj": 24, "embed_tokens": 13, "lm_head": 13}


def hf_tensor(name: str) -> torch.Tensor:
    rows = next((size for key, size in SIZES.items() if key in name), 20)
    generator = torch.Generator().manual_seed(len(name))
    shape = (rows,) if name.endswith("bias") or "norm" in name else (rows, 24)
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_both_directions_are_inverse(family: str, tp: int) -> None:
    shape = dataclasses.replace(SHAPE, family=family)
    for rule in rules_for(shape):
        names = rule.hf_names(1)
        tensors = [hf_tensor(name) for name in names]
        shards = [to_megatron(rule, tensors, shape, rank, tp) for rank in range(tp)]
        assert len({shard.shape for shard in shards}) == 1
        back = to_hf(rule, shards, shape)
        assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True)), rule


def test_qkv_is_interleaved_per_query_group() -> None:
    shape = ModelShape("llama", num_layers=1, num_heads=4, num_query_groups=2, head_dim=1, vocab_size=8, tied=True)
    rule, _ = rule_of("decoder.layers.0.self_attention.linear_qkv.weight", rules_for(shape))
    q, k, v = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([[10.0], [11.0]]), torch.tensor([[20.0], [21.0]])
    whole = to_megatron(rule, [q, k, v], shape, 0, 1)
    assert whole.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert to_megatron(rule, [q, k, v], shape, 1, 2).flatten().tolist() == [2, 3, 11, 21]


def test_gate_and_up_are_stacked_within_every_shard() -> None:
    rule, layer = rule_of("decoder.layers.2.mlp.linear_fc1.weight", rules_for(SHAPE))
    assert layer == 2 and rule.hf_names(2)[0] == "model.layers.2.mlp.gate_proj.weight"
    gate, up = torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]
    assert to_megatron(rule, [gate, up], SHAPE, 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_padded_vocabulary_is_cut_on_the_way_back() -> None:
    rule, _ = rule_of("output_layer.weight", rules_for(SHAPE))
    head = torch.randn(13, 5)
    shards = [to_megatron(rule, [head], SHAPE, rank, 4) for rank in range(4)]
    assert SHAPE.padded_vocab(4) == 16 and all(shard.shape == (4, 5) for shard in shards)
    assert (shards[3][1:] == 0).all()
    assert torch.equal(to_hf(rule, shards, SHAPE)[0], head)


def test_names_of_transformer_engine_layers_are_known() -> None:
    rules = rules_for(dataclasses.replace(SHAPE, family="qwen3"))
    for name, hf in {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    }.items():
        rule, layer = rule_of(f"decoder.layers.7.{name}", rules)
        assert rule.hf_names(layer) == (f"model.layers.7.{hf}",)


def test_unknown_and_missing_names_are_named() -> None:
    with pytest.raises(KeyError, match=r"decoder\.layers\.0\.mlp\.router\.weight"):
        rule_of("decoder.layers.0.mlp.router.weight", rules_for(SHAPE))
    names = expected_hf_names(SHAPE)
    check_hf_names(names, SHAPE, "folder")
    with pytest.raises(ValueError, match=r"folder: tensors don't fit a qwen2 model: unknown extra.weight"):
        check_hf_names(names | {"extra.weight"}, SHAPE, "folder")
    with pytest.raises(ValueError, match=r"missing model.norm.weight, unknown extra.weight"):
        check_hf_names(names - {"model.norm.weight"} | {"extra.weight"}, SHAPE, "folder")


def test_tied_and_untied_models_do_not_share_rules() -> None:
    """A table changed for one model must not be wrong for the next."""
    tied = dataclasses.replace(SHAPE, tied=True)
    assert "lm_head.weight" in expected_hf_names(SHAPE)
    assert "lm_head.weight" not in expected_hf_names(tied)
    assert "lm_head.weight" in expected_hf_names(SHAPE)
    check_hf_names(expected_hf_names(tied) | {"lm_head.weight"}, tied, "folder")  # HF may store the copy


@pytest.mark.parametrize(
    ("config", "message"),
    [({"model_type": "mamba"}, "mamba"), ({"model_type": "llama", "attention_bias": True}, "attention_bias")],
)
def test_unsupported_models_are_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape.from_hf(config)
