"""One batch a step, each of which may be collected while the one before is trained on."""

import asyncio
from dataclasses import asdict
from typing import Any

from dapo_megatron.config import Config
from dapo_megatron.rollout.sampler import DynamicSampler, SampledBatch, load_group
from dapo_megatron.rollout.sampling_stats import SamplingStats
from dapo_megatron.stopping import StopAsked, StopSignal


class Batches:
    """The sampler's batches in the order of the steps.

    Step s makes weights s of weights s - 1. With rollout.max_staleness 0 its batch is collected when it is asked for. With 1 it
    was begun when step s - 1 had got its own, by weights s - 2. What becomes of it when weights s - 1 are published is
    publish.pause's matter: it is complete by then, or goes on and ends under the new ones. Either way no token is older than
    s - 2, but for what the sampler itself carries over. Nothing is collected past the last step.

    As a context it ends what is in flight. The sampler's state is part of its own.
    """

    def __init__(self, sampler: DynamicSampler, cfg: Config, stop: StopSignal) -> None:
        self._stop = stop
        self._sampler, self._max_staleness, self._pause = sampler, cfg.rollout.max_staleness, cfg.publish.pause
        self._last_version = cfg.run.steps - 1  # that a batch is wanted for
        self._collecting: asyncio.Task[SampledBatch] | None = None
        self._next: SampledBatch | None = None

    async def __aenter__(self) -> "Batches":
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Whatever ended the run, nothing is left in flight."""
        if self._collecting is not None:
            self._collecting.cancel()
            await asyncio.wait({self._collecting})
            self._collecting = None

    async def take(self, version: int) -> SampledBatch:
        """The batch to train weights `version` with, which the engine holds. Raises what DynamicSampler.collect does, also of a
        collect in the background; nothing is in flight then. StopAsked if the run shall stop: a batch that is collected ahead
        is waited for and kept, any other is given up."""
        await self.finish()
        if self._stop.asked:
            raise StopAsked
        batch, self._next = self._next, None
        if batch is None:
            batch = await self._stop.cut(self._sampler.collect(version))
        if self._max_staleness and version < self._last_version:
            work = self._sampler.collect(version, version + self._max_staleness, resample=self._pause == "abort")
            self._collecting = asyncio.create_task(work)
            # An error that nobody comes for, since another one ended the run: asyncio shall not print it.
            self._collecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return batch

    async def before_publish(self) -> None:
        """Return when the engine may be given new weights."""
        if self._pause == "drain":
            await self.finish()

    async def finish(self) -> None:
        """Wait until the next batch, if it was begun, is complete."""
        if self._collecting is not None:
            task, self._collecting = self._collecting, None
            self._next = await task

    def state_dict(self) -> dict[str, Any]:
        """The sampler's, and the batch that is collected ahead. Only after `finish`."""
        assert self._collecting is None, "a collect is going on: finish it first"
        return {**self._sampler.state_dict(), "next": self._next and asdict(self._next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError if there is a batch collected ahead and rollout.max_staleness doesn't allow to train on it."""
        self._sampler.load_state_dict(state)
        self._next = _load_batch(state["next"]) if state.get("next") else None
        if self._next and not self._max_staleness:
            raise ValueError(
                "rollout.max_staleness: 0 came after 1, but the checkpoint holds a batch that was collected ahead, by weights "
                "too old for that. Resume with 1 and run.steps at the next step, after which nothing is ahead, and then with 0"
            )


def _load_batch(state: dict[str, Any]) -> SampledBatch:
    """A batch from its asdict form."""
    groups = {name: [load_group(group) for group in state[name]] for name in ("groups", "filtered")}
    return SampledBatch(**{**state, **groups, "stats": SamplingStats(**state["stats"])})
