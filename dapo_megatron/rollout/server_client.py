"""One rollout server, whatever program it runs: what HttpEngine asks of it, and HTTP whose faults are told apart."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np

from dapo_megatron.records import Completion
from dapo_megatron.rollout.engine import GenerateRequest, WeightSender

# A connection that has been idle so long isn't used again. SGLang closes it after 5 s, and a request that meets that is lost.
KEEPALIVE_S = 2.0


class Unanswered(Exception):
    """The server did not answer, answered with something else than it should, or said that the fault is its own: another
    attempt may succeed, here or elsewhere."""


@contextmanager
def reading(answer: Any) -> Iterator[None]:
    """Around what takes an answer apart: Unanswered if it isn't what it should be."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as e:
        raise Unanswered(f"the answer can't be read ({type(e).__name__}: {e}): {str(answer)[:200]}") from e


class ServerClient(Protocol):
    """Errors, if nothing else is said: Unanswered, and ValueError for a request that the server refuses."""

    url: str

    async def check_model(self, timeout_s: float) -> None:
        """RuntimeError unless the server runs the expected model in the expected way."""
        ...

    async def probe(self, timeout_s: float) -> None:
        """Returns if the server computes."""
        ...

    async def generate(self, request: GenerateRequest, rid: str, version: int, timeout_s: float) -> Completion:
        """`rid` is of this attempt alone. Prefixes are kept apart by `version`, that of the published weights."""
        ...

    async def prefill(self, request: GenerateRequest, rid: str, version: int, timeout_s: float) -> None:
        """Compute the prompt and keep it for the requests that follow."""
        ...

    async def abort(self, rid: str) -> None:
        """Never raises: a server that does not answer is dealt with by the request itself."""
        ...

    async def prompt_logprobs(self, token_ids: tuple[int, ...], rid: str, version: int, timeout_s: float) -> np.ndarray:
        """float32 [len - 1], at temperature 1, by the weights and not by what a cache holds."""
        ...

    def weight_sender(self) -> WeightSender: ...

    async def begin_update(self, pause: str, timeout_s: float) -> None:
        """Pause (`publish.pause`), drop prefixes, get ready for buckets; what a failed update left open is closed first."""
        ...

    async def end_update(self, version: int, timeout_s: float) -> None:
        """Go on with the new weights. RuntimeError if the server does not hold this version."""
        ...

    async def checksums(self, timeout_s: float) -> dict[str, str]:
        """Its parameters' checksums, see WeightSender.checksums; empty if this kind of server can't tell."""
        ...

    async def aclose(self) -> None: ...


# Of a model's config.json: two that agree on these have the same parameters.
SAME = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def require_same(
    url: str, model: str, model_dir: Path, config: dict[str, Any], settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    """RuntimeError unless a server's config.json is that of `model_dir`, as far as it tells, and its settings are as expected;
    None: it doesn't tell."""
    ours = {key: value for key, value in json.loads((model_dir / "config.json").read_text()).items() if key in SAME} | expected
    theirs = {key: value for key, value in (config | settings).items() if key in ours and value is not None}
    wrong = [f"{key} {value!r} instead of {ours[key]!r}" for key, value in theirs.items() if value != ours[key]]
    if wrong:
        raise RuntimeError(
            f"the server on {url} runs {model} with {', '.join(wrong)}; start it with the run's model ({model_dir}) and "
            "settings, or correct rollout.servers"
        )


class ServerHttp:
    """JSON over HTTP to one server. Connections belong to an event loop: a new loop gets new ones."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url, self._transport = url.rstrip("/"), transport
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        """The answer's JSON, {} if it is another kind of text. Raises Unanswered, or ValueError for a refusal (4xx)."""
        return await self._call("POST", path, timeout_s, json=body)

    async def get(self, path: str, timeout_s: float) -> Any:
        return await self._call("GET", path, timeout_s)

    async def _call(self, method: str, path: str, timeout_s: float, **kwargs: Any) -> Any:
        try:
            response = await self._client().request(method, f"{self.url}{path}", timeout=timeout_s, **kwargs)
        except httpx.TimeoutException as e:
            raise Unanswered(f"{path}: no answer within {timeout_s:.0f} s") from e
        except httpx.HTTPError as e:
            raise Unanswered(f"{path}: {type(e).__name__}: {e}") from e
        if response.status_code >= 500:
            raise Unanswered(f"{path}: {response.status_code}: {response.text[:500]}")
        if response.status_code != 200:
            raise ValueError(f"refused by {self.url}{path}: {response.text[:1000]}")
        if not response.headers.get("content-type", "").startswith("application/json"):
            return {}
        try:
            return response.json()
        except json.JSONDecodeError as e:
            raise Unanswered(f"{path}: the answer is no JSON: {response.text[:200]!r}") from e

    def _client(self) -> httpx.AsyncClient:
        if self._http is None or self._loop is not asyncio.get_running_loop():
            limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S)
            self._http = httpx.AsyncClient(limits=limits, trust_env=False, transport=self._transport)
            self._loop = asyncio.get_running_loop()
        return self._http

    async def aclose(self) -> None:
        if self._http is not None and self._loop is asyncio.get_running_loop():
            await self._http.aclose()
        self._http = None


def no_tokens() -> Completion:
    """Of a request that was interrupted before its first token."""
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")
