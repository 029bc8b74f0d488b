"""Rollout engines as Ray actors: owners of SGLang or vLLM servers, or the local engine in a process of its own."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import ray

from dapo_megatron.cluster.placement import Place, Spot, here
from dapo_megatron.cluster.session import gather_all, get_all, is_own_session, redirect_output
from dapo_megatron.config import Config
from dapo_megatron.layout import ranks_under_servers
from dapo_megatron.records import Completion
from dapo_megatron.rollout.engine import GenerateRequest, RolloutEngine, WeightSender
from dapo_megatron.rollout.http_engine import HttpEngine
from dapo_megatron.rollout.local_engine import NAME, LocalEngine, LocalWeightSender, OneServer
from dapo_megatron.rollout.server_client import ServerClient, ServerHttp
from dapo_megatron.rollout.sglang_client import SGLangClient
from dapo_megatron.rollout.sglang_server import SGLangServer
from dapo_megatron.rollout.sglang_weights import ServerLayout
from dapo_megatron.rollout.vllm_client import VLLMClient
from dapo_megatron.rollout.vllm_server import VLLMServer
from dapo_megatron.weights.turns import Trainer, Turns

_PROCESSES = {"sglang": SGLangServer, "vllm": VLLMServer}


@ray.remote
class ServerOwner:
    """Owns one server (rollout.engine), which dies with it."""

    def __init__(self, engine: str, options: dict[str, Any], log: str, gpus: str) -> None:
        redirect_output(log)
        if gpus:  # others than Ray has given it: none, since they are the trainer's too
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        self._gpus = tuple(gpus.split(",")) if gpus else ()
        self._process = _PROCESSES[engine]
        # Of a cluster's node: the address that trainer ranks on other nodes reach.
        self._options = {**options, "host": options["host"] or ray.util.get_node_ip_address()}
        self._server = self._process(**self._options)

    def start(self) -> tuple[str, Place]:
        self._server.start()
        place = here()
        return self._server.url, replace(place, gpus=self._gpus or place.gpus)

    def restart(self) -> str:
        """On a free port if any will do: what is left of the old one's connections is in nobody's way."""
        self._server.stop()
        self._server = self._process(**self._options)
        return self.start()[0]

    def stop(self) -> None:
        self._server.stop()

    def alive(self) -> bool:
        return self._server.alive


class OwnedServer:
    """Implements ServerSource. `make_owner` starts an owner: anew if it died with its server."""

    def __init__(self, make_owner: Callable[[], Any]) -> None:
        self._make_owner = make_owner
        self.owner = make_owner()

    async def alive(self) -> bool:
        with contextlib.suppress(RuntimeError):  # its owner is dead
            return await self._ask("alive")
        return False

    async def end(self) -> None:
        with contextlib.suppress(RuntimeError):  # its owner is dead, and it with it
            await self._ask("stop")

    async def restart(self) -> str:
        try:
            await self._ask("alive")
        except RuntimeError:
            self.owner = self._make_owner()
        return await self._ask("restart")

    async def _ask(self, method: str) -> Any:
        return (await gather_all([getattr(self.owner, method).remote()]))[0]


class OthersServer:
    """Implements ServerSource for a server that someone else started and has to start again."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url.rstrip("/"), timeout_s

    async def alive(self) -> bool:
        """Whether anything listens at its address; more can't be known."""
        address = urlsplit(self._url)
        try:
            _, writer = await asyncio.open_connection(address.hostname, address.port or 80)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # the network's fault, perhaps
        writer.close()
        return True

    async def end(self) -> None:
        """Not ours to end."""

    async def restart(self) -> str:
        """Waits until it answers again."""
        deadline = time.monotonic() + self._timeout_s
        async with httpx.AsyncClient(trust_env=False) as http:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(f"{self._url}/health", timeout=5)).status_code == 200:
                        return self._url
                await asyncio.sleep(1.0)
        raise RuntimeError(f"rollout.servers: {self._url} did not answer again within {self._timeout_s:.0f} s")


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


class RemoteLocalEngine(OneServer):
    """RolloutEngine whose engine is a LocalEngineHost."""

    max_inflight_groups = LocalEngine.max_inflight_groups

    def __init__(self, host: Any, dtype: str) -> None:
        self._host, self._dtype = host, dtype

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._call("generate", request)

    async def abort(self, request_ids: list[str]) -> None:
        await self._call("abort", request_ids)

    async def weight_senders(self) -> dict[str, WeightSender]:
        return {NAME: LocalWeightSender(RemoteLoader(self._host), self._dtype)}

    async def begin_update(self, version: int, servers: Collection[str]) -> None:
        await self._call("begin_update", version)

    async def end_update(self, version: int, servers: Collection[str]) -> None:
        await self._call("end_update", version)

    async def prompt_logprobs(self, token_ids: tuple[int, ...], server: str = "") -> np.ndarray:
        return await self._call("prompt_logprobs", token_ids)

    async def checksums(self, servers: Collection[str]) -> dict[str, dict[str, str]]:
        return await self._call("checksums")

    async def _call(self, method: str, *args: Any) -> Any:
        (result,) = await gather_all([getattr(self._host, method).remote(*args)])
        return result


class Engines:
    """Starts what the configuration asks for; `engine` is there after end_start. `device` ("cpu", "cuda"): of the servers.
    `spots`: of the servers that are started. `note`: see HttpEngine."""

    def __init__(
        self,
        cfg: Config,
        model_dir: str,
        eos_ids: tuple[int, ...],
        log_dir: str,
        device: str,
        spots: Sequence[Spot],
        note: Callable[[str], None],
    ) -> None:
        self._cfg, self._model_dir, self._device, self._note = cfg, model_dir, device, note
        self._dtype = cfg.model.dtype if cfg.rollout.dtype == "auto" else cfg.rollout.dtype
        self._shares_devices = cfg.cluster.colocate and cfg.rollout.engine == "sglang"
        self._host: Any = None  # of the local engine
        self._sources: list[OwnedServer | OthersServer] = []
        self.engine: RolloutEngine
        self.places: list[Place] = []  # of the servers that are started
        if cfg.rollout.engine == "local":
            host = LocalEngineHost.options(num_cpus=0)  # type: ignore[attr-defined]
            self._host = host.remote(model_dir, self._dtype, eos_ids, f"{log_dir}/local_engine.log")
        elif cfg.rollout.servers:
            self._sources = [OthersServer(url, cfg.rollout.startup_timeout_s) for url in cfg.rollout.servers]
        else:
            self._sources = [OwnedServer(partial(self._make_owner, spot, number, log_dir)) for number, spot in enumerate(spots)]

    def _make_owner(self, spot: Spot, number: int, log_dir: str) -> Any:
        owner = ServerOwner.options(**spot.options)  # type: ignore[attr-defined]
        options = self._server_options(number, log_dir)
        return owner.remote(self._cfg.rollout.engine, options, f"{log_dir}/server_{number}_owner.log", spot.gpus)

    def _server_options(self, number: int, log_dir: str) -> dict[str, Any]:
        rollout = self._cfg.rollout
        saver = ["--enable-memory-saver"] if self._shares_devices and self._device == "cuda" else []
        return {
            "model_dir": self._model_dir,
            "host": "127.0.0.1" if is_own_session() else "",  # nothing of a local run's servers listens to the network
            "port": rollout.base_port + number if rollout.base_port else 0,
            "tp": rollout.tp,
            "dtype": self._dtype,
            "device": self._device,
            "max_total_tokens": rollout.max_total_tokens,
            "mem_fraction": rollout.mem_fraction,
            "extra_args": saver + list(rollout.server_args),
            "log_path": os.path.abspath(f"{log_dir}/server_{number}.log"),  # noqa: PTH100
            "startup_timeout_s": rollout.startup_timeout_s,
            "seed": self._cfg.run.seed + number,
            "python": str(Path(rollout.python).expanduser().absolute()) if rollout.python else "",
        }

    def begin_start(self) -> list[Any]:
        return [source.owner.start.remote() for source in self._sources if isinstance(source, OwnedServer)]

    def end_start(self, started: list[tuple[str, Place]]) -> None:
        """`started`: what begin_start's references became."""
        self.places = [place for _, place in started]
        if self._host is not None:
            self.engine = RemoteLocalEngine(self._host, self._dtype)
            return
        rollout, publish = self._cfg.rollout, self._cfg.publish
        self.engine = HttpEngine(
            self._sources,
            [url for url, _ in started] or rollout.servers,
            self._client_maker(),
            self._model_dir,
            pause=publish.pause,
            max_inflight_groups=rollout.max_inflight_groups,
            request_timeout_s=rollout.request_timeout_s,
            update_timeout_s=publish.timeout_s,
            health_interval_s=rollout.health_interval_s,
            health_timeout_s=rollout.health_timeout_s,
            version=None,
            note=self._note,
        )

    def _client_maker(self) -> Callable[[str, int], ServerClient]:
        backend = "ipc" if self._shares_devices else "gloo" if self._device == "cpu" else "nccl"
        ranks = ranks_under_servers(self._cfg) if self._shares_devices and self._device == "cuda" else None
        model = Path(self._model_dir)
        layout = ServerLayout.of(model, tp=self._cfg.rollout.tp, dtype=self._dtype, device=self._device)

        def make(url: str, slot: int) -> ServerClient:
            timeout_s = self._cfg.publish.timeout_s
            http = ServerHttp(url)
            if self._cfg.rollout.engine == "vllm":
                return VLLMClient(http, model, layout, backend=backend, sender_timeout_s=timeout_s)
            of_server = ranks[slot] if ranks else ()
            return SGLangClient(http, model, layout, backend=backend, sender_timeout_s=timeout_s, ranks=of_server)

        return make

    def turns(self, trainer: Trainer) -> Turns:
        """Whose turn it is on devices that the servers share with the trainer."""
        if self._shares_devices and isinstance(self.engine, HttpEngine):
            return Turns(trainer, self.engine.memory)
        return Turns()

    def kill(self) -> None:
        """At once, even while a server is starting: the kernel ends it with its owner."""
        owners = [source.owner for source in self._sources if isinstance(source, OwnedServer)]
        for actor in [*owners, *([self._host] if self._host else [])]:
            ray.kill(actor)
