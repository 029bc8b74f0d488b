"""Weights in and out of this rank's model through the one mapping table: load from an HF folder, stream to HF tensors."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dapo_megatron.weights.hf_folder import HFFolder, check_tied_head
from dapo_megatron.weights.mapping import (
    Index,
    ModelShape,
    Rule,
    check_hf_names,
    is_sharded,
    rule_of,
    rules_for,
    to_hf,
    to_megatron,
)


def named_parameters(chunks: Sequence[torch.nn.Module], shape: ModelShape) -> Iterator[tuple[str, torch.nn.Parameter, bool]]:
    """(name with the global layer and expert number, parameter, is it the second copy of a tied embedding)."""
    first_expert = parallel_state.get_expert_model_parallel_rank() * (
        shape.num_experts // parallel_state.get_expert_model_parallel_world_size()
    )
    for model in chunks:
        for name, param in model.named_parameters():
            if name.startswith("decoder.layers."):
                local = int(name.split(".")[2])
                layer = model.decoder.layers[local].layer_number - 1  # type: ignore[union-attr,index]
                name = ".".join(["decoder", "layers", str(layer), *name.split(".")[3:]])
                name = _EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + first_expert}", name)
            copy = shape.tied and name == "output_layer.weight"
            yield ("embedding.word_embeddings.weight" if copy else name), param, copy


_EXPERT = re.compile(r"(mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)")  # one by one, or grouped


def load_hf_weights(chunks: Sequence[torch.nn.Module], folder: HFFolder, shape: ModelShape) -> None:
    """Fill this rank's parameters. Errors: a tensor missing, unknown or of the wrong shape is named."""
    check_hf_names(folder.names(), shape, str(folder.path))
    check_tied_head(folder, shape.tied)
    rules = rules_for(shape)
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, param, _ in named_parameters(chunks, shape):
            rule, index = rule_of(name, rules)
            names = rule.hf_names(index)
            tensors = [folder.tensor(n) for n in names]
            value = to_megatron(rule, tensors, shape, 0, 1) if rule.is_expert else to_megatron(rule, tensors, shape, rank, tp)
            if value.shape != param.shape:
                raise ValueError(
                    f"{folder.path}: {', '.join(names)} give {tuple(value.shape)}, config.json says {tuple(param.shape)}"
                )
            param.copy_(value)


def _weight(param: torch.nn.Parameter) -> Tensor:
    return param.detach()


def stream_hf_tensors(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    dtype: torch.dtype | None = None,
    value: Callable[[Any], Tensor] = _weight,
) -> Iterator[tuple[str, Tensor]]:
    """This pipeline stage's weights (or what `value` takes of each parameter) as full HF tensors, some of them the parameters
    themselves. If they will be cast to a smaller `dtype`, they have it already: it is done before they are gathered.

    Collective over the tensor-parallel (for experts: and expert-parallel) group, all of whose ranks get them. No more than one
    parameter of all these ranks is held at a time.
    """
    rules = rules_for(shape)
    for name, param, copy in named_parameters(chunks, shape):
        if copy:
            continue
        rule, own = rule_of(name, rules)
        local = value(param)
        if dtype is not None and dtype.itemsize < local.dtype.itemsize:
            local = local.to(dtype)
        local = local.contiguous()
        for index, shards in _gather_experts(local, own, shape) if rule.is_expert else [(own, _gather(local, rule))]:
            yield from zip(rule.hf_names(index), to_hf(rule, shards, shape), strict=True)


def _gather(local: Tensor, rule: Rule) -> list[Tensor]:
    """Of all tensor-parallel ranks, in order; a replicated tensor once."""
    return _all_gather(local, parallel_state.get_tensor_model_parallel_group()) if is_sharded(rule) else [local]


def _gather_experts(local: Tensor, index: Index, shape: ModelShape) -> Iterator[tuple[Index, list[Tensor]]]:
    """What the expert-parallel ranks hold in this place: whole experts."""
    experts = _all_gather(local, parallel_state.get_expert_model_parallel_group())
    assert index.expert is not None
    step = shape.num_experts // len(experts)
    for rank, expert in enumerate(experts):
        yield Index(index.layer, index.expert % step + rank * step), [expert]


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [local]
    gathered = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(gathered, local, group=group)
    return gathered
