"""What vLLM calls the things that HttpEngine asks of a server. Servers run our extension of vLLM's workers, see vllm_server."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from dapo_megatron.records import Completion
from dapo_megatron.rollout.engine import GenerateRequest, WeightSender
from dapo_megatron.rollout.server_client import SAME, ServerHttp, Unanswered, reading, require_same
from dapo_megatron.rollout.sglang_weights import ServerLayout
from dapo_megatron.rollout.vllm_weights import VLLMWeightSender

# publish.pause -> what /pause is asked for. "keep" freezes requests; clearing the cache makes it forget what it computed for
# them.
_PAUSES = {
    "drain": "mode=abort&clear_cache=true",
    "abort": "mode=abort&clear_cache=true",
    "retract": "mode=keep&clear_cache=true",
    "in_place": "mode=keep&clear_cache=false",
}
_FIRST_VERSION = "default"  # what vLLM calls the weights that it was started with


class VLLMClient:
    """Implements ServerClient.

    Args:
        model_dir: the model that the server must run.
        layout: of the server's weights.
        backend: of the groups that carry weights, "gloo" or "nccl". nccl refuses a trainer and a server on the same GPU.
    """

    def __init__(self, http: ServerHttp, model_dir: Path, layout: ServerLayout, *, backend: str, sender_timeout_s: float):
        self.url, self._http, self._model_dir = http.url, http, model_dir
        self._layout, self._backend, self._sender_timeout_s = layout, backend, sender_timeout_s
        self._max_tokens = 0  # of prompt and response together; 0: not asked yet

    async def check_model(self, timeout_s: float) -> None:
        (first, *_) = await self._rpc("dapo_describe", timeout_s, keys=list(SAME))
        settings = {key: first[key] for key in ("tp_size", "dtype", "logprobs_mode")}
        expected = {"tp_size": self._layout.tp, "dtype": self._layout.dtype, "logprobs_mode": "processed_logprobs"}
        require_same(self.url, first["model"], self._model_dir, first["config"], settings, expected)
        self._max_tokens = first["max_model_len"]

    async def probe(self, timeout_s: float) -> None:
        # goes through the scheduler's loop to the workers and back, between two steps
        await self._rpc("check_health", timeout_s)

    async def _rpc(self, method: str, timeout_s: float, **kwargs: Any) -> list[Any]:
        """What each tensor-parallel rank answers."""
        answer = await self._http.post("/collective_rpc", {"method": method, "kwargs": kwargs}, timeout_s)
        with reading(answer):
            return answer["results"]

    # Generation

    async def generate(self, request: GenerateRequest, rid: str, version: int, timeout_s: float) -> Completion:
        await self._check_length(request, timeout_s)
        return completion(await self._http.post("/inference/v1/generate", self.generate_body(request, rid, version), timeout_s))

    async def prefill(self, request: GenerateRequest, rid: str, version: int, timeout_s: float) -> None:
        """Not needed: of requests that come together vLLM computes a common prefix once."""

    async def _check_length(self, request: GenerateRequest, timeout_s: float) -> None:
        # vLLM would cut the response without a word
        if not self._max_tokens:
            await self.check_model(timeout_s)
        length = len(request.token_ids) + request.params.max_new_tokens
        if length > self._max_tokens:
            raise ValueError(
                f"request {request.request_id}: {len(request.token_ids)} tokens and {request.params.max_new_tokens} new ones "
                f"exceed the context length of {self._max_tokens} of the server on {self.url}"
            )

    def generate_body(self, request: GenerateRequest, rid: str, version: int) -> dict[str, Any]:
        """`seed` is not sent: the same seed gives the same tokens only if the same requests happen to be computed together."""
        params = request.params
        return {
            "request_id": rid,
            "token_ids": list(request.token_ids),
            "sampling_params": {
                "max_tokens": params.max_new_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "stop_token_ids": list(params.stop_token_ids),
                "logprobs": 0,  # of the sampled token alone
                "detokenize": False,
            },
            # Keeps the prefix caches of different weights apart.
            "cache_salt": str(version),
        }

    async def abort(self, rid: str) -> None:
        with contextlib.suppress(Unanswered, ValueError):
            await self._http.post("/abort_requests", self.abort_body(rid), 10.0)

    def abort_body(self, rid: str) -> dict[str, Any]:
        return {"request_ids": [f"generate-tokens-{rid}"]}

    async def prompt_logprobs(self, token_ids: tuple[int, ...], rid: str, version: int, timeout_s: float) -> np.ndarray:
        """vLLM computes the whole prompt for it, whatever its cache holds."""
        answer = await self._http.post("/inference/v1/generate", self.prompt_logprobs_body(token_ids, rid, version), timeout_s)
        with reading(answer):
            entries = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
            return np.array([entry[str(token)]["logprob"] for token, entry in entries], np.float32)

    def prompt_logprobs_body(self, token_ids: tuple[int, ...], rid: str, version: int) -> dict[str, Any]:
        return {
            "request_id": rid,
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
            "cache_salt": str(version),
        }

    # Weights

    def weight_sender(self) -> WeightSender:
        return VLLMWeightSender(self.url, self._layout, backend=self._backend, timeout_s=self._sender_timeout_s)

    async def begin_update(self, pause: str, timeout_s: float) -> None:
        await self._http.post(f"/pause?{_PAUSES[pause]}", {}, timeout_s)
        await self._rpc("dapo_begin", timeout_s)

    async def end_update(self, version: int, timeout_s: float) -> None:
        held = sorted(set(await self._rpc("dapo_end", timeout_s)))
        if held != [str(version)]:
            raise RuntimeError(f"{self.url} holds weights of version {', '.join(held)} after version {version} was published")
        await self._http.post("/update_weight_version", {"new_version": str(version)}, timeout_s)
        await self._http.post("/resume", {}, timeout_s)

    async def checksums(self, timeout_s: float) -> dict[str, str]:
        """ "TP rank/parameter" -> checksum, cut to the length of SGLang's."""
        answer = await self._http.post("/weight_checker", {"action": "checksum"}, timeout_s)
        with reading(answer):
            sums = answer["checksums"].items()
            return {f"{name.rpartition(':tp')[2].replace(':', '/', 1)}": digest[:16] for name, digest in sums}

    async def aclose(self) -> None:
        await self._http.aclose()


def completion(answer: dict[str, Any]) -> Completion:
    """vLLM's answer to one request. A matched EOS is among the ids and has its log-prob. Unanswered if it is none."""
    with reading(answer):
        (choice,) = answer["choices"]
        ids = choice["token_ids"]
        entries = (choice["logprobs"] or {}).get("content") or []
        if [entry["token_id"] for entry in entries] != ids:
            raise Unanswered(f"vLLM answered {len(ids)} tokens but {len(entries)} log-probs, or of other tokens")
        versions = np.full(len(ids), -1, np.int32)
        for span in choice["weight_versions"] or ():
            versions[span["start"] : span["end"]] = 0 if span["version"] == _FIRST_VERSION else int(span["version"])
        if (versions < 0).any():
            raise Unanswered(f"vLLM answered tokens without weight version: {choice['weight_versions']}")
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array([entry["logprob"] for entry in entries], np.float32),
            versions=versions,
            finish_reason=choice["finish_reason"],
        )
