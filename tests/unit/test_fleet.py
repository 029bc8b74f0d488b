"""Servers that die, hang, answer rubbish, come back: scripted ones, a transport in place of HTTP. Real ones:
tests/integration/test_server_faults.py."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dapo_megatron.addresses import free_port
from dapo_megatron.records import Completion
from dapo_megatron.rollout.engine import GenerateRequest, SamplingParams
from dapo_megatron.rollout.fleet import MAX_FAILURES, MAX_RESTARTS
from dapo_megatron.rollout.http_engine import HttpEngine
from tests.sglang_engines import Source, make_engine

PARAMS = SamplingParams(5)
CONFIG = {"vocab_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2, "architectures": ["Tiny"]}


def answer(version: str) -> dict[str, Any]:
    return {
        "output_ids": [5, 2],
        "meta_info": {
            "output_token_logprobs": [[-0.5, 5, None], [-0.5, 2, None]],
            "weight_versions": [{"version": version, "start": 0, "end": 2}],
            "finish_reason": {"type": "stop"},
        },
    }


class World:
    """Scripted servers by host. `fault` (host -> response or exception) takes the place of an answer to /generate; requests to
    a host in `hang` are never answered."""

    def __init__(self, model_dir: Path, num_servers: int, **kwargs: Any) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []  # host, path, body
        self.fault: dict[str, Callable[[], httpx.Response]] = {}
        self.hang: set[str] = set()
        self.unreadable = ""  # path of a call that is answered with something else than it should
        self.version: dict[str, str] = {}
        self.notes: list[str] = []
        self.model_path = str(model_dir)
        urls = [f"http://s{i}" for i in range(num_servers)]
        settings = {"health_interval_s": 0.02, "health_timeout_s": 5.0, "note": self.notes.append, **kwargs}
        transport = httpx.MockTransport(self.handle)
        self.engine: HttpEngine = make_engine(urls, model_dir, transport=transport, **settings)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        host, path, body = request.url.host, request.url.path, json.loads(request.content or b"{}")
        self.asked.append((host, path, body))
        if host in self.hang:
            await asyncio.sleep(request.extensions["timeout"]["read"])
            raise httpx.ReadTimeout("")
        if path == self.unreadable:
            return httpx.Response(200, json=[1])
        if path == "/generate" and host in self.fault:
            return self.fault[host]()
        if path == "/generate":
            await asyncio.sleep(0.005)
            return httpx.Response(200, json=answer(body["extra_key"]))
        if path == "/model_info":
            info = {"weight_version": self.version.get(host, "0"), "model_path": self.model_path, "architectures": ["Tiny"]}
            return httpx.Response(200, json=info)
        return httpx.Response(200, json={})

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def opened() -> Any:
            await self.engine.open()
            try:
                return await asyncio.wait_for(work(), 20)
            finally:
                await self.engine.aclose()

        return asyncio.run(opened())

    async def groups(self, first: int, number: int = 4) -> list[Completion]:
        return await asyncio.gather(
            *(
                self.engine.generate(GenerateRequest(f"{g}.0/{i}", (1,), PARAMS))
                for g in range(first, first + number)
                for i in (0, 1)
            )
        )

    async def update(self, version: int, servers: list[str]) -> None:
        await self.engine.begin_update(version, servers)
        self.version = {f"s{i}": str(version) for i in range(9)}
        await self.engine.end_update(version, servers)

    def hosts(self, path: str = "/generate") -> set[str]:
        return {host for host, asked, _ in self.asked if asked == path}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def refuse() -> httpx.Response:
    raise httpx.ConnectError("refused")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_dead_server_s_requests_go_elsewhere_and_it_serves_again_with_new_weights_only(model_dir: Path) -> None:
    world = World(model_dir, 2)
    engine = world.engine
    engine.fleet._sources[0] = Source(alive=False, restart=lambda: "http://s2")
    world.fault["s0"] = refuse

    async def work() -> None:
        assert len(await world.groups(0)) == 8 and engine.num_retries >= 1
        await engine.joined()
        assert engine.waiting() == ["server 0.1"] and await engine.drop_lost() == ["server 0"]
        await world.groups(4)
        assert "s2" not in world.hosts()  # it has no weights yet
        await world.update(0, ["server 0.1"])
        world.asked.clear()
        await world.groups(8)
        assert world.hosts() == {"s1", "s2"}

    world.run(work)
    assert world.notes == ["server 0 is lost (its process has ended) and started anew", "server 0 is up again"]


def test_the_only_server_dies_and_the_request_waits_for_it(model_dir: Path) -> None:
    world = World(model_dir, 1)
    world.engine.fleet._sources[0] = Source(alive=False, restart=lambda: "http://s1")
    world.fault["s0"] = refuse

    async def work() -> Completion:
        call = asyncio.create_task(world.engine.generate(GenerateRequest("0/0", (1,), PARAMS)))
        await world.engine.joined()
        await world.update(0, world.engine.waiting())
        return await call

    assert len(world.run(work)) == 2


def test_a_hung_server_is_found_by_the_probe_and_its_requests_are_not_left_waiting(model_dir: Path) -> None:
    world = World(model_dir, 2, health_timeout_s=0.1)
    engine = world.engine
    engine.fleet._sources[0] = Source(restart=lambda: "http://s2")

    async def work() -> None:
        world.hang.add("s0")
        assert len(await world.groups(0)) == 8
        await engine.joined()

    world.run(work)
    assert world.notes[0].startswith("server 0 is lost (no sign of life for 0 s: /health_generate: no answer")


RUBBISH: dict[str, Callable[[], httpx.Response]] = {
    "500": lambda: httpx.Response(500, text="boom"),
    "no json": lambda: httpx.Response(200, headers={"content-type": "application/json"}, content=b'{"output_ids": [5,'),
    "html": lambda: httpx.Response(200, text="<html>"),
    "empty": lambda: httpx.Response(200, json={}),
    "list": lambda: httpx.Response(200, json=[1]),
    "null fields": lambda: httpx.Response(200, json={"output_ids": None, "meta_info": None}),
    "no version": lambda: httpx.Response(
        200, json={**answer("0"), "meta_info": {**answer("0")["meta_info"], "weight_versions": []}}
    ),
    "version x": lambda: httpx.Response(200, json=answer("x")),
    "other tokens": lambda: httpx.Response(200, json={**answer("0"), "output_ids": [7, 2]}),
}


@pytest.mark.parametrize("kind", RUBBISH)
def test_a_server_that_answers_rubbish_is_avoided(model_dir: Path, kind: str) -> None:
    world = World(model_dir, 2)
    world.fault["s0"] = RUBBISH[kind]
    assert len(world.run(lambda: world.groups(0))) == 8
    alone = World(model_dir, 1, max_attempts=1)
    alone.fault["s0"] = RUBBISH[kind]
    with pytest.raises(RuntimeError, match=r"request 0/0 failed: http://s0: "):
        alone.run(lambda: alone.engine.generate(GenerateRequest("0/0", (1,), PARAMS)))


@pytest.mark.parametrize("path", ["/model_info", "/weights_checker"])
def test_control_answers_that_can_t_be_read_cost_the_server_and_not_the_run(model_dir: Path, path: str) -> None:
    world = World(model_dir, 1)

    async def work() -> None:
        await world.engine.begin_update(0, ["server 0"])
        world.unreadable = path
        with pytest.raises(RuntimeError, match=r"server 0 \(http://s0\): the answer can't be read"):
            if path == "/model_info":
                await world.engine.end_update(0, ["server 0"])
            await world.engine.checksums(["server 0"])
        assert await world.engine.drop_lost() == ["server 0"]

    world.run(work)


def test_a_server_that_others_started_comes_back_when_it_answers_again() -> None:
    from dapo_megatron.cluster.engines import OthersServer

    async def healthy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def work() -> None:
        port = free_port()
        server = OthersServer(f"http://127.0.0.1:{port}/", timeout_s=10)
        back = asyncio.create_task(server.restart())
        done, _ = await asyncio.wait({back}, timeout=0.2)
        assert not done and not await server.alive()
        async with await asyncio.start_server(healthy, "127.0.0.1", port):
            assert await server.alive()
            assert await back == f"http://127.0.0.1:{port}"
        with pytest.raises(RuntimeError, match=r"rollout\.servers: http://127\.0\.0\.1:.* did not answer again within 1 s"):
            await OthersServer(f"http://127.0.0.1:{port}", timeout_s=1).restart()

    asyncio.run(asyncio.wait_for(work(), 30))


def test_three_failures_in_a_row_start_a_server_anew_though_it_lives(model_dir: Path) -> None:
    world = World(model_dir, 2, max_attempts=2 * MAX_FAILURES + 2)
    engine = world.engine
    engine.fleet._sources[0] = Source(restart=lambda: "http://s2")
    world.fault["s0"] = world.fault["s1"] = RUBBISH["500"]
    engine.fleet._sources[1] = Source(restart=lambda: "http://s3")

    async def work() -> None:
        call = asyncio.create_task(asyncio.wait({asyncio.create_task(world.groups(0, 1))}))
        await engine.joined()
        call.cancel()

    world.run(work)
    assert any("3 failures in a row, the last: /generate: 500: boom" in note for note in world.notes)


def test_requests_that_fail_together_count_as_one_failure(model_dir: Path) -> None:
    world = World(model_dir, 2)
    world.fault["s0"] = RUBBISH["500"]
    assert len(world.run(lambda: world.groups(0, 20))) == 40 and not world.notes
    assert world.engine.num_retries >= 2 * MAX_FAILURES and world.engine.fleet.up[0].num_failures < MAX_FAILURES


def test_a_server_that_never_comes_back_is_given_up_and_the_last_one_s_loss_ends_the_run(model_dir: Path) -> None:
    tries: list[int] = []

    def restart() -> str:
        tries.append(1)
        raise RuntimeError("out of memory")

    world = World(model_dir, 1)
    world.engine.fleet._sources[0] = Source(alive=False, restart=restart)
    world.fault["s0"] = refuse
    with pytest.raises(RuntimeError, match=r"no rollout server is left.*server 0: out of memory"):
        world.run(lambda: world.engine.generate(GenerateRequest("0/0", (1,), PARAMS)))
    assert len(tries) == MAX_RESTARTS and world.notes[-1].startswith(f"server 0 is given up after {MAX_RESTARTS} restarts")


def test_a_group_s_prompt_is_computed_once_and_first(model_dir: Path) -> None:
    world = World(model_dir, 2)

    async def work() -> None:
        await asyncio.gather(
            *(world.engine.generate(GenerateRequest(f"0/{i}", (1, 2), PARAMS, group_size=4)) for i in range(4))
        )
        await world.engine.generate(GenerateRequest("1/0", (1, 2), PARAMS))

    world.run(work)
    limits = [body["sampling_params"]["max_new_tokens"] for _, path, body in world.asked if path == "/generate"]
    assert limits == [0, 5, 5, 5, 5, 5]


def test_a_group_that_waits_for_its_prompt_moves_with_all_its_requests(model_dir: Path) -> None:
    world = World(model_dir, 2, health_timeout_s=0.05)
    engine = world.engine

    async def work() -> list[Completion]:
        world.hang.add("s0")
        calls = [GenerateRequest(f"0/{i}", (1, 2), PARAMS, group_size=4) for i in range(4)]
        early = [asyncio.create_task(engine.generate(call)) for call in calls[:2]]
        await until(lambda: not any(server.name == "server 0" for server in engine.fleet.up))
        return await asyncio.gather(*early, *(engine.generate(call) for call in calls[2:]))

    assert len(world.run(work)) == 4


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_requests_that_come_during_an_update_wait_and_are_asked_for_under_the_new_version(model_dir: Path, pause: str) -> None:
    world = World(model_dir, 1, pause=pause)

    async def work() -> tuple[Completion, Completion]:
        before = asyncio.create_task(world.engine.generate(GenerateRequest("0/0", (1,), PARAMS)))
        await until(lambda: "s0" in world.hosts())
        await world.engine.begin_update(1, ["server 0"])
        during = asyncio.create_task(world.engine.generate(GenerateRequest("1/0", (1,), PARAMS)))
        await before
        assert len([1 for _, path, _ in world.asked if path == "/generate"]) == 1
        world.version["s0"] = "1"
        await world.engine.end_update(1, ["server 0"])
        return await before, await during

    before, during = world.run(work)
    assert before.versions.tolist() == [0, 0] and during.versions.tolist() == [1, 1]
    paths = [path for _, path, _ in world.asked]
    assert ("/flush_cache" in paths) == (pause != "in_place")
    assert [body for _, path, body in world.asked if path == "/pause_generation"] == [{"mode": pause}]


def test_an_abort_reaches_a_request_that_still_waits_for_a_server(model_dir: Path) -> None:
    world = World(model_dir, 1, version=None)

    async def work() -> Completion:
        call = asyncio.create_task(world.engine.generate(GenerateRequest("0/0", (1,), PARAMS)))
        await asyncio.sleep(0)
        await world.engine.abort(["0/0"])
        return await call

    assert world.run(work).finish_reason == "abort" and not world.hosts()


def test_a_server_that_fails_in_an_update_is_lost_and_others_go_on(model_dir: Path) -> None:
    world = World(model_dir, 2, update_timeout_s=0.1)
    world.engine.fleet._sources[0] = Source(restart=lambda: "http://s2")

    async def work() -> None:
        world.hang.add("s0")
        with pytest.raises(RuntimeError, match=r"server 0 \(http://s0\): /pause_generation: no answer"):
            await world.engine.begin_update(1, ["server 0", "server 1"])
        assert await world.engine.drop_lost() == ["server 0"] and list(await world.engine.weight_senders()) == ["server 1"]
        with pytest.raises(RuntimeError, match="server 0: lost"):
            await world.engine.begin_update(1, ["server 0"])
        await world.update(1, ["server 1"])
        assert len(await world.groups(0)) == 8

    world.run(work)


def test_a_server_with_another_model_is_refused_at_once(model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 64}))
    world = World(model_dir, 1)
    world.model_path = str(other)
    with pytest.raises(RuntimeError, match="vocab_size 64 instead of 100"):
        world.run(lambda: world.groups(0))
    world.model_path = "somebody/elses"  # can't be read here: the architecture is the same
    world.run(lambda: world.groups(0))
