"""Log-probs of whole texts by a Megatron model in one process, loaded by Megatron itself from a torch_dist checkpoint."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from dapo_megatron.algo.packing import pack_minibatch_for
from dapo_megatron.config import Config, ModelConfig
from dapo_megatron.policy import checkpoint, cpu_backend, model
from dapo_megatron.policy.forward import DeviceBatch, LogprobHead, run_model
from dapo_megatron.records import Sample
from dapo_megatron.weights.mapping import ModelShape


@contextmanager
def single_rank() -> Iterator[None]:
    """This process is the only rank of a process group of its own, without any network."""
    cpu_backend.install()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class Scorer:
    """The model of an HF configuration in fp32, its weights loaded by Megatron from a torch_dist folder. On a process group of
    one rank. ValueError if the folder can't be loaded, or asks for code to be run."""

    def __init__(self, folder: Path, hf_config: dict[str, Any]) -> None:
        # fp32 whatever the checkpoint's dtype is: both sides of a comparison then differ by rounding of 1e-6 only
        self._cfg = Config(model=ModelConfig(dtype="float32"))
        parallel_state.initialize_model_parallel(expert_tensor_parallel_size=1)
        tensor_parallel.model_parallel_cuda_manual_seed(self._cfg.run.seed)
        shape = ModelShape.from_hf(hf_config)
        self._chunks = model.build_model(self._cfg, hf_config, shape)
        checkpoint.load_weights(folder, self._chunks)
        for chunk in self._chunks:
            chunk.eval()
        self._head = LogprobHead(shape.vocab_size, 1.0, self._cfg.parallel.logprob_chunk_tokens)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self._chunks:
            yield from chunk.parameters()

    def logprobs(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """For each text of at least two token ids, float32 [length - 1]: of every token but the first, at temperature 1."""
        samples = [text_sample(np.asarray(text, np.int32)) for text in texts]
        (batches,) = pack_minibatch_for(self._cfg.parallel, samples)
        found = np.empty(sum(len(sample.mask) for sample in samples), np.float32)
        with torch.no_grad():
            for batch in map(DeviceBatch, batches):
                found[batch.number] = run_model(self._chunks[0], batch, self._head).cpu().numpy()
        return np.split(found, np.cumsum([len(sample.mask) for sample in samples])[:-1])


def text_sample(token_ids: np.ndarray) -> Sample:
    """A text as a response to its first token; what only the loss looks at is zero."""
    zeros = np.zeros(len(token_ids) - 1, np.float32)
    return Sample(token_ids, 1, zeros, zeros.astype(np.int32), zeros == 0, zeros, zeros, group=0)
