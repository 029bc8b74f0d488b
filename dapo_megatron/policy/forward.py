"""One micro-batch through the model: packed tokens in, log-prob and entropy of the response tokens out."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import functional

from dapo_megatron.algo.objective import merge_stats
from dapo_megatron.algo.packing import context_share
from dapo_megatron.ops.linear_logprob import linear_logprob, linear_loss
from dapo_megatron.policy.attention import PackedTrees
from dapo_megatron.records import MicroBatch


class DeviceBatch:
    """This context-parallel rank's part of a MicroBatch as tensors on its device; log-probs come later.

    Of the R response tokens only those in the mask are here: nothing is computed for the others, whose hidden states never meet
    the vocabulary.
    """

    def __init__(self, whole: MicroBatch) -> None:
        device = torch.cuda.current_device()
        cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        batch = context_share(whole, cp, cp_rank)

        def tensor(array: Any, dtype: torch.dtype) -> Tensor:
            return torch.tensor(array, dtype=dtype, device=device)  # copies: arrays from the object store are read-only

        self.token_ids = tensor(batch.token_ids, torch.int64)
        self.position_ids = tensor(batch.position_ids, torch.int64)
        self.positions = tensor(batch.positions[batch.mask], torch.int64)
        self.targets = tensor(batch.targets[batch.mask], torch.int64)
        self.rollout_logprobs = tensor(batch.rollout_logprobs[batch.mask], torch.float32)
        self.stale = tensor(batch.stale[batch.mask], torch.bool)
        self.advantages = tensor(batch.advantages[batch.mask], torch.float32)
        self.weights = tensor(batch.weights[batch.mask], torch.float32)
        self.number = batch.number[batch.mask]
        self.num_valid = batch.num_valid
        self.packed_trees = PackedTrees(whole, cp, cp_rank, device)
        self.logprobs = torch.empty(0)  # [R], as the last pass found them: Policy.old_logprobs, then every update
        self.old_logprobs: Tensor | None = None  # [R]
        self.importance: Tensor | None = None  # [R], weights of algo.off_policy.old_policy
        self.stats: dict[str, Tensor] = {}  # of the last update


# (micro-batch, which of its R response tokens, their log-probs, their entropies) -> (loss, statistics)
Objective = Callable[[DeviceBatch, slice, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass
class Head(ABC):
    """GPTModel's output_processor: takes the place of output layer and loss. Positions that predict no response token are left
    out before the vocabulary is touched."""

    vocab_size: int
    temperature: float
    tile_tokens: int

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Any,
        context: DeviceBatch,
        config: Any,
        **_: Any,
    ) -> Tensor:
        """hidden_states [T/cp (/tp with sequence parallelism), 1, hidden]."""
        if config.sequence_parallel:
            hidden = _rows(gather_from_sequence_parallel_region(hidden_states), context.positions)
        else:
            hidden = copy_to_tensor_model_parallel_region(_rows(hidden_states, context.positions))
        weight = output_layer.weight if output_weight is None else output_weight
        return self.output(hidden, weight, context, config)

    @abstractmethod
    def output(self, hidden: Tensor, weight: Tensor, batch: DeviceBatch, config: Any) -> Tensor:
        """hidden [R, hidden], weight [vocab/tp, hidden]."""


def _rows(hidden_states: Tensor, positions: Tensor) -> Tensor:
    """[T, 1, hidden] -> [R, hidden]. Positions repeat where responses share a prompt: an embedding adds their gradients up in a
    fixed order, and on CPUs fast, as indexing doesn't."""
    return functional.embedding(positions, hidden_states[:, 0])


class LogprobHead(Head):
    """The response tokens' log-probs, fp32 [R]."""

    def output(self, hidden: Tensor, weight: Tensor, batch: DeviceBatch, config: Any) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        return linear_logprob(hidden, weight, batch.targets, self.temperature, self.vocab_size, group, self.tile_tokens)[0]


@dataclass
class LossHead(Head):
    """The micro-batch's loss, a scalar; its statistics and the log-probs are put into the DeviceBatch."""

    objective: Objective

    def output(self, hidden: Tensor, weight: Tensor, batch: DeviceBatch, config: Any) -> Tensor:
        def tile_loss(tokens: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, tuple[dict[str, Tensor], Tensor]]:
            loss, stats = self.objective(batch, tokens, logprobs, entropy)
            return loss, (stats, logprobs.detach())

        loss, tiles = linear_loss(
            hidden,
            weight,
            batch.targets,
            tile_loss,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            tile_tokens=self.tile_tokens,
            # the schedule will multiply the loss by this
            grad_scale=1.0 if config.grad_scale_func is None else float(config.grad_scale_func(torch.ones(()))),
        )
        batch.stats = merge_stats(stats for stats, _ in tiles)
        batch.logprobs = torch.cat([logprobs for _, logprobs in tiles])
        return loss


def run_model(model: Any, batch: DeviceBatch, head: Head) -> Tensor:
    """What `head` makes of it on the last pipeline stage, hidden states elsewhere."""
    return model(
        batch.token_ids[None],
        batch.position_ids[None],
        None,
        packed_seq_params=batch.packed_trees,
        output_processor=head,
        output_processor_context=batch,
    )
