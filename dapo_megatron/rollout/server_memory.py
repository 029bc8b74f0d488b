"""Rollout servers that share their devices with the trainer: which of them has given up which part of its memory."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol, cast

from dapo_megatron.rollout.fleet import Fleet, Server
from dapo_megatron.rollout.server_client import Unanswered


class MemoryClient(Protocol):
    """A ServerClient whose server can give memory up. Errors are the same."""

    async def release_memory(self, tags: Collection[str], timeout_s: float) -> None:
        """Stops serving. The tags are "weights", "kv_cache" and "cuda_graph"."""
        ...

    async def resume_memory(self, tags: Collection[str], timeout_s: float) -> None:
        """The contents are lost. Only what was given up: asked for more, SGLang's scheduler dies."""
        ...

    async def go_on(self, timeout_s: float) -> None:
        """Serves again, with the weights that it has kept."""
        ...


@dataclass
class _State:
    version: int | None  # of the weights that it has kept
    given_up: set[str] = field(default_factory=set)


class ServerMemory:
    """Implements weights.turns.Servers.

    While a server lacks memory it counts as one that lacks weights: it gets no requests and isn't asked for a sign of life; and
    no server is started. Whoever calls holds Publisher.lock, so that nobody publishes to it.

    A server that fails is lost; the others go on.
    """

    def __init__(self, fleet: Fleet, timeout_s: float) -> None:
        self._fleet, self._timeout_s = fleet, timeout_s
        self._states: dict[Server, _State] = {}  # of those that lack memory

    async def release(self, tags: Collection[str]) -> None:
        """RuntimeError if a request is in flight."""
        if busy := [server.name for server in self._fleet.up if server.num_inflight]:
            raise RuntimeError(f"memory can't be given up while requests are in flight at {', '.join(busy)}")
        self._fleet.may_start.clear()
        for server in self._fleet.up:
            self._states.setdefault(server, _State(server.version))
            server.version = None

        async def give_up(client: MemoryClient, server: Server, state: _State) -> None:
            new = set(tags) - state.given_up
            state.given_up |= new
            if "weights" in new:
                state.version = None
            if new:
                await client.release_memory(sorted(new), self._timeout_s)

        await self._each(give_up)

    async def resume(self, tags: Collection[str]) -> None:
        async def take_back(client: MemoryClient, server: Server, state: _State) -> None:
            back = state.given_up & set(tags)
            if back:
                await client.resume_memory(sorted(back), self._timeout_s)
            state.given_up -= back
            if state.given_up:
                return
            del self._states[server]
            if state.version is not None:
                await client.go_on(self._timeout_s)
                self._fleet.serves(server, state.version)

        await self._each(take_back)
        if not self._states:
            self._fleet.may_start.set()

    async def _each(self, work: Callable[[MemoryClient, Server, _State], Awaitable[None]]) -> None:
        """At all servers that lack memory and are still there, at the same time."""
        self._states = {server: state for server, state in self._states.items() if server in self._fleet.up}
        servers = list(self._states)
        calls = [work(cast(MemoryClient, server.client), server, self._states[server]) for server in servers]
        for server, error in zip(servers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(error, Unanswered | ValueError):
                self._states.pop(server, None)
                self._fleet.lose(server, f"its memory could not change hands: {error}")
            elif error is not None:
                raise error
