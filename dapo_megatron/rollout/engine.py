"""What a rollout engine is: token ids in, token ids with log-probs out; weights can be replaced under a version."""

from collections.abc import Collection, Hashable, Iterable
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
    group_size: int = 1  # requests of this group with the very same token_ids


class WeightSender(Protocol):
    """A trainer rank's end of a publish. It is pickled to the rank, then used there: open once, send buckets, close."""

    device: str  # "cpu" or "cuda": where it wants buckets
    dtype: str  # torch's name of the dtype it wants them in

    @property
    def layout(self) -> Hashable:
        """Senders of equal layouts have equal checksums."""
        ...

    def open(self, sender: int, num_senders: int) -> None: ...

    def send(self, bucket: list[tuple[str, Any]], version: int) -> None:
        """Hand over named HF tensors (torch, full, unsharded; from trainer ranks a weights.buckets.Bucket) and return when the
        engine has taken them: they are overwritten then. Called from a thread of its own."""
        ...

    def checksums(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, str]:
        """What `RolloutEngine.checksums` has to answer for these HF tensors (full, whole layers). Needs no open."""
        ...

    def close(self) -> None: ...


class RolloutEngine(Protocol):
    """The controller's end. `generate` may be called concurrently. Behind it are one or more servers, which go by names: one
    that is lost and started anew comes back under another one."""

    max_inflight_groups: int  # the sampler keeps at most this many groups in flight

    async def open(self) -> None:
        """Before anything else, in the event loop that all else runs in. RuntimeError if the engine can't be used."""
        ...

    async def aclose(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        """`engine/*`."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion: ...

    async def abort(self, request_ids: list[str]) -> None:
        """Interrupt: the matching `generate` calls return soon, with what they have and finish_reason "abort"."""
        ...

    async def weight_senders(self) -> dict[str, WeightSender]:
        """One for each server that can take weights, which is one at least: it waits for it, or raises RuntimeError."""
        ...

    def waiting(self) -> list[str]:
        """Servers that lack weights, such as those that were started anew."""
        ...

    async def joined(self) -> None:
        """Returns when there are servers that lack weights."""
        ...

    async def drop_lost(self, failed: Collection[str] = ()) -> list[str]:
        """Servers that were lost since the last call; those in `failed` are taken as lost. They come back by themselves."""
        ...

    async def begin_update(self, version: int, servers: Collection[str]) -> None:
        """Pause (publish.pause), drop prefix caches, get ready for buckets. RuntimeError if a server can't."""
        ...

    async def end_update(self, version: int, servers: Collection[str]) -> None:
        """Commit: from now on these servers' completions carry `version`."""
        ...

    async def prompt_logprobs(self, token_ids: tuple[int, ...], server: str = "") -> np.ndarray:
        """float32 [len - 1]: the log-prob of each token but the first, at temperature 1, by the server's weights (empty: of
        any server)."""
        ...

    async def checksums(self, servers: Collection[str]) -> dict[str, dict[str, str]]:
        """For each server, its own parameter names -> checksum. They equal what `WeightSender.checksums` makes of the
        trainer's tensors (the union over senders) if it holds the same values. Empty for a server that can't tell."""
        ...
