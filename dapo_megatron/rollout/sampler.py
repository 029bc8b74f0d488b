"""Dynamic sampling (arXiv 2503.14476, section 3.2), per group instead of per wave.

Groups are resolved - accepted or filtered - in the order in which they were submitted, never in the order in which
they finish: otherwise short responses would be preferred and no run would repeat. How many groups are wanted
depends on resolved groups alone. So which groups a batch holds and where the prompt stream stands afterwards doesn't
depend on timing; the surplus does where max_inflight_groups holds groups back, or by how far an abort found it.
"""

import asyncio
import contextlib
import hashlib
import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from dapo_megatron.config import SamplingConfig
from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.rollout.engine import GenerateRequest, RolloutEngine, SamplingParams
from dapo_megatron.rollout.sampling_stats import AcceptanceRate, SamplingStats

ABORT_RETRY_S = 1.0  # an abort may overtake its request on the way to the engine, so it is repeated until all have returned
MAX_INTERRUPTIONS = 10  # of one response by publishes, of which a collect sees one, or a few if it fails and starts over

Score = Callable[[Prompt, list[Completion]], Awaitable[Group]]


class PromptStream(Protocol):
    """Endless prompts; `position` is that of the next one and may be set back."""

    position: int

    def next(self) -> Prompt: ...


@dataclass
class SampledBatch:
    groups: list[Group]  # accepted ones, in submission order
    filtered: list[Group]  # judged and not kept
    stats: SamplingStats
    position: int = 0  # the stream's, with this batch done
    seconds: float = 0.0  # from the first request to the full batch


@dataclass
class _Entry:
    """A submitted group. Responses that aren't finished have finish_reason "abort": empty or partial."""

    prompt: Prompt
    position: int  # the stream's, right after this prompt
    completions: list[Completion]  # [G]
    group: Group | None = None  # once scored
    attempt: int = 0

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason != "abort" for completion in self.completions)

    @property
    def num_tokens(self) -> int:
        return sum(len(completion) for completion in self.completions)


def request_seed(run_seed: int, prompt_index: int, sample: int, offset: int = 0, dropped: int = 0) -> int:
    """Seed in [0, 2^63) of a request: the same in every run and process, other for every sample.

    `offset` is the number of tokens sampled before: a continuation must not draw the random numbers of its beginning
    again. Nor must what is sampled anew those of what was dropped: `dropped` is how often that has happened.
    """
    name = f"{run_seed}/{prompt_index}/{sample}/{offset}" + (f"/{dropped}" if dropped else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


def is_informative(group: Group) -> bool:
    """0 < number of correct < G, by the raw verdicts. Never by the shaped reward: a length penalty would make a uniformly
    wrong group look informative."""
    return 0 < int(group.correct.sum()) < len(group.correct)


class DynamicSampler:
    """Fills batches of prompts_per_step informative groups from the prompt stream.

    `score` turns a prompt and its G responses into a Group. `params` are the training's sampling parameters, with the
    response limit as max_new_tokens.
    """

    def __init__(
        self,
        config: SamplingConfig,
        stream: PromptStream,
        engine: RolloutEngine,
        score: Score,
        params: SamplingParams,
        seed: int,
    ):
        for name, choices in (("surplus", ("rewind", "carry")), ("on_budget", ("smaller_batch", "stop"))):
            if getattr(config, name) not in choices:
                raise ValueError(f"sampling.{name}: {getattr(config, name)!r} is unknown; use {' or '.join(choices)}")
        if engine.max_inflight_groups < 1:
            raise ValueError(f"rollout.max_inflight_groups: {engine.max_inflight_groups} is too small; use at least 1")
        self.config, self.stream, self.engine, self.score = config, stream, engine, score
        self.params, self.seed = params, seed
        self.rate = AcceptanceRate()
        self.carried: list[_Entry] = []
        self.num_attempts = 0  # groups ever started: makes request ids unique in the run

    @property
    def max_groups(self) -> int:
        """The budget: groups that one collect may take from the stream."""
        return max(1, math.floor(self.config.max_groups_factor * self.config.prompts_per_step + 1e-9))

    async def collect(self, version: int, newest: int | None = None, resample: bool = False) -> SampledBatch:
        """The next batch, sampled by the engine's weights `version`. Returns with nothing left in flight.

        Weights up to `newest` may be published meanwhile; with `resample` responses that this interrupts are dropped and
        sampled anew.

        Raises RuntimeError if the budget is used up and on_budget is `stop` or no group at all was kept, or if the
        engine samples with other weights than these. Errors of the engine and of `score` surface as they are.
        After an error nothing is in flight and stream and sampler stand where they stood before.
        """
        start, begin = self.stream.position, time.monotonic()
        work = _Collect(self, version, version if newest is None else newest, resample)
        try:
            await work.fill()
            await work.stop()
            return work.finish(begin)
        except BaseException:
            await work.cancel()
            self.stream.position = start
            raise

    def state_dict(self) -> dict[str, Any]:
        """Plain dictionaries, numbers, strings and numpy arrays: the estimate, the attempts, the carried groups."""
        return {
            "num_attempts": self.num_attempts,
            "rate": asdict(self.rate),
            "carried": [asdict(entry) for entry in self.carried],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_attempts = state["num_attempts"]
        self.rate = AcceptanceRate(**state["rate"])
        self.carried = [_load_entry(entry) for entry in state["carried"]]


class _Collect:
    """One collect in progress. The sampler itself changes only in `finish`, when nothing can fail any more."""

    def __init__(self, sampler: DynamicSampler, oldest: int, newest: int, resample: bool):
        self.sampler, self.config, self.engine = sampler, sampler.config, sampler.engine
        self.oldest, self.newest, self.resample = oldest, newest, resample
        self.rate = replace(sampler.rate)
        self.backlog = deque(replace(entry, completions=list(entry.completions)) for entry in sampler.carried)
        self.queue: deque[_Entry] = deque()  # submitted and not resolved, in order
        self.running: dict[asyncio.Task[None], _Entry] = {}
        self.requests: set[str] = set()  # at the engine
        self.stopping = False
        self.position = sampler.stream.position  # after the last resolved prompt
        self.kept: list[Group] = []
        self.filtered: list[Group] = []
        self.lengths: list[int] = []  # of all responses in resolved groups
        self.num_correct = self.num_cut = 0
        self.stats = SamplingStats(
            groups_carried_in=len(self.backlog), tokens_carried_in=sum(entry.num_tokens for entry in self.backlog)
        )

    async def fill(self) -> None:
        """Submit and resolve groups until the batch is full or the budget is used up."""
        while len(self.kept) < self.config.prompts_per_step:
            self._submit()
            if not self.queue:
                self.stats.budget_used_up = True
                return
            if self.queue[0].group is None:
                await self._wait()
            else:
                self._resolve(self.queue.popleft())

    def _submit(self) -> None:
        """Top up to as many unresolved groups as will probably be needed, within what the engine takes at once.

        A group leaves the engine's share when it is scored, but the number needed moves only when groups are resolved.
        """
        missing = self.config.prompts_per_step - len(self.kept)
        wanted = math.ceil(missing / (self.rate.estimate if self.config.dynamic else 1.0))
        while len(self.queue) < wanted and len(self.running) < self.engine.max_inflight_groups:
            entry = self.backlog.popleft() if self.backlog else self._draw()
            if entry is None:
                return
            self.queue.append(entry)
            if entry.group is None:
                entry.attempt = self.sampler.num_attempts
                self.sampler.num_attempts += 1
                self.running[asyncio.create_task(self._run(entry))] = entry

    def _draw(self) -> _Entry | None:
        if self.stats.groups_sampled >= self.sampler.max_groups:
            return None
        self.stats.groups_sampled += 1
        prompt = self.sampler.stream.next()
        nothing = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")
        return _Entry(prompt, self.sampler.stream.position, [nothing] * self.config.samples_per_prompt)

    async def _run(self, entry: _Entry) -> None:
        num_new = sum(completion.finish_reason == "abort" and not len(completion) for completion in entry.completions)
        await _all_or_cancel([self._sample(entry, i, num_new) for i in range(len(entry.completions))])
        if entry.finished and not self.stopping:
            entry.group = await self.sampler.score(entry.prompt, entry.completions)

    async def _sample(self, entry: _Entry, sample: int, num_new: int) -> None:
        """Sample one response, or go on with it where it was interrupted. `num_new`: the group's that begin with nothing."""
        prefix, params = entry.completions[sample], self.sampler.params
        for dropped in itertools.count():
            if prefix.finish_reason != "abort" or self.stopping:
                return
            request = GenerateRequest(
                request_id=f"{entry.prompt.index}.{entry.attempt}/{sample}",
                token_ids=entry.prompt.token_ids + tuple(prefix.token_ids.tolist()),
                params=replace(params, max_new_tokens=params.max_new_tokens - len(prefix)),
                seed=request_seed(self.sampler.seed, entry.prompt.index, sample, len(prefix), dropped),
                group_size=1 if len(prefix) else num_new,
            )
            new = await self._generate(request)
            joined = _join(prefix, new, params)
            if joined.finish_reason != "abort" or self.stopping:
                entry.completions[sample] = joined
                return
            if not self.resample or dropped >= MAX_INTERRUPTIONS:
                raise RuntimeError(
                    f"the engine interrupted request {request.request_id} of its own accord after {len(new)} tokens; look "
                    f"into its log, and let nobody else abort requests there"
                )
            self.stats.tokens_aborted += len(new)

    async def _generate(self, request: GenerateRequest) -> Completion:
        self.requests.add(request.request_id)
        try:
            new = await self.engine.generate(request)
        finally:
            self.requests.discard(request.request_id)
        if ((new.versions < self.oldest) | (new.versions > self.newest)).any():
            wanted = f"{self.oldest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
            raise RuntimeError(
                f"request {request.request_id} was sampled by weight versions {sorted(set(new.versions.tolist()))} "
                f"instead of {wanted}: a publish is missing or failed; publish again before sampling"
            )
        self.stats.tokens_generated += len(new)
        return new

    async def _wait(self) -> None:
        """Until a running group has finished."""
        done, _ = await asyncio.wait(self.running, return_when=asyncio.FIRST_COMPLETED)
        self._reap(done)

    def _reap(self, done: set[asyncio.Task[None]]) -> None:
        for task in done:
            del self.running[task]
            if not task.cancelled():
                task.result()  # raises what the engine or the scorer raised

    def _resolve(self, entry: _Entry) -> None:
        group, stats = entry.group, self.stats
        assert group is not None
        self.position = entry.position
        num_correct = int(group.correct.sum())
        keep = not self.config.dynamic or is_informative(group)
        self.rate.update(keep)
        (self.kept if keep else self.filtered).append(group)
        if keep:
            stats.tokens_kept += entry.num_tokens
        elif num_correct == len(group.correct):
            stats.tokens_filtered_correct += entry.num_tokens
        else:
            stats.tokens_filtered_wrong += entry.num_tokens
        stats.groups_resolved += 1
        stats.groups_kept += keep
        stats.groups_all_correct += num_correct == len(group.correct)
        stats.groups_all_wrong += num_correct == 0
        self.lengths += [len(completion) for completion in entry.completions]
        self.num_correct += num_correct
        self.num_cut += sum(completion.finish_reason == "length" for completion in entry.completions)

    async def stop(self) -> None:
        """Interrupt what is in flight and wait until the engine has handed over the partial responses."""
        self.stopping = True
        for task, entry in self.running.items():
            if entry.finished:
                task.cancel()  # it waits for a verdict that nobody needs now
        while self.running:
            if self.requests:
                await self.engine.abort(sorted(self.requests))
            done, _ = await asyncio.wait(self.running, timeout=ABORT_RETRY_S)
            self._reap(done)

    async def cancel(self) -> None:
        """After an error: leave nothing behind, even if the engine doesn't answer any more."""
        requests = sorted(self.requests)
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        if requests:
            with contextlib.suppress(Exception):  # the first error is the one to report
                await asyncio.wait_for(self.engine.abort(requests), timeout=ABORT_RETRY_S)

    def finish(self, begin: float) -> SampledBatch:
        """Decide about the surplus, complete the statistics, commit to the sampler."""
        stats = self.stats
        if stats.budget_used_up and (self.config.on_budget == "stop" or not self.kept):
            raise RuntimeError(self._budget_message())
        surplus = [*self.queue, *self.backlog]
        num_tokens = sum(entry.num_tokens for entry in surplus)
        if self.config.surplus == "carry":
            stats.groups_carried_out, stats.tokens_carried_out = len(surplus), num_tokens
            self.sampler.carried = surplus
        else:
            stats.groups_cut = len(surplus)
            stats.tokens_aborted += num_tokens
            self.sampler.carried = []
            if surplus:
                self.sampler.stream.position = self.position
        self.sampler.rate = self.rate.fade()
        stats.acceptance_rate = self.sampler.rate.estimate if self.config.dynamic else 1.0
        stats.accuracy = self.num_correct / len(self.lengths)
        stats.response_length_mean = sum(self.lengths) / len(self.lengths)
        stats.response_length_max = max(self.lengths)
        stats.cut_share = self.num_cut / len(self.lengths)
        return SampledBatch(self.kept, self.filtered, stats, self.sampler.stream.position, time.monotonic() - begin)

    def _budget_message(self) -> str:
        stats, config = self.stats, self.config
        return (
            f"dynamic sampling kept {stats.groups_kept} of the {config.prompts_per_step} groups it needs: of "
            f"{stats.groups_resolved} groups {stats.groups_all_correct} were all correct and {stats.groups_all_wrong} "
            f"all wrong, and sampling.max_groups_factor={config.max_groups_factor:g} allows no more. Check the "
            f"verifier, use easier or harder prompts, raise sampling.max_groups_factor or "
            f"sampling.samples_per_prompt, or lower sampling.prompts_per_step"
        )


def _join(prefix: Completion, new: Completion, params: SamplingParams) -> Completion:
    """`prefix` and its continuation. An abort that came after the last token interrupted nothing."""
    token_ids = np.concatenate([prefix.token_ids, new.token_ids]).astype(np.int32)
    finish_reason = new.finish_reason
    if finish_reason == "abort" and len(new) and token_ids[-1] in params.stop_token_ids:
        finish_reason = "stop"
    elif finish_reason == "abort" and len(token_ids) >= params.max_new_tokens:
        finish_reason = "length"
    return Completion(
        token_ids=token_ids,
        logprobs=np.concatenate([prefix.logprobs, new.logprobs]).astype(np.float32),
        versions=np.concatenate([prefix.versions, new.versions]).astype(np.int32),
        finish_reason=finish_reason,
    )


async def _all_or_cancel(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """Run all; if one fails or the caller is cancelled, cancel the others and wait for their end."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _load_entry(state: dict[str, Any]) -> _Entry:
    """An entry from its asdict form."""
    group = state["group"]
    return _Entry(
        **{
            **state,
            "prompt": _load_prompt(state["prompt"]),
            "completions": [Completion(**item) for item in state["completions"]],
            "group": None if group is None else load_group(group),
        }
    )


def load_group(state: dict[str, Any]) -> Group:
    """A group from its asdict form."""
    completions = [Completion(**item) for item in state["completions"]]
    return Group(**{**state, "prompt": _load_prompt(state["prompt"]), "completions": completions})


def _load_prompt(state: dict[str, Any]) -> Prompt:
    return Prompt(**{**state, "token_ids": tuple(state["token_ids"])})
