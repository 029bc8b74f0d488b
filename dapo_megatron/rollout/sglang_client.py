"""What SGLang calls the things that HttpEngine asks of a server."""

import contextlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from dapo_megatron.records import Completion
from dapo_megatron.rollout.colocated import ColocatedWeightSender
from dapo_megatron.rollout.engine import GenerateRequest, WeightSender
from dapo_megatron.rollout.server_client import ServerHttp, Unanswered, reading, require_same
from dapo_megatron.rollout.sglang_weights import ServerLayout, SGLangWeightSender

FLUSH_TIMEOUT_S = 30


class SGLangClient:
    """Implements ServerClient.

    Args:
        model_dir: the model that the server must run.
        layout: of the server's weights.
        backend: of the groups that carry weights, "gloo" or "nccl"; "ipc" for a server on the trainer's devices, see
            ColocatedWeightSender.
        ranks: with "ipc" on GPUs the trainer rank on the GPU of each of the server's ranks.
    """

    def __init__(
        self,
        http: ServerHttp,
        model_dir: Path,
        layout: ServerLayout,
        *,
        backend: str,
        sender_timeout_s: float,
        ranks: tuple[int, ...] = (),
    ):
        self.url, self._http, self._model_dir = http.url, http, model_dir
        self._layout, self._backend, self._sender_timeout_s, self._ranks = layout, backend, sender_timeout_s, ranks

    async def check_model(self, timeout_s: float) -> None:
        """Compares config.json where the server's model is a folder that can be read here; else the architecture alone."""
        info = await self._http.get("/model_info", timeout_s)
        server = await self._http.get("/server_info", timeout_s)
        with reading((info, server)):
            theirs, dtype = {"architectures": info.get("architectures") or []}, server.get("dtype")
            settings = {"tp_size": server.get("tp_size"), "dtype": None if dtype == "auto" else dtype}
            config = Path(info["model_path"]) / "config.json"
        with contextlib.suppress(OSError):
            theirs = json.loads(config.read_text())
        expected = {"tp_size": self._layout.tp, "dtype": self._layout.dtype}
        require_same(self.url, str(info.get("model_path")), self._model_dir, theirs, settings, expected)

    async def probe(self, timeout_s: float) -> None:
        # answered as soon as the scheduler has given anything, if need be a token that this call asks for
        await self._http.get("/health_generate", timeout_s)

    # Generation

    async def generate(self, request: GenerateRequest, rid: str, version: int, timeout_s: float) -> Completion:
        return completion(await self._http.post("/generate", self.generate_body(request, rid, version), timeout_s))

    async def prefill(self, request: GenerateRequest, rid: str, version: int, timeout_s: float) -> None:
        await self._http.post("/generate", self.prefill_body(request, rid, version), timeout_s)

    def generate_body(self, request: GenerateRequest, rid: str, version: int) -> dict[str, Any]:
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
            "extra_key": str(version),
        }

    def prefill_body(self, request: GenerateRequest, rid: str, version: int) -> dict[str, Any]:
        return {
            "rid": rid,
            "input_ids": list(request.token_ids),
            "sampling_params": {"max_new_tokens": 0},
            "extra_key": str(version),
        }

    async def abort(self, rid: str) -> None:
        with contextlib.suppress(Unanswered, ValueError):
            await self._http.post("/abort_request", {"rid": rid}, 10.0)

    async def prompt_logprobs(self, token_ids: tuple[int, ...], rid: str, version: int, timeout_s: float) -> np.ndarray:
        """Bypasses the prefix cache."""
        answer = await self._http.post("/generate", self.prompt_logprobs_body(token_ids, rid, version), timeout_s)
        with reading(answer):
            return np.array([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]], np.float32)

    def prompt_logprobs_body(self, token_ids: tuple[int, ...], rid: str, version: int) -> dict[str, Any]:
        return {
            "rid": rid,
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": str(version),
        }

    # Weights

    def weight_sender(self) -> WeightSender:
        if self._backend == "ipc":
            return ColocatedWeightSender(self.url, self._layout, ranks=self._ranks, timeout_s=self._sender_timeout_s)
        return SGLangWeightSender(self.url, self._layout, backend=self._backend, timeout_s=self._sender_timeout_s)

    async def begin_update(self, pause: str, timeout_s: float) -> None:
        await self._http.post("/pause_generation", {"mode": "abort" if pause == "drain" else pause}, timeout_s)
        if pause != "in_place":  # there running requests keep what they have, and extra_key keeps others from finding it
            # It waits for requests to end, which those that were retracted don't. Not 200: some are running.
            wait_s = 0 if pause == "retract" else FLUSH_TIMEOUT_S
            await self._http.post(f"/flush_cache?timeout={wait_s}", {}, wait_s + timeout_s)
        try:
            await self._http.post("/begin_weight_update", {}, timeout_s)
        except ValueError as e:
            if "already open" not in str(e):
                raise
            await self._http.post("/end_weight_update", {}, timeout_s)  # left by a publish that failed
            await self._http.post("/begin_weight_update", {}, timeout_s)

    async def end_update(self, version: int, timeout_s: float) -> None:
        await self._http.post("/end_weight_update", {}, timeout_s)
        info = await self._http.get("/model_info", timeout_s)
        with reading(info):
            held = info["weight_version"]
        if str(held) != str(version):
            raise RuntimeError(f"{self.url} holds weights of version {held} after version {version} was published")
        await self._http.post("/continue_generation", {}, timeout_s)

    # Memory, see server_memory.MemoryClient. SGLang's scheduler dies of the first two calls without a GPU.

    async def release_memory(self, tags: Collection[str], timeout_s: float) -> None:
        await self._http.post("/pause_generation", {"mode": "abort"}, timeout_s)
        # The scheduler also dies if something runs, were it a call for a sign of life: an answer other than 200.
        await self._http.post(f"/flush_cache?timeout={FLUSH_TIMEOUT_S}", {}, timeout_s)
        if self._layout.device == "cuda":
            await self._http.post("/release_memory_occupation", {"tags": list(tags)}, timeout_s)

    async def resume_memory(self, tags: Collection[str], timeout_s: float) -> None:
        if self._layout.device == "cuda":
            await self._http.post("/resume_memory_occupation", {"tags": list(tags)}, timeout_s)

    async def go_on(self, timeout_s: float) -> None:
        await self._http.post("/continue_generation", {}, timeout_s)

    async def checksums(self, timeout_s: float) -> dict[str, str]:
        """ "TP rank/SGLang's parameter name" -> checksum."""
        answer = await self._http.post("/weights_checker", {"action": "checksum"}, timeout_s)
        with reading(answer):
            return {
                f"{rank['parallelism_info'][0]['tp_rank']}/{name}": checksum
                for rank in answer["ranks"]
                for name, checksum in rank["checksums"].items()
            }

    async def aclose(self) -> None:
        await self._http.aclose()


def completion(answer: dict[str, Any]) -> Completion:
    """SGLang's answer to one request. A matched EOS is among the ids and has its log-prob. Unanswered if it is none."""
    with reading(answer):
        meta, ids = answer["meta_info"], answer["output_ids"]
        entries = meta.get("output_token_logprobs") or []  # [log-prob, id, text]; absent if aborted before the first token
        if [entry[1] for entry in entries] != ids:
            raise Unanswered(f"SGLang answered {len(ids)} tokens but {len(entries)} log-probs, or of other tokens")
        versions = np.full(len(ids), -1, np.int32)
        for span in meta["weight_versions"]:
            versions[span["start"] : span["end"]] = int(span["version"])
        if (versions < 0).any():
            raise Unanswered(f"SGLang answered tokens without weight version: {meta['weight_versions']}")
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array([entry[0] for entry in entries], np.float32),
            versions=versions,
            finish_reason=meta["finish_reason"]["type"],
        )
