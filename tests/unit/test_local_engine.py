"""The local engine: pure sampling, true log-probs, versions, and no weight forgotten."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dapo_megatron.rollout.engine import GenerateRequest, SamplingParams
from dapo_megatron.rollout.local_engine import LocalEngine, sample

EOS = 2
PROMPT = (5, 9, 3, 20)


def make_model(seed: int, tied: bool = True) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).requires_grad_(False).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(0)


@pytest.fixture
def engine(model, tmp_path) -> LocalEngine:
    model.save_pretrained(tmp_path)
    return LocalEngine(tmp_path, dtype="float32", eos_ids=(EOS,))


def request(i: int, max_new_tokens: int = 16, seed: int | None = None, **params) -> GenerateRequest:
    return GenerateRequest(f"g/{i}", PROMPT, SamplingParams(max_new_tokens, **params), i if seed is None else seed)


def generate(engine: LocalEngine, *requests: GenerateRequest) -> list:
    async def work() -> list:
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(work())


def reference(model: Any, token_ids: np.ndarray, temperature: float) -> np.ndarray:
    ids = torch.tensor([[*PROMPT, *token_ids.tolist()]])
    logprobs = (model(ids).logits[0, len(PROMPT) - 1 : -1] / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[0, len(PROMPT) :, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_model_at_the_temperature(engine, model, temperature):
    for c in generate(engine, *(request(i, temperature=temperature) for i in range(8))):
        np.testing.assert_allclose(c.logprobs, reference(model, c.token_ids, temperature), atol=1e-5)
        assert c.token_ids.dtype == c.versions.dtype == np.int32 and c.logprobs.dtype == np.float32


def test_a_response_depends_on_its_seed_and_not_on_order_or_company(engine):
    alone = [generate(engine, request(i))[0] for i in range(6)]
    together = generate(engine, *(request(i) for i in reversed(range(6))))[::-1]
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.logprobs.tolist() == b.logprobs.tolist()
    assert len({tuple(c.token_ids) for c in alone}) == 6
    same_seed = generate(engine, request(0, seed=3), request(1, seed=3))
    assert same_seed[0].token_ids.tolist() == same_seed[1].token_ids.tolist() == alone[3].token_ids.tolist()


def test_sampling_follows_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    n = 20_000

    def frequencies(params: SamplingParams) -> np.ndarray:
        return np.bincount([sample(logits, params, generator)[0] for _ in range(n)], minlength=4) / n

    def check(params: SamplingParams, expected: torch.Tensor) -> None:
        p = expected.numpy()
        assert (np.abs(frequencies(params) - p) <= 5 * np.sqrt(p * (1 - p) / n)).all()

    check(SamplingParams(1), logits.softmax(-1))
    check(SamplingParams(1, temperature=0.5), (logits / 0.5).softmax(-1))
    probs = logits.softmax(-1)  # 0.644 0.237 0.087 0.032
    two = torch.tensor([probs[0], probs[1], 0, 0]) / (probs[0] + probs[1])
    check(SamplingParams(1, top_k=2), two)
    check(SamplingParams(1, top_p=0.7), two)  # the token that crosses 0.7 belongs to it
    check(SamplingParams(1, top_p=0.1), torch.tensor([1.0, 0, 0, 0]))
    token, logprob = sample(logits, SamplingParams(1, top_k=1), generator)
    assert token == 0 and logprob == pytest.approx(float(probs[0].log()))  # not renormalised
    token, logprob = sample(logits, SamplingParams(1, temperature=0), generator)
    assert token == 0 and logprob == pytest.approx(float(probs[0].log()))


def test_eos_belongs_to_the_response_and_the_limit_cuts(engine):
    completions = generate(engine, *(request(i, max_new_tokens=40) for i in range(16)))
    stopped = [c for c in completions if c.finish_reason == "stop"]
    cut = [c for c in completions if c.finish_reason == "length"]
    assert stopped and cut and len(stopped) + len(cut) == 16
    assert all(c.token_ids[-1] == EOS and EOS not in c.token_ids[:-1] for c in stopped)
    assert all(len(c) == 40 and EOS not in c.token_ids for c in cut)
    early = generate(engine, request(0, stop_token_ids=tuple(range(32))))[0]
    assert len(early) == 1 and early.finish_reason == "stop"


def test_abort_returns_what_there_is(engine):
    async def work():
        calls = [asyncio.create_task(engine.generate(request(i, 60, stop_token_ids=()))) for i in range(2)]
        for _ in range(3):
            await asyncio.sleep(0)
        await engine.abort(["g/0", "unknown"])
        return await asyncio.gather(*calls)

    aborted, other = asyncio.run(work())
    assert aborted.finish_reason == "abort" and 0 < len(aborted) < 4 and len(aborted.logprobs) == len(aborted)
    assert other.finish_reason != "abort" and len(other) > len(aborted)


def test_publish_replaces_the_weights_and_moves_the_version(engine, model):
    new = make_model(1)

    async def work():
        (sender,) = (await engine.weight_senders()).values()
        await engine.begin_update(4)
        sender.open(0, 1)
        tensors = list(new.named_parameters())
        sender.send(tensors[:3], 4)
        sender.send(tensors[3:], 4)
        sender.close()
        await engine.end_update(4)
        held = await engine.checksums()
        assert held == {"local": sender.checksums(tensors)}
        with torch.no_grad():
            tensors[5][1].view(-1)[0] += 1e-3
        wrong = sender.checksums(tensors)
        assert [name for name in wrong if wrong[name] != held["local"][name]] == [tensors[5][0]]
        with torch.no_grad():
            tensors[5][1].view(-1)[0] -= 1e-3
        return await engine.generate(request(0)), await engine.prompt_logprobs(PROMPT)

    completion, prompt = asyncio.run(work())
    np.testing.assert_allclose(completion.logprobs, reference(new, completion.token_ids, 1.0), atol=1e-4)
    assert np.abs(completion.logprobs - reference(model, completion.token_ids, 1.0)).max() > 0.1
    assert (completion.versions == 4).all() and prompt.shape == (3,)


def test_an_update_must_be_complete_and_exact(engine, model):
    tensors = [(name, tensor.detach()) for name, tensor in model.named_parameters()]

    async def work():
        with pytest.raises(ValueError, match="version 1 came while version None"):
            engine.load_bucket(tensors, 1)
        await engine.begin_update(1)
        with pytest.raises(ValueError, match=r"'model\.nothing' is unknown"):
            engine.load_bucket([("model.nothing", torch.zeros(1))], 1)
        with pytest.raises(ValueError, match="has shape"):
            engine.load_bucket([(tensors[0][0], torch.zeros(1))], 1)
        engine.load_bucket(tensors[:-1], 1)
        with pytest.raises(ValueError, match="sent twice"):
            engine.load_bucket(tensors[:1], 1)
        with pytest.raises(ValueError, match=rf"1 weights were not sent, such as \['{tensors[-1][0]}'\]"):
            await engine.end_update(1)
        with pytest.raises(RuntimeError, match="being published"):
            await engine.generate(request(0))
        await engine.begin_update(1)  # starts over
        engine.load_bucket(tensors, 1)
        await engine.end_update(1)
        return await engine.generate(request(0))

    assert (asyncio.run(work()).versions == 1).all()


def test_wrong_requests(engine):
    with pytest.raises(ValueError, match="exceed the model's context of 64"):
        generate(engine, request(0, max_new_tokens=61))
    with pytest.raises(ValueError, match=r"ids in 0\.\.31"):
        generate(engine, GenerateRequest("g/0", (32,), SamplingParams(1)))
    with pytest.raises(ValueError, match="in flight already"):
        generate(engine, request(0), request(0))
