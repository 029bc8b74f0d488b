"""Runs inside vLLM's workers (--worker-extension-cls), in vLLM's environment, and imports nothing of ours. It lets trainer
ranks broadcast weights into the model. vLLM has such an interface too, but only over NCCL or CUDA IPC, and an update that
breaks off in the middle leaves its loader with half of a layer, which the next update takes for its own.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

_dispatch = utils.dispatch_cpu_unquantized_gemm


def _keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    """On CPU vLLM packs a copy of each matrix for oneDNN and throws the matrix away: new ones would have no place to go to, and
    checksums nothing to look at."""
    _dispatch(layer, remove_weight=False)


if current_platform.is_cpu():
    utils.dispatch_cpu_unquantized_gemm = _keep_weights
    # The other kernel, for small matrices on AMX, turns biases into float32.
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


class WeightUpdates:
    """Becomes a base of vLLM's Worker. Its methods are called by POST /collective_rpc, on all tensor-parallel ranks at once."""

    def dapo_describe(self: Any, keys: list[str]) -> dict[str, Any]:
        """What the server runs; `keys`: of the model's config.json."""
        model = self.vllm_config.model_config
        return {
            "config": {key: getattr(model.hf_config, key, None) for key in keys},
            "model": model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "tp_size": self.vllm_config.parallel_config.tensor_parallel_size,
            "max_model_len": model.max_model_len,
            "logprobs_mode": str(model.logprobs_mode),
        }

    def dapo_names(self: Any) -> list[str]:
        """Of the model's parameters."""
        return [name for name, _ in self.model_runner.get_model().named_parameters()]

    def dapo_open_group(
        self: Any,
        group_name: str,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join a sender, which is rank 0, in a group of its own."""
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(master_address, master_port, world_size, is_master=False, timeout=timeout)
        rank = rank_offset + dist.get_rank()
        prefix, name = PrefixStore(group_name, store), GroupName(group_name)
        group, _ = _new_process_group_helper(world_size, rank, [], Backend(backend), prefix, group_name=name, timeout=timeout)
        _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}  # destroy_process_group looks for it
        self.__dict__.setdefault("dapo_groups", {})[group_name] = group, backend

    def dapo_close_group(self: Any, group_name: str) -> None:
        group, _ = self.dapo_groups.pop(group_name)
        dist.destroy_process_group(group)

    def dapo_begin(self: Any) -> None:
        """An update that was broken off needs no other end than a new one, which sends everything again."""
        self.dapo_updating = True

    def dapo_load(
        self: Any, group_name: str, names: list[str], dtypes: list[str], shapes: list[list[int]], weight_version: str
    ) -> None:
        """Take one bucket of full HF tensors, which are broadcast as one piece of memory, one behind the other."""
        if not self.__dict__.get("dapo_updating"):
            raise RuntimeError("weights came outside of an update: dapo_begin first")
        group, backend = self.dapo_groups[group_name]
        kinds = [getattr(torch, dtype) for dtype in dtypes]
        sizes = [kind.itemsize * torch.Size(shape).numel() for kind, shape in zip(kinds, shapes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device if backend == "nccl" else "cpu")
        group.broadcast(flat, 0).wait()
        split = zip(names, kinds, shapes, flat.split(sizes), strict=True)
        tensors = [(name, piece.view(kind).view(shape)) for name, kind, shape, piece in split]
        # Copies into the parameters, so that the two ends of tied embeddings stay one.
        self.model_runner.get_model().load_weights(tensors)
        self.dapo_version = weight_version

    def dapo_end(self: Any) -> str:
        """Make the model compute with what was loaded. Returns the version that came with it."""
        if current_platform.is_cpu():
            self.dapo_pack()
        elif current_platform.is_cuda():
            torch.cuda.synchronize()
        self.dapo_updating = False
        return self.__dict__.get("dapo_version", "none")

    def dapo_pack(self: Any) -> None:
        """Pack all matrices for oneDNN again. Without it, and for the output layer that shares the embeddings' weights with
        vLLM's own update too, the old ones would go on being used."""
        for layer in self.model_runner.get_model().modules():
            if "cpu_linear" in layer.__dict__:
                layer.quant_method.process_weights_after_loading(layer)
