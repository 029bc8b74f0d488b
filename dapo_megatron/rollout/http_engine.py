"""Rollout servers over HTTP as one RolloutEngine: a client for any number of them."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dapo_megatron.records import Completion
from dapo_megatron.rollout.engine import GenerateRequest, WeightSender
from dapo_megatron.rollout.fleet import Fleet, Server, ServerSource
from dapo_megatron.rollout.server_client import ServerClient, Unanswered, no_tokens
from dapo_megatron.rollout.server_memory import ServerMemory


@dataclass(eq=False)
class _Call:
    """One call of `generate`. `rid` is the id of its present attempt at the server."""

    request_id: str
    server: Server | None = None
    rid: str = ""
    aborted: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Group:
    calls: set[_Call] = field(default_factory=set)
    server: Server | None = None
    prefill: tuple[tuple[str, int], asyncio.Future[None]] | None = None  # (server's name, version), when it is done


class HttpEngine:
    """Implements RolloutEngine. A group goes to the server with the fewest requests in flight, and all of the group's
    requests (request_id up to "/") to the same one, which then computes the prompt once, before it is sampled from.

    Args:
        sources, urls: of servers that all run the model in `model_dir`.
        make_client: from a server's address and its place among `sources`.
        pause: see publish.pause.
        max_attempts: after so many failed attempts, on other servers if there are any, a request is given up.
        update_timeout_s: for one call of an update.
        health_interval_s, health_timeout_s: see rollout.*.
        version: of the weights that the servers start with; None: they wait for weights.
        note: is told when a server is lost or comes back.
    """

    def __init__(
        self,
        sources: Sequence[ServerSource],
        urls: Sequence[str],
        make_client: Callable[[str, int], ServerClient],
        model_dir: str | Path,
        *,
        pause: str = "drain",
        max_inflight_groups: int = 64,
        request_timeout_s: float = 600.0,
        update_timeout_s: float = 300.0,
        health_interval_s: float = 10.0,
        health_timeout_s: float = 120.0,
        max_attempts: int = 3,
        version: int | None = 0,
        note: Callable[[str], None] = lambda text: None,
    ):
        if not urls:
            raise ValueError("urls: empty; give the address of one server at least")
        self.vocab_size: int = json.loads((Path(model_dir) / "config.json").read_text())["vocab_size"]
        self.pause, self.max_inflight_groups, self.max_attempts = pause, max_inflight_groups, max_attempts
        self.request_timeout_s, self.update_timeout_s = request_timeout_s, update_timeout_s
        self.num_retries = 0  # attempts after the first, since the start
        self.fleet = Fleet(
            sources, urls, make_client, version=version, interval_s=health_interval_s, timeout_s=health_timeout_s, note=note
        )
        self.memory = ServerMemory(self.fleet, update_timeout_s)
        self._groups: dict[str, _Group] = {}  # those with calls in flight
        self._numbers = itertools.count()

    async def open(self) -> None:
        """RuntimeError if a server runs another model; from now on they are looked after."""
        try:
            await asyncio.gather(*(server.client.check_model(self.update_timeout_s) for server in self.fleet.up))
        except (Unanswered, ValueError) as e:
            raise RuntimeError(f"a rollout server can't tell its model: {e}") from e
        self.fleet.watch()

    async def aclose(self) -> None:
        await self.fleet.aclose()

    def metrics(self) -> dict[str, float]:
        return {
            "engine/servers": float(len(self.fleet.up) - len(self.fleet.waiting())),
            "engine/restarts": float(self.fleet.num_restarts),
            "engine/retries": float(self.num_retries),
        }

    # Generation

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one response. While weights are being published it waits.

        Raises:
            ValueError: the server cannot take such a request (too long, a token id outside the vocabulary).
            RuntimeError: no server answered in max_attempts attempts, or none is left.
        """
        self._check_tokens(request.request_id, request.token_ids)
        name = _group_of(request.request_id)
        group = self._groups.setdefault(name, _Group())
        call = _Call(request.request_id)
        group.calls.add(call)
        failed: list[str] = []
        try:
            while server := await self._server_for(group, call):
                begin = time.monotonic()
                server.num_requests += 1
                try:
                    result = await self._attempt(request, call, group, server)
                    if result is not None:
                        self.fleet.served(server)
                        return result
                except Unanswered as e:
                    if call.aborted:
                        break
                    failed.append(f"{server.client.url}: {e}")
                    if len(failed) == self.max_attempts:
                        raise RuntimeError(f"request {request.request_id} failed: " + "; ".join(failed)) from e
                    self.num_retries += 1
                    await self.fleet.failed(server, str(e), begin)
                finally:
                    server.num_requests -= 1
            return no_tokens()
        finally:
            call.done.set()
            group.calls.discard(call)
            if not group.calls:
                self._groups.pop(name, None)

    async def _server_for(self, group: _Group, call: _Call) -> Server | None:
        """None if the call was aborted meanwhile."""
        held = group.server
        if held is None or held not in self.fleet.up or held.version is None or held.num_failures:
            group.server = await self.fleet.pick(lambda: call.aborted)
        call.server = group.server
        return None if call.aborted else group.server

    async def _attempt(self, request: GenerateRequest, call: _Call, group: _Group, server: Server) -> Completion | None:
        """None if the call was aborted or the weights changed before it was sent."""
        version = server.version
        assert version is not None
        if request.group_size > 1:
            await self._prefilled(request, group, server, version)
            if call.aborted or server.version != version:
                return None
        call.rid = self._rid(request.request_id)  # a server refuses an id that it still knows: every attempt has its own
        try:
            return await server.ask(server.client.generate(request, call.rid, version, self.request_timeout_s))
        except Unanswered:
            if server in self.fleet.up:
                await server.client.abort(call.rid)  # it may still be working on it
            raise

    async def _prefilled(self, request: GenerateRequest, group: _Group, server: Server, version: int) -> None:
        """Servers that get a group's requests together compute its prompt for each: so it is asked for once, first."""
        if group.prefill is None or group.prefill[0] != (server.name, version):
            call = server.client.prefill(request, self._rid(request.request_id), version, self.request_timeout_s)
            group.prefill = (server.name, version), asyncio.ensure_future(server.ask(call))
        done = group.prefill[1]  # another call may put a new one there meanwhile
        await asyncio.wait({done})  # the group's, not this call's: it isn't cancelled with it
        done.result()

    def _rid(self, request_id: str) -> str:
        return f"{request_id}/{next(self._numbers)}"

    def _check_tokens(self, what: str, token_ids: Sequence[int]) -> None:
        # An id outside the vocabulary kills the server's scheduler, and a retry then the next server's.
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise ValueError(
                f"request {what}: token_ids must be one or more ids in 0..{self.vocab_size - 1}, got "
                f"{token_ids[:20]}...; check that the tokenizer belongs to the model"
            )

    async def abort(self, request_ids: list[str]) -> None:
        """Interrupt; returns when the matching `generate` calls have."""
        ids = set(request_ids)
        groups = {_group_of(i) for i in ids} & self._groups.keys()
        calls = [call for group in groups for call in self._groups[group].calls if call.request_id in ids]
        for call in calls:
            call.aborted = True
        self.fleet.notify()
        while calls := [call for call in calls if not call.done.is_set()]:
            # Again and again: an abort that overtakes its request at the server has no effect.
            await asyncio.gather(*(call.server.client.abort(call.rid) for call in calls if call.server and call.rid))
            waits = [asyncio.ensure_future(call.done.wait()) for call in calls]
            await asyncio.wait(waits, timeout=0.5)
            for wait in waits:
                wait.cancel()

    async def prompt_logprobs(self, token_ids: tuple[int, ...], server: str = "") -> np.ndarray:
        """float32 [len - 1]: log-prob of each token but the first, at temperature 1, by the named server (empty: any)."""
        self._check_tokens("prompt_logprobs", token_ids)
        chosen = self._named([server])[0] if server else await self.fleet.pick()
        assert chosen is not None
        try:
            call = chosen.client.prompt_logprobs(
                token_ids, self._rid("prompt-logprobs"), chosen.version or 0, self.request_timeout_s
            )
            return await chosen.ask(call)
        except Unanswered as e:
            raise RuntimeError(f"no log-probs from {chosen.name}: {e}") from e

    # Weights

    async def weight_senders(self) -> dict[str, WeightSender]:
        return {server.name: server.client.weight_sender() for server in await self.fleet.some_up()}

    def waiting(self) -> list[str]:
        return [server.name for server in self.fleet.waiting()]

    async def joined(self) -> None:
        await self.fleet.some_waiting()

    async def drop_lost(self, failed: Collection[str] = ()) -> list[str]:
        for server in list(self.fleet.up):
            if server.name in failed:
                self.fleet.lose(server, "it could not take the weights")
        return await self.fleet.take_lost()

    async def begin_update(self, version: int, servers: Collection[str]) -> None:
        """New requests wait from here on. After a failed publish call it again."""
        chosen = self._named(servers)
        busy = {name for name, group in self._groups.items() if any(call.server in chosen for call in group.calls)}
        if self.pause == "drain" and busy:
            raise RuntimeError(f"version {version} cannot be published while groups {sorted(busy)[:5]} are in flight")
        for server in chosen:
            server.version = None
        await self._control(chosen, lambda server: server.client.begin_update(self.pause, self.update_timeout_s))

    async def end_update(self, version: int, servers: Collection[str]) -> None:
        chosen = self._named(servers)
        await self._control(chosen, lambda server: server.client.end_update(version, self.update_timeout_s))
        for server in chosen:
            self.fleet.serves(server, version)

    async def checksums(self, servers: Collection[str]) -> dict[str, dict[str, str]]:
        chosen = self._named(servers)
        sums = await self._control(chosen, lambda server: server.client.checksums(self.update_timeout_s))
        return {server.name: of_server for server, of_server in zip(chosen, sums, strict=True)}

    def _named(self, names: Collection[str]) -> list[Server]:
        by_name = {server.name: server for server in self.fleet.up}
        if lost := sorted(set(names) - by_name.keys()):
            raise RuntimeError(f"{', '.join(lost)}: lost")
        return [by_name[name] for name in names]

    async def _control(self, servers: list[Server], call: Callable[[Server], Any]) -> list[Any]:
        """Ask all at once. RuntimeError if one fails; it is lost if it didn't answer."""
        results = await asyncio.gather(*(server.ask(call(server)) for server in servers), return_exceptions=True)
        failed = [(server, e) for server, e in zip(servers, results, strict=True) if isinstance(e, BaseException)]
        for server, e in failed:
            if not isinstance(e, Unanswered | ValueError | RuntimeError):
                raise e
            if isinstance(e, Unanswered):
                self.fleet.lose(server, str(e))
        if failed:
            raise RuntimeError("; ".join(f"{server.name} ({server.client.url}): {e}" for server, e in failed))
        return results


def _group_of(request_id: str) -> str:
    return request_id.partition("/")[0]
