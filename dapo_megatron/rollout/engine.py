"""What a rollout engine is: token ids in, token ids with log-probs out; weights can be replaced under a version."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dapo_megatron.records import Completion


@dataclass(frozen=True)
class SamplingParams:
    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerateRequest:
    """One sample of one prompt. `seed` is used by engines whose sampling can be repeated."""

    request_id: str  # "group/sample": a group's requests go to one server
    token_ids: tuple[int, ...]  # the prompt, and what an interrupted request had sampled already
    params: SamplingParams
    seed: int = 0


class WeightSender(Protocol):
    """A trainer rank's end of a publish. It is pickled to the rank, then used there: open once, send buckets, close."""

    def open(self, sender: int, num_senders: int) -> None: ...

    def send(self, bucket: list[tuple[str, Any]], version: int) -> None:
        """Hand over named HF tensors (torch, full, unsharded) and return when the engine has taken them."""
        ...

    def checksums(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, str]:
        """What `RolloutEngine.checksums` has to answer for these HF tensors (full, whole layers). Needs no open."""
        ...

    def close(self) -> None: ...


class RolloutEngine(Protocol):
    """The controller's end. `generate` may be called concurrently."""

    max_inflight_groups: int  # the sampler keeps at most this many groups in flight

    async def generate(self, request: GenerateRequest) -> Completion: ...

    async def abort(self, request_ids: list[str]) -> None:
        """Interrupt: the matching `generate` calls return soon, with what they have and finish_reason "abort"."""
        ...

    def weight_senders(self) -> list[WeightSender]:
        """One sender for each engine behind this object."""
        ...

    async def begin_update(self, version: int) -> None:
        """Drained of requests: pause, drop prefix caches, get ready for buckets."""
        ...

    async def end_update(self, version: int) -> None:
        """Commit: from now on completions carry `version`."""
        ...

    async def prompt_logprobs(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """float32 [len - 1]: the log-prob of each token but the first, at temperature 1, by the engine's weights."""
        ...

    async def checksums(self) -> list[dict[str, str]]:
        """For each engine, its own parameter names -> checksum. They equal what `WeightSender.checksums` makes of the
        trainer's tensors (the union over senders) if the engine holds the same values."""
        ...
