"""What is peculiar to a real vLLM server: requests that a publish meets, shared prompts, several ranks, and its fault with
tied embeddings. Skipped without DAPO_VLLM_PYTHON."""

import asyncio
import copy
import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo_megatron.rollout.engine import GenerateRequest, SamplingParams
from dapo_megatron.rollout.http_engine import HttpEngine
from dapo_megatron.rollout.vllm_client import VLLMClient
from dapo_megatron.rollout.vllm_server import VLLMServer
from dapo_megatron.weights.publish import Publisher
from tests.integration.test_engine_contract import PROMPT, SERVERS, named, other_weights, publish, reference, run, sender_of
from tests.sglang_engines import make_engine

COOL = 0.25  # far from uniform, so that wrong weights show


def engine_on(server: VLLMServer, **kwargs: Any) -> HttpEngine:
    folder = server.model_dir
    return make_engine([server.url], folder, client_class=VLLMClient, update_timeout_s=60, tp=server.tp, **kwargs)


def model_of(server: VLLMServer) -> Any:
    return AutoModelForCausalLM.from_pretrained(server.model_dir, dtype=torch.float32).requires_grad_(False).eval()


def endless(model: Any) -> Any:
    new = copy.deepcopy(model)
    new.model.embed_tokens.weight[model.config.eos_token_id] = 0
    return new


@pytest.mark.parametrize(("pause", "version"), [("abort", 11), ("retract", 13), ("in_place", 15)])  # none comes twice
def test_requests_that_a_publish_meets(vllm_server, pause, version):
    """Each token has the version of the weights that sampled it; with retract the new ones computed the whole context."""
    first = endless(model_of(vllm_server))
    new = endless(other_weights(first, seed=1))
    engine = engine_on(vllm_server, pause=pause, request_timeout_s=60)
    requests = [GenerateRequest(f"g/{i}", PROMPT, SamplingParams(2000, COOL)) for i in range(2)]

    async def work():
        await slow_down(vllm_server, 0.005)
        await publish(engine, named(first), version)
        sender = sender_of(engine)
        await asyncio.to_thread(sender.open, 0, 1)
        calls = [asyncio.create_task(engine.generate(request)) for request in requests]
        await served(vllm_server, 10, calls)
        await engine.begin_update(version + 1, SERVERS)
        await asyncio.to_thread(sender.send, named(new), version + 1)
        sender.close()
        await engine.end_update(version + 1, SERVERS)
        if pause != "abort":
            await served(vllm_server, 10, calls)
            await engine.abort([request.request_id for request in requests])
        results = await asyncio.gather(*calls)
        await slow_down(vllm_server, 0.0)
        return results

    for completion in run(engine, work):
        old = completion.versions == version
        assert old.any() and (np.diff(completion.versions) >= 0).all()
        before = np.abs(completion.logprobs - reference(first, PROMPT, completion.token_ids, COOL))
        assert before[old].max() < 1e-2  # wrong weights: 10 and more
        assert completion.finish_reason == "abort" or pause != "abort"
        assert set(completion.versions.tolist()) == ({version} if pause == "abort" else {version, version + 1})
        if pause == "abort":
            continue
        after = np.abs(completion.logprobs - reference(new, PROMPT, completion.token_ids, COOL))[~old]
        assert (after[0] < 1e-2) == (pause == "retract")  # in place, old keys and values go into it


async def slow_down(server: VLLMServer, seconds: float) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        rpc = {"method": "dapo_slow_down", "kwargs": {"seconds": seconds}}
        (await http.post(f"{server.url}/collective_rpc", json=rpc)).raise_for_status()


async def served(server: VLLMServer, num_tokens: int, calls: list[asyncio.Task]) -> None:
    """Returns when the server has sampled this many tokens more, or answered a call."""
    begin = await metric(server, "vllm:generation_tokens_total")
    while await metric(server, "vllm:generation_tokens_total") < begin + num_tokens and not any(call.done() for call in calls):
        await asyncio.sleep(0.01)


async def metric(server: VLLMServer, name: str) -> float:
    async with httpx.AsyncClient(trust_env=False) as http:
        lines = (await http.get(f"{server.url}/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def test_a_groups_prompt_is_computed_once(vllm_server):
    """Whole blocks of it, without asking for it first; and not after the weights have changed."""
    model = model_of(vllm_server)
    engine = engine_on(vllm_server)
    prompt = tuple(np.random.default_rng(0).integers(3, 70, 96).tolist())  # three blocks of 32, the last is needed anew

    async def group(name: str) -> float:
        begin = await metric(vllm_server, "vllm:prefix_cache_hits_total")
        requests = [GenerateRequest(f"{name}/{i}", prompt, SamplingParams(4), group_size=4) for i in range(4)]
        await asyncio.gather(*(engine.generate(request) for request in requests))
        return await metric(vllm_server, "vllm:prefix_cache_hits_total") - begin

    async def work():
        await publish(engine, named(model), 7)
        hits = [await group("a"), await group("b")]
        await publish(engine, named(model), 8)
        return [*hits, await group("c")]

    assert run(engine, work) == [3 * 64, 4 * 64, 3 * 64]


@pytest.mark.slow
def test_weights_of_two_ranks(vllm_server, vllm_python, tmp_path):
    log_path = tmp_path / "log"
    with VLLMServer(
        vllm_server.model_dir, tp=2, dtype="float32", python=vllm_python, log_path=log_path, startup_timeout_s=300
    ) as server:
        engine = engine_on(server)
        new = other_weights(model_of(server), seed=2)

        async def work():
            await engine.open()
            await publish(engine, named(new), 3)
            return await engine.checksums(SERVERS), await engine.prompt_logprobs(PROMPT)

        held, logprobs = run(engine, work)
        assert held["server 0"] == sender_of(engine).checksums(named(new)) and "1/lm_head.weight" not in held["server 0"]
        np.testing.assert_allclose(logprobs, reference(new, PROMPT[:1], np.array(PROMPT[1:]), 1.0), atol=1e-4)


class Trainer:
    """The trainer's end of a publish in this process."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.senders: dict[str, Any] = {}

    async def open_senders(self, senders: dict[str, Any]) -> None:
        for name in senders.keys() - self.senders.keys():
            await asyncio.to_thread(senders[name].open, 0, 1)
            self.senders[name] = senders[name]

    async def close_senders(self) -> None:
        while self.senders:
            await asyncio.to_thread(self.senders.popitem()[1].close)

    async def send_weights(self, version: int, servers: list[str]) -> dict[str, float]:
        for name in servers:
            await asyncio.to_thread(self.senders[name].send, named(self.model), version)
        return {"bytes": 1.0, "buckets": 1.0}

    async def checksums(self, servers: list[str]) -> dict[str, dict[str, str]]:
        return {name: self.senders[name].checksums(named(self.model)) for name in servers}

    async def score(self, sequences: list[tuple[int, ...]]) -> list[np.ndarray]:
        return [reference(self.model, ids[:1], np.array(ids[1:]), 1.0) for ids in sequences]


async def check(server: VLLMServer) -> None:
    """Publish with publish.check."""
    engine = engine_on(server, version=None)
    trainer = Trainer(other_weights(model_of(server), seed=4))
    publisher = Publisher(trainer, engine, check_every=1, tolerance=1e-3)
    async with publisher:
        try:
            await publisher.publish(1, [PROMPT])
        finally:
            await trainer.close_senders()


def test_a_publish_is_proved(vllm_server):
    asyncio.run(asyncio.wait_for(check(vllm_server), 60))


@pytest.mark.slow
def test_weights_that_arrive_but_are_not_computed_with_are_found_out(vllm_server, vllm_python, tmp_path, monkeypatch):
    """vLLM's own update leaves the old output layer, packed for oneDNN, where it shares the embeddings' weights. All checksums
    are right then; the log-probs are not."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    own = ["--worker-extension-cls", "vllm_test_extension.OwnUpdates"]
    folder, log_path = vllm_server.model_dir, tmp_path / "log"
    with (
        VLLMServer(
            folder, dtype="float32", python=vllm_python, log_path=log_path, startup_timeout_s=300, extra_args=own
        ) as server,
        pytest.raises(RuntimeError, match="server 0 computes with other weights than version 1, though it took them"),
    ):
        asyncio.run(asyncio.wait_for(check(server), 60))
