"""A scripted engine for tests of the dynamic sampler: each test decides which group finishes when."""

import asyncio
from dataclasses import asdict

import numpy as np

from dapo_megatron.config import SamplingConfig
from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.rollout.engine import SamplingParams
from dapo_megatron.rollout.sampler import DynamicSampler

PROMPT_LEN = 3
MAX_NEW_TOKENS = 40
EOS = 2


class Stream:
    """Prompt i has index i; its tokens name it."""

    def __init__(self):
        self.position = 0

    def next(self):
        index = self.position
        self.position += 1
        return Prompt(index, f"p{index}", (index,) * PROMPT_LEN, "gold")


def response(index, sample):
    """All tokens of a prompt's sample: between 1 and 17, EOS last, a pure function of both numbers."""
    length = int(np.random.default_rng([index, sample]).integers(1, 18))
    return [100 * index + 20 * sample + k + 3 for k in range(length - 1)] + [EOS]


class Engine:
    """Requests wait until `release` or `abort`. An aborted one hands over `partial(missing tokens)` of them."""

    def __init__(self, max_inflight_groups=1000, partial=lambda missing: missing // 2):
        self.max_inflight_groups, self.partial = max_inflight_groups, partial
        self.version = 0
        self.requests = []  # all ever seen
        self.waiting = {}  # request id -> future that becomes the finish reason
        self.most_groups = 0
        self.generated = 0
        self.ignored_aborts = 0

    async def generate(self, request):
        self.requests.append(request)
        future = self.waiting[request.request_id] = asyncio.get_running_loop().create_future()
        self.most_groups = max(self.most_groups, len(self.groups()))
        try:
            reason = await future
        finally:
            del self.waiting[request.request_id]
        group, sample = request.request_id.split("/")
        tokens = response(int(group.split(".")[0]), int(sample))[len(request.token_ids) - PROMPT_LEN :]
        if reason == "abort":
            tokens = tokens[: self.partial(len(tokens))]
        elif len(tokens) > request.params.max_new_tokens:
            tokens, reason = tokens[: request.params.max_new_tokens], "length"
        self.generated += len(tokens)
        return Completion(
            np.array(tokens, np.int32),
            np.array(tokens, np.float32) / -1000,
            np.full(len(tokens), self.version, np.int32),
            reason,
        )

    async def abort(self, request_ids):
        if self.ignored_aborts:
            self.ignored_aborts -= 1
            return
        for request_id in request_ids:
            self._end(request_id, "abort")

    def _end(self, request_id, reason):
        future = self.waiting.get(request_id)
        if future is not None and not future.done():
            future.set_result(reason)

    def groups(self):
        """Numbers of the prompts in flight."""
        return {int(request_id.split(".")[0]) for request_id, f in self.waiting.items() if not f.done()}

    def release(self, index):
        for request_id in list(self.waiting):
            if request_id.startswith(f"{index}."):
                self._end(request_id, "stop")


async def settle():
    for _ in range(30):
        await asyncio.sleep(0)


def make_sampler(engine, verdicts, stream=None, seed=7, params=None, score=None, **config):
    """`verdicts(index)` is the correctness of a prompt's responses."""

    async def score_now(prompt, completions):
        correct = np.array(verdicts(prompt.index), bool)
        return Group(prompt, completions, [""] * len(completions), correct, correct.astype(np.float32), np.zeros(len(correct)))

    return DynamicSampler(
        SamplingConfig(**{"prompts_per_step": 4, "samples_per_prompt": 2, **config}),
        stream or Stream(),
        engine,
        score or score_now,
        params or SamplingParams(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(EOS,)),
        seed,
    )


def mixed(index):
    return (1, 0)


def varied(index):
    """About half of the groups are mixed."""
    return np.random.default_rng(index + 1000).permutation([(1, 0), (0, 1), (1, 1), (0, 0)])[0]


async def drive(sampler, engine, rank, version=0, served=None):
    """Collect while always releasing the group in flight with the smallest rank(prompt index). `served`: the version of the
    engine's weights, if it isn't the one that is collected for."""
    engine.version = version if served is None else served
    result = await released(sampler.collect(version), engine, rank)
    assert not engine.waiting
    return result


async def released(coroutine, engine, rank=lambda index: index):
    """Its result, while always releasing the group in flight with the smallest rank(prompt index)."""
    task = asyncio.create_task(coroutine)
    while True:
        await settle()
        if task.done():
            return task.result()
        if engine.groups():
            engine.release(min(engine.groups(), key=rank))
        else:
            await asyncio.sleep(0.001)


def collect(sampler, engine, rank=lambda index: index, version=0):
    return asyncio.run(drive(sampler, engine, rank, version))


def content(batch):
    return [(g.prompt.index, [(c.token_ids.tolist(), c.logprobs.tolist()) for c in g.completions]) for g in batch.groups]


def check_accounts(stats):
    s = stats
    assert s.groups_sampled + s.groups_carried_in == s.groups_resolved + s.groups_cut + s.groups_carried_out
    fates = s.tokens_kept + s.tokens_filtered_correct + s.tokens_filtered_wrong + s.tokens_aborted
    assert s.tokens_generated + s.tokens_carried_in == fates + s.tokens_carried_out


def run_three_steps(verdicts, surplus, rank):
    # An abort that finds every token sampled: how far a group had got is then no question of timing.
    engine = Engine(partial=lambda missing: missing)
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    sampler = make_sampler(engine, verdicts, surplus=surplus, params=params, max_groups_factor=20)
    results = []
    for version in range(3):
        batch = collect(sampler, engine, rank, version)
        check_accounts(batch.stats)
        results.append((content(batch), asdict(batch.stats), sampler.stream.position))
    return results
