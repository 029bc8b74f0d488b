"""Weights through the call itself into a real SGLang server, in the order of calls of shared devices."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo_megatron.rollout.colocated import ColocatedWeightSender
from dapo_megatron.rollout.http_engine import HttpEngine
from dapo_megatron.rollout.sglang_server import SGLangServer
from dapo_megatron.rollout.sglang_weights import ServerLayout
from dapo_megatron.weights.buckets import buckets
from dapo_megatron.weights.turns import Turns
from tests.integration.test_engine_contract import PROMPT, error, named, other_weights, reference, run, samples
from tests.sglang_engines import make_engine
from tests.unit.test_colocated import megatrons_load_from_bytes


class Trainer:
    async def offload(self) -> None: ...
    async def onload(self) -> None: ...


@pytest.fixture(autouse=True)
def as_in_a_trainer_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.storage, "_load_from_bytes", megatrons_load_from_bytes)


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).requires_grad_(False).eval()


@pytest.fixture
def engine(sglang_server: SGLangServer, tiny_model_dir: Path, model: Any) -> Iterator[HttpEngine]:
    engine = make_engine([sglang_server.url], tiny_model_dir, request_timeout_s=60, update_timeout_s=30)
    yield engine
    run(engine, lambda: publish(engine, model, 0))


async def publish(engine: HttpEngine, model: Any, version: int) -> dict[str, str]:
    """What the server must hold then."""
    tensors = named(model)
    layout = ServerLayout.of(engine_folder(model), tp=1, dtype="float32", device="cpu")
    sender = ColocatedWeightSender(engine.fleet.up[0].client.url, layout, timeout_s=30)
    turns = Turns(Trainer(), engine.memory)
    async with turns.training():
        pass
    await turns.before_update()
    servers = list(await engine.weight_senders())
    await engine.begin_update(version, servers)
    await asyncio.to_thread(sender.open, 0, 1)
    for bucket in buckets(tensors, 50_000, sender.device, sender.dtype):
        await asyncio.to_thread(sender.send, bucket, version)
    sender.close()
    await turns.after_update()
    await engine.end_update(version, servers)
    return sender.checksums(tensors)


def engine_folder(model: Any) -> Path:
    return Path(model.config._name_or_path)


def test_the_server_computes_with_what_it_was_sent(engine: HttpEngine, model: Any) -> None:
    new = other_weights(model, seed=3)

    async def work() -> tuple[Any, ...]:
        before = await samples(engine)
        expected = await publish(engine, new, 5)
        return (
            before,
            expected,
            await engine.checksums(["server 0"]),
            await samples(engine),
            await engine.prompt_logprobs(PROMPT),
        )

    before, expected, held, after, prompt = run(engine, work)
    assert held == {"server 0": expected}
    assert error(model, before) < 1e-4 and error(new, after) < 1e-4
    assert error(model, after) > 0.1  # the comparison sees the difference between the two
    np.testing.assert_allclose(prompt, reference(new, PROMPT[:1], np.array(PROMPT[1:]), 1.0), atol=1e-4)
    assert all((completion.versions == 5).all() for completion in after)


def test_a_bucket_that_is_refused_and_an_update_left_in_the_middle_can_be_started_over(engine: HttpEngine, model: Any) -> None:
    new = other_weights(model, seed=4)
    layout = ServerLayout.of(engine_folder(model), tp=1, dtype="float32", device="cpu")
    sender = ColocatedWeightSender(engine.fleet.up[0].client.url, layout, timeout_s=30)

    async def work() -> tuple[Any, ...]:
        await asyncio.to_thread(sender.open, 0, 1)
        with pytest.raises(RuntimeError, match=r"refused /update_weights_from_tensor.*begin_weight_update"):
            await asyncio.to_thread(sender.send, named(new)[:3], 6)
        await engine.begin_update(6, ["server 0"])
        await asyncio.to_thread(sender.send, named(new)[:3], 6)
        sender.close()
        return await publish(engine, new, 6), await engine.checksums(["server 0"])

    expected, held = run(engine, work)
    assert held == {"server 0": expected}
