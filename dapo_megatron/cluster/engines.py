"""Rollout engines as Ray actors: owners of SGLang servers, or the local engine in a process of its own."""

import os
from typing import Any

import numpy as np
import ray

from dapo_megatron.cluster.session import gather_all, get_all, redirect_output
from dapo_megatron.config import Config
from dapo_megatron.records import Completion
from dapo_megatron.rollout.engine import GenerateRequest, RolloutEngine, WeightSender
from dapo_megatron.rollout.local_engine import LocalEngine, LocalWeightSender
from dapo_megatron.rollout.sglang_engine import SGLangEngine
from dapo_megatron.rollout.sglang_server import SGLangServer


@ray.remote
class ServerOwner:
    """Owns one SGLang server, which dies with it."""

    def __init__(self, options: dict[str, Any], log: str) -> None:
        redirect_output(log)
        # Loopback in a session of our own; in a cluster the address that trainer ranks on other nodes reach.
        self._server = SGLangServer(**options, host=ray.util.get_node_ip_address())

    def start(self) -> str:
        self._server.start()
        return self._server.url


@ray.remote
class LocalEngineHost(LocalEngine):
    def __init__(self, model_dir: str, dtype: str, eos_ids: tuple[int, ...], log: str) -> None:
        redirect_output(log)
        super().__init__(model_dir, dtype=dtype, eos_ids=eos_ids)


class RemoteLoader:
    """LocalEngine.load_bucket across processes; travels to the trainer rank with its sender."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def __call__(self, bucket: list[tuple[str, Any]], version: int) -> None:
        get_all([self._host.load_bucket.remote(bucket, version)])


class RemoteLocalEngine:
    """RolloutEngine whose engine is a LocalEngineHost."""

    max_inflight_groups = LocalEngine.max_inflight_groups

    def __init__(self, host: Any, dtype: str) -> None:
        self._host, self._dtype = host, dtype

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._call("generate", request)

    async def abort(self, request_ids: list[str]) -> None:
        await self._call("abort", request_ids)

    def weight_senders(self) -> list[WeightSender]:
        return [LocalWeightSender(RemoteLoader(self._host), self._dtype)]

    async def begin_update(self, version: int) -> None:
        await self._call("begin_update", version)

    async def end_update(self, version: int) -> None:
        await self._call("end_update", version)

    async def prompt_logprobs(self, token_ids: tuple[int, ...]) -> np.ndarray:
        return await self._call("prompt_logprobs", token_ids)

    async def checksums(self) -> list[dict[str, str]]:
        return await self._call("checksums")

    async def _call(self, method: str, *args: Any) -> Any:
        (result,) = await gather_all([getattr(self._host, method).remote(*args)])
        return result


class Engines:
    """Starts what the configuration asks for; `engine` is there after end_start. `options`: Ray's, for each server."""

    def __init__(
        self, cfg: Config, model_dir: str, eos_ids: tuple[int, ...], log_dir: str, options: list[dict[str, Any]]
    ) -> None:
        self._cfg, self._model_dir = cfg, model_dir
        self._device = "cuda" if options[0]["num_gpus"] else "cpu"
        self._dtype = cfg.model.dtype if cfg.rollout.dtype == "auto" else cfg.rollout.dtype
        self.engine: RolloutEngine
        if cfg.rollout.engine == "local":
            host = LocalEngineHost.options(num_cpus=0)  # type: ignore[attr-defined]
            self._owners = [host.remote(model_dir, self._dtype, eos_ids, f"{log_dir}/local_engine.log")]
            return
        self._owners = [
            ServerOwner.options(**options[number]).remote(  # type: ignore[attr-defined]
                self._server_options(number, log_dir), f"{log_dir}/server_{number}_owner.log"
            )
            for number in range(cfg.rollout.num_servers)
        ]

    def _server_options(self, number: int, log_dir: str) -> dict[str, Any]:
        rollout = self._cfg.rollout
        return {
            "model_dir": self._model_dir,
            "port": rollout.base_port + number if rollout.base_port else 0,
            "tp": rollout.tp,
            "dtype": self._dtype,
            "device": self._device,
            "max_total_tokens": rollout.max_total_tokens,
            "mem_fraction": rollout.mem_fraction,
            "extra_args": list(rollout.server_args),
            "log_path": os.path.abspath(f"{log_dir}/server_{number}.log"),  # noqa: PTH100
            "startup_timeout_s": rollout.startup_timeout_s,
            "seed": self._cfg.run.seed + number,
        }

    def begin_start(self) -> list[Any]:
        return [] if self._cfg.rollout.engine == "local" else [owner.start.remote() for owner in self._owners]

    def end_start(self, urls: list[str]) -> None:
        if self._cfg.rollout.engine == "local":
            self.engine = RemoteLocalEngine(self._owners[0], self._dtype)
            return
        rollout = self._cfg.rollout
        shared_gpu = self._device == "cuda" and self._cfg.cluster.colocate
        self.engine = SGLangEngine(
            urls,
            self._model_dir,
            tp=rollout.tp,
            dtype=self._dtype,
            device=self._device,
            max_inflight_groups=rollout.max_inflight_groups,
            request_timeout_s=rollout.request_timeout_s,
            update_timeout_s=self._cfg.publish.timeout_s,
            backend="gloo" if shared_gpu else "",  # nccl refuses two ranks on one GPU
        )

    def kill(self) -> None:
        """At once, even while a server is starting: the kernel ends it with its owner."""
        for owner in self._owners:
            ray.kill(owner)
