"""What we send to SGLang, compared with the installed version, which accepts unknown keys in silence. And our client
against scripted answers: retries, balancing, aborts. No SGLang server runs here."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dapo_megatron.rollout.engine import GenerateRequest, SamplingParams
from dapo_megatron.rollout.http_engine import HttpEngine
from dapo_megatron.rollout.server_client import ServerHttp
from dapo_megatron.rollout.sglang_client import SGLangClient
from dapo_megatron.rollout.sglang_server import SGLangServer
from dapo_megatron.rollout.sglang_weights import ServerLayout
from tests import sglang_engines

PARAMS = SamplingParams(5, temperature=0.7, top_p=0.9, top_k=3, stop_token_ids=(2,))
Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {"vocab_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def make_engine(model_dir: Path, handler: Handler, num_servers: int = 1, **kwargs: Any) -> HttpEngine:
    urls = [f"http://s{i}" for i in range(num_servers)]
    return sglang_engines.make_engine(urls, model_dir, transport=httpx.MockTransport(handler), **kwargs)


def answer(token_ids=(5, 2), version: str = "0", reason: str = "stop") -> dict[str, Any]:
    return {
        "output_ids": list(token_ids),
        "meta_info": {
            "output_token_logprobs": [[-0.5, t, None] for t in token_ids],
            "weight_versions": [{"version": version, "start": 0, "end": len(token_ids)}],
            "finish_reason": {"type": reason},
        },
    }


def canned(request: httpx.Request) -> httpx.Response:
    """A healthy server's answer to every call we make."""
    path = request.url.path
    if path == "/generate":
        body = answer()
        body["meta_info"]["input_token_logprobs"] = [[None, 1, None], [-1.5, 2, None]]
        return httpx.Response(200, json=body)
    if path == "/model_info":
        return httpx.Response(200, json={"weight_version": "3"})
    if path == "/weights_checker":
        rank = {"checksums": {"w": "00"}, "parallelism_info": [{"tp_rank": 0}]}
        return httpx.Response(200, json={"success": True, "ranks": [rank]})
    return httpx.Response(200, text="")


def bodies_we_send(model_dir: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path, body) of every kind of call of the engine and the sender."""
    import torch

    sent: list[tuple[str, str, dict[str, Any]]] = []

    def record(request: httpx.Request) -> httpx.Response:
        sent.append((request.method, request.url.path, json.loads(request.content or b"{}")))
        return canned(request)

    engine = make_engine(model_dir, record)

    async def everything() -> None:
        await engine.generate(GenerateRequest("0/0", (1, 2), PARAMS))
        await engine.prompt_logprobs((1, 2))
        await engine.generate(GenerateRequest("0/0", (1, 2), PARAMS, group_size=2))
        await engine.fleet.up[0].client.abort("0/0/1")
        await engine.begin_update(3, ["server 0"])
        await engine.end_update(3, ["server 0"])
        await engine.checksums(["server 0"])

    asyncio.run(everything())
    sender: Any = engine.fleet.up[0].client.weight_sender()
    sent.append(("POST", "/init_weights_update_group", sender.open_body("127.0.0.1", 1234)))
    sent.append(("POST", "/update_weights_from_distributed", sender.send_body([("w", torch.zeros(2, 3))], 3)))
    sent.append(("POST", "/destroy_weights_update_group", {"group_name": "g"}))
    layout = ServerLayout(tp=2, dtype="bfloat16", device="cuda", num_kv_heads=2)
    http = ServerHttp("http://s", httpx.MockTransport(record))
    on_our_gpus = SGLangClient(http, model_dir, layout, backend="ipc", sender_timeout_s=5)

    async def change_hands() -> None:
        await on_our_gpus.release_memory(["weights"], 5)
        await on_our_gpus.resume_memory(["weights"], 5)

    asyncio.run(change_hands())
    colocated: Any = on_our_gpus.weight_sender()
    for body in (colocated.send_body(["a", "b"], 3), colocated.fence_body(3)):
        sent.append(("POST", "/update_weights_from_tensor", body))
    return sent


_COMPARE = """
import dataclasses, inspect, json, sys, typing
sys.modules |= dict.fromkeys(("flash_attn", "flashinfer", "megatron"))  # as in our servers on CPU
import msgspec
from sglang.srt.entrypoints.http_server import app
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

sent, command = json.load(sys.stdin)
methods = {}
for route in app.routes:
    for method in getattr(route, "methods", None) or ():
        methods[method, route.path] = route.endpoint

def request_class(endpoint):
    for hint in typing.get_type_hints(endpoint, include_extras=False).values():
        for kind in (hint, *typing.get_args(hint)):
            if inspect.isclass(kind) and kind.__module__ == io_struct.__name__:
                return kind

def fields(kind):
    if dataclasses.is_dataclass(kind):
        return {f.name for f in dataclasses.fields(kind)}
    return {f.name for f in msgspec.structs.fields(kind)}

problems = []
for method, path, body in sent:
    if (method, path) not in methods:
        problems.append(f"no route {method} {path}")
        continue
    kind = request_class(methods[method, path])
    if kind is None:
        if body:
            problems.append(f"{path} takes no body")
        continue
    problems += [f"{path} ({kind.__name__}) has no {key}" for key in body if key not in fields(kind)]
    known = fields(SamplingParams) if hasattr(SamplingParams, "__struct_fields__") or dataclasses.is_dataclass(
        SamplingParams) else set(inspect.signature(SamplingParams).parameters)
    problems += [f"sampling_params has no {key}" for key in body.get("sampling_params", {}) if key not in known]
import argparse
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
unknown = parser.parse_known_args(command)[1]
problems += [f"the server has no argument {a}" for a in unknown]
print(json.dumps(problems))
"""


def compare(sent, command, model_dir) -> list[str]:
    server = SGLangServer(model_dir, dtype="float32", log_path=model_dir / "log")
    env = server.environment()
    done = subprocess.run(
        [sys.executable, "-c", _COMPARE], input=json.dumps([sent, command]), env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_key_we_send_is_known_to_the_installed_sglang(model_dir):
    sent = bodies_we_send(model_dir)
    paths = {path for _, path, _ in sent}
    assert paths >= {"/generate", "/abort_request", "/pause_generation", "/flush_cache", "/weights_checker"}
    cpu = SGLangServer(model_dir, dtype="float32", log_path="log").command()
    gpu = SGLangServer(model_dir, dtype="bfloat16", device="cuda", tp=4, log_path="log").command()
    # One process for all, with a mistake of each kind among them to see that they are found.
    wrong = [
        ("POST", "/generate", {"extra_keys": "0", "sampling_params": {"temprature": 1.0}}),
        ("POST", "/update_weights_from_distributed", {"version": "1"}),
        ("POST", "/no_such_call", {}),
    ]
    problems = compare([*sent, *wrong], [*cpu, *gpu, "--enable-memory-saver", "--no-such-flag"], model_dir)
    assert problems == [
        "/generate (GenerateReqInput) has no extra_keys",
        "sampling_params has no temprature",
        "/update_weights_from_distributed (UpdateWeightsFromDistributedReqInput) has no version",
        "no route POST /no_such_call",
        "the server has no argument --no-such-flag",
    ]


def test_completion_is_read_from_the_answer(model_dir):
    def handler(request: httpx.Request) -> httpx.Response:
        body = answer((5, 6, 2))
        body["meta_info"]["weight_versions"] = [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 3},
        ]
        return httpx.Response(200, json=body)

    completion = asyncio.run(make_engine(model_dir, handler).generate(GenerateRequest("0/0", (1,), PARAMS)))
    assert completion.token_ids.tolist() == [5, 6, 2] and completion.versions.tolist() == [3, 4, 4]
    assert completion.logprobs.tolist() == [-0.5] * 3 and completion.finish_reason == "stop"


def test_tokens_without_logprobs_are_an_error(model_dir):
    def handler(request: httpx.Request) -> httpx.Response:
        body = answer((5, 6))
        body["meta_info"]["output_token_logprobs"].pop()
        return httpx.Response(200, json=body)

    with pytest.raises(RuntimeError, match="2 tokens but 1 log-probs"):
        asyncio.run(make_engine(model_dir, handler, max_attempts=1).generate(GenerateRequest("0/0", (1,), PARAMS)))


def test_old_weights_keys_and_values_are_never_used_again(model_dir):
    """The prefix cache: emptied in every update before new weights can come, and a name of its own for every version."""
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"{}")
        asked.append(request.url.path + (f" {body['extra_key']}" if "extra_key" in body else ""))
        return canned(request)

    engine = make_engine(model_dir, handler)

    async def work() -> None:
        await engine.generate(GenerateRequest("0/0", (1,), PARAMS))
        await engine.begin_update(3, ["server 0"])
        asked.append("weights")
        await engine.end_update(3, ["server 0"])
        await engine.generate(GenerateRequest("1/0", (1,), PARAMS))

    asyncio.run(work())
    assert asked == [
        "/generate 0",
        "/pause_generation",
        "/flush_cache",
        "/begin_weight_update",
        "weights",
        "/end_weight_update",
        "/model_info",
        "/continue_generation",
        "/generate 3",
    ]


def test_a_retry_aborts_the_first_attempt_and_has_an_id_of_its_own(model_dir):
    rids: list[str] = []
    aborted: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        rid = json.loads(request.content)["rid"]
        if request.url.path == "/abort_request":
            aborted.append(rid)
            return httpx.Response(200)
        rids.append(rid)
        if len(rids) == 1:
            raise httpx.ReadTimeout("slow", request=request)
        return httpx.Response(503, text="busy") if len(rids) == 2 else httpx.Response(200, json=answer())

    engine = make_engine(model_dir, handler)
    assert len(asyncio.run(engine.generate(GenerateRequest("7/0", (1,), PARAMS)))) == 2
    assert len(set(rids)) == 3 and all(rid.startswith("7/0/") for rid in rids)
    assert aborted == rids[:2] and engine.num_retries == 2


def test_a_dead_server_is_left_for_another_and_no_server_at_all_is_an_error(model_dir):
    hosts: list[str] = []

    def one_dead(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        if request.url.host == "s0":
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, json=answer())

    engine = make_engine(model_dir, one_dead, num_servers=2)

    async def twice() -> None:
        await engine.generate(GenerateRequest("0/0", (1,), PARAMS))
        hosts.clear()
        await engine.generate(GenerateRequest("1/0", (1,), PARAMS))

    asyncio.run(twice())
    assert hosts == ["s1"]  # it is not tried first again

    def all_dead(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(RuntimeError, match=r"request 0/0 failed: http://s0: /generate: ConnectError: refused; http://s1: "):
        asyncio.run(make_engine(model_dir, all_dead, 2, max_attempts=2).generate(GenerateRequest("0/0", (1,), PARAMS)))


@pytest.mark.parametrize("group_size", [1, 4])
def test_a_group_stays_on_one_server_and_groups_spread(model_dir, group_size):
    hosts: dict[str, set[str]] = {}

    async def slow(request: httpx.Request) -> httpx.Response:
        hosts.setdefault(json.loads(request.content)["rid"].split("/")[0], set()).add(request.url.host)
        await asyncio.sleep(0.01)
        return httpx.Response(200, json=answer())

    engine = make_engine(model_dir, slow, num_servers=2)  # type: ignore[arg-type]

    async def work() -> None:
        await asyncio.gather(
            *(
                engine.generate(GenerateRequest(f"{g}.0/{i}", (1,), PARAMS, group_size=group_size))
                for g in range(6)
                for i in range(4)
            )
        )

    asyncio.run(work())
    assert all(len(used) == 1 for used in hosts.values())
    assert sorted(host for used in hosts.values() for host in used) == ["s0"] * 3 + ["s1"] * 3
    assert all(server.num_inflight == server.num_requests == 0 for server in engine.fleet.up) and not engine._groups


def test_a_refused_request_is_not_retried(model_dir):
    calls = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(400, text="longer than the model's context length")

    engine = make_engine(model_dir, handler)
    with pytest.raises(ValueError, match="context length"):
        asyncio.run(engine.generate(GenerateRequest("0/0", (1,), PARAMS)))
    with pytest.raises(ValueError, match=r"ids in 0\.\.99"):
        asyncio.run(engine.generate(GenerateRequest("0/0", (100,), PARAMS)))
    assert len(calls) == 1


def test_wrong_settings(model_dir):
    with pytest.raises(ValueError, match=r"rollout\.dtype: 'auto' must be resolved"):
        ServerLayout.of(model_dir, tp=1, dtype="auto", device="cpu")
    with pytest.raises(ValueError, match="urls: empty"):
        make_engine(model_dir, canned, num_servers=0)
    with pytest.raises(ValueError, match=r"no config\.json"):
        SGLangServer(model_dir / "nowhere", dtype="float32", log_path="log")
