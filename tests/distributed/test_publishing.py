"""What trainer ranks do for a publish beside sending weights: log-probs of given texts, and word of servers that failed."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dapo_megatron.cluster.trainer import PolicyGroup
from dapo_megatron.config import Config
from dapo_megatron.policy import weights_io
from dapo_megatron.policy.policy import Policy
from dapo_megatron.policy.sending import Sending
from dapo_megatron.policy.worker import PolicyWorker
from tests.distributed.harness import LAYOUTS, VOCAB, RankPool, make_config, make_samples, pack

TEXTS = [tuple(np.random.default_rng(n).integers(0, VOCAB, n).tolist()) for n in (2, 30, 7, 2, 61, 12, 3)]


def worker_on(rank: int, cfg: Config, folder: Path) -> PolicyWorker:
    """A PolicyWorker in a process that has joined its group already."""
    worker = PolicyWorker.__new__(PolicyWorker)
    worker.cfg, worker.rank, worker.model_dir = cfg, rank, str(folder)
    worker.policy = Policy(cfg, folder)
    return worker


def scores(rank: int, cfg: Config, folder: Path) -> list[dict[int, float]]:
    worker = worker_on(rank, cfg, folder)
    worker.load_batch([pack(make_samples(), cfg)[worker.policy.dp_rank]])
    before = worker.old_logprobs()
    parts = [worker.score(texts) for texts in (TEXTS, TEXTS[1:3])]
    assert worker.old_logprobs() == before  # the batch has not changed
    return parts


def reference(folder: Path, texts: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        each = [(model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1), torch.tensor(ids[1:])) for ids in texts]
    return [logprobs.gather(1, targets[:, None])[:, 0].numpy() for logprobs, targets in each]


async def merged(of_ranks: list[dict[int, float]], texts: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """What PolicyGroup makes of the ranks' answers."""

    def actor(answer: dict[int, float]) -> Any:
        async def remote(method: str, *args: Any) -> dict[int, float]:
            return answer

        return SimpleNamespace(call=SimpleNamespace(remote=remote))

    return await PolicyGroup([actor(answer) for answer in of_ranks], make_config(), "").score(list(texts))


@pytest.mark.parametrize(("layout", "model"), [("TP2xCP2", "llama_untied"), ("PP2xEP2", "qwen3_moe")])
def test_scores_are_transformers_logprobs(ranks: RankPool, models: dict[str, Path], layout: str, model: str) -> None:
    cfg = make_config(**LAYOUTS[layout])
    cfg.parallel.max_tokens_per_microbatch = 64
    of_ranks = ranks.run(scores, cfg.world_size, cfg, models[model])
    for call, texts in enumerate((TEXTS, TEXTS[1:3])):
        found = asyncio.run(merged([parts[call] for parts in of_ranks], texts))
        assert [array.dtype for array in found] == [np.float32] * len(texts)
        for ours, theirs in zip(found, reference(models[model], texts), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


class Failing:
    """A sender to a server that fails for one stage. What `calls` holds is that of this rank's copy."""

    device, dtype, layout = "cpu", "float32", "one"

    def __init__(self, stage: int) -> None:
        self._fails_at, self.calls = stage, []  # type: ignore[var-annotated]

    def open(self, sender: int, num_senders: int) -> None:
        self._stage = sender
        self.calls.append("open")

    def send(self, bucket: Any, version: int) -> None:
        self.calls.append("send")
        if self._stage == self._fails_at:
            raise RuntimeError(f"no answer to stage {self._stage}")

    def close(self) -> None:
        self.calls.append("close")


def send_to_failing(rank: int, folder: Path) -> tuple[str, list[list[str]]]:
    sending = Sending(Policy(make_config(**LAYOUTS["PP2"]), folder))
    senders = {"a": Failing(0), "b": Failing(1), "c": Failing(-1)}
    sending.open(senders)
    try:
        sending.send(4, ["a", "b", "c"], 10**9)
    except RuntimeError as error:
        return str(error), [sender.calls for sender in senders.values()]
    raise AssertionError("failures were not told")


def test_a_server_that_failed_one_stage_is_left_alone_by_the_others_and_all_ranks_know(
    ranks: RankPool, models: dict[str, Path]
) -> None:
    (first, first_calls), (second, second_calls) = ranks.run(send_to_failing, 2, models["llama_tied"])
    assert (
        first
        == second
        == ("weights of version 4 did not reach a, b: RuntimeError: no answer to stage 0; RuntimeError: no answer to stage 1")
    )
    assert first_calls == [["open", "send", "close"], ["open", "send", "close"], ["open", "send"]]
    assert second_calls == [["open", "close"], ["open", "send", "close"], ["open", "send"]]


def cast_streams(rank: int, cfg: Config, folder: Path) -> tuple[int, bool]:
    """(Bytes gathered for a stream in bf16, is it equal to one in fp32 that is cast afterwards.)"""
    policy = Policy(cfg, folder)
    num_bytes, gather = 0, weights_io.dist.all_gather

    def counted(gathered: list[torch.Tensor], local: torch.Tensor, group: Any) -> None:
        nonlocal num_bytes
        num_bytes += local.nbytes
        gather(gathered, local, group=group)

    weights_io.dist.all_gather = counted  # type: ignore[assignment]
    try:
        narrow = list(policy.stream_weights(torch.bfloat16))
        gathered = num_bytes
        wide = list(policy.stream_weights())
    finally:
        weights_io.dist.all_gather = gather  # type: ignore[assignment]
    assert num_bytes == 3 * gathered
    return gathered, all(a == b and torch.equal(s, t.bfloat16()) for (a, s), (b, t) in zip(narrow, wide, strict=True))


def test_weights_for_a_bf16_server_are_gathered_in_bf16(ranks: RankPool, models: dict[str, Path]) -> None:
    answers = ranks.run(cast_streams, 2, make_config(**LAYOUTS["TP2xEP2"]), models["qwen3_moe"])
    assert all(gathered > 0 and same for gathered, same in answers)
