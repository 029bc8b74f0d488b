"""What we send to vLLM, and how we read its answers. The comparison with its request classes, which accept unknown keys in
silence, is skipped without DAPO_VLLM_PYTHON. No vLLM server runs here."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dapo_megatron.rollout.engine import GenerateRequest, SamplingParams
from dapo_megatron.rollout.http_engine import HttpEngine
from dapo_megatron.rollout.vllm_client import VLLMClient
from dapo_megatron.rollout.vllm_server import VLLMServer
from tests.sglang_engines import make_engine

PARAMS = SamplingParams(5, temperature=0.7, top_p=0.9, top_k=3, stop_token_ids=(2,))
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
DESCRIPTION = {
    "config": {key: CONFIG.get(key) for key in ("architectures", "vocab_size", "intermediate_size")},
    "model": "/models/m",
    "dtype": "float32",
    "tp_size": 1,
    "max_model_len": 64,
    "logprobs_mode": "processed_logprobs",
}
Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def engine_with(model_dir: Path, handler: Handler, **kwargs: Any) -> HttpEngine:
    return make_engine(["http://s"], model_dir, transport=httpx.MockTransport(handler), client_class=VLLMClient, **kwargs)


def answer(token_ids=(5, 6, 2), spans=(("3", 0, 3),), reason: str = "stop") -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5 - i} for i, token in enumerate(token_ids)]
    versions = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    choice = {"token_ids": list(token_ids), "logprobs": {"content": content}, "finish_reason": reason}
    return {"choices": [choice | {"weight_versions": versions}]}


class Server:
    """A healthy server's answers to every call we make. `changes`: path, or method of our extension -> another answer."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.asked: list[tuple[str, str, dict[str, Any]]] = []  # method, path with query, body

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"{}")
        self.asked.append((request.method, request.url.raw_path.decode(), body))
        name = body["method"] if request.url.path == "/collective_rpc" else request.url.path
        prompt = {"prompt_logprobs": [None, {"2": {"logprob": -1.5}, "7": {"logprob": -0.1}}]}
        answers: dict[str, Any] = {
            "/inference/v1/generate": answer() | prompt,
            "/weight_checker": {"checksums": {"dp0:pp0:pcp0:tp1:w.weight": "ab" * 32}},
            "dapo_describe": {"results": [DESCRIPTION]},
            "dapo_end": {"results": ["3"]},
        }
        return httpx.Response(200, json=self.changes.get(name, answers.get(name, {"results": [None]})))

    def calls(self) -> list[str]:
        return [f"{path} {body['method']}" if "method" in body else path for _, path, body in self.asked]


def generate(engine: HttpEngine, request: GenerateRequest) -> Any:
    return asyncio.run(engine.generate(request))


def everything(model_dir: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path with query, body) of every kind of call of the engine and the sender."""
    import torch

    server = Server()
    engine = engine_with(model_dir, server)

    async def work() -> None:
        await engine.generate(GenerateRequest("0/0", (1, 2), PARAMS, group_size=2))
        await engine.prompt_logprobs((1, 2))
        client = engine.fleet.up[0].client
        await client.abort("0/0/1")
        await client.probe(1.0)
        for pause in ("drain", "retract", "in_place", "abort"):
            engine.pause = pause
            await engine.begin_update(3, ["server 0"])
            await engine.end_update(3, ["server 0"])
        await engine.checksums(["server 0"])

    asyncio.run(work())
    sender: Any = engine.fleet.up[0].client.weight_sender()
    bodies = {
        "dapo_open_group": sender.open_body("127.0.0.1", 1234),
        "dapo_load": sender.send_body([("w", torch.zeros(2, 3))], 3),
        "dapo_close_group": {"group_name": "g"},
    }
    rpcs = [{"method": method, "kwargs": kwargs} for method, kwargs in bodies.items()]
    return [*server.asked, *(("POST", "/collective_rpc", rpc) for rpc in [*rpcs, {"method": "dapo_names"}])]


_COMPARE = """
import inspect, json, sys, typing, urllib.parse
from fastapi import FastAPI
from dapo_vllm_extension import WeightUpdates
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.rl.online.api_router import router as rl
from vllm.entrypoints.scale_out.token_in_token_out.api_router import router as tokens
from vllm.entrypoints.serve.dev.rpc.api_router import router as rpc
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.worker.gpu_worker import Worker

sent, command = json.load(sys.stdin)
routes = {(method, r.path): r.endpoint for router in (rl, tokens, rpc) for r in router.routes for method in r.methods}
READ_BY_HAND = {"/collective_rpc": {"method", "args", "kwargs", "timeout"}, "/abort_requests": {"request_ids"}}
problems = []
for method, url, body in sent:
    path, _, query = url.partition("?")
    if (method, path) not in routes:
        problems.append(f"no route {method} {path}")
        continue
    parameters = typing.get_type_hints(routes[method, path])
    known = READ_BY_HAND.get(path) or set(parameters)
    if "request" in parameters and hasattr(parameters["request"], "model_fields"):
        known = set(parameters["request"].model_fields)
    for key, value in [*body.items(), *urllib.parse.parse_qsl(query)]:
        if key not in known:
            problems.append(f"{path} has no {key}")
        elif isinstance(value, str) and typing.get_origin(parameters.get(key)) is typing.Literal:
            if value not in typing.get_args(parameters[key]):
                problems.append(f"{path} has no {key} {value}")
    fields = set(SamplingParams.__struct_fields__)
    problems += [f"sampling_params has no {key}" for key in body.get("sampling_params", {}) if key not in fields]
    if path == "/collective_rpc":
        function = getattr(WeightUpdates, body["method"], None) or getattr(Worker, body["method"], None)
        try:
            inspect.signature(function).bind(None, **body.get("kwargs", {}))
        except TypeError as e:
            problems.append(f"{body['method']}: {e}")
unknown = make_arg_parser(FlexibleArgumentParser()).parse_known_args(command)[1]
problems += [f"the server has no argument {a}" for a in unknown]
print(json.dumps(problems))
"""


def test_every_key_we_send_is_known_to_vllm(model_dir):
    python = os.environ.get("DAPO_VLLM_PYTHON", "")
    if not python:
        pytest.skip("DAPO_VLLM_PYTHON names no interpreter whose environment has vLLM")
    server = VLLMServer(model_dir, dtype="float32", log_path="log")
    gpu = VLLMServer(model_dir, dtype="bfloat16", device="cuda", tp=4, log_path="log").command()
    # One process for all, with a mistake of each kind among them to see that they are found.
    wrong = [
        ("POST", "/inference/v1/generate", {"extra_key": "0", "sampling_params": {"temprature": 1.0}}),
        ("POST", "/pause?mode=freeze", {}),
        ("POST", "/collective_rpc", {"method": "dapo_load", "kwargs": {"load_format": "x"}}),
        ("POST", "/no_such_call", {}),
    ]
    command = [*server.command(), *gpu, "--no-such-flag"]
    done = subprocess.run(
        [python, "-c", _COMPARE],
        input=json.dumps([[*everything(model_dir), *wrong], command]),
        env=server.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [
        "/inference/v1/generate has no extra_key",
        "sampling_params has no temprature",
        "/pause has no mode freeze",
        "dapo_load: missing a required argument: 'group_name'",
        "no route POST /no_such_call",
        "the server has no argument --no-such-flag",
    ]


def test_an_answer_is_read(model_dir):
    server = Server(**{"/inference/v1/generate": answer(spans=(("default", 0, 1), ("4", 1, 3)))})
    completion = generate(engine_with(model_dir, server), GenerateRequest("0/0", (1, 2), PARAMS))
    assert completion.token_ids.tolist() == [5, 6, 2] and completion.versions.tolist() == [0, 4, 4]
    assert completion.logprobs.tolist() == [-0.5, -1.5, -2.5] and completion.finish_reason == "stop"
    server = Server(**{"/inference/v1/generate": answer((), (), "abort")})
    assert len(generate(engine_with(model_dir, server), GenerateRequest("0/0", (1, 2), PARAMS))) == 0
    logprobs = asyncio.run(engine_with(model_dir, Server()).prompt_logprobs((1, 2)))
    assert logprobs.tolist() == [-1.5] and logprobs.dtype == np.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [5, 6]}, "2 tokens but 3 log-probs"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 2}]}, "tokens without weight version"),
        ({"weight_versions": None}, "tokens without weight version"),
        ({"logprobs": None}, "3 tokens but 0 log-probs"),
    ],
)
def test_an_answer_that_lacks_something_is_none(model_dir, change, message):
    wrong = answer()
    wrong["choices"][0] |= change
    with pytest.raises(RuntimeError, match=message):
        generate(engine_with(model_dir, Server(**{"/inference/v1/generate": wrong})), GenerateRequest("0/0", (1,), PARAMS))


def test_a_request_over_the_context_length_is_not_sent(model_dir):
    """vLLM would cut its response."""
    server = Server()
    engine = engine_with(model_dir, server)
    generate(engine, GenerateRequest("0/0", (1,) * 59, PARAMS))  # 64 with its 5 new ones
    with pytest.raises(ValueError, match="60 tokens and 5 new ones exceed the context length of 64"):
        generate(engine, GenerateRequest("0/1", (1,) * 60, PARAMS))
    assert server.calls().count("/inference/v1/generate") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode 'raw_logprobs' instead of 'processed_logprobs'"),
        ({"tp_size": 2}, "tp_size 2 instead of 1"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16' instead of 'float32'"),
        ({"config": {"vocab_size": 64}}, "vocab_size 64 instead of 100"),
    ],
)
def test_a_server_of_another_kind_is_refused(model_dir, change, message):
    engine = engine_with(model_dir, Server(dapo_describe={"results": [DESCRIPTION | change]}))
    with pytest.raises(RuntimeError, match=f"/models/m with {message}; start it with the run's model"):
        asyncio.run(engine.open())


def test_an_update(model_dir):
    """Old keys and values are dropped or, in place, out of reach of new requests; the version is what came with the weights."""
    server = Server()
    engine = engine_with(model_dir, server)
    request = GenerateRequest("0/0", (1,), PARAMS)

    async def work(pause: str) -> list[str]:
        await engine.generate(request)
        server.asked.clear()
        engine.pause = pause
        await engine.begin_update(3, ["server 0"])
        await engine.end_update(3, ["server 0"])
        await engine.generate(request)
        return server.calls()

    end = ["/collective_rpc dapo_end", "/update_weight_version", "/resume", "/inference/v1/generate"]
    begin = "/collective_rpc dapo_begin"
    assert asyncio.run(work("drain")) == ["/pause?mode=abort&clear_cache=true", begin, *end]
    assert server.asked[-1][2]["cache_salt"] == "3" and server.asked[-3][2] == {"new_version": "3"}
    assert asyncio.run(work("retract")) == ["/pause?mode=keep&clear_cache=true", begin, *end]
    assert asyncio.run(work("in_place")) == ["/pause?mode=keep&clear_cache=false", begin, *end]
    server.changes["dapo_end"] = {"results": ["3", "2"]}  # the second rank got nothing
    with pytest.raises(RuntimeError, match="holds weights of version 2, 3 after version 3 was published"):
        asyncio.run(work("drain"))
    assert "/resume" not in server.calls()


def test_checksums_go_by_rank_and_name(model_dir):
    engine = engine_with(model_dir, Server())
    assert asyncio.run(engine.checksums(["server 0"])) == {"server 0": {"1/w.weight": "ab" * 8}}


def test_command_and_environment(model_dir, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    cpu = VLLMServer(model_dir, dtype="auto", tp=2, max_total_tokens=320, log_path="log")
    arguments = dict(zip(cpu.command(), cpu.command()[1:], strict=False))
    # two of keys and values, two layers, one head of 32 in bf16 on each rank; 320 tokens are 10 blocks, and two over
    assert arguments["--kv-cache-memory-bytes"] == str(2 * 2 * 32 * 2 * 12 * 32) and arguments["--max-model-len"] == "320"
    assert arguments["--logprobs-mode"] == "processed_logprobs" and arguments["--generation-config"] == "vllm"
    folder, other = cpu.environment()["PYTHONPATH"].split(os.pathsep)
    assert (Path(folder) / "dapo_vllm_extension.py").is_file() and other == "/elsewhere"
    (model_dir / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 64}))
    with pytest.raises(ValueError, match=r"rollout\.engine: vLLM's attention on CPU has no heads of size 16"):
        cpu.command()
    gpu = VLLMServer(model_dir, dtype="bfloat16", device="cuda", log_path="log")
    assert "--max-model-len" not in gpu.command() and "TORCHDYNAMO_DISABLE" not in gpu.environment()
