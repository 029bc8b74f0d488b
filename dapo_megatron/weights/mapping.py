"""The one table of HF <-> Megatron parameter names and layouts. Used for loading, publishing, export and conversion alike.

A rule says which Megatron tensor corresponds to which HF tensors and how (`kind`). Rules are immutable data, made afresh
for a model: nothing is shared between models. Both directions of every kind stand next to each other below.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """What the mapping must know of a model, read from HF's config.json. num_experts is 0 for a dense model, whose ffn_size is
    that of its one MLP; otherwise ffn_size is that of an expert."""

    family: str
    num_layers: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    tied: bool
    hidden_size: int = 0
    ffn_size: int = 0
    num_experts: int = 0

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "ModelShape":
        """ValueError for a model that the table doesn't describe, or a configuration that lacks a size."""
        sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
        odd = [name for name in sizes if name in config and not (isinstance(config[name], int) and config[name] > 0)]
        if odd:
            raise ValueError(f"config.json: {odd[0]} is {config[odd[0]]!r}; it must be a number from 1 up")
        heads, groups = config.get("num_attention_heads", 1), config.get("num_key_value_heads") or 1
        if heads % groups:
            raise ValueError(f"config.json: num_key_value_heads ({groups}) does not divide num_attention_heads ({heads})")
        family = config.get("model_type", "")
        if family not in FAMILIES:
            raise ValueError(f"model_type: {family!r} has no weight mapping; supported are {', '.join(FAMILIES)}")
        if config.get("mlp_bias") or (family != "qwen2" and config.get("attention_bias")):
            raise ValueError(f"model_type: {family} with attention_bias or mlp_bias has no weight mapping")
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError("mlp_only_layers, decoder_sparse_step: a model with dense layers among MoE layers has no mapping")
        try:
            heads = config["num_attention_heads"]
            moe = family == "qwen3_moe"  # transformers 5 writes num_local_experts for what the hub's files call num_experts
            return cls(
                family=family,
                num_layers=config["num_hidden_layers"],
                num_heads=heads,
                num_query_groups=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocab_size=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings", False)),
                hidden_size=config["hidden_size"],
                ffn_size=config["moe_intermediate_size" if moe else "intermediate_size"],
                num_experts=(config.get("num_experts") or config["num_local_experts"]) if moe else 0,
            )
        except KeyError as error:
            raise ValueError(f"config.json lacks {error.args[0]}, which a {family} model needs") from None

    def padded_vocab(self, tp: int) -> int:
        """Rows of the vocabulary-parallel weights: the vocabulary rounded up to a multiple of tp."""
        return -(-self.vocab_size // tp) * tp

    def size(self, dim: str) -> int:
        """The length of one of the dimensions that rules name."""
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_query_groups * self.head_dim,
            "head": self.head_dim,
            "ffn": self.ffn_size,
            "experts": self.num_experts,
        }[dim]


class Index(NamedTuple):
    """Which of the parameters of a rule: (global) layer and expert, None where the rule has none."""

    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True)
class Rule:
    """`megatron` are the names one parameter may have (Transformer Engine's spec fuses norms into linears, the local one has
    experts one by one). `dims` are the dimensions of each of the HF tensors (ModelShape.size)."""

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    kind: str
    dims: tuple[tuple[str, ...], ...]

    def hf_names(self, index: Index) -> tuple[str, ...]:
        return tuple(name.format(layer=index.layer, expert=index.expert) for name in self.hf)

    def hf_shapes(self, shape: ModelShape) -> list[tuple[int, ...]]:
        """Of one parameter's HF tensors, in the rule's order."""
        return [tuple(map(shape.size, dims)) for dims in self.dims]

    def indices(self, shape: ModelShape) -> Iterator[Index]:
        """All parameters that the rule stands for, layer by layer."""
        for layer in range(shape.num_layers) if "{layer}" in self.hf[0] else (None,):
            for expert in range(shape.num_experts) if self.is_expert else (None,):
                yield Index(layer, expert)

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.hf[0]


_LAYER = "decoder.layers.{layer}."
_ATTENTION = f"{_LAYER}self_attention."
_EXPERTS = f"{_LAYER}mlp.experts."
_HF_LAYER = "model.layers.{layer}."
_HF_QKV = tuple(f"{_HF_LAYER}self_attn.{x}_proj" for x in "qkv")
_HF_EXPERT = f"{_HF_LAYER}mlp.experts.{{expert}}."
_NORM_AFTER_ATTENTION = f"{_HF_LAYER}post_attention_layernorm.weight"
_COMMON = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), "vocab", (("vocab", "hidden"),)),
    Rule(
        (f"{_LAYER}input_layernorm.weight", f"{_ATTENTION}linear_qkv.layer_norm_weight"),
        (f"{_HF_LAYER}input_layernorm.weight",),
        "replicated",
        (("hidden",),),
    ),
    Rule(
        (f"{_ATTENTION}linear_qkv.weight",),
        tuple(f"{n}.weight" for n in _HF_QKV),
        "qkv",
        (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
    ),
    Rule((f"{_ATTENTION}linear_proj.weight",), (f"{_HF_LAYER}self_attn.o_proj.weight",), "columns", (("hidden", "q"),)),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), "replicated", (("hidden",),)),
)
_QKV_BIAS = (Rule((f"{_ATTENTION}linear_qkv.bias",), tuple(f"{n}.bias" for n in _HF_QKV), "qkv", (("q",), ("kv",), ("kv",))),)
_QK_NORM = tuple(
    Rule((f"{_ATTENTION}{x}_layernorm.weight",), (f"{_HF_LAYER}self_attn.{x}_norm.weight",), "replicated", (("head",),))
    for x in "qk"
)
_DENSE = (
    Rule(
        (f"{_LAYER}pre_mlp_layernorm.weight", f"{_LAYER}mlp.linear_fc1.layer_norm_weight"),
        (_NORM_AFTER_ATTENTION,),
        "replicated",
        (("hidden",),),
    ),
    Rule(
        (f"{_LAYER}mlp.linear_fc1.weight",),
        (f"{_HF_LAYER}mlp.gate_proj.weight", f"{_HF_LAYER}mlp.up_proj.weight"),
        "gate_up",
        (("ffn", "hidden"), ("ffn", "hidden")),
    ),
    Rule((f"{_LAYER}mlp.linear_fc2.weight",), (f"{_HF_LAYER}mlp.down_proj.weight",), "columns", (("hidden", "ffn"),)),
)
_MOE = (
    Rule((f"{_LAYER}pre_mlp_layernorm.weight",), (_NORM_AFTER_ATTENTION,), "replicated", (("hidden",),)),
    Rule((f"{_LAYER}mlp.router.weight",), (f"{_HF_LAYER}mlp.gate.weight",), "replicated", (("experts", "hidden"),)),
    Rule(
        (f"{_EXPERTS}local_experts.{{expert}}.linear_fc1.weight", f"{_EXPERTS}linear_fc1.weight{{expert}}"),
        (f"{_HF_EXPERT}gate_proj.weight", f"{_HF_EXPERT}up_proj.weight"),
        "gate_up",
        (("ffn", "hidden"), ("ffn", "hidden")),
    ),
    Rule(
        (f"{_EXPERTS}local_experts.{{expert}}.linear_fc2.weight", f"{_EXPERTS}linear_fc2.weight{{expert}}"),
        (f"{_HF_EXPERT}down_proj.weight",),
        "columns",
        (("hidden", "ffn"),),
    ),
)
_LM_HEAD = Rule(("output_layer.weight",), ("lm_head.weight",), "vocab", (("vocab", "hidden"),))


def rules_for(shape: ModelShape) -> tuple[Rule, ...]:
    extra = {"llama": (), "qwen2": _QKV_BIAS, "qwen3": _QK_NORM, "qwen3_moe": _QK_NORM}[shape.family]
    return _COMMON + extra + (_MOE if shape.num_experts else _DENSE) + (() if shape.tied else (_LM_HEAD,))


def rule_of(name: str, rules: Sequence[Rule]) -> tuple[Rule, Index]:
    """The rule of a Megatron parameter name, and which of its parameters (with global layer and expert in the name). An
    unknown name is a KeyError that names it."""
    for rule in rules:
        for pattern in rule.megatron:
            if found := _regex(pattern).fullmatch(name):
                return rule, Index(**{part: int(number) for part, number in found.groupdict().items()})
    raise KeyError(f"Megatron parameter {name!r} has no rule in the weight mapping")


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(pattern)))


def expected_hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """All HF tensors of the model by name."""
    return {
        name: size
        for rule in rules_for(shape)
        for index in rule.indices(shape)
        for name, size in zip(rule.hf_names(index), rule.hf_shapes(shape), strict=True)
    }


def check_hf_names(names: Iterable[str], shape: ModelShape, where: str) -> None:
    """Every HF tensor must be known and none may be missing. Buffers that HF may store (rotary inv_freq) are allowed, and so is
    the second copy of a tied embedding."""
    present = {n for n in names if not n.endswith("rotary_emb.inv_freq")}
    if shape.tied:
        present.discard("lm_head.weight")
    expected = expected_hf_shapes(shape).keys()
    problems = [f"missing {n}" for n in sorted(expected - present)] + [f"unknown {n}" for n in sorted(present - expected)]
    if problems:
        shown = ", ".join(problems[:6]) + (f" and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise ValueError(f"{where}: tensors don't fit a {shape.family} model: {shown}")


# --- kinds: HF tensors -> one rank's Megatron tensor, and all ranks' Megatron tensors -> HF tensors ---


def _joined(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    """A single one isn't copied."""
    return torch.cat(list(shards), dim) if len(shards) > 1 else shards[0]


def _to_vocab(hf: Sequence[Tensor], shape: ModelShape, rank: int, tp: int) -> Tensor:
    padding = shape.padded_vocab(tp) - hf[0].shape[0]
    padded = torch.nn.functional.pad(hf[0], (0, 0, 0, padding)) if padding else hf[0]  # a copy, of a large tensor
    return padded.chunk(tp)[rank]


def _from_vocab(shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    return [_joined(shards)[: shape.vocab_size]]


def _to_qkv(hf: Sequence[Tensor], shape: ModelShape, rank: int, tp: int) -> Tensor:
    """Rows per query group: [q of the group's heads, k, v]; a rank has whole groups."""
    groups, rest = shape.num_query_groups, hf[0].shape[1:]
    per_group = [t.reshape(groups, -1, *rest) for t in hf]  # each [groups, heads_per_group or 1 * head_dim, ...]
    return torch.cat(per_group, dim=1).chunk(tp)[rank].flatten(0, 1)


def _from_qkv(shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    rest = shards[0].shape[1:]
    per_group = _joined(shards).reshape(shape.num_query_groups, -1, *rest)
    q_rows = shape.num_heads // shape.num_query_groups * shape.head_dim
    split = per_group.split([q_rows, shape.head_dim, shape.head_dim], dim=1)
    return [t.flatten(0, 1) for t in split]


def _to_gate_up(hf: Sequence[Tensor], shape: ModelShape, rank: int, tp: int) -> Tensor:
    """[gate; up] stacked within every rank's shard."""
    return torch.cat([t.chunk(tp)[rank] for t in hf])


def _from_gate_up(shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    halves = [shard.chunk(2) for shard in shards]
    return [_joined([half[i] for half in halves]) for i in (0, 1)]


class _Kind(NamedTuple):
    to_megatron: Callable[..., Tensor]
    to_hf: Callable[..., list[Tensor]]
    axis: int | None  # along which the Megatron tensor is sharded


_KINDS = {
    "replicated": _Kind(lambda hf, shape, rank, tp: hf[0], lambda shards, shape: [shards[0]], None),
    "columns": _Kind(
        lambda hf, shape, rank, tp: hf[0].chunk(tp, dim=1)[rank], lambda shards, shape: [_joined(shards, dim=1)], 1
    ),
    "vocab": _Kind(_to_vocab, _from_vocab, 0),
    "qkv": _Kind(_to_qkv, _from_qkv, 0),
    "gate_up": _Kind(_to_gate_up, _from_gate_up, 0),
}


def to_megatron(rule: Rule, hf: Sequence[Tensor], shape: ModelShape, tp_rank: int, tp: int) -> Tensor:
    """HF tensors (full, in the rule's order) -> the Megatron tensor of tensor-parallel rank tp_rank of tp."""
    return _KINDS[rule.kind].to_megatron(hf, shape, tp_rank, tp)


def to_hf(rule: Rule, shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    """The Megatron tensors of all tensor-parallel ranks, in order -> the full HF tensors in the rule's order. Some may be views
    of those given."""
    return _KINDS[rule.kind].to_hf(shards, shape)


def is_sharded(rule: Rule) -> bool:
    return _KINDS[rule.kind].axis is not None


# --- Megatron's torch_dist checkpoints: layers (and experts) stacked into global tensors that no layout shows in ---


def stored_keys(rule: Rule) -> tuple[str, ...]:
    """Names under which the parameters of a rule lie in a torch_dist checkpoint, all layers (and experts) in one tensor
    [num_layers, (num_experts,) ...]. The first is Transformer Engine's, which is written."""
    names = reversed(rule.megatron) if not rule.is_expert else rule.megatron[:1]
    return tuple(name.replace("layers.{layer}", "layers").replace("local_experts.{expert}", "experts") for name in names)


def stored_place(rule: Rule, index: Index, shape: ModelShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(leading offsets, leading sizes) of one parameter within its stored tensor; () and () where nothing is stacked."""
    places = [(index.layer, shape.num_layers), (index.expert, shape.num_experts)]
    found = [(offset, size) for offset, size in places if offset is not None]
    return tuple(offset for offset, _ in found), tuple(size for _, size in found)


def stored_shape(rule: Rule, shape: ModelShape, tp: int) -> tuple[int, ...]:
    """The global shape of one parameter: all tensor-parallel ranks together, a vocabulary padded to a multiple of tp."""
    shapes = rule.hf_shapes(shape)
    rows = shape.padded_vocab(tp) if rule.kind == "vocab" else sum(size[0] for size in shapes)
    return (rows, *shapes[0][1:])


def stored_chunks(rule: Rule, shape: ModelShape, tp: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the chunks in which Megatron's tensor-parallel ranks save one parameter, within stored_shape. Gate
    and up are global each: [all gates; all ups]. Experts aren't split."""
    tp = 1 if rule.is_expert else tp
    whole, axis = stored_shape(rule, shape, tp), _KINDS[rule.kind].axis
    if axis is None:
        return [((0,) * len(whole), whole)]
    num_chunks = tp * (2 if rule.kind == "gate_up" else 1)
    length = whole[axis] // num_chunks
    sizes = tuple(length if i == axis else size for i, size in enumerate(whole))
    return [(tuple(n * length if i == axis else 0 for i in range(len(whole))), sizes) for n in range(num_chunks)]


def check_tensor_parallel(shape: ModelShape, tp: int) -> None:
    """ValueError unless heads, query groups and a dense MLP can be divided among tp ranks."""
    split = {"attention heads": shape.num_heads, "query groups": shape.num_query_groups}
    for what, size in (split if shape.num_experts else {**split, "MLP rows": shape.ffn_size}).items():
        if size % tp:
            raise ValueError(f"tp: {tp} does not divide the model's {what} ({size}); use a divisor")
