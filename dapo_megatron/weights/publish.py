"""Publishing: the controller's part of one transfer of new weights from trainer ranks to engines."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from dapo_megatron.config import Config
from dapo_megatron.weights.turns import Turns

TokenIds = tuple[int, ...]
# Mean difference between the log-probs of trainer and server, by the coarser of their dtypes. Rounding alone is 1e-7 in fp32
# and 0.01 to 0.03 in bf16.
LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def logprob_tolerance(cfg: Config) -> float:
    return max(LOGPROB_TOLERANCE[dtype] for dtype in (cfg.model.dtype, cfg.rollout.dtype) if dtype != "auto")


class Sending(Protocol):
    """The trainer ranks, as seen from here. Servers go by name."""

    async def open_senders(self, senders: dict[str, Any]) -> None: ...
    async def send_weights(self, version: int, servers: list[str]) -> dict[str, float]: ...
    async def close_senders(self) -> None: ...
    async def checksums(self, servers: list[str]) -> dict[str, dict[str, str]]: ...
    async def score(self, sequences: list[TokenIds]) -> list[np.ndarray]: ...


class Receiving(Protocol):
    """The engines (rollout.engine.RolloutEngine)."""

    async def open(self) -> None: ...
    async def aclose(self) -> None: ...
    async def weight_senders(self) -> dict[str, Any]: ...
    def waiting(self) -> list[str]: ...
    async def joined(self) -> None: ...
    async def drop_lost(self, failed: Collection[str] = ()) -> list[str]: ...
    async def begin_update(self, version: int, servers: Collection[str]) -> None: ...
    async def end_update(self, version: int, servers: Collection[str]) -> None: ...
    async def checksums(self, servers: Collection[str]) -> dict[str, dict[str, str]]: ...
    async def prompt_logprobs(self, token_ids: TokenIds, server: str = "") -> np.ndarray: ...


class Publisher:
    """idle -> paused (begin_update) -> updating (send_weights) -> committed (end_update), and so on for the next version.

    Whatever fails in between, there is one recovery: the same version from the beginning, over new connections, to the servers
    that are left. If none was lost meanwhile it is tried once; then the error is raised.

    As a context it opens and closes the engine, and in the background gives the weights to servers that were started anew.
    `lock` is held by whoever changes the trainer's weights, until they are published: they belong to no version meanwhile.

    Args:
        check_every: so many publishes are checked once (publish.check); 0: none.
        turns: with servers on the trainer's devices, who has the memory.
        tolerance: of the mean difference between trainer's and server's log-probs, in nats, see LOGPROB_TOLERANCE.
    """

    def __init__(
        self,
        trainer: Sending,
        engine: Receiving,
        check_every: int,
        tolerance: float = math.inf,
        turns: Turns | None = None,
    ) -> None:
        self._trainer, self._engine, self._check_every, self._tolerance = trainer, engine, check_every, tolerance
        self._turns = turns or Turns()
        self.lock = asyncio.Lock()
        self.version = -1
        self._num_published = 0
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Publisher":
        await self._engine.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._engine.aclose()

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Around everything that computes with or changes the trainer's weights; afterwards publish them."""
        async with self.lock, self._turns.training():
            yield

    @contextlib.asynccontextmanager
    async def checkpoint(self) -> AsyncIterator[None]:
        """Around what reads the trainer's whole state, with nothing in flight."""
        async with self.lock, self._turns.checkpoint():
            yield

    async def publish(self, version: int, texts: Sequence[Sequence[int] | np.ndarray] = ()) -> dict[str, float]:
        """All servers hold the trainer's weights as `version` when this returns; the caller holds the lock. Where it is
        checked, so are the log-probs of `texts`. Returns the `sync/*` metrics of the transfer."""
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()  # it only ends by an error
        begin, num_failures = time.monotonic(), 0
        while True:
            try:
                moved = await self._transfer(version)
                break
            except RuntimeError:
                num_failures += not await self._engine.drop_lost()
                if num_failures > 1:
                    raise
                await self._trainer.close_senders()
        self.version = version
        self._num_published += 1
        seconds = time.monotonic() - begin
        if self._check_every and self._num_published % self._check_every == 0:
            await self.compare(texts)
        if self._keeping is None:
            self._keeping = asyncio.ensure_future(self._keep_up())
        return {"sync/publish_gb_per_s": moved["bytes"] / 1e9 / seconds, "sync/publish_buckets": moved["buckets"]}

    async def _transfer(self, version: int, servers: list[str] | None = None) -> dict[str, float]:
        """To these servers; None: to all that are up."""
        await self._turns.before_update()
        senders = await self._engine.weight_senders()
        servers = list(senders) if servers is None else servers
        # First of all: a server that hangs is found out here, where it is known which one it is.
        await self._engine.begin_update(version, servers)
        await self._trainer.open_senders(senders)
        moved = await self._trainer.send_weights(version, servers)
        await self._turns.after_update()
        await self._engine.end_update(version, servers)
        return moved

    async def _keep_up(self) -> None:
        """Servers that were started anew get the present weights before they serve."""
        while True:
            await self._engine.joined()
            async with self.lock:
                if waiting := self._engine.waiting():  # else a publish has come first
                    try:
                        await self._transfer(self.version, waiting)
                    except RuntimeError:
                        await self._engine.drop_lost(waiting)  # they will be back, or are given up
                        await self._trainer.close_senders()

    async def compare(self, texts: Sequence[Sequence[int] | np.ndarray] = ()) -> None:
        """Raise RuntimeError unless every server holds, bit for bit in its dtype, what the trainer has (if it can tell), and
        gives `texts` the trainer's log-probs: a server may hold the right weights and compute with something else."""
        servers = list(senders := await self._engine.weight_senders())
        await self._trainer.open_senders(senders)
        expected = await self._trainer.checksums(servers)
        for name, held in (await self._engine.checksums(servers)).items():
            want = expected[name] if held else {}
            missing = sorted(want.keys() ^ held.keys())
            different = sorted(key for key in want.keys() & held.keys() if want[key] != held[key])
            if missing or different:
                raise RuntimeError(
                    f"publish.check: {name} does not hold version {self.version}: {len(different)} tensors differ "
                    f"{different[:4]}, {len(missing)} are on one side only {missing[:4]}"
                )
        token_ids = [tuple(int(token) for token in text) for text in texts if len(text) > 1]
        ours = np.concatenate([np.zeros(0, np.float32), *(await self._trainer.score(token_ids) if token_ids else [])])
        for name in servers if token_ids else ():
            theirs = np.concatenate([await self._engine.prompt_logprobs(ids, name) for ids in token_ids])
            difference = float(np.abs(ours - theirs).mean())
            if not difference <= self._tolerance:
                raise RuntimeError(
                    f"publish.check: {name} computes with other weights than version {self.version}, though it took them: "
                    f"its log-probs of {ours.size} tokens are {difference:.2g} from the trainer's on average, "
                    f"{self._tolerance:g} is allowed"
                )
