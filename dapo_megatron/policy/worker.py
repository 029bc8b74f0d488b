"""What the controller asks of a trainer rank: the Policy's step, publishing its part of the weights, files."""

import os
import resource
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapo_megatron.config import Config
from dapo_megatron.policy import model as model_builder
from dapo_megatron.policy.policy import Policy, Stats, init_distributed
from dapo_megatron.policy.weights_io import Bucket
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
        self._senders: list[Any] = []
        self._num_engines = 0

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

    # --- publishing: stage after stage, so that servers never wait for two senders at once ---

    def open_senders(self, senders: list[Any]) -> None:
        """Connect this pipeline stage's leader with every engine."""
        self._num_engines = len(senders)
        self._senders = senders if self.policy.is_stage_leader else []
        failure: RuntimeError | None = None
        for stage in self._stages_in_turn():
            try:
                for sender in self._senders:
                    sender.open(stage, self.policy.num_stages)
            except RuntimeError as error:
                failure = error
        if failure is not None:
            raise failure

    def send_weights(self, version: int) -> None:
        """Hand the current weights to every engine, each stage its own layers, bucket by bucket."""
        failure: RuntimeError | None = None
        for _ in self._stages_in_turn():
            for bucket in self.policy.stream_weights(self._bucket_bytes) if self.policy.is_first_replica else ():
                try:
                    for sender in self._senders if failure is None else ():
                        sender.send(bucket, version)
                except RuntimeError as error:  # goes on with the others, who wait for this rank, so that all can try again
                    failure = error
        if failure is not None:
            raise failure

    def checksums(self) -> list[dict[str, str]]:
        """For each engine, what it must hold of this stage's weights; empty on ranks that don't lead a stage."""
        sums = []
        for engine in range(self._num_engines if self.policy.is_first_replica else 0):
            tensors = (item for bucket in self.policy.stream_weights(self._bucket_bytes) for item in bucket)
            if self.policy.is_stage_leader:
                sums.append(self._senders[engine].checksums(tensors))
            else:
                deque(tensors, maxlen=0)  # takes part in the gathering
        return sums

    def close_senders(self) -> None:
        for sender in self._senders:
            sender.close()
        self._senders = []

    def _stages_in_turn(self) -> Iterator[int]:
        """Yields once, when it is this rank's stage's turn."""
        for stage in range(self.policy.num_stages):
            if stage == self.policy.stage:
                yield stage
            dist.barrier()

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
        self._write_folder(out, self.policy.stream_weights)

    def write_gradients(self, out: str) -> None:
        """The last update's gradients, as clipped, in the form of an HF folder (see Policy.stream_gradients)."""
        self._write_folder(out, self.policy.stream_gradients)

    def _write_folder(self, out: str, stream: Callable[[int], Iterator[Bucket]]) -> None:
        partial = Path(out + ".partial")
        if self.rank == 0:
            start_folder(partial, Path(self.model_dir), self.cfg.model.dtype)
        dist.barrier()
        written = {}
        buckets = stream(self._bucket_bytes)
        if self.policy.is_first_replica:
            tensors = (item for bucket in buckets for item in bucket)
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
