"""Trainer and rollout servers on the same devices: whose turn it is to have the memory.

Servers have it while they generate, the trainer while it trains. Between the two the weights go over:

    training()       servers give everything up; the trainer has its optimizer state and gradients on the device
    before_update()  servers take the memory of their weights back, whose contents are lost
                     (publish: begin, buckets)
    after_update()   servers take the memory of keys and values back
                     (publish: end; they generate)
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Protocol

WEIGHTS = ("weights",)
CACHES = ("kv_cache", "cuda_graph")


class Trainer(Protocol):
    """The trainer ranks. Either call may come twice."""

    async def offload(self) -> None: ...
    async def onload(self) -> None: ...


class Servers(Protocol):
    """Those of rollout.server_memory.ServerMemory, which knows who has given up what."""

    async def release(self, tags: Collection[str]) -> None:
        """Idle servers give this memory up; none serves or is started until it has been resumed."""
        ...

    async def resume(self, tags: Collection[str]) -> None:
        """Those that have given this memory up take it back."""
        ...


class Turns:
    """Of a trainer and servers that share devices; without any nothing here does anything."""

    def __init__(self, trainer: Trainer | None = None, servers: Servers | None = None) -> None:
        assert (trainer is None) == (servers is None)
        self._trainer, self._servers = trainer, servers
        self._offloaded = False

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """From here on the servers can't generate, until new weights are published. If that fails, or what is done here does,
        a publish is still possible."""
        async with self._trainers_turn((*WEIGHTS, *CACHES)):
            yield

    @asynccontextmanager
    async def checkpoint(self) -> AsyncIterator[None]:
        """Also takes the trainer's state to the device, while the servers keep their weights and go on afterwards."""
        try:
            async with self._trainers_turn(CACHES):
                yield
        finally:
            await self.after_update()

    async def before_update(self) -> None:
        """Before a server is asked anything about its weights."""
        await self._offload()
        if self._servers is not None:
            await self._servers.resume(WEIGHTS)

    async def after_update(self) -> None:
        """When trainer ranks have freed what they sent, and before servers go on."""
        if self._servers is not None:
            await self._servers.resume(CACHES)

    @asynccontextmanager
    async def _trainers_turn(self, tags: Collection[str]) -> AsyncIterator[None]:
        if self._servers is None or self._trainer is None:
            yield
            return
        await self._servers.release(tags)
        try:
            self._offloaded = False
            await self._trainer.onload()
            yield
        finally:
            await self._offload()

    async def _offload(self) -> None:
        if self._trainer is not None and not self._offloaded:
            await self._trainer.offload()
            self._offloaded = True
