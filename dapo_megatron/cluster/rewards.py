"""A pool of processes that decode and verify responses, with a time limit that holds whatever a verifier is stuck in."""

import asyncio
import time
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from dapo_megatron.cluster.session import readable, redirect_output
from dapo_megatron.config import Config
from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.reward.scoring import Scorer
from dapo_megatron.reward.verifiers import Verdict


@ray.remote
class RewardWorker:
    def __init__(self, cfg: Config, model_dir: str, log: str) -> None:
        from transformers import AutoTokenizer

        redirect_output(log)
        self._scorer = Scorer.from_config(cfg.reward, cfg.rollout.max_response_tokens)
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
        self._seconds = 0.0

    def _new_worker(self) -> Any:
        return RewardWorker.options(num_cpus=0).remote(*self._args)  # type: ignore[attr-defined]

    def take_metrics(self) -> dict[str, float]:
        """What has been done since the last call: seconds summed over workers; verdicts that failed or took too long."""
        metrics = {"time/reward_s": self._seconds, "reward/verifier_errors": float(self._scorer.num_errors)}
        self._seconds, self._scorer.num_errors = 0.0, 0
        return metrics

    async def score(self, prompt: Prompt, completions: list[Completion]) -> Group:
        """The scored group. A response whose verdict takes over reward.timeout_s is incorrect; its worker is replaced."""
        ids = [completion.token_ids for completion in completions]
        verified = await self._verify(ids, prompt.gold, self._timeout_s * len(ids))
        if verified is None:  # one by one, to find the culprit
            verified = []
            for one in ids:
                single = await self._verify([one], prompt.gold, self._timeout_s)
                verified += single or [("", Verdict(False, None, f"no verdict within {self._timeout_s:g} s"))]
        texts, verdicts = [text for text, _ in verified], [verdict for _, verdict in verified]
        return self._scorer.group(prompt, texts, completions, verdicts)

    async def _verify(self, ids: list[Any], gold: str, timeout_s: float) -> list[tuple[str, Verdict]] | None:
        if self._idle is None:
            self._idle = asyncio.Queue()
            for worker in self._workers:
                self._idle.put_nowait(worker)
        worker = await self._idle.get()
        try:
            await worker.ready.remote()  # starting up is not the verifier's time
            begin = time.monotonic()
            result = await asyncio.wait_for(worker.verify.remote(ids, gold), timeout_s)
            self._seconds += time.monotonic() - begin
            return result
        except (TimeoutError, RayActorError):  # stuck, or crashed by what it was given
            ray.kill(worker)
            worker = self._new_worker()
            return None
        except RayError as error:
            raise readable(error) from error
        finally:
            self._idle.put_nowait(worker)
