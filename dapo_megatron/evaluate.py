"""Accuracy on held-out prompts: in a run through its own engines, and by `dapo eval`, which starts nothing but engines. Touches
neither the training stream nor its random state."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import comb
from pathlib import Path

from dapo_megatron.checkpoint_files import sync
from dapo_megatron.cluster.cluster import start_engines
from dapo_megatron.config import Config
from dapo_megatron.config_io import config_hash, resolved_yaml
from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.rollout.engine import GenerateRequest, RolloutEngine, SamplingParams
from dapo_megatron.rollout.http_engine import HttpEngine
from dapo_megatron.rollout.sampler import request_seed
from dapo_megatron.setup import prepare
from dapo_megatron.telemetry.metrics import METRICS

VERSION = 0  # of a model's own weights, as engines report it until others are published to them


class Evaluator:
    """k samples at eval.temperature of every prompt and, if wanted, a greedy one."""

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
        return measure(*await self.answer(step))

    async def answer(self, version: int) -> tuple[list[Group], list[Group]]:
        """A group of the k samples for each prompt, and one of the greedy response; none of the latter unless eval.greedy.
        RuntimeError if the engine doesn't hold weights of this version."""
        sampled = await self._groups(self._sampled, self._cfg.eval.samples, "eval", version)
        return sampled, await self._groups(self._greedy, 1, "greedy", version) if self._cfg.eval.greedy else []

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


def measure(sampled: Sequence[Group], greedy: Sequence[Group]) -> dict[str, float]:
    """The `eval/*` metrics of what Evaluator.answer gave; without majority_at_k if the verifier tells no answers."""
    k = len(sampled[0].correct)
    completions = [completion for group in sampled for completion in group.completions]
    values = {
        "eval/avg_at_k": sum(float(group.correct.mean()) for group in sampled) / len(sampled),
        "eval/pass_at_k": pass_at(k, sampled),
        "eval/k": float(k),
        "eval/prompts": float(len(sampled)),
        "eval/length_mean": sum(map(len, completions)) / len(completions),
        "eval/cut_share": sum(completion.finish_reason == "length" for completion in completions) / len(completions),
        "eval/verifier_errors": float(sum(group.num_errors for group in (*sampled, *greedy))),
    }
    if all(group.extracted for group in sampled):
        values["eval/majority_at_k"] = sum(map(majority, sampled)) / len(sampled)
    if greedy:
        values["eval/greedy"] = sum(bool(group.correct[0]) for group in greedy) / len(greedy)
    return values


def pass_at(k: int, groups: Sequence[Group]) -> float:
    """pass@k: how likely it is that at least one of k samples is correct, by n >= k samples of each prompt, c of them correct:
    the mean of 1 - C(n - c, k) / C(n, k), without bias (Chen et al. 2021, arXiv 2107.03374, section 2.1)."""
    chances = [1 - comb(len(g.correct) - int(g.correct.sum()), k) / comb(len(g.correct), k) for g in groups]
    return sum(chances) / len(chances)


def majority(group: Group) -> float:
    """Whether the answer that most responses agree on is correct; in a tie the share of the first that are, which is what
    drawing one of them gives on average. Responses without an answer don't vote; 0 if there is none."""
    votes = Counter(answer for answer in group.extracted if answer is not None)
    first = {answer for answer, number in votes.items() if number == max(votes.values())}
    right = {answer for answer, correct in zip(group.extracted, group.correct, strict=True) if correct}
    return len(first & right) / max(len(first), 1)


def main(cfg: Config) -> int:
    """`dapo eval`: prints what model.path achieves on data.eval, writes it to RUN/eval/TIME-HASH.json, returns the exit code.
    Touches nothing else of the run's folder: a run may be going on in it. Raises ValueError and RuntimeError for users to
    read."""
    folder = Path(cfg.run.dir).expanduser() / cfg.run.name / "eval"
    prepared = prepare(cfg)
    for name, text in prepared.eval_facts().items():
        _say(f"{name:<8}  {text}")
    with start_engines(cfg, prepared.model_dir, prepared.eos_ids, folder, _say) as (engine, rewards):
        _say(f"evaluating: {cfg.eval.samples} samples of each prompt{', and a greedy one' if cfg.eval.greedy else ''} ...")
        evaluator = Evaluator(cfg, engine, rewards.score, prepared.eval_prompts, prepared.eos_ids)
        begin = time.monotonic()
        sampled, greedy = asyncio.run(answer_by_own_weights(evaluator, engine))
        seconds = time.monotonic() - begin
    values, passes = measure(sampled, greedy), pass_curve(sampled)
    _say(table(values, passes))
    found = {"model": cfg.model.path, "metrics": values, "pass_at": passes, "seconds": seconds}
    _say(f"written to {_write(folder, cfg, found)}")
    return 0


async def answer_by_own_weights(evaluator: Evaluator, engine: RolloutEngine) -> tuple[list[Group], list[Group]]:
    """Evaluator.answer by servers that nobody publishes to: they serve the weights that they were started with."""
    serving = None
    try:
        await engine.open()
        serving = asyncio.ensure_future(_let_serve(engine))
        return await evaluator.answer(VERSION)
    finally:
        if serving is not None:
            serving.cancel()
        await engine.aclose()


async def _let_serve(engine: RolloutEngine) -> None:
    """Servers that were lost too, when they have been started anew: they have loaded the same weights again."""
    while True:
        await engine.joined()
        assert isinstance(engine, HttpEngine)  # with others none ever lacks weights
        for server in engine.fleet.waiting():
            engine.fleet.serves(server, VERSION)


def pass_curve(sampled: Sequence[Group]) -> dict[int, float]:
    """pass@1, 2, 4, ... up to the number of samples."""
    num_samples = len(sampled[0].correct)
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return {k: pass_at(k, sampled) for k in (*powers, num_samples)}


def table(values: Mapping[str, float], passes: Mapping[int, float]) -> str:
    """For people, in the order of METRICS."""
    lines = [
        f"{name:<{_WIDTH}}  {values[name]:>8.4g}  {metric.unit:<9}  {metric.meaning}"
        for name, metric in METRICS.items()
        if name in values
    ]
    lines.append(f"{'pass@':<{_WIDTH}}  " + "  ".join(f"{k}: {value:.4g}" for k, value in passes.items()))
    if "eval/majority_at_k" not in values:
        lines.append("majority@k is left out: the verifier doesn't tell the answers that it reads")
    return "\n".join(lines)


_WIDTH = max(len(name) for name in METRICS if name.startswith("eval/"))


def _write(folder: Path, cfg: Config, found: Mapping[str, object]) -> Path:
    """The file, which is whole when it gets its name, and whose name no other evaluation has."""
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{config_hash(cfg)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**found, "config": resolved_yaml(cfg)}, indent=1), encoding="utf-8")
    sync(partial)
    partial.replace(path)
    return path


def _say(text: str) -> None:
    print(text, flush=True)
