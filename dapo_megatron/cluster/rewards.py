"""A pool of processes that decode and verify responses, with a time limit that holds whatever a verifier is stuck in."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from dapo_megatron.cluster.session import readable, redirect_output
from dapo_megatron.config import Config
from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.reward.scoring import Scorer
from dapo_megatron.reward.verifiers import Verdict


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """For transformers it isn't there, unless it is loaded already: a tokenizer doesn't need it, and its import takes seconds
    and most of a worker's memory."""
    hidden = sys.modules.setdefault("torch", None) is None  # type: ignore[arg-type]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]


@ray.remote
class RewardWorker:
    def __init__(self, cfg: Config, model_dir: str, log: str) -> None:
        redirect_output(log)
        self._scorer = Scorer.from_config(cfg.reward, cfg.rollout.max_response_tokens)
        with _without_torch():
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def ready(self) -> None:
        """Answers when the worker has started."""

    def verify(self, token_ids: list[Any], gold: str) -> list[tuple[str, Verdict]]:
        """Text and verdict of each response."""
        texts = [str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)) for ids in token_ids]
        return [(text, self._scorer.verify(text, gold)) for text in texts]


class RewardPool:
    """`score` may be awaited concurrently; each call takes one idle worker."""

    def __init__(self, cfg: Config, model_dir: str, log_dir: str) -> None:
        self._args = (cfg, model_dir, f"{log_dir}/rewards.log")
        self._timeout_s = cfg.reward.timeout_s
        self._scorer = Scorer.from_config(cfg.reward, cfg.rollout.max_response_tokens)
        self._workers = [self._new_worker() for _ in range(cfg.reward.num_workers)]
        self._idle: asyncio.Queue[Any] | None = None

    def _new_worker(self) -> Any:
        return RewardWorker.options(num_cpus=0).remote(*self._args)  # type: ignore[attr-defined]

    async def score(self, prompt: Prompt, completions: list[Completion]) -> Group:
        """The scored group. A response whose verdict takes over reward.timeout_s is incorrect; its worker is replaced."""
        ids = [completion.token_ids for completion in completions]
        verified, seconds = await self._verify(ids, prompt.gold, self._timeout_s * len(ids))
        if verified is None:  # one by one, to find the culprit
            verified = []
            for one in ids:
                single, more = await self._verify([one], prompt.gold, self._timeout_s)
                seconds += more
                verified += single or [("", Verdict(False, None, f"no verdict within {self._timeout_s:g} s"))]
        texts, verdicts = [text for text, _ in verified], [verdict for _, verdict in verified]
        group = self._scorer.group(prompt, texts, completions, verdicts)
        group.reward_s = seconds
        return group

    async def _verify(self, ids: list[Any], gold: str, timeout_s: float) -> tuple[list[tuple[str, Verdict]] | None, float]:
        """And the seconds that it took. None: the worker had to be replaced."""
        if self._idle is None:
            self._idle = asyncio.Queue()
            for worker in self._workers:
                self._idle.put_nowait(worker)
        worker = await self._idle.get()
        begin = time.monotonic()
        try:
            await worker.ready.remote()
            begin = time.monotonic()  # starting up is not the verifier's time
            result = await asyncio.wait_for(worker.verify.remote(ids, gold), timeout_s)
            return result, time.monotonic() - begin
        except (TimeoutError, RayActorError):  # stuck, or crashed by what it was given
            ray.kill(worker)
            worker = self._new_worker()
            return None, time.monotonic() - begin
        except RayError as error:
            raise readable(error) from error
        finally:
            self._idle.put_nowait(worker)
