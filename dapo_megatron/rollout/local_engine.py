"""A small engine for exact repetition and debugging: transformers in one process, without a server.

A response is a function of (weights, prompt, sampling parameters, request.seed) alone: every request is computed in a
batch of its own and has its own random generator, so neither order nor company of requests can change it.
"""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo_megatron.records import Completion
from dapo_megatron.rollout.engine import GenerateRequest, SamplingParams, WeightSender

Bucket = list[tuple[str, Any]]
NAME = "local"


def local_checksums(tensors: Iterable[tuple[str, Any]], dtype: str) -> dict[str, str]:
    """HF name -> first 8 bytes of the SHA-256 of the tensor's bytes in `dtype` (torch's name of it), in hexadecimal."""
    import torch

    return {
        name: hashlib.sha256(
            tensor.detach().to("cpu", getattr(torch, dtype)).contiguous().reshape(-1).view(torch.uint8).numpy()
        ).hexdigest()[:16]
        for name, tensor in tensors
    }


class LocalWeightSender:
    """Implements WeightSender by calling `load(bucket, version)`: LocalEngine.load_bucket, or a remote call of it."""

    def __init__(self, load: Callable[[Bucket, int], None], dtype: str):
        self._load, self.dtype, self.layout, self.device = load, dtype, dtype, "cpu"

    def open(self, sender: int, num_senders: int) -> None:
        pass

    def send(self, bucket: Bucket, version: int) -> None:
        import torch

        dtype = getattr(torch, self.dtype)
        # Copies: a tensor that is part of a bucket would be pickled with all of it.
        self._load([(name, tensor.detach().to("cpu", dtype, copy=True)) for name, tensor in bucket], version)

    def checksums(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, str]:
        return local_checksums(tensors, self.dtype)

    def close(self) -> None:
        pass


class OneServer:
    """The part of RolloutEngine that is about servers, for an engine that is one process and takes the run along if it dies."""

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {"engine/servers": 1.0, "engine/restarts": 0.0, "engine/retries": 0.0}

    def waiting(self) -> list[str]:
        return []

    async def joined(self) -> None:
        await asyncio.Event().wait()

    async def drop_lost(self, failed: Collection[str] = ()) -> list[str]:
        return []


class LocalEngine(OneServer):
    """Implements RolloutEngine. Requests take turns, token by token, on the caller's event loop.

    Args:
        model_dir: folder in Hugging Face's format.
        dtype: "float32" or "bfloat16".
        eos_ids: tokens that end a response, besides a request's stop_token_ids.
        version: of the weights in model_dir.
    """

    max_inflight_groups = 1

    def __init__(self, model_dir: str | Path, *, dtype: str, eos_ids: Sequence[int], version: int = 0):
        import torch
        from transformers import AutoModelForCausalLM

        from dapo_megatron.weights.hub_names import hub_tensors

        self.dtype, self.version = dtype, version
        self._eos_ids = frozenset(eos_ids)
        self._model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=getattr(torch, dtype))
        self._model.requires_grad_(False).eval()
        self._parameters = {  # tied ones once
            name: tensor for held, param in self._model.named_parameters() for name, tensor in hub_tensors(held, param)
        }
        self._aborted: dict[str, bool] = {}  # by id of each request in flight
        self._updating: int | None = None
        self._loaded: set[str] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one response. ValueError if prompt and max_new_tokens exceed the model's context."""
        import torch

        self._check(request)
        params = request.params
        stop_ids = self._eos_ids.union(params.stop_token_ids)
        generator = torch.Generator().manual_seed(request.seed)
        ids: list[int] = []
        logprobs: list[float] = []
        reason = "length"
        self._aborted[request.request_id] = False
        try:
            cache, fresh = None, list(request.token_ids)
            while len(ids) < params.max_new_tokens:
                await asyncio.sleep(0)  # the others' turn
                if self._aborted[request.request_id]:
                    reason = "abort"
                    break
                output = self._model(torch.tensor([fresh]), past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                token, logprob = sample(output.logits[0, -1], params, generator)
                ids.append(token)
                logprobs.append(logprob)
                fresh = [token]
                if token in stop_ids:
                    reason = "stop"
                    break
        finally:
            del self._aborted[request.request_id]
        versions = np.full(len(ids), self.version, np.int32)  # no update begins while a request is in flight
        return Completion(np.array(ids, np.int32), np.array(logprobs, np.float32), versions, reason)

    def _check(self, request: GenerateRequest) -> None:
        if request.request_id in self._aborted:
            raise ValueError(f"request_id: {request.request_id!r} is in flight already; give every request its own")
        if self._updating is not None:
            raise RuntimeError(f"request {request.request_id} came while version {self._updating} is being published")
        limit, vocab = self._model.config.max_position_embeddings, self._model.config.vocab_size
        if not request.token_ids or min(request.token_ids) < 0 or max(request.token_ids) >= vocab:
            raise ValueError(f"request {request.request_id}: token_ids must be one or more ids in 0..{vocab - 1}")
        if len(request.token_ids) + request.params.max_new_tokens > limit:
            raise ValueError(
                f"request {request.request_id}: {len(request.token_ids)} prompt tokens and rollout.max_response_tokens "
                f"{request.params.max_new_tokens} exceed the model's context of {limit}; lower one of them"
            )

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self._aborted:
                self._aborted[request_id] = True

    async def prompt_logprobs(self, token_ids: tuple[int, ...], server: str = "") -> np.ndarray:
        """float32 [len - 1]: log-prob of each token but the first, at temperature 1."""
        import torch

        ids = torch.tensor([token_ids])
        logprobs = self._model(ids).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()

    async def weight_senders(self) -> dict[str, WeightSender]:
        """For a trainer in the same process; elsewhere wrap load_bucket in a remote call."""
        return {NAME: LocalWeightSender(self.load_bucket, self.dtype)}

    async def begin_update(self, version: int, servers: Collection[str] = (NAME,)) -> None:
        """After a failed publish call it again: everything has to be loaded anew."""
        if self._aborted:
            raise RuntimeError(f"version {version} cannot be published while {sorted(self._aborted)[:5]} are in flight")
        self._updating, self._loaded = version, set()

    def load_bucket(self, bucket: Bucket, version: int) -> None:
        """Take over named HF tensors. ValueError: an unknown name, a wrong shape, a repetition, another version."""
        if version != self._updating:
            raise ValueError(f"weights of version {version} came while version {self._updating} is being published")
        for name, tensor in bucket:
            if name not in self._parameters:
                raise ValueError(f"weight {name!r} is unknown to {type(self._model).__name__}")
            if name in self._loaded:
                raise ValueError(f"weight {name!r} was sent twice for version {version}")
            target = self._parameters[name]
            if tensor.shape != target.shape:
                raise ValueError(f"weight {name!r} has shape {list(tensor.shape)}, not {list(target.shape)}")
            target.copy_(tensor)
            self._loaded.add(name)

    async def end_update(self, version: int, servers: Collection[str] = (NAME,)) -> None:
        """Commit. ValueError if a weight was not sent."""
        missing = sorted(self._parameters.keys() - self._loaded)
        if version != self._updating or missing:
            raise ValueError(
                f"version {version} cannot be committed (begun: {self._updating}): {len(missing)} weights were not "
                f"sent, such as {missing[:5]}"
            )
        self.version, self._updating = version, None

    async def checksums(self, servers: Collection[str] = (NAME,)) -> dict[str, dict[str, str]]:
        return {NAME: local_checksums(self._parameters.items(), self.dtype)}


def sample(logits: Any, params: SamplingParams, generator: Any) -> tuple[int, float]:
    """Draw a token from logits [vocab]. Its log-prob is that at the temperature, before top-k and top-p.

    Temperature 0 takes the most likely token, with its log-prob at temperature 1.
    """
    import torch

    logprobs = (logits.float() / (params.temperature or 1.0)).log_softmax(-1)
    if params.temperature == 0:
        token = int(logprobs.argmax())
        return token, float(logprobs[token])
    probs = logprobs.exp()
    if params.top_k > 0 or params.top_p < 1:
        ordered, order = probs.sort(descending=True, stable=True)
        keep = ordered.cumsum(0) - ordered < params.top_p  # the first token is always kept
        if params.top_k > 0:
            keep[params.top_k :] = False
        probs = torch.zeros_like(probs).index_put_((order,), ordered * keep)
    token = int(torch.multinomial(probs, 1, generator=generator))
    return token, float(logprobs[token])
