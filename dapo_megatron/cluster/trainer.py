"""The trainer ranks as Ray actors, and the group through which the controller speaks to all of them."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from dapo_megatron.addresses import free_port, url_host
from dapo_megatron.cluster.placement import Place, Spot, here
from dapo_megatron.cluster.session import gather_all, get_all, redirect_output
from dapo_megatron.config import Config
from dapo_megatron.layout import spans
from dapo_megatron.records import MicroBatch

Share = list[list[MicroBatch]]  # [mini-batch][micro-batch] of one data-parallel rank


@ray.remote
class TrainerRank:
    """One Megatron rank. Built in two steps, since rank 0's address must be known before any can start."""

    def __init__(self, log: str) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        redirect_output(log)
        self._worker: Any = None

    def address(self) -> str:
        host = ray.util.get_node_ip_address()
        return f"{url_host(host)}:{free_port(host)}"

    def start(self, cfg: Config, model_dir: str, rank: int, world_size: int, master: str) -> dict[str, Any]:
        from dapo_megatron.policy.worker import PolicyWorker

        self._worker = PolicyWorker(cfg, model_dir, rank, world_size, master)
        return {**self._worker.describe(), "place": here()}

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)


def make_ranks(spots: Sequence[Spot], log_dir: str) -> list[Any]:
    return [
        TrainerRank.options(**spot.options).remote(f"{log_dir}/trainer_{rank}.log")  # type: ignore[attr-defined]
        for rank, spot in enumerate(spots)
    ]


class PolicyGroup:
    """All trainer ranks. Calls return when every rank has; a rank's failure is raised here."""

    def __init__(self, actors: list[Any], cfg: Config, model_dir: str) -> None:
        self._actors, self._cfg, self._model_dir = actors, cfg, model_dir
        self.facts: list[dict[str, Any]] = []  # by rank, see PolicyWorker.describe
        self.places: list[Place] = []  # by rank

    def begin_start(self) -> list[Any]:
        """Start loading on every rank; give the results to end_start. In two parts so that servers can load meanwhile."""
        master = get_all([self._actors[0].address.remote()])[0]
        world = len(self._actors)
        return [actor.start.remote(self._cfg, self._model_dir, rank, world, master) for rank, actor in enumerate(self._actors)]

    def end_start(self, facts: list[dict[str, Any]]) -> None:
        self.facts = facts
        self.places = [fact["place"] for fact in facts]

    def lost(self) -> str:
        """Which ranks have died, for people; "" if none has. Takes ten seconds if some are stuck."""
        answers = {actor.__ray_ready__.remote(): rank for rank, actor in enumerate(self._actors)}
        done, _ = ray.wait(list(answers), num_returns=len(answers), timeout=10)
        dead = []
        for answer in done:
            try:
                ray.get(answer)
            except RayError:
                dead.append(answers[answer])
        return f"trainer rank(s) {spans(sorted(dead))} died (killed, out of memory, or with their node)" if dead else ""

    def kernels(self) -> dict[str, object]:
        """For the console's header: which parts were chosen, TE, apex or torch."""
        facts = self.facts[0]
        return {"kernels": f"layers {facts['layers']}, optimizer {facts['optimizer']}, on {facts['device']}"}

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await gather_all([actor.call.remote(method, *args) for actor in self._actors])

    async def load_batch(self, shares: list[Share]) -> None:
        """shares[dp rank]. Each goes into the object store once; every rank fetches its own."""
        refs = [ray.put(share) for share in shares]
        await gather_all(
            [
                actor.call.remote("load_batch", refs[facts["dp_rank"]])
                for actor, facts in zip(self._actors, self.facts, strict=True)
            ]
        )

    async def old_logprobs(self) -> list[dict[str, float]]:
        """Statistics of each model replica."""
        return [stats for stats in await self._all("old_logprobs") if stats]

    async def token_logprobs(self, index: int) -> dict[int, float]:
        """What old_logprobs found for mini-batch `index`, by the response tokens' numbers (MicroBatch), those in the mask."""
        return {number: value for part in await self._all("token_logprobs", index) for number, value in part.items()}

    async def update(self, index: int, lr: float) -> list[dict[str, float]]:
        """Statistics of each model replica."""
        return [stats for stats in await self._all("update", index, lr) if stats]

    async def offload(self) -> None:
        """Optimizer state and gradients leave the device, to rollout servers on it. On CPU nothing does."""
        await self._all("offload")

    async def onload(self) -> None:
        await self._all("onload")

    async def open_senders(self, senders: dict[str, Any]) -> None:
        """Connections with these servers (WeightSender by name) and no others; those that there are stay. RuntimeError names
        the servers that can't be reached, the others are connected."""
        await self._all("open_senders", senders)

    async def send_weights(self, version: int, servers: list[str]) -> dict[str, float]:
        """The present weights to these servers. Returns "bytes" and "buckets" of one server. RuntimeError names the servers
        that failed, the others have them; the senders of those that failed are closed."""
        stages = await self._all("send_weights", version, servers)
        return {name: float(sum(sent.get(name, 0) for sent in stages)) for name in ("bytes", "buckets")}

    async def close_senders(self) -> None:
        await self._all("close_senders")

    async def checksums(self, servers: list[str]) -> dict[str, dict[str, str]]:
        """What each of these servers must hold: the union over pipeline stages."""
        parts = [part for part in await self._all("checksums", servers) if part]
        return {server: {k: v for part in parts for k, v in part[server].items()} for server in servers}

    async def score(self, sequences: list[tuple[int, ...]]) -> list[np.ndarray]:
        """For each sequence of at least two token ids, float32 [length - 1]: the log-prob of every token but the first, at
        temperature 1, by the present weights."""
        found = {number: value for part in await self._all("score", sequences) for number, value in part.items()}
        ends = np.cumsum([len(sequence) - 1 for sequence in sequences])
        return np.split(np.array([found[number] for number in range(ends[-1])], np.float32), ends[:-1])

    async def peak_memory_gb(self) -> float:
        return max(await self._all("peak_memory_gb"))

    async def save(self, folder: str) -> None:
        await self._all("save", folder)

    async def load(self, folder: str) -> None:
        await self._all("load", folder)

    async def write_gradients(self, out: str) -> None:
        await self._all("write_gradients", out)

    async def export_hf(self, out: str) -> None:
        await self._all("export_hf", out)
