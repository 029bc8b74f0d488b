"""The rollout servers as a fleet: who serves, who has been lost, and how the lost ones come back.

A server is *waiting* while it lacks the current weights, and *serving* after. One that dies, hangs or answers nothing but
errors is lost: its requests go elsewhere, it is started anew in the background under another name, and waits for weights again.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dapo_megatron.rollout.server_client import ServerClient, Unanswered

MAX_FAILURES = 3  # a server that fails so often in a row, though its process lives, is started anew
MAX_RESTARTS = 3  # and one that has to be started anew so often, without having served in between, is given up


class ServerSource(Protocol):
    """Where a server comes from."""

    async def alive(self) -> bool:
        """False if its process has ended; True if it runs, or if that can't be known."""
        ...

    async def end(self) -> None:
        """End what is left of it, if it is ours."""
        ...

    async def restart(self) -> str:
        """End what is left of it, start it anew, return its address once it answers. RuntimeError if it doesn't."""
        ...


@dataclass(eq=False)
class Server:
    """`name` is "server SLOT", and ".RESTARTS" after it once it was started anew: another life, another name."""

    slot: int
    name: str
    client: ServerClient
    version: int | None  # of the weights it serves; None: waiting
    num_inflight: int = 0  # calls over HTTP
    num_requests: int = 0  # given to it, also those that wait for their prompt
    num_failures: int = 0  # in a row, one after the other
    last_failure: float = -math.inf
    last_sign: float = field(default_factory=time.monotonic)  # of life
    answers: set[asyncio.Future[Any]] = field(default_factory=set)  # that somebody waits for

    def burden(self) -> tuple[bool, int]:
        """Least first: one whose last answer failed is chosen only if all others' did too."""
        return self.num_failures > 0, self.num_requests

    async def ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of `call`; Unanswered as soon as the server is lost."""
        answer = asyncio.ensure_future(call)
        self.answers.add(answer)
        self.num_inflight += 1
        try:
            await asyncio.wait({answer})
            if answer.cancelled():
                raise Unanswered(f"{self.name} was lost")
            result = answer.result()
            self.num_failures, self.last_sign = 0, time.monotonic()
            return result
        finally:
            self.num_inflight -= 1
            self.answers.discard(answer)
            answer.cancel()


class Fleet:
    """Args:
    sources, urls: of each server; all are up.
    make_client: from a server's address and slot.
    version: of the weights that they serve from the start; None: they wait for weights.
    """

    def __init__(
        self,
        sources: Sequence[ServerSource],
        urls: Sequence[str],
        make_client: Callable[[str, int], ServerClient],
        *,
        version: int | None,
        interval_s: float,
        timeout_s: float,
        note: Callable[[str], None],
    ) -> None:
        self._sources, self._make_client, self._note = list(sources), make_client, note
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self.up = [Server(slot, f"server {slot}", make_client(url, slot), version) for slot, url in enumerate(urls)]
        self.num_restarts = 0
        self.may_start = asyncio.Event()  # not while the trainer has the servers' devices
        self.may_start.set()
        self._lives = [0] * len(urls)  # how often each slot was started anew
        self._in_a_row = [0] * len(urls)  # the same, since it last served
        self._reviving: dict[int, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._lost: list[str] = []  # names, since take_lost
        self._why = ""  # the last one was lost

    # Who serves

    async def pick(self, given_up: Callable[[], bool] = lambda: False) -> Server | None:
        """The serving one with the least to do; waits for one if there is none. None once `given_up` (look again: `notify`).
        RuntimeError if there will never be one."""
        while not given_up():
            if serving := [server for server in self.up if server.version is not None]:
                return min(serving, key=Server.burden)
            await self._change()
        return None

    async def some_up(self) -> list[Server]:
        """Those that can take weights: one at least."""
        while not self.up:
            await self._change()
        return list(self.up)

    def waiting(self) -> list[Server]:
        return [server for server in self.up if server.version is None]

    async def some_waiting(self) -> None:
        while not self.waiting():
            await self._change(forever=True)

    async def _change(self, forever: bool = False) -> None:
        if not self.up and not self._reviving and not forever:
            raise RuntimeError(f"no rollout server is left, the last one was lost for this: {self._why}")
        future = asyncio.get_running_loop().create_future()
        self._waiters.add(future)
        try:
            await future
        finally:
            self._waiters.discard(future)

    def notify(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)

    # Losing and reviving

    async def failed(self, server: Server, why: str, begin: float) -> None:
        """It didn't answer what it was asked at `begin` (time.monotonic). Lost if its process is gone, or if that has happened
        too often in a row: calls that were under way at the last failure have failed with it and don't count again."""
        if begin > server.last_failure:
            server.num_failures += 1
            server.last_failure = time.monotonic()
        if server not in self.up:
            return
        if not await self._sources[server.slot].alive():
            self.lose(server, "its process has ended")
        elif server.num_failures >= MAX_FAILURES:
            self.lose(server, f"{server.num_failures} failures in a row, the last: {why}")

    def lose(self, server: Server, why: str) -> None:
        """Its requests fail at once, so that they go elsewhere; it is started anew."""
        if server not in self.up:
            return
        self.up.remove(server)
        self._lost.append(server.name)
        self._why = f"{server.name}: {why}"
        for answer in list(server.answers):
            answer.cancel()
        if self._in_a_row[server.slot] >= MAX_RESTARTS:
            self._note(f"{server.name} is given up after {MAX_RESTARTS} restarts: {why}")
        else:
            self._note(f"{server.name} is lost ({why}) and started anew")
            self._reviving[server.slot] = asyncio.ensure_future(self._revive(server))
        self.notify()

    async def take_lost(self) -> list[str]:
        """Those lost since the last call; it looks at all processes once more."""
        for server in list(self.up):
            if not await self._sources[server.slot].alive():
                self.lose(server, "its process has ended")
        lost, self._lost = self._lost, []
        return lost

    async def _revive(self, dead: Server) -> None:
        slot = dead.slot
        await self._sources[slot].end()  # it may hold memory that the trainer wants before it may start again
        while self._in_a_row[slot] < MAX_RESTARTS:
            await self.may_start.wait()
            self._in_a_row[slot] += 1
            self._lives[slot] += 1
            self.num_restarts += 1
            try:
                client = self._make_client(await self._sources[slot].restart(), slot)
                await client.check_model(self._timeout_s)
            except (RuntimeError, ValueError, Unanswered) as e:
                self._why = f"server {slot}: {e}"
                continue
            self.up.append(Server(slot, f"server {slot}.{self._lives[slot]}", client, None))
            self._note(f"server {slot} is up again")
            break
        else:
            self._note(f"server {slot} is given up after {MAX_RESTARTS} restarts: {self._why}")
        del self._reviving[slot]
        self.notify()

    def serves(self, server: Server, version: int) -> None:
        server.version, server.last_sign, server.num_failures = version, time.monotonic(), 0
        self.notify()

    def served(self, server: Server) -> None:
        self._in_a_row[server.slot] = 0

    # Watching

    def watch(self) -> None:
        """Look after all servers in the background, until aclose."""
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            # One that has no weights is being published to: it can't compute, and the publish has its own time-outs.
            await asyncio.gather(*(self._probe(server) for server in self.up if server.version is not None))

    async def _probe(self, server: Server) -> None:
        why = "it doesn't answer"
        try:
            await server.client.probe(min(self._timeout_s, 30.0))
            server.last_sign = time.monotonic()
            return
        except (Unanswered, ValueError) as e:
            why = str(e)
        if server not in self.up or server.version is None:
            return
        if not await self._sources[server.slot].alive():
            self.lose(server, "its process has ended")
        elif (silence := time.monotonic() - server.last_sign) > self._timeout_s:
            self.lose(server, f"no sign of life for {silence:.0f} s: {why}")

    async def aclose(self) -> None:
        tasks = [*self._reviving.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.up:
            with contextlib.suppress(Exception):
                await server.client.aclose()
