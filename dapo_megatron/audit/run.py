"""`dapo audit`: one mini-batch on the configured layout, on a single rank and by plain transformers; do they agree?"""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from dapo_megatron.algo.packing import pack_minibatch_for
from dapo_megatron.algo.samples import set_weights
from dapo_megatron.audit.batch import audit_batch, old_logprobs, with_old_logprobs
from dapo_megatron.audit.compare import compare, table
from dapo_megatron.audit.record import Record, RecordedTrainer
from dapo_megatron.audit.reference import ReferencePolicy
from dapo_megatron.audit.shorten import shortened
from dapo_megatron.cluster.cluster import start_trainer
from dapo_megatron.config import Config, ParallelConfig
from dapo_megatron.config_io import config_hash
from dapo_megatron.data.stream import PromptStream
from dapo_megatron.layout import sizes_text
from dapo_megatron.records import Sample
from dapo_megatron.weights.source import resolve_model

# An update must be visible in the weights' dtype: with a real run's 1e-6 none would be in bf16.
UPDATE_LR = 1e-2


def audit_config(cfg: Config, stream: PromptStream, decode: Callable[[Sequence[int]], str]) -> int:
    """Before a run; returns 0 if everything is within the tolerances, else 1. Writes RUN/audit/before.json."""
    folder = (Path(cfg.run.dir).expanduser() / cfg.run.name / "audit").absolute()  # actors may be in another folder
    work = folder / "before"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model_dir = resolve_model(cfg.model)
    if cfg.audit.num_layers:
        model_dir = shortened(model_dir, cfg.audit.num_layers, work / "model")
    samples = audit_batch(cfg, stream)
    set_weights(samples, cfg.algorithm.aggregation, cfg.audit.max_tokens)
    _say(f"{len(samples)} sequences, {sum(s.num_valid for s in samples)} response tokens, {model_dir}")
    reference = _reference(cfg, model_dir)
    samples = with_old_logprobs(samples, reference.logprobs(samples))
    layout = _compute(cfg, model_dir, samples, work / "layout")
    single = _compute(_single_rank(cfg), model_dir, samples, work / "single")
    return _judge(cfg, reference, layout, single, f"layout {sizes_text(cfg.parallel)}", folder / "before.json", decode, work)


def audit_step(cfg: Config, run_dir: Path, step: int) -> int:
    """A step that the run has recorded (audit.save_every), computed again; `cfg` is the record's. Writes
    RUN/audit/step_NNNNNN.json."""
    from transformers import AutoTokenizer

    folder = run_dir.absolute() / "audit" / f"step_{step:06d}"
    record = Record.read(folder)
    work = folder / "again"
    shutil.rmtree(work, ignore_errors=True)
    _say(f"step {step}: {len(record.samples)} samples of its first mini-batch")
    single = _compute(_single_rank(cfg), folder / "before", record.samples, work / "single", lr=record.facts["lr"], after=False)
    reference = _reference(cfg, folder / "before")
    tokenizer = AutoTokenizer.from_pretrained(folder / "before")
    title, report = f"as recorded, {record.facts['layout']}", folder.with_suffix(".json")
    return _judge(cfg, reference, record, single, title, report, lambda ids: str(tokenizer.decode(list(ids))), work)


def _reference(cfg: Config, model_dir: Path) -> ReferencePolicy:
    from transformers.utils.logging import disable_progress_bar

    _say("loading plain transformers in fp64 ...")
    disable_progress_bar()  # one line a phase is enough, and logs aren't terminals
    return ReferencePolicy(model_dir, cfg.algorithm, cfg.rollout.temperature, getattr(torch, cfg.model.dtype))


def _judge(
    cfg: Config,
    reference: ReferencePolicy,
    layout: Record,
    single: Record,
    title: str,
    report: Path,
    decode: Callable[[Sequence[int]], str],
    work: Path,
) -> int:
    """`work` has what was computed, several times the model's size: it is kept only for looking into a difference."""
    _say("loss and gradients by plain transformers in fp64 ...")
    samples = layout.samples
    step = reference.step(samples, old_logprobs(samples, reference.logprobs(samples), cfg.algorithm))
    judged = partial(compare, reference=step, settings=cfg.optimizer, dtype=cfg.model.dtype)
    alone = judged("single rank", single)
    comparisons = [judged(title, layout, single=alone), alone]
    for comparison in comparisons:
        print(table(comparison, lambda token: decode([token])))
    ok = all(comparison.ok for comparison in comparisons)
    found = {"ok": ok, "model": cfg.model.path, "dtype": cfg.model.dtype, "config_hash": config_hash(cfg)}
    found["comparisons"] = [comparison.as_dict() for comparison in comparisons]
    report.write_text(json.dumps(found, indent=2), encoding="utf-8")
    print(f"{'all equal' if ok else 'DIFFERENT'} ({cfg.model.dtype}, reference: transformers in fp64); every figure: {report}")
    if ok:
        shutil.rmtree(work)
    else:
        print(f"what was computed is kept in {work}")
    return 0 if ok else 1


def _compute(
    cfg: Config, model_dir: Path, samples: Sequence[Sample], folder: Path, lr: float = UPDATE_LR, after: bool = True
) -> Record:
    """Loss, gradients and one update on the layout of `cfg`."""
    _say(f"Megatron on {cfg.world_size} rank(s) ...")

    async def step() -> None:
        with start_trainer(cfg, model_dir, folder.parent) as trainer:
            recorded = RecordedTrainer(trainer, cfg, 0, folder, [samples], after)
            shares = pack_minibatch_for(cfg.parallel, samples)
            await recorded.load_batch([[share] for share in shares])
            if cfg.algorithm.old_logprobs == "trainer":
                await recorded.old_logprobs()
            await recorded.update(0, lr)

    asyncio.run(step())
    return Record.read(folder)


def _single_rank(cfg: Config) -> Config:
    p = cfg.parallel
    alone = ParallelConfig(max_tokens_per_microbatch=p.max_tokens_per_microbatch, logprob_chunk_tokens=p.logprob_chunk_tokens)
    return replace(cfg, parallel=alone)


def _say(text: str) -> None:
    print(text, flush=True)
