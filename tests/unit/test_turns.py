"""Whose turn it is on shared devices: the order of calls, and that whatever fails leaves servers which can be published to."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import httpx
import pytest

from dapo_megatron.records import Completion
from dapo_megatron.rollout.engine import GenerateRequest, SamplingParams
from dapo_megatron.rollout.http_engine import HttpEngine
from dapo_megatron.rollout.server_client import ServerHttp
from dapo_megatron.rollout.sglang_client import SGLangClient
from dapo_megatron.rollout.sglang_weights import ServerLayout
from dapo_megatron.weights.publish import Publisher
from dapo_megatron.weights.turns import Turns
from tests.sglang_engines import Source
from tests.unit import test_publish

ALL = "cuda_graph kv_cache weights"
CACHES = "cuda_graph kv_cache"


class Calls(list[str]):
    """Trainer and servers in one; `fails` is the call that does."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails = fails

    async def note(self, call: str) -> None:
        self.append(call)
        await asyncio.sleep(0)
        if call == self.fails:
            raise RuntimeError(f"{call} failed")

    async def offload(self) -> None:
        await self.note("offload")

    async def onload(self) -> None:
        await self.note("onload")

    async def release(self, tags: Collection[str]) -> None:
        await self.note("release " + " ".join(sorted(tags)))

    async def resume(self, tags: Collection[str]) -> None:
        await self.note("resume " + " ".join(sorted(tags)))


async def publish(turns: Turns, calls: list[str]) -> None:
    await turns.before_update()
    calls.append("buckets")
    await turns.after_update()


STEP = [f"release {ALL}", "onload", "train", "offload", "resume weights", "buckets", f"resume {CACHES}"]


async def step(turns: Turns, calls: Calls) -> None:
    async with turns.training():
        await calls.note("train")
    await publish(turns, calls)


def test_a_run() -> None:
    calls = Calls()
    turns = Turns(calls, calls)

    async def work() -> None:
        await publish(turns, calls)
        await step(turns, calls)
        async with turns.checkpoint():
            calls.append("save")
        await step(turns, calls)

    asyncio.run(work())
    first = ["offload", "resume weights", "buckets", f"resume {CACHES}"]  # the trainer starts with everything on the device
    checkpoint = [f"release {CACHES}", "onload", "save", "offload", f"resume {CACHES}"]
    assert calls == [*first, *STEP, *checkpoint, *STEP]


def test_nothing_is_done_where_no_device_is_shared() -> None:
    calls = Calls()
    turns = Turns()

    async def work() -> None:
        await step(turns, calls)
        async with turns.checkpoint():
            calls.append("save")

    asyncio.run(work())
    assert calls == ["train", "buckets", "save"]


@pytest.mark.parametrize("fails", ["train", "onload"])
def test_after_a_failure_the_trainer_is_offloaded_and_a_publish_goes_as_ever(fails: str) -> None:
    calls = Calls(fails)
    turns = Turns(calls, calls)

    async def work() -> None:
        with pytest.raises(RuntimeError, match=f"{fails} failed"):
            await step(turns, calls)
        await publish(turns, calls)

    asyncio.run(work())
    before = STEP[: STEP.index(fails) + 1]
    assert calls == [*before, "offload", "resume weights", "buckets", f"resume {CACHES}"]


def test_a_cancelled_step_offloads_the_trainer() -> None:
    calls = Calls()
    turns = Turns(calls, calls)

    async def for_ever() -> None:
        async with turns.training():
            await asyncio.Event().wait()

    async def work() -> None:
        task = asyncio.ensure_future(for_ever())
        while "onload" not in calls:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(work())
    assert calls == [f"release {ALL}", "onload", "offload"]


def test_a_failed_checkpoint_gives_the_servers_their_caches_back() -> None:
    calls = Calls()
    turns = Turns(calls, calls)

    async def work() -> None:
        with pytest.raises(OSError, match="disk full"):
            async with turns.checkpoint():
                raise OSError("disk full")

    asyncio.run(work())
    assert calls == [f"release {CACHES}", "onload", "offload", f"resume {CACHES}"]


@pytest.mark.parametrize("fails_first", ["", "send", "open"])
def test_a_publisher_keeps_to_the_turns(fails_first: str) -> None:
    """Also when it starts over."""
    calls = Calls()
    noted = test_publish.Calls(**{fails_first: 1})
    noted.names = calls
    engine = test_publish.Engine(noted, {"x": "1"}, [])
    publisher = Publisher(test_publish.Trainer(noted), engine, 0, turns=Turns(calls, calls))

    async def work() -> None:
        async with publisher.training():
            await calls.note("train")
        await publisher.publish(3)
        async with publisher.checkpoint():
            await calls.note("save")

    test_publish.run(publisher, work)
    once = ["resume weights", "begin a,b", "open a,b", "send 3 a,b", f"resume {CACHES}", "end"]
    first_failure = [call.split()[0] for call in once].index(fails_first) if fails_first else -1
    failed = [*once[: first_failure + 1], "close"] if fails_first else []
    checkpoint = [f"release {CACHES}", "onload", "save", "offload", f"resume {CACHES}"]
    before = [f"release {ALL}", "onload", "train", "offload"]
    assert calls == ["engine opened", *before, *failed, *once, *checkpoint, "engine closed"]


class Scripted:
    """SGLang servers on GPUs, which know what they have given up, and answer 500 to a call named in `broken` (host, path)."""

    def __init__(self, model_dir: Path, num_servers: int = 2, device: str = "cuda", source: Any = Source) -> None:
        config = {"vocab_size": 100, "num_attention_heads": 4, "architectures": ["Tiny"]}
        (model_dir / "config.json").write_text(json.dumps(config))
        self.model_path = str(model_dir)
        self.calls: list[str] = []
        self.away: dict[str, set[str]] = {}
        self.version = "0"
        self.broken: set[tuple[str, str]] = set()
        self.faults: list[str] = []
        self.generating = asyncio.Event()
        layout = ServerLayout(tp=1, dtype="bfloat16", device=device, num_kv_heads=4)
        transport = httpx.MockTransport(self.handle)

        def client(url: str, slot: int) -> SGLangClient:
            return SGLangClient(ServerHttp(url, transport), model_dir, layout, backend="gloo", sender_timeout_s=5)

        urls = [f"http://s{i}" for i in range(num_servers)]
        settings = {"health_interval_s": 0.001, "update_timeout_s": 5.0}
        self.engine = HttpEngine([source() for _ in urls], urls, client, model_dir, **settings)
        self.memory = self.engine.memory

    async def handle(self, request: httpx.Request) -> httpx.Response:
        host, path, body = request.url.host, request.url.path, json.loads(request.content or b"{}")
        away = self.away.setdefault(host, set())
        if path in ("/generate", "/health_generate"):
            self.generating.set()
            if away:
                self.faults.append(f"{host} computes without {away}")
        if path == "/model_info":
            return httpx.Response(
                200, json={"weight_version": self.version, "model_path": self.model_path, "architectures": ["Tiny"]}
            )
        if path in ("/generate", "/server_info", "/health_generate"):
            await asyncio.sleep(0.001)
            return httpx.Response(200, json=tokens() if path == "/generate" else {})
        tags = set(body.get("tags", ()))
        self.calls.append(" ".join([f"{host}{path}", *sorted(tags)]))
        if (host, path) in self.broken:
            return httpx.Response(500, text="CUDA error")
        if path == "/release_memory_occupation":
            assert not tags & away
            away |= tags
        if path == "/resume_memory_occupation":
            assert tags <= away, "SGLang's scheduler dies of this"
            away -= tags
        if path == "/begin_weight_update":
            assert "weights" not in away
        if path == "/continue_generation":
            assert not away
        return httpx.Response(200, json={})

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def opened() -> None:
            await self.engine.open()
            try:
                await asyncio.wait_for(work(), 20)
            finally:
                await self.engine.aclose()

        asyncio.run(opened())
        assert self.faults == []

    async def publish(self, turns: Turns, version: int) -> list[str]:
        await turns.before_update()
        servers = list(await self.engine.weight_senders())
        await self.engine.begin_update(version, servers)
        self.version = str(version)
        await turns.after_update()
        await self.engine.end_update(version, servers)
        return servers

    async def generate(self, name: str = "0/0") -> Completion:
        return await self.engine.generate(GenerateRequest(name, (1,), SamplingParams(5)))


def tokens() -> dict[str, Any]:
    meta = {"output_token_logprobs": [[-0.5, 5, None]], "finish_reason": {"type": "stop"}}
    return {"output_ids": [5], "meta_info": {**meta, "weight_versions": [{"version": "0", "start": 0, "end": 1}]}}


def of(calls: list[str], host: str) -> list[str]:
    return [call.removeprefix(host) for call in calls if call.startswith(f"{host}/")]


RELEASE = ["/pause_generation", "/flush_cache"]
UPDATE = ["/pause_generation", "/flush_cache", "/begin_weight_update"]


def test_servers_on_gpus_give_everything_up_and_get_it_back_around_an_update(tmp_path: Path) -> None:
    """With calls for signs of life all the time, which a server without memory would die of."""
    world, trainer = Scripted(tmp_path), Calls()
    turns = Turns(trainer, world.memory)

    async def work() -> None:
        async with turns.training():
            late = asyncio.ensure_future(world.generate("1/0"))
            await asyncio.sleep(0.02)
            assert not late.done()  # it waits for the weights
        assert await world.publish(turns, 1) == ["server 0", "server 1"]
        await late
        async with turns.checkpoint():
            await asyncio.sleep(0.02)
        await world.generate()

    world.run(work)
    turn = [
        *RELEASE,
        f"/release_memory_occupation {ALL}",
        "/resume_memory_occupation weights",
        *UPDATE,
        f"/resume_memory_occupation {CACHES}",
        "/end_weight_update",
        "/continue_generation",
    ]
    saving = [
        *RELEASE,
        f"/release_memory_occupation {CACHES}",
        f"/resume_memory_occupation {CACHES}",
        "/continue_generation",
    ]
    assert of(world.calls, "s0") == of(world.calls, "s1") == [*turn, *saving]


def test_on_cpu_the_calls_that_sglang_dies_of_are_left_out(tmp_path: Path) -> None:
    world = Scripted(tmp_path, num_servers=1, device="cpu")
    turns = Turns(Calls(), world.memory)

    async def work() -> None:
        async with turns.training():
            pass
        await world.publish(turns, 1)
        async with turns.checkpoint():
            pass
        await world.generate()

    world.run(work)
    update = [*UPDATE, "/end_weight_update", "/continue_generation"]
    assert of(world.calls, "s0") == [*RELEASE, *update, *RELEASE, "/continue_generation"]


def test_memory_is_not_given_up_while_a_request_is_in_flight(tmp_path: Path) -> None:
    world = Scripted(tmp_path, num_servers=1)
    turns = Turns(Calls(), world.memory)

    async def work() -> None:
        call = asyncio.ensure_future(world.generate())
        await world.generating.wait()
        with pytest.raises(RuntimeError, match="in flight at server 0"):
            async with turns.training():
                raise AssertionError("the trainer got its turn")
        await call
        await world.generate()  # goes on serving

    world.run(work)
    assert world.calls == []


def test_after_a_step_that_failed_servers_are_not_asked_twice_and_can_be_published_to(tmp_path: Path) -> None:
    world = Scripted(tmp_path, num_servers=1)
    turns = Turns(Calls(), world.memory)

    async def work() -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="nan"):
                async with turns.training():
                    raise RuntimeError("nan")
        await turns.before_update()  # of a publish that then fails
        await world.publish(turns, 1)
        await world.generate()

    world.run(work)
    releases = [call for call in world.calls if "memory" in call]
    assert releases == [
        f"s0/release_memory_occupation {ALL}",
        "s0/resume_memory_occupation weights",
        f"s0/resume_memory_occupation {CACHES}",
    ]


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/resume_memory_occupation"])
def test_a_server_that_fails_is_started_anew_when_the_trainer_has_given_the_device_back(tmp_path: Path, path: str) -> None:
    started: list[bool] = []
    ended: list[bool] = []
    offloaded = False

    class Restarting(Source):
        async def end(self) -> None:
            ended.append(offloaded)

        async def restart(self) -> str:
            started.append(offloaded)
            return "http://new"

    class Trainer(Calls):
        async def offload(self) -> None:
            nonlocal offloaded
            await asyncio.sleep(0.02)
            offloaded = True

    world = Scripted(tmp_path, source=Restarting)
    turns = Turns(Trainer(), world.memory)

    async def work() -> None:
        world.broken.add(("s1", path))
        async with turns.training():
            await asyncio.sleep(0.02)
        first = await world.publish(turns, 1)
        if "server 1.1" not in first:
            await world.engine.joined()
        assert world.engine.fleet.up[0].version == 1
        await world.publish(turns, 2)
        assert {server.name: server.version for server in world.engine.fleet.up} == {"server 0": 2, "server 1.1": 2}

    world.run(work)
    assert started == [True]
    assert ended == [path.startswith("/resume")]  # at once, so that the trainer gets its memory
    assert not [call for call in of(world.calls, "new") if "memory" in call]  # it has all of its own
