"""SGLang over HTTP as a RolloutEngine: one client for any number of servers."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from dapo_megatron.records import Completion
from dapo_megatron.rollout.engine import GenerateRequest, WeightSender
from dapo_megatron.rollout.sglang_weights import ServerLayout, SGLangWeightSender


@dataclass
class _Server:
    url: str
    num_inflight: int = 0
    suspect: bool = False  # its last answer failed: chosen only if all others' did too

    def burden(self) -> tuple[bool, int]:
        return self.suspect, self.num_inflight


@dataclass(eq=False)
class _Call:
    """One call of `generate`. `rid` is the id of its present attempt at the server."""

    request_id: str
    server: _Server
    rid: str = ""
    aborted: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class _Unanswered(Exception):
    """The server did not answer, or said that the fault is its own: another attempt may succeed."""


class SGLangEngine:
    """Implements RolloutEngine. A group goes to the server with the fewest requests in flight, and all of the group's
    requests (request_id up to "/") to the same one, which then computes the prompt once.

    Args:
        urls: of servers that all run the model in `model_dir`.
        tp, dtype, device: of the servers, see SGLangServer; dtype resolved.
        max_attempts: after so many failed attempts, on other servers if there are any, a request is given up.
        update_timeout_s: for one bucket of weights.
        backend: of the groups that carry weights; empty: gloo on CPU, nccl on GPU. nccl refuses a trainer and a server
            on the same GPU: use gloo there.
        version: of the weights that the servers start with.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model_dir: str | Path,
        *,
        tp: int = 1,
        dtype: str,
        device: str = "cpu",
        max_inflight_groups: int = 64,
        request_timeout_s: float = 600.0,
        update_timeout_s: float = 300.0,
        max_attempts: int = 3,
        backend: str = "",
        version: int = 0,
    ):
        if not urls:
            raise ValueError("urls: empty; give the address of one SGLang server at least")
        config = json.loads((Path(model_dir) / "config.json").read_text())
        self.vocab_size: int = config["vocab_size"]
        num_kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        self.layout = ServerLayout(tp=tp, dtype=dtype, device=device, num_kv_heads=num_kv_heads)
        self.backend = backend or ("nccl" if device == "cuda" else "gloo")
        self.max_inflight_groups = max_inflight_groups
        self.request_timeout_s, self.update_timeout_s = request_timeout_s, update_timeout_s
        self.max_attempts = max_attempts
        self.version = version
        self.num_retries = 0  # attempts after the first, since the start
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._groups: dict[str, set[_Call]] = {}  # calls in flight by group
        self._attempts = itertools.count()
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # Generation

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one response.

        Raises:
            ValueError: the server cannot take such a request (too long, a token id outside the vocabulary).
            RuntimeError: no server answered in max_attempts attempts.
        """
        self._check_tokens(request.request_id, request.token_ids)
        group = self._groups.setdefault(_group_of(request.request_id), set())
        call = _Call(request.request_id, next(iter(group)).server if group else min(self._servers, key=_Server.burden))
        group.add(call)
        failed: list[str] = []
        try:
            while True:
                try:
                    return await self._attempt(request, call)
                except _Unanswered as e:
                    if call.aborted:
                        return _no_tokens()
                    failed.append(f"{call.server.url}: {e}")
                    if len(failed) == self.max_attempts:
                        raise RuntimeError(f"request {request.request_id} failed: " + "; ".join(failed)) from e
                    self.num_retries += 1
                    call.server = min(self._servers, key=_Server.burden)
        finally:
            call.done.set()
            group.discard(call)
            if not group:
                self._groups.pop(_group_of(request.request_id), None)

    async def _attempt(self, request: GenerateRequest, call: _Call) -> Completion:
        # SGLang refuses an id that it still knows, so every attempt has its own.
        call.rid = f"{request.request_id}/{next(self._attempts)}"
        server = call.server
        server.num_inflight += 1
        body = self.generate_body(request, call.rid)
        try:
            answer = await self._post(server, "/generate", body, self.request_timeout_s)
            server.suspect = False
        except _Unanswered:
            server.suspect = True
            await self._abort_rid(server, call.rid)  # it may still be working on it
            raise
        finally:
            server.num_inflight -= 1
        return _completion(answer)

    def generate_body(self, request: GenerateRequest, rid: str) -> dict[str, Any]:
        """`seed` is not sent: SGLang samples by it only in a mode that its CPU attention does not have."""
        params = request.params
        return {
            "rid": rid,
            "input_ids": list(request.token_ids),
            "sampling_params": {
                "max_new_tokens": params.max_new_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "stop_token_ids": list(params.stop_token_ids),
            },
            "return_logprob": True,
            # Keeps the prefix caches of different weights apart.
            "extra_key": str(self.version),
        }

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
        groups = {_group_of(i) for i in ids}
        calls = [call for group in groups for call in self._groups.get(group, ()) if call.request_id in ids]
        for call in calls:
            call.aborted = True
        while calls := [call for call in calls if not call.done.is_set()]:
            # Again and again: an abort that overtakes its request at the server has no effect.
            await asyncio.gather(*(self._abort_rid(call.server, call.rid) for call in calls))
            waits = [asyncio.ensure_future(call.done.wait()) for call in calls]
            await asyncio.wait(waits, timeout=0.5)
            for wait in waits:
                wait.cancel()

    async def _abort_rid(self, server: _Server, rid: str) -> None:
        with contextlib.suppress(httpx.HTTPError):  # a server that does not answer is dealt with by the request itself
            await self._client().post(f"{server.url}/abort_request", json={"rid": rid}, timeout=10.0)

    async def prompt_logprobs(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """float32 [len - 1]: log-prob of each token but the first, at temperature 1. Bypasses the prefix cache."""
        self._check_tokens("prompt_logprobs", token_ids)
        server = min(self._servers, key=_Server.burden)
        answer = await self._post(server, "/generate", self.prompt_logprobs_body(token_ids), self.request_timeout_s)
        return np.array([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]], np.float32)

    def prompt_logprobs_body(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {
            "rid": f"prompt-logprobs/{next(self._attempts)}",
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": str(self.version),
        }

    # Weights

    def weight_senders(self) -> list[WeightSender]:
        return [
            SGLangWeightSender(server.url, self.layout, backend=self.backend, timeout_s=self.update_timeout_s)
            for server in self._servers
        ]

    async def begin_update(self, version: int) -> None:
        """Pause the servers, empty their prefix caches, open the update. After a failed publish call it again."""
        if self._groups:
            raise RuntimeError(f"version {version} cannot be published while groups {sorted(self._groups)[:5]} are in flight")
        await asyncio.gather(*(self._begin_update(server) for server in self._servers))

    async def _begin_update(self, server: _Server) -> None:
        await self._control(server, "/pause_generation", {"mode": "abort"})
        await self._control(server, "/flush_cache?timeout=30", {})  # other than 200: requests are still running
        try:
            await self._control(server, "/begin_weight_update", {})
        except RuntimeError as e:
            if "already open" not in str(e):
                raise
            await self._control(server, "/end_weight_update", {})  # left by a publish that failed
            await self._control(server, "/begin_weight_update", {})

    async def end_update(self, version: int) -> None:
        """Commit. RuntimeError if a server has not got weights of this version."""
        await asyncio.gather(*(self._end_update(server, version) for server in self._servers))
        self.version = version

    async def _end_update(self, server: _Server, version: int) -> None:
        await self._control(server, "/end_weight_update", {})
        held = await self._held_version(server)
        if held != str(version):
            raise RuntimeError(f"{server.url} holds weights of version {held} after version {version} was published")
        await self._control(server, "/continue_generation", {})
        server.suspect = False

    async def _held_version(self, server: _Server) -> str:
        try:
            answer = await self._client().get(f"{server.url}/model_info", timeout=self.update_timeout_s)
        except httpx.HTTPError as e:
            raise RuntimeError(f"/model_info failed at {server.url}: {e or type(e).__name__}") from e
        return str(answer.json()["weight_version"])

    async def checksums(self) -> list[dict[str, str]]:
        """One mapping "TP rank/SGLang's parameter name" -> checksum for each server; to be compared with what
        `SGLangWeightSender.checksums` makes of the trainer's tensors."""
        answers = await asyncio.gather(
            *(self._control(server, "/weights_checker", {"action": "checksum"}) for server in self._servers)
        )
        return [
            {
                f"{rank['parallelism_info'][0]['tp_rank']}/{name}": checksum
                for rank in answer["ranks"]
                for name, checksum in rank["checksums"].items()
            }
            for answer in answers
        ]

    # HTTP

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None and self._loop is asyncio.get_running_loop():
            await self._http.aclose()
        self._http = None

    def _client(self) -> httpx.AsyncClient:
        """Connections belong to an event loop; a new one gets new ones."""
        if self._http is None or self._loop is not asyncio.get_running_loop():
            self._http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False)
            self._loop = asyncio.get_running_loop()
        return self._http

    async def _control(self, server: _Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A call that is not a request for tokens. RuntimeError if it fails."""
        try:
            return await self._post(server, path, body, self.update_timeout_s)
        except (_Unanswered, ValueError) as e:
            raise RuntimeError(f"{path} failed at {server.url}: {e}") from e

    async def _post(self, server: _Server, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            response = await self._client().post(f"{server.url}{path}", json=body, timeout=timeout_s)
        except httpx.TimeoutException as e:
            raise _Unanswered(f"no answer within {timeout_s:.0f} s") from e
        except httpx.HTTPError as e:
            raise _Unanswered(f"{type(e).__name__}: {e}") from e
        if response.status_code >= 500:
            raise _Unanswered(f"{response.status_code}: {response.text[:500]}")
        if response.status_code != 200:
            raise ValueError(f"refused by {server.url}: {response.text[:1000]}")
        return response.json() if response.headers.get("content-type", "").startswith("application/json") else {}


def _group_of(request_id: str) -> str:
    return request_id.partition("/")[0]


def _no_tokens() -> Completion:
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")


def _completion(answer: dict[str, Any]) -> Completion:
    """SGLang's answer to one request. A matched EOS is among the ids and has its log-prob."""
    meta, ids = answer["meta_info"], answer["output_ids"]
    entries = meta.get("output_token_logprobs") or []  # [log-prob, id, text]; absent if aborted before the first token
    if [entry[1] for entry in entries] != ids:
        raise RuntimeError(f"SGLang answered {len(ids)} tokens but {len(entries)} log-probs, or of other tokens")
    versions = np.full(len(ids), -1, np.int32)
    for span in meta["weight_versions"]:
        versions[span["start"] : span["end"]] = int(span["version"])
    assert (versions >= 0).all(), f"tokens without weight version: {meta['weight_versions']}"
    return Completion(
        token_ids=np.array(ids, np.int32),
        logprobs=np.array([entry[0] for entry in entries], np.float32),
        versions=versions,
        finish_reason=meta["finish_reason"]["type"],
    )
