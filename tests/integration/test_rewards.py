"""The reward pool: verdicts from processes, with a limit that holds whatever a worker is stuck in."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from transformers import AutoTokenizer

from dapo_megatron.cluster.rewards import RewardPool
from dapo_megatron.cluster.session import ray_session
from dapo_megatron.config import Config
from dapo_megatron.config_io import load_config
from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.weights.source import resolve_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cfg() -> Iterator[Config]:
    with ray_session(hide_gpus=True):
        yield load_config(ROOT / "configs/tiny_cpu.yaml", ["reward.verifier=exact_answer", "reward.timeout_s=5"])


@pytest.fixture
def model_dir(cfg: Config) -> str:
    return str(resolve_model(cfg.model))


def completions(model_dir: str, *texts: str) -> list[Completion]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = [np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32) for text in texts]
    return [Completion(i, np.zeros(len(i), np.float32), np.zeros(len(i), np.int32), "stop") for i in ids]


def score(pool: RewardPool, model_dir: str, *texts: str) -> Group:
    return asyncio.run(pool.score(Prompt(0, "p", (1,), "12", "set"), completions(model_dir, *texts)))


def kill_worker(pool: RewardPool) -> None:
    os.kill(ray.get(pool._workers[0].__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)


def make_verifier_loop(pool: RewardPool) -> None:
    class Endless:
        def verify(self, text: str, gold: str) -> None:
            while True:
                pass

    ray.get(pool._workers[0].__ray_call__.remote(lambda self: setattr(self, "_scorer", Endless())))


def test_verdicts(cfg: Config, model_dir: str, tmp_path: Path) -> None:
    pool = RewardPool(cfg, model_dir, str(tmp_path))
    group = score(pool, model_dir, "answer: 12", "answer: 13")
    assert group.correct.tolist() == [True, False] and group.texts[0].endswith("12")
    assert group.raw_reward.tolist() == [1.0, -1.0]
    assert group.reward_s > 0 and group.num_errors == 0
    loaded = ray.get(pool._workers[0].__ray_call__.remote(lambda self: "torch" in sys.modules))
    assert not loaded  # it takes seconds and 600 MB


def set_verifier(pool: RewardPool, verifier: Callable[[str, str], object]) -> None:
    ray.get(pool._workers[0].__ray_call__.remote(lambda self: setattr(self._scorer, "_verifier", verifier)))
    pool._idle = None  # queues belong to the loop of the call before


def test_a_verifier_that_raises_or_gives_no_verdict(cfg: Config, model_dir: str, tmp_path: Path) -> None:
    def raises(text: str, gold: str) -> None:
        raise RecursionError("too deep")

    pool = RewardPool(cfg, model_dir, str(tmp_path))
    set_verifier(pool, raises)
    group = score(pool, model_dir, "answer: 12", "answer: 13")
    assert group.correct.tolist() == [False, False] and group.num_errors == 2
    set_verifier(pool, lambda text, gold: float("nan"))
    with pytest.raises(ValueError, match=r"data source set, problem p: verifier exact_answer gave nan"):
        score(pool, model_dir, "answer: 12")


@pytest.mark.slow
@pytest.mark.parametrize("break_worker", [kill_worker, make_verifier_loop])
def test_a_dead_or_stuck_worker_is_replaced(
    cfg: Config, model_dir: str, tmp_path: Path, break_worker: Callable[[RewardPool], None]
) -> None:
    cfg.reward.timeout_s = 1.0
    pool = RewardPool(cfg, model_dir, str(tmp_path))
    assert score(pool, model_dir, "answer: 12").correct.tolist() == [True]
    pool._idle = None  # queues belong to the loop of the call before
    break_worker(pool)
    group = score(pool, model_dir, "answer: 12", "answer: 13")
    assert group.correct.tolist() == [True, False] and group.num_errors == 0


@pytest.mark.slow
def test_verdicts_over_the_limit_are_incorrect_and_counted(cfg: Config, model_dir: str, tmp_path: Path) -> None:
    cfg.reward.timeout_s = 1e-6
    pool = RewardPool(cfg, model_dir, str(tmp_path))
    group = score(pool, model_dir, "answer: 12")
    assert group.correct.tolist() == [False] and group.num_errors == 1
