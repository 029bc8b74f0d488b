"""The HF <-> Megatron rule table: inverse on every tensor-parallel size, layouts by hand, unknown and missing names."""

import dataclasses

import pytest
import torch

from dapo_megatron.weights.mapping import (
    ModelShape,
    Rule,
    check_hf_names,
    expected_hf_shapes,
    is_sharded,
    rule_of,
    rules_for,
    stored_chunks,
    stored_keys,
    stored_place,
    stored_shape,
    to_hf,
    to_megatron,
)

# 4 query groups of 2 heads; a vocabulary that no tp divides
SHAPE = ModelShape(
    "qwen2",
    num_layers=3,
    num_heads=8,
    num_query_groups=4,
    head_dim=4,
    vocab_size=13,
    tied=False,
    hidden_size=20,
    ffn_size=24,
)
MOE = dataclasses.replace(SHAPE, family="qwen3_moe", num_experts=5)
SHAPES = {"llama": dataclasses.replace(SHAPE, family="llama"), "qwen2": SHAPE, "qwen3_moe": MOE}
SHAPES["qwen3"] = dataclasses.replace(SHAPE, family="qwen3")


def hf_tensors(rule: Rule, shape: ModelShape) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(rule.hf[0]))
    return [torch.randn(size, generator=generator) for size in rule.hf_shapes(shape)]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", SHAPES)
def test_both_directions_are_inverse(family: str, tp: int) -> None:
    shape = SHAPES[family]
    for rule in rules_for(shape):
        tensors = hf_tensors(rule, shape)
        shards = [to_megatron(rule, tensors, shape, rank, tp) for rank in range(tp)]
        assert len({shard.shape for shard in shards}) == 1
        back = to_hf(rule, shards, shape)
        assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True)), rule


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", SHAPES)
def test_stored_chunks_are_what_tensor_parallel_ranks_hold(family: str, tp: int) -> None:
    """One rank's parameter is its chunks one below the other (gate and up) or its one chunk; all of them together cover the
    global tensor, which is that of a single rank."""
    shape = SHAPES[family]
    for rule in rules_for(shape):
        size = stored_shape(rule, shape, tp)
        tensors = hf_tensors(rule, shape)
        num_ranks = 1 if rule.is_expert else tp
        whole = to_megatron(rule, tensors, shape, 0, 1)
        whole = torch.nn.functional.pad(whole, (0,) * (2 * whole.ndim - 1) + (size[0] - len(whole),))
        chunks = stored_chunks(rule, shape, tp)
        parts = [whole[tuple(slice(o, o + n) for o, n in zip(offset, length, strict=True))] for offset, length in chunks]
        assert whole.shape == size and sum(part.numel() for part in parts) == whole.numel()
        for rank in range(num_ranks if is_sharded(rule) else 1):
            own = torch.cat(parts[rank :: len(parts) // (2 if rule.kind == "gate_up" else 1)])
            assert torch.equal(own, to_megatron(rule, tensors, shape, rank, num_ranks)), rule


def test_names_of_experts() -> None:
    """Local layers have experts one by one, grouped ones as weight{expert}; checkpoints stack both."""
    rules = rules_for(MOE)
    one, index = rule_of("decoder.layers.2.mlp.experts.local_experts.4.linear_fc1.weight", rules)
    assert (one, index) == rule_of("decoder.layers.2.mlp.experts.linear_fc1.weight4", rules)
    assert index == (2, 4) and one.hf_names(index)[1] == "model.layers.2.mlp.experts.4.up_proj.weight"
    assert stored_keys(one) == ("decoder.layers.mlp.experts.experts.linear_fc1.weight",)
    assert stored_place(one, index, MOE) == ((2, 4), (3, 5))
    assert len(list(one.indices(MOE))) == 15
    norm, index = rule_of("decoder.layers.1.input_layernorm.weight", rules)
    assert stored_keys(norm)[0] == "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    assert stored_place(norm, index, MOE) == ((1,), (3,))


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_spellings_of_the_number_of_experts(key: str) -> None:
    config = {"model_type": "qwen3_moe", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 11}
    config |= {"moe_intermediate_size": 6, "intermediate_size": 99, key: 3}
    shape = ModelShape.from_hf(config)
    assert (shape.num_experts, shape.ffn_size) == (3, 6)
    assert expected_hf_shapes(shape)["model.layers.1.mlp.experts.2.down_proj.weight"] == (8, 6)


def test_qkv_is_interleaved_per_query_group() -> None:
    shape = dataclasses.replace(SHAPES["llama"], num_heads=4, num_query_groups=2, head_dim=1)
    rule, _ = rule_of("decoder.layers.0.self_attention.linear_qkv.weight", rules_for(shape))
    q, k, v = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([[10.0], [11.0]]), torch.tensor([[20.0], [21.0]])
    whole = to_megatron(rule, [q, k, v], shape, 0, 1)
    assert whole.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert to_megatron(rule, [q, k, v], shape, 1, 2).flatten().tolist() == [2, 3, 11, 21]


def test_gate_and_up_are_stacked_within_every_shard() -> None:
    rule, index = rule_of("decoder.layers.2.mlp.linear_fc1.weight", rules_for(SHAPE))
    assert index == (2, None) and rule.hf_names(index)[0] == "model.layers.2.mlp.gate_proj.weight"
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
    rules = rules_for(SHAPES["qwen3"])
    for name, hf in {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    }.items():
        rule, index = rule_of(f"decoder.layers.7.{name}", rules)
        assert rule.hf_names(index) == (f"model.layers.7.{hf}",)


def test_unknown_and_missing_names_are_named() -> None:
    with pytest.raises(KeyError, match=r"decoder\.layers\.0\.mlp\.router\.weight"):
        rule_of("decoder.layers.0.mlp.router.weight", rules_for(SHAPE))
    names = set(expected_hf_shapes(SHAPE))
    check_hf_names(names, SHAPE, "folder")
    with pytest.raises(ValueError, match=r"folder: tensors don't fit a qwen2 model: unknown extra.weight"):
        check_hf_names(names | {"extra.weight"}, SHAPE, "folder")
    with pytest.raises(ValueError, match=r"missing model.norm.weight, unknown extra.weight"):
        check_hf_names(names - {"model.norm.weight"} | {"extra.weight"}, SHAPE, "folder")


def test_tied_and_untied_models_do_not_share_rules() -> None:
    """A table changed for one model must not be wrong for the next."""
    tied = dataclasses.replace(SHAPE, tied=True)
    assert "lm_head.weight" in expected_hf_shapes(SHAPE)
    assert "lm_head.weight" not in expected_hf_shapes(tied)
    assert "lm_head.weight" in expected_hf_shapes(SHAPE)
    check_hf_names(expected_hf_shapes(tied).keys() | {"lm_head.weight"}, tied, "folder")  # HF may store the copy


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"model_type": "llama", "num_attention_heads": 4}, "lacks num_hidden_layers"),
    ],
)
def test_unsupported_models_are_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape.from_hf(config)
