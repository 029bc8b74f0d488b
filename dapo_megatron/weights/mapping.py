"""The one table of HF <-> Megatron parameter names and layouts. Used for loading, publishing and export alike.

A rule says which Megatron tensor corresponds to which HF tensors and how (`kind`). Rules are immutable data, made afresh
for a model: nothing is shared between models. Both directions of every kind stand next to each other below.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelShape:
    """What the mapping must know of a model, read from HF's config.json."""

    family: str
    num_layers: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    tied: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "ModelShape":
        family = config.get("model_type", "")
        if family not in FAMILIES:
            raise ValueError(f"model_type: {family!r} has no weight mapping; supported are {', '.join(FAMILIES)}")
        if config.get("mlp_bias") or (family != "qwen2" and config.get("attention_bias")):
            raise ValueError(f"model_type: {family} with attention_bias or mlp_bias has no weight mapping")
        heads = config["num_attention_heads"]
        return cls(
            family=family,
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def padded_vocab(self, tp: int) -> int:
        """Rows of the vocabulary-parallel weights: the vocabulary rounded up to a multiple of tp."""
        return -(-self.vocab_size // tp) * tp


@dataclass(frozen=True)
class Rule:
    """`megatron` are the names one parameter may have (Transformer Engine's spec fuses norms into linears); {} is the layer."""

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    kind: str

    def hf_names(self, layer: int | None) -> tuple[str, ...]:
        return tuple(name.format(layer) for name in self.hf)


_ATTENTION = "decoder.layers.{}.self_attention."
_HF_ATTENTION = "model.layers.{}.self_attn."
_HF_QKV = tuple(f"{_HF_ATTENTION}{x}_proj" for x in "qkv")
_COMMON = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), "vocab"),
    Rule(
        ("decoder.layers.{}.input_layernorm.weight", f"{_ATTENTION}linear_qkv.layer_norm_weight"),
        ("model.layers.{}.input_layernorm.weight",),
        "replicated",
    ),
    Rule((f"{_ATTENTION}linear_qkv.weight",), tuple(f"{n}.weight" for n in _HF_QKV), "qkv"),
    Rule((f"{_ATTENTION}linear_proj.weight",), (f"{_HF_ATTENTION}o_proj.weight",), "columns"),
    Rule(
        ("decoder.layers.{}.pre_mlp_layernorm.weight", "decoder.layers.{}.mlp.linear_fc1.layer_norm_weight"),
        ("model.layers.{}.post_attention_layernorm.weight",),
        "replicated",
    ),
    Rule(
        ("decoder.layers.{}.mlp.linear_fc1.weight",),
        ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
        "gate_up",
    ),
    Rule(("decoder.layers.{}.mlp.linear_fc2.weight",), ("model.layers.{}.mlp.down_proj.weight",), "columns"),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), "replicated"),
)
_QKV_BIAS = (Rule((f"{_ATTENTION}linear_qkv.bias",), tuple(f"{n}.bias" for n in _HF_QKV), "qkv"),)
_QK_NORM = tuple(Rule((f"{_ATTENTION}{x}_layernorm.weight",), (f"{_HF_ATTENTION}{x}_norm.weight",), "replicated") for x in "qk")
_LM_HEAD = Rule(("output_layer.weight",), ("lm_head.weight",), "vocab")


def rules_for(shape: ModelShape) -> tuple[Rule, ...]:
    extra = {"llama": (), "qwen2": _QKV_BIAS, "qwen3": _QK_NORM}[shape.family]
    return _COMMON + extra + (() if shape.tied else (_LM_HEAD,))


def rule_of(name: str, rules: Sequence[Rule]) -> tuple[Rule, int | None]:
    """The rule and the (global) layer of a Megatron parameter name. An unknown name is a KeyError that names it."""
    layer_match = re.match(r"decoder\.layers\.(\d+)\.", name)
    layer = int(layer_match.group(1)) if layer_match else None
    generic = re.sub(r"^decoder\.layers\.\d+\.", "decoder.layers.{}.", name)
    for rule in rules:
        if generic in rule.megatron:
            return rule, layer
    raise KeyError(f"Megatron parameter {name!r} has no rule in the weight mapping")


def expected_hf_names(shape: ModelShape) -> set[str]:
    names: set[str] = set()
    for rule in rules_for(shape):
        layers = range(shape.num_layers) if "{}" in rule.hf[0] else (None,)
        for layer in layers:
            names.update(rule.hf_names(layer))
    return names


def check_hf_names(names: Iterable[str], shape: ModelShape, where: str) -> None:
    """Every HF tensor must be known and none may be missing. Buffers that HF may store (rotary inv_freq) are allowed, and so is
    the second copy of a tied embedding."""
    present = {n for n in names if not n.endswith("rotary_emb.inv_freq")}
    if shape.tied:
        present.discard("lm_head.weight")
    expected = expected_hf_names(shape)
    problems = [f"missing {n}" for n in sorted(expected - present)] + [f"unknown {n}" for n in sorted(present - expected)]
    if problems:
        shown = ", ".join(problems[:6]) + (f" and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise ValueError(f"{where}: tensors don't fit a {shape.family} model: {shown}")


# --- kinds: HF tensors -> one rank's Megatron tensor, and all ranks' Megatron tensors -> HF tensors ---


def _to_vocab(hf: Sequence[Tensor], shape: ModelShape, rank: int, tp: int) -> Tensor:
    padding = shape.padded_vocab(tp) - hf[0].shape[0]
    padded = torch.nn.functional.pad(hf[0], (0, 0, 0, padding))
    return padded.chunk(tp)[rank]


def _from_vocab(shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    return [torch.cat(list(shards))[: shape.vocab_size]]


def _to_qkv(hf: Sequence[Tensor], shape: ModelShape, rank: int, tp: int) -> Tensor:
    """Rows per query group: [q of the group's heads, k, v]; a rank has whole groups."""
    groups, rest = shape.num_query_groups, hf[0].shape[1:]
    per_group = [t.reshape(groups, -1, *rest) for t in hf]  # each [groups, heads_per_group or 1 * head_dim, ...]
    return torch.cat(per_group, dim=1).chunk(tp)[rank].flatten(0, 1)


def _from_qkv(shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    rest = shards[0].shape[1:]
    per_group = torch.cat(list(shards)).reshape(shape.num_query_groups, -1, *rest)
    q_rows = shape.num_heads // shape.num_query_groups * shape.head_dim
    split = per_group.split([q_rows, shape.head_dim, shape.head_dim], dim=1)
    return [t.flatten(0, 1) for t in split]


def _to_gate_up(hf: Sequence[Tensor], shape: ModelShape, rank: int, tp: int) -> Tensor:
    """[gate; up] stacked within every rank's shard."""
    return torch.cat([t.chunk(tp)[rank] for t in hf])


def _from_gate_up(shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    halves = [shard.chunk(2) for shard in shards]
    return [torch.cat([half[i] for half in halves]) for i in (0, 1)]


_KINDS: dict[str, tuple[Callable[..., Tensor], Callable[..., list[Tensor]]]] = {
    "replicated": (lambda hf, shape, rank, tp: hf[0], lambda shards, shape: [shards[0]]),
    "columns": (
        lambda hf, shape, rank, tp: hf[0].chunk(tp, dim=1)[rank],
        lambda shards, shape: [torch.cat(shards, dim=1)],
    ),
    "vocab": (_to_vocab, _from_vocab),
    "qkv": (_to_qkv, _from_qkv),
    "gate_up": (_to_gate_up, _from_gate_up),
}


def to_megatron(rule: Rule, hf: Sequence[Tensor], shape: ModelShape, tp_rank: int, tp: int) -> Tensor:
    """HF tensors (full, in the rule's order) -> the Megatron tensor of tensor-parallel rank tp_rank of tp."""
    return _KINDS[rule.kind][0](hf, shape, tp_rank, tp)


def to_hf(rule: Rule, shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    """The Megatron tensors of all tensor-parallel ranks, in order -> the full HF tensors in the rule's order."""
    return _KINDS[rule.kind][1](shards, shape)


def is_sharded(rule: Rule) -> bool:
    return rule.kind != "replicated"
