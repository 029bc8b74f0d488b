"""Real SGLang servers that are killed, stopped, and published to under load. No request may be lost, and all must end up with
the right weights. In every phase one server is killed and another stopped, so that they are started anew together."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo_megatron.records import Completion
from dapo_megatron.rollout.engine import GenerateRequest, SamplingParams
from dapo_megatron.rollout.http_engine import HttpEngine
from dapo_megatron.rollout.sglang_server import SGLangServer
from dapo_megatron.weights.publish import Publisher
from tests.sglang_engines import make_engine

pytestmark = pytest.mark.slow
PROMPT = tuple(range(7, 40))


class Process:
    """Implements ServerSource with a server of this process."""

    def __init__(self, model_dir: Path, log_dir: Path, name: str) -> None:
        self._make = lambda: SGLangServer(model_dir, dtype="float32", log_path=log_dir / f"{name}.log", startup_timeout_s=300)
        self.server = self._make()

    async def alive(self) -> bool:
        return self.server.alive

    async def end(self) -> None:
        await asyncio.to_thread(self.server.stop)

    async def restart(self) -> str:
        def anew() -> str:
            self.server.stop()
            self.server = self._make()
            self.server.start()
            return self.server.url

        return await asyncio.to_thread(anew)

    def signal(self, number: int) -> None:
        """To all of the server's processes."""
        assert self.server.pid is not None
        os.killpg(self.server.pid, number)


class Trainer:
    """The trainer's end of a publish in this process: real senders, `models` by version. `before_bucket` is called first."""

    def __init__(self, models: dict[int, Any]) -> None:
        self.models = models
        self.senders: dict[str, Any] = {}
        self.before_bucket: Callable[[], None] = lambda: None

    async def open_senders(self, senders: dict[str, Any]) -> None:
        for name in self.senders.keys() - senders.keys():
            await asyncio.to_thread(self.senders.pop(name).close)
        for name in senders.keys() - self.senders.keys():
            await asyncio.to_thread(senders[name].open, 0, 1)
            self.senders[name] = senders[name]

    async def send_weights(self, version: int, servers: list[str]) -> dict[str, float]:
        tensors = [(name, tensor.detach()) for name, tensor in self.models[version].named_parameters()]
        for start in range(0, len(tensors), 10):
            self.before_bucket()
            for name in servers:
                await asyncio.to_thread(self.senders[name].send, tensors[start : start + 10], version)
        return {"bytes": 1.0, "buckets": 1.0}

    async def close_senders(self) -> None:
        await self.open_senders({})

    async def checksums(self, servers: list[str]) -> dict[str, dict[str, str]]:
        raise NotImplementedError

    async def score(self, sequences: list[tuple[int, ...]]) -> list[np.ndarray]:
        raise NotImplementedError


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path) -> dict[int, Any]:
    """Of each version, none alike. Responses go on to their limit: EOS has logit 0, where others are far above."""
    first = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    models = {}
    for version in range(1, 6):
        torch.manual_seed(version)
        models[version] = AutoModelForCausalLM.from_config(first.config, dtype=torch.float32).requires_grad_(False).eval()
        models[version].model.embed_tokens.weight[first.config.eos_token_id] = 0
    return models


@pytest.fixture(scope="module")
def processes(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    logs = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        processes = [Process(tiny_model_dir, logs, f"server_{i}") for i in range(3)]
        for process in processes:
            stack.callback(lambda process=process: process.server.stop())
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda process: process.server.start(), processes))
        yield processes


class World:
    def __init__(self, processes: list[Process], models: dict[int, Any], model_dir: Path, pause: str) -> None:
        self.notes: list[str] = []
        self.processes, self.models = processes, models
        self.engine: HttpEngine = make_engine(
            [process.server.url for process in processes],
            model_dir,
            sources=processes,
            pause=pause,
            version=None,
            request_timeout_s=60.0,
            update_timeout_s=8.0,
            health_interval_s=0.5,
            health_timeout_s=5.0,
            note=self.notes.append,
        )
        self.trainer = Trainer(models)
        self.publisher = Publisher(self.trainer, self.engine, 0)

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def inside() -> Any:
            async with self.publisher:
                await self.publisher.publish(1)
                return await asyncio.wait_for(work(), 300)

        return asyncio.run(inside())

    async def samples(self, name: str, groups: int, length: int = 24) -> list[Completion]:
        params = SamplingParams(length)
        calls = [GenerateRequest(f"{name}.{g}/{i}", PROMPT, params, group_size=4) for g in range(groups) for i in range(4)]
        return await asyncio.gather(*(self.engine.generate(call) for call in calls))

    async def all_serve(self, version: int) -> None:
        """And with these weights."""
        while len([server for server in self.engine.fleet.up if server.version == version]) < len(self.processes):
            await asyncio.sleep(0.1)
        reference = self.logprobs(PROMPT, version)
        for server in self.engine.fleet.up:
            np.testing.assert_allclose(await self.engine.prompt_logprobs(PROMPT, server.name), reference, atol=1e-4)

    def logprobs(self, token_ids: tuple[int, ...], version: int) -> np.ndarray:
        """[len - 1], by transformers."""
        ids = torch.tensor([token_ids])
        return self.models[version](ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()

    def names_of_lost(self) -> list[str]:
        return [note.split(" is lost")[0] for note in self.notes if " is lost" in note]

    def check(self, completions: list[Completion]) -> None:
        """Every log-prob is that of transformers with the weights that the token claims."""
        for completion in completions:
            tokens = (*PROMPT, *completion.token_ids.tolist())
            for version in set(completion.versions.tolist()):
                at = completion.versions == version
                np.testing.assert_allclose(
                    completion.logprobs[at], self.logprobs(tokens, version)[len(PROMPT) - 1 :][at], atol=1e-4
                )


def test_servers_are_lost_while_they_generate(processes: list[Process], models: dict[int, Any], tiny_model_dir: Path) -> None:
    world = World(processes, models, tiny_model_dir, "drain")

    async def work() -> None:
        before = await world.samples("a", 3)
        calls = asyncio.create_task(world.samples("b", 9, length=600))
        await asyncio.sleep(0.5)
        assert min(server.num_inflight for server in world.engine.fleet.up) > 0
        processes[0].signal(signal.SIGKILL)
        processes[1].signal(signal.SIGSTOP)
        completions = await calls
        assert len(completions) == 36 and all(c.finish_reason in ("stop", "length") for c in completions)
        world.check(before + completions)
        await world.all_serve(1)

    world.run(work)
    assert sorted(world.names_of_lost()) == ["server 0", "server 1"]


def test_servers_are_lost_in_the_middle_of_a_publish(
    processes: list[Process], models: dict[int, Any], tiny_model_dir: Path
) -> None:
    world = World(processes, models, tiny_model_dir, "drain")

    def once() -> None:
        world.trainer.before_bucket = lambda: None
        processes[1].signal(signal.SIGKILL)
        processes[2].signal(signal.SIGSTOP)

    async def work() -> None:
        await world.samples("a", 3)
        world.trainer.before_bucket = once
        async with world.publisher.lock:
            await world.publisher.publish(2)
        completions = await world.samples("b", 6)
        assert all((c.versions == 2).all() for c in completions)
        world.check(completions)
        await world.all_serve(2)

    world.run(work)
    assert sorted(world.names_of_lost()) == ["server 1", "server 2"]


def test_servers_are_lost_while_nobody_asks(processes: list[Process], models: dict[int, Any], tiny_model_dir: Path) -> None:
    world = World(processes, models, tiny_model_dir, "drain")

    async def work() -> None:
        assert processes[0].server.pid is not None
        # Its scheduler alone: the part that answers HTTP lives.
        children = psutil.Process(processes[0].server.pid).children(recursive=True)
        next(p for p in children if "sched" in p.name() or "sched" in " ".join(p.cmdline())).send_signal(signal.SIGSTOP)
        processes[2].signal(signal.SIGKILL)
        while len(world.names_of_lost()) < 2:
            await asyncio.sleep(0.1)
        world.check(await world.samples("a", 6))
        await world.all_serve(1)

    world.run(work)
    assert any("server 0 is lost (no sign of life" in note for note in world.notes)


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_published_to_under_load(processes: list[Process], models: dict[int, Any], tiny_model_dir: Path, pause: str) -> None:
    world = World(processes, models, tiny_model_dir, pause)

    async def work() -> None:
        running = asyncio.create_task(world.samples("a", 6, length=1200))
        await asyncio.sleep(0.7)
        async with world.publisher.lock:
            await world.publisher.publish(2)
        new = await world.samples("b", 4)
        assert all((c.versions == 2).all() for c in new)
        world.check(new)
        await world.all_serve(2)
        old = await running
        both = [c for c in old if set(c.versions.tolist()) == {1, 2}]
        if pause == "abort":
            cut = [c for c in old if c.finish_reason == "abort"]
            assert cut and all((c.versions == 1).all() for c in cut)
        else:
            assert both, [(len(c), c.finish_reason, sorted(set(c.versions.tolist()))) for c in old]
            assert all(c.finish_reason in ("stop", "length") and (np.diff(c.versions) >= 0).all() for c in old)
        if pause != "in_place":  # there keys and values of the old weights stay in use
            world.check(old)

    world.run(work)


def test_a_thousand_short_requests(processes: list[Process], models: dict[int, Any], tiny_model_dir: Path) -> None:
    world = World(processes, models, tiny_model_dir, "drain")

    async def work() -> list[Completion]:
        requests = [GenerateRequest(f"{i // 4}/{i % 4}", (7 + i % 60,), SamplingParams(1 + i % 5)) for i in range(1000)]
        return await asyncio.gather(*(world.engine.generate(request) for request in requests))

    completions = world.run(work)
    for i, completion in enumerate(completions):
        assert 1 <= len(completion) <= 1 + i % 5 and len(completion.logprobs) == len(completion.versions) == len(completion)
        if i % 50 == 0:  # whose answer it is
            expected = world.logprobs((7 + i % 60, *completion.token_ids.tolist()), 1)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
