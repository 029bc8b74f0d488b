"""One micro-batch through the model: packed tokens in, log-prob and entropy of the response tokens out."""

from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from dapo_megatron.algo.packing import context_share, zigzag_indices
from dapo_megatron.ops.linear_logprob import linear_logprob
from dapo_megatron.records import MicroBatch


class DeviceBatch:
    """This context-parallel rank's part of a MicroBatch as tensors on its device; the old log-probs come later."""

    def __init__(self, whole: MicroBatch) -> None:
        device = torch.cuda.current_device()
        cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        batch = context_share(whole, cp, cp_rank)
        starts = np.repeat(whole.cu_seqlens[:-1], np.diff(whole.cu_seqlens))
        held = zigzag_indices(whole.cu_seqlens, cp, cp_rank)

        def tensor(array: Any, dtype: torch.dtype) -> Tensor:
            return torch.tensor(array, dtype=dtype, device=device)  # copies: arrays from the object store are read-only

        self.token_ids = tensor(batch.token_ids, torch.int64)
        self.cu_seqlens = tensor(batch.cu_seqlens, torch.int32)
        self.position_ids = tensor((np.arange(len(starts)) - starts)[held], torch.int64)
        self.positions = tensor(batch.positions, torch.int64)
        self.targets = tensor(batch.targets, torch.int64)
        self.rollout_logprobs = tensor(batch.rollout_logprobs, torch.float32)
        self.stale = tensor(batch.stale, torch.bool)
        self.mask = tensor(batch.mask, torch.bool)
        self.advantages = tensor(batch.advantages, torch.float32)
        self.weights = tensor(batch.weights, torch.float32)
        self.number = batch.number
        self.num_valid = batch.num_valid
        self.max_seqlen = int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max())
        self.trainer_logprobs = torch.empty(0)  # [R], by the weights before the step; known after Policy.old_logprobs
        self.old_logprobs: Tensor | None = None

    def packed_seq_params(self) -> PackedSeqParams:
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )


class LogprobHead:
    """GPTModel's output_processor: selects the positions that predict response tokens before the vocabulary is touched."""

    def __init__(self, vocab_size: int, temperature: float, chunk_tokens: int, with_entropy_grad: bool) -> None:
        self.vocab_size = vocab_size
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.with_entropy_grad = with_entropy_grad

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
        """hidden_states [T/cp (/tp with sequence parallelism), 1, hidden] -> fp32 [2, R]: log-probs and entropies."""
        group = parallel_state.get_tensor_model_parallel_group()
        if config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states)[:, 0][context.positions]
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states[:, 0][context.positions])
        weight = output_layer.weight if output_weight is None else output_weight
        logprobs, entropy = linear_logprob(
            hidden, weight, context.targets, self.temperature, self.vocab_size, group, self.chunk_tokens
        )
        return torch.stack([logprobs, entropy if self.with_entropy_grad else entropy.detach()])


def run_model(model: Any, batch: DeviceBatch, head: LogprobHead) -> Tensor:
    """[2, R] on the last pipeline stage, hidden states elsewhere."""
    return model(
        batch.token_ids[None],
        batch.position_ids[None],
        None,
        packed_seq_params=batch.packed_seq_params(),
        output_processor=head,
        output_processor_context=batch,
    )
