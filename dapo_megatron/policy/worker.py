"""What the controller asks of a trainer rank: the Policy's step, publishing its part of the weights, files."""

import os
import resource
import shutil
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dapo_megatron.algo.packing import pack_minibatch_for
from dapo_megatron.config import Config
from dapo_megatron.policy import model as model_builder
from dapo_megatron.policy.offload import Offload
from dapo_megatron.policy.policy import Policy, Stats, init_distributed
from dapo_megatron.policy.scorer import text_sample
from dapo_megatron.policy.sending import Sending
from dapo_megatron.policy.shared_sending import SharedSending
from dapo_megatron.records import MicroBatch
from dapo_megatron.weights.hf_folder import finish_folder, start_folder, write_shards


class PolicyWorker:
    """One per Megatron rank. Methods are collective unless said otherwise: all ranks, same order, same arguments but the
    batch's share."""

    def __init__(self, cfg: Config, model_dir: str, rank: int, world_size: int, master: str) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        init_distributed(rank, world_size, master)
        self.cfg, self.model_dir, self.rank = cfg, model_dir, rank
        self.policy = Policy(cfg, model_dir)
        shared = cfg.cluster.colocate and torch.cuda.is_available()
        self._sending = SharedSending(self.policy) if shared else Sending(self.policy)
        self._offload = Offload(self.policy)

    def describe(self) -> dict[str, Any]:
        """Not collective."""
        return {
            "dp_rank": self.policy.dp_rank,
            "layers": model_builder.choose_kernels(self.policy.gpt[0].config.params_dtype),
            "optimizer": model_builder.optimizer_kernels(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }

    def load_batch(self, minibatches: list[list[MicroBatch]]) -> None:
        self.policy.load_batch(minibatches)

    def old_logprobs(self) -> Stats:
        return self.policy.old_logprobs()

    def update(self, index: int, lr: float) -> Stats:
        return self.policy.update(index, lr)

    def token_logprobs(self, index: int) -> dict[int, float]:
        """Not collective."""
        return self.policy.token_logprobs(index)

    def peak_memory_gb(self) -> float:
        """Not collective. Device memory on a GPU, else resident memory of the process, in 10^9 bytes."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

    # --- memory, see Offload: what needs the optimizer's state or gradients has to come between onload and offload ---

    def offload(self) -> None:
        self._offload.offload()

    def onload(self) -> None:
        self._offload.onload()

    # --- publishing, see Sending ---

    def open_senders(self, senders: Mapping[str, Any]) -> None:
        self._sending.open(senders)

    def send_weights(self, version: int, servers: Collection[str]) -> dict[str, int]:
        return self._sending.send(version, servers, self._bucket_bytes)

    def checksums(self, servers: Collection[str]) -> dict[str, dict[str, str]]:
        return self._sending.checksums(servers)

    def close_senders(self) -> None:
        """Not collective."""
        self._sending.close()

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[int, float]:
        """This rank's part of the sequences' log-probs (see PolicyGroup.score) by the tokens' numbers, which count all tokens
        but each sequence's first. The batch that is loaded stays."""
        samples = [text_sample(np.asarray(ids, np.int32)) for ids in sequences]
        shares = pack_minibatch_for(replace(self.cfg.parallel, share_prompts=False), samples)
        return self.policy.logprobs(shares[self.policy.dp_rank], temperature=1.0)

    @property
    def _bucket_bytes(self) -> int:
        return self.cfg.publish.bucket_mb * 2**20

    # --- files ---

    def save(self, folder: str) -> None:
        """Model and optimizer as torch_dist, and in hf/ the model's config and tokenizer: whoever reads the checkpoint needs
        nothing else."""
        self.policy.save(folder)
        if self.rank == 0:
            start_folder(Path(folder) / "hf", Path(self.model_dir), self.cfg.model.dtype)

    def load(self, folder: str) -> None:
        self.policy.load(folder)

    def export_hf(self, out: str) -> None:
        """The policy as an HF folder; every stage's leader writes its own layers. `out` appears when it is whole."""
        self._write_folder(out, self.policy.stream_weights())

    def write_gradients(self, out: str) -> None:
        """The last update's gradients, as clipped, in the form of an HF folder (see Policy.stream_gradients)."""
        self._write_folder(out, self.policy.stream_gradients())

    def _write_folder(self, out: str, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        partial = Path(out + ".partial")
        if self.rank == 0:
            start_folder(partial, Path(self.model_dir), self.cfg.model.dtype)
        dist.barrier()
        written = {}
        if self.policy.is_first_replica:
            if self.policy.is_stage_leader:
                written = write_shards(partial, f"stage{self.policy.stage}", tensors)
            else:
                deque(tensors, maxlen=0)
        all_written: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_written, written)
        if self.rank == 0:
            finish_folder(partial, [shard for part in all_written for shard in part.items()])
            shutil.rmtree(out, ignore_errors=True)
            partial.rename(out)
        dist.barrier()
