"""Accuracy on held-out prompts through the same engines. Touches neither the training stream nor its random state."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from dapo_megatron.config import Config
from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.rollout.engine import GenerateRequest, RolloutEngine, SamplingParams
from dapo_megatron.rollout.sampler import request_seed


class Evaluator:
    """avg@k (k samples at eval.temperature) and, if wanted, greedy accuracy."""

    def __init__(
        self,
        cfg: Config,
        engine: RolloutEngine,
        score: Callable[[Prompt, list[Completion]], Awaitable[Group]],
        prompts: Sequence[Prompt],
        eos_ids: tuple[int, ...],
    ) -> None:
        self._cfg, self._engine, self._score, self._prompts = cfg, engine, score, prompts
        self._sampled = SamplingParams(
            max_new_tokens=cfg.rollout.max_response_tokens,
            temperature=cfg.eval.temperature,
            top_p=cfg.eval.top_p,
            stop_token_ids=eos_ids,
        )
        self._greedy = SamplingParams(cfg.rollout.max_response_tokens, temperature=0.0, stop_token_ids=eos_ids)

    async def evaluate(self, step: int) -> dict[str, float]:
        """The `eval/*` metrics (telemetry.metrics) of the weights after `step`, which the engine holds: RuntimeError if not."""
        k = self._cfg.eval.samples
        sampled = await self._groups(self._sampled, k, "eval", step)
        lengths = [len(c) for group in sampled for c in group.completions]
        cut = [c.finish_reason == "length" for group in sampled for c in group.completions]
        values = {
            "eval/avg_at_k": sum(float(group.correct.mean()) for group in sampled) / len(sampled),
            "eval/k": float(k),
            "eval/prompts": float(len(sampled)),
            "eval/length_mean": sum(lengths) / len(lengths),
            "eval/cut_share": sum(cut) / len(cut),
        }
        if self._cfg.eval.greedy:
            greedy = await self._groups(self._greedy, 1, "greedy", step)
            values["eval/greedy"] = sum(bool(group.correct[0]) for group in greedy) / len(greedy)
        return values

    async def _groups(self, params: SamplingParams, num_samples: int, label: str, version: int) -> list[Group]:
        limit = asyncio.Semaphore(self._engine.max_inflight_groups)

        async def one(number: int, prompt: Prompt) -> Group:
            requests = [
                GenerateRequest(
                    request_id=f"{label}{version}.{number}/{i}",
                    token_ids=prompt.token_ids,
                    params=params,
                    seed=request_seed(0, prompt.index, i),
                    group_size=num_samples,
                )
                for i in range(num_samples)
            ]
            async with limit:
                completions = await asyncio.gather(*(self._engine.generate(request) for request in requests))
            if any(completion.finish_reason == "abort" for completion in completions):
                raise RuntimeError(f"evaluation: the engine interrupted a response to prompt {prompt.uid}")
            if others := {int(v) for completion in completions for v in completion.versions} - {version}:
                raise RuntimeError(f"evaluation after step {version}: the engine answered by weight versions {sorted(others)}")
            return await self._score(prompt, list(completions))

        return list(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(self._prompts))))
