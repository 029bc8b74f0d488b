"""Small models on disk, a fixed uneven mini-batch, the plain transformers reference, and gloo ranks that run a Policy."""

import gc
import math
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from dapo_megatron.addresses import free_port
from dapo_megatron.algo.packing import concatenate, pack_minibatch_for
from dapo_megatron.algo.samples import set_weights
from dapo_megatron.audit.reference import ReferencePolicy, ReferenceStep, clip_scale
from dapo_megatron.config import Config, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_megatron.records import Sample
from dapo_megatron.weights.hub_names import hub_tensors
from tests.forking import CONTEXT, preload

preload("dapo_megatron.policy.worker", "tests.distributed.harness")  # takes longer than a test
JOB_TIMEOUT_S = 120.0
MAX_THREADS = 250  # of a rank's process; what process groups leave behind takes time from the others: it is replaced then
VOCAB = 67  # not a multiple of 2: vocabulary padding is always at work
COMMON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama_untied": dict(model_type="llama", tie_word_embeddings=False, **COMMON),
    "llama_tied": dict(model_type="llama", tie_word_embeddings=True, **COMMON),
    "qwen2_tied": dict(model_type="qwen2", tie_word_embeddings=True, **COMMON),
    "qwen3_untied": dict(model_type="qwen3", tie_word_embeddings=False, head_dim=16, **COMMON),
    "qwen3_moe": dict(
        model_type="qwen3_moe",
        tie_word_embeddings=False,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=28,
        norm_topk_prob=True,
        **COMMON,
    ),
}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "PP2 VPP2": {"pp": 2, "vpp": 2},
    "DP2": {"dp": 2},
    "DP4": {"dp": 4},
    "CP2": {"cp": 2},
    "TP2xPP2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "TP2xCP2": {"tp": 2, "cp": 2, "sequence_parallel": True},
    "PP2xCP2": {"pp": 2, "cp": 2},
    "TP2xPP2xDP2": {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True},
    "TP2": {"tp": 2},
    # for models with experts
    "EP2": {"dp": 2, "ep": 2},
    "TP2xEP2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "PP2xEP2": {"pp": 2, "dp": 2, "ep": 2},
    "CP2xEP2": {"cp": 2, "ep": 2},
    "TP2xEP4": {"tp": 2, "dp": 2, "ep": 4, "sequence_parallel": True},
}


def make_model(name: str, folder: Path) -> Path:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = dict(MODELS[name])
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():  # norms and biases away from 1 and 0, so that swapping them is seen
            if param.ndim == 1:
                param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(folder)
    return folder


def make_samples(seed: int = 3, num_groups: int = 3, group_size: int = 3) -> list[Sample]:
    """Uneven lengths from 1 token up, one masked response, one longer than the others together."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(num_groups):
        prompt_len = int(rng.integers(2, 9))
        for i in range(group_size):
            length = 60 if (group, i) == (1, 0) else int(rng.integers(1, 8))
            samples.append(
                Sample(
                    token_ids=rng.integers(0, VOCAB, prompt_len + length).astype(np.int32),
                    prompt_len=prompt_len,
                    rollout_logprobs=rng.normal(-4, 0.1, length).astype(np.float32),
                    staleness=np.zeros(length, np.int32),
                    mask=np.full(length, (group, i) != (2, 1)),
                    advantages=np.full(length, rng.normal(), np.float32),
                    weights=np.zeros(length),
                    group=group,
                )
            )
    return samples


def make_config(
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    cp: int = 1,
    dp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    **rest: Any,
) -> Config:
    cfg = Config(model=ModelConfig(path="unused", dtype="float32"))
    cfg.parallel = ParallelConfig(tp, pp, vpp, cp, dp, ep, sequence_parallel, logprob_chunk_tokens=16)
    cfg.rollout.max_response_tokens = 64
    cfg.rollout.temperature = 0.8
    cfg.optimizer.clip_grad = 1e9  # the gradients themselves are compared
    for key, value in rest.items():
        section, name = key.split("__")
        setattr(getattr(cfg, section), name, value)
    return cfg


def pack(samples: list[Sample], cfg: Config) -> list[list[Any]]:
    set_weights(samples, cfg.algorithm.aggregation, cfg.rollout.max_response_tokens)
    return pack_minibatch_for(cfg.parallel, samples)


def pack_by_number(samples: list[Sample], cfg: Config, per_microbatch: int, pad_sequences_to: int = 1) -> list[list[Any]]:
    """Micro-batches of so many samples, dealt out in turn, each sequence padded to a multiple of `pad_sequences_to`."""
    parallel = cfg.parallel
    pad = math.lcm(pad_sequences_to, parallel.sequence_multiple)
    tail = math.lcm(pad, parallel.microbatch_multiple)
    rounds = -(-len(samples) // (parallel.dp * per_microbatch))
    rounds += -rounds % parallel.num_microbatches_multiple
    cut = [range(len(samples))[i : i + per_microbatch] for i in range(0, len(samples), per_microbatch)]
    cut += [range(0)] * (rounds * parallel.dp - len(cut))
    return [
        [concatenate(samples, [[i] for i in part], tail, pad) for part in cut[rank :: parallel.dp]]
        for rank in range(parallel.dp)
    ]


class ReferenceTrainer(ReferencePolicy):
    """With AdamW (arXiv 1711.05101, algorithm 2), written out, since it judges the optimizer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_updates = 0

    def update(self, step: ReferenceStep, lr: float, settings: OptimizerConfig) -> None:
        """One update, its gradients clipped by their global norm; no weight decay on norms and biases."""
        self._num_updates += 1
        scale = clip_scale(step.grad_norm, settings.clip_grad)
        with torch.no_grad():
            for name, param in self._tensors():
                grad = step.gradients[name] * scale
                m, v = self._moments.get(name, (torch.zeros_like(grad), torch.zeros_like(grad)))
                m = settings.beta1 * m + (1 - settings.beta1) * grad
                v = settings.beta2 * v + (1 - settings.beta2) * grad**2
                self._moments[name] = (m, v)
                m_hat = m / (1 - settings.beta1**self._num_updates)
                v_hat = v / (1 - settings.beta2**self._num_updates)
                decay = settings.weight_decay if param.ndim > 1 else 0.0
                param.copy_(param * (1 - lr * decay) - lr * m_hat / (v_hat.sqrt() + settings.eps))

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors())

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [item for name, param in self.model.named_parameters() for item in hub_tensors(name, param.detach())]


def _serve(connection: Any) -> None:
    """A rank's process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    from megatron.core import parallel_state

    from dapo_megatron.policy.policy import init_distributed

    connection.send("ready")
    while (job := connection.recv()) is not None:
        target, rank, world, port, args = job
        try:
            init_distributed(rank, world, f"127.0.0.1:{port}", timeout_s=60)
            reply = (True, pickle.dumps(target(rank, *args)))
            torch.distributed.barrier()
        except Exception:
            reply = (False, traceback.format_exc())
        if torch.distributed.is_initialized():
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
        gc.collect()  # a process group that anything still refers to keeps its threads, some 60 a job
        connection.send((*reply, psutil.Process().num_threads()))


class RankPool:
    """Processes that become gloo ranks, job after job."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Any]] = []

    def run(self, target: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        """target(rank, *args) on `world` ranks; the results in rank order."""
        new: list[Any] = []
        while len(self._workers) < world:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs,))  # not daemonic: checkpointing spawns
            process.start()
            self._workers.append((process, ours))
            new.append(ours)
        for connection in new:  # whoever is ready would lose patience with the others
            connection.recv()
        port = free_port()
        for rank in range(world):
            self._workers[rank][1].send((target, rank, world, port, args))
        replies = [self._reply(rank) for rank in range(world)]
        if max(num_threads for _, _, num_threads in replies) > MAX_THREADS:
            self.close()
        failures = [text for ok, text, _ in replies if not ok]
        assert not failures, "\n".join(failures)
        return [pickle.loads(data) for _, data, _ in replies]

    def _reply(self, rank: int) -> tuple[bool, Any, int]:
        """Ranks that wait for each other are ended, not waited for: the next job gets new ones."""
        _, connection = self._workers[rank]
        if connection.poll(JOB_TIMEOUT_S):
            return connection.recv()
        for other, _ in self._workers:
            other.kill()
        self._workers = []
        raise AssertionError(f"rank {rank} gave no answer within {JOB_TIMEOUT_S:.0f} s: do the ranks wait for each other?")

    def close(self) -> None:
        for process, connection in self._workers:
            connection.send(None)
            process.join(timeout=20)
            if process.is_alive():
                process.kill()
        self._workers = []
