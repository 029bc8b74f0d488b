"""The policy that is trained: one object per Megatron rank, all ranks calling the same methods in the same order."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from dapo_megatron.algo.objective import dapo_objective, merge_stats
from dapo_megatron.algo.off_policy import drift_stats, old_policy
from dapo_megatron.config import Config
from dapo_megatron.policy import checkpoint, cpu_backend, model, pipeline_fixes, weights_io
from dapo_megatron.policy.forward import DeviceBatch, Head, LogprobHead, LossHead, run_model
from dapo_megatron.records import MicroBatch
from dapo_megatron.weights.hf_folder import HFFolder
from dapo_megatron.weights.mapping import ModelShape

Stats = dict[str, float]


def init_distributed(rank: int, world_size: int, master: str, timeout_s: float = 1800.0) -> None:
    """Join the process group at `master` (host:port) and become a CPU or CUDA rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    cpu_backend.install()
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://{master}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


class Policy:
    """Model, optimizer and the step's batch on this rank. init_distributed must have been called."""

    def __init__(self, cfg: Config, model_dir: str | Path) -> None:
        self.cfg = cfg
        parallel = cfg.parallel
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=1,  # an expert lies whole on its rank
        )
        tensor_parallel.model_parallel_cuda_manual_seed(cfg.run.seed)
        pipeline_fixes.install()  # everywhere or nowhere: a rank without it doesn't understand one with it
        folder = HFFolder(model_dir)
        self.shape = ModelShape.from_hf(folder.config)
        self.gpt = model.build_model(cfg, folder.config, self.shape)  # model chunks; one without virtual stages
        weights_io.load_hf_weights(self.gpt, folder, self.shape)
        self.model = self._wrap()
        self.optimizer = self._optimizer()
        algorithm = cfg.algorithm
        head = self.shape.vocab_size, cfg.rollout.temperature, parallel.logprob_chunk_tokens
        self.logprob_head = LogprobHead(*head)
        self.loss_head = LossHead(
            *head,
            partial(
                _objective,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                dual_clip=algorithm.dual_clip,
                entropy_coef=algorithm.entropy_coef,
                importance_cap=algorithm.importance_cap,
            ),
        )
        self.minibatches: list[list[DeviceBatch]] = []

    def _wrap(self) -> list[DistributedDataParallel]:
        config = self.gpt[0].config
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=True
        )
        config.finalize_model_grads_func = finalize_model_grads
        wrapped = [
            DistributedDataParallel(
                config=config, ddp_config=ddp_config, module=Float16Module(config, chunk) if config.bf16 else chunk
            )
            for chunk in self.gpt
        ]
        # gradients are reduced during the last micro-batch's backward only
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        return wrapped

    def _optimizer(self) -> Any:
        settings = self.cfg.optimizer
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                clip_grad=settings.clip_grad,
                params_dtype=self.gpt[0].config.params_dtype,
                bf16=self.gpt[0].config.bf16,
                use_distributed_optimizer=True,
            ),
            self.model,
        )
        # step() would clip by a norm that is nan and so turn every weight into nan; the norm is the same on all ranks
        optimizer.get_grad_norm = partial(_finite_norm, optimizer.get_grad_norm)
        return optimizer

    # --- the step ---

    def load_batch(self, minibatches: list[list[MicroBatch]]) -> None:
        """This data-parallel rank's share of the rollout batch: for each mini-batch its micro-batches."""
        self.minibatches = [[DeviceBatch(batch) for batch in micro] for micro in minibatches]
        if self.cfg.algorithm.old_logprobs == "engine":
            for batch in (batch for micro in self.minibatches for batch in micro):
                batch.old_logprobs = batch.rollout_logprobs

    def old_logprobs(self) -> Stats:
        """Log-probs of the whole batch by the weights before the step's first update, and what follows from them; kept beside
        the batch. Not with algorithm.old_logprobs=engine.

        Returns algo.off_policy.drift_stats of this rank's share, empty on all but one rank of a model replica.
        """
        batches = [batch for micro in self.minibatches for batch in micro]
        with torch.no_grad():
            outputs = self._run(batches, self.logprob_head, _keep_logprobs, forward_only=True)
        stats = []
        for batch, output in zip(batches, outputs, strict=False):  # no outputs but on the last stage
            batch.logprobs = output["logprobs"]
            tokens = batch.logprobs, batch.rollout_logprobs, batch.stale, self.cfg.algorithm.importance_cap
            batch.old_logprobs, batch.importance = old_policy(*tokens)
            stats.append(drift_stats(*tokens))
        return _plain(merge_stats(stats)) if self._reports() else {}

    def token_logprobs(self, index: int) -> dict[int, float]:
        """What old_logprobs or, if it came later, the last update found for mini-batch `index`, by the numbers (MicroBatch) of
        the response tokens in the mask; {} on ranks that don't report. Not collective."""
        return {
            int(number): value
            for batch in (self.minibatches[index] if self._reports() else [])
            for number, value in zip(batch.number, batch.logprobs.tolist(), strict=True)
        }

    def logprobs(self, batches: list[MicroBatch], temperature: float) -> dict[int, float]:
        """By the present weights, of micro-batches that aren't the step's: by the numbers of the response tokens in the mask,
        {} on ranks that don't report. Every rank has to give as many micro-batches."""
        device_batches = [DeviceBatch(batch) for batch in batches]
        head = replace(self.logprob_head, temperature=temperature)
        with torch.no_grad():
            outputs = self._run(device_batches, head, _keep_logprobs, forward_only=True)
        return {
            int(number): value
            for batch, output in zip(device_batches, outputs, strict=False)  # no outputs but on the last stage
            for number, value in zip(batch.number, output["logprobs"].tolist(), strict=True)
            if self._reports()
        }

    def update(self, index: int, lr: float) -> Stats:
        """One optimizer step on mini-batch `index`. Returns sums over this rank's share (see algo.objective and, by the policy
        before this update, algo.off_policy.drift_stats), grad_norm.

        If a loss or gradient isn't finite on any rank, all leave weights and optimizer state as they are; grad_norm_max is nan
        or inf then, and only then.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # Megatron marks norms and biases with wd_mult 0 and leaves applying it to its scheduler, which isn't used here.
            group["weight_decay"] = self.cfg.optimizer.weight_decay * group["wd_mult"]
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        stats = self._run(self.minibatches[index], self.loss_head, _keep_stats, forward_only=False)
        try:
            _, grad_norm, _ = self.optimizer.step()
        except _NotFiniteError as error:
            grad_norm = error.norm
        if not self._reports():
            return {}
        return {"grad_norm_max": float(grad_norm), **_plain(merge_stats(stats))}

    def _run(self, batches: list[DeviceBatch], head: Head, loss: Any, forward_only: bool) -> list[dict[str, Any]]:
        def forward_step(iterator: Iterator[DeviceBatch], ddp: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)
            return run_model(ddp, batch, head), partial(loss, batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.model] if len(self.model) > 1 else iter(batches),
            model=self.model,
            num_microbatches=len(batches),
            seq_length=1,  # shapes are exchanged (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _reports(self) -> bool:
        """One rank speaks for each share of the tokens."""
        return (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True) and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    # --- weights and state ---

    @property
    def dp_rank(self) -> int:
        return parallel_state.get_data_parallel_rank()

    @property
    def num_stages(self) -> int:
        return parallel_state.get_pipeline_model_parallel_world_size()

    @property
    def stage(self) -> int:
        return parallel_state.get_pipeline_model_parallel_rank()

    @property
    def is_stage_leader(self) -> bool:
        """The one rank of its pipeline stage that hands weights over."""
        first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return first and parallel_state.get_tensor_model_parallel_rank() == 0

    @property
    def is_first_replica(self) -> bool:
        """One of the ranks of a pipeline stage that gather its weights: all others hold the same. Tensor-parallel ranks, and
        expert-parallel ones, which the configuration lets have whole tensor-parallel groups or parts of one."""
        first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return first or parallel_state.get_expert_data_parallel_rank() == 0

    def stream_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Full HF tensors of this rank's pipeline stage (collective over its tensor-parallel group), see stream_hf_tensors."""
        return weights_io.stream_hf_tensors(self.gpt, self.shape, dtype)

    def stream_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The last update's gradients, as clipped, under HF names. The distributed optimizer leaves every data-parallel
        rank with its shard only; the shards are gathered first. Collective over all ranks of the stage."""
        for buffer in (buffer for chunk in self.model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
        return weights_io.stream_hf_tensors(self.gpt, self.shape, value=lambda p: p.main_grad)

    def save(self, folder: str | Path) -> None:
        checkpoint.save(Path(folder), self.model, self.optimizer)

    def load(self, folder: str | Path) -> None:
        checkpoint.load(Path(folder), self.model, self.optimizer)


def _plain(stats: dict[str, Tensor]) -> Stats:
    return {name: float(value) for name, value in stats.items()}


class _NotFiniteError(Exception):
    """Raised amid the optimizer's step, before it changes anything."""

    def __init__(self, norm: float) -> None:
        super().__init__(f"the gradient norm is {norm}")
        self.norm = norm


def _finite_norm(norm: Callable[[], Any]) -> Any:
    value = norm()
    if not math.isfinite(value):
        raise _NotFiniteError(float(value))
    return value


# The schedule's loss functions: (sum, local token count, what _run returns). By Megatron's contract with
# calculate_per_token_loss the count is summed over all ranks and divides every gradient once: nothing here divides by a count.


def _keep_logprobs(batch: DeviceBatch, logprobs: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return logprobs.sum(), torch.tensor(batch.num_valid, dtype=torch.int), {"logprobs": logprobs}


def _keep_stats(batch: DeviceBatch, loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return loss, torch.tensor(batch.num_valid, dtype=torch.int), batch.stats


def _objective(
    batch: DeviceBatch, tokens: slice, logprobs: Tensor, entropy: Tensor, importance_cap: float, **settings: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of w * N * term over a tile of tokens, and its statistics."""
    assert batch.old_logprobs is not None, "old_logprobs() comes before update()"
    old, engine, stale = batch.old_logprobs[tokens], batch.rollout_logprobs[tokens], batch.stale[tokens]
    importance = None if batch.importance is None else batch.importance[tokens]
    everything = torch.ones_like(stale)  # the batch has nothing but tokens in the mask
    loss, stats = dapo_objective(
        logprobs,
        old,
        batch.advantages[tokens],
        batch.weights[tokens],
        everything,
        entropy=entropy,
        importance=importance,
        **settings,
    )
    error = (logprobs.detach() - old)[~stale].exp().sub(1.0).abs()
    stats["fresh_ratio_error_max"] = error.max() if len(error) else error.sum()
    stats |= drift_stats(logprobs.detach(), engine, stale, importance_cap)
    # The gradient norm is what all ranks decide by. The clips' backward would keep from it that a loss isn't finite, and an
    # importance cap that a weight isn't.
    finite = loss.detach().isfinite() & old.isfinite().all() & (importance is None or engine.isfinite().all())
    logprobs.register_hook(lambda gradient: gradient.where(finite, torch.nan))
    return loss, stats
