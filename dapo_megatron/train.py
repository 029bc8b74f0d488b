"""DAPO (arXiv 2503.14476): the step, and the loop around it.

The controller decides the order. It names no engine and no Megatron class: sampling, training ranks and servers stand behind
`run`, and what a word like `publish` means is in the module of that name.
"""

import asyncio
from dataclasses import dataclass

from dapo_megatron.algo.packing import pack_minibatch_for
from dapo_megatron.algo.samples import build_samples, set_weights, split_minibatches
from dapo_megatron.audit.record import RecordedTrainer, StepTrainer
from dapo_megatron.cluster.cluster import Cluster, start_cluster
from dapo_megatron.config import Config
from dapo_megatron.evaluate import Evaluator
from dapo_megatron.nonfinite import NonfiniteGuard
from dapo_megatron.records import MicroBatch, Sample
from dapo_megatron.rollout.ahead import Batches
from dapo_megatron.run_folder import RunFolder
from dapo_megatron.setup import Prepared, make_sampler, prepare
from dapo_megatron.stopping import CutOff, ProcessLost, StopAsked, StopSignal
from dapo_megatron.telemetry.console import RunConsole
from dapo_megatron.telemetry.measure import Phases, measure_step
from dapo_megatron.telemetry.samples import write_samples
from dapo_megatron.weights.publish import Publisher, logprob_tolerance


@dataclass
class Run:
    """What a step works with."""

    cfg: Config
    cluster: Cluster
    prepared: Prepared
    batches: Batches
    publisher: Publisher
    evaluator: Evaluator
    guard: NonfiniteGuard
    folder: RunFolder
    console: RunConsole
    phases: Phases


async def dapo_step(run: Run, step: int) -> dict[str, float]:
    """One rollout step; returns its metrics. The engines hold the weights of version step - 1 before and of step after.

    With rollout.max_staleness the next step's batch is collected meanwhile.
    """
    cfg, phase = run.cfg, run.phases
    policy: StepTrainer = run.cluster.policy
    with phase("rollout"):  # sample, score and filter until the batch is full
        sampled = await run.batches.take(version=step - 1)
    samples = build_samples(
        sampled.groups,
        version=step - 1,
        advantage=cfg.algorithm.advantage,
        std_eps=cfg.algorithm.std_eps,
        overlong_filter=cfg.reward.overlong.filter,
    )
    minibatches = split_minibatches(samples, cfg.optimizer.prompts_per_minibatch)
    if cfg.audit.save_every and step % cfg.audit.save_every == 0:
        folder = run.folder.path / "audit" / f"step_{step:06d}"
        policy = RecordedTrainer(run.cluster.policy, cfg, step, folder, minibatches, after=False)
    async with run.publisher.training():  # no server is given weights that are about to change
        await policy.load_batch(pack(cfg, minibatches))
        with phase("old_logprobs"):
            drift = await policy.old_logprobs() if cfg.algorithm.old_logprobs == "trainer" else []
        with phase("update"):
            updates = []
            for index, minibatch in enumerate(minibatches):
                if any(sample.num_valid for sample in minibatch):  # all filtered: no loss, no update, no weight decay
                    updates.append(await policy.update(index, learning_rate(cfg, step)))
                    run.guard.check(step, index, minibatch, updates[-1])
        run.publisher.version = step
    with phase("rollout"):
        await run.batches.before_publish()
    with phase("publish"):
        async with run.publisher.lock:
            published = await run.publisher.publish(version=step, texts=[s.token_ids for s in samples[:4]])
    write_samples(run.folder.path, step, sampled.groups, sampled.filtered, run.prepared.decode)
    return {
        **measure_step(sampled, samples, drift, updates, len(minibatches)),
        **published,
        **run.cluster.engine.metrics(),
        "optimizer/lr": learning_rate(cfg, step),
        "optimizer/nonfinite_in_a_row": float(run.guard.num_in_a_row),
        "sync/version": float(step),
    }


def pack(cfg: Config, minibatches: list[list[Sample]]) -> list[list[list[MicroBatch]]]:
    """[dp rank][mini-batch][micro-batch]: weights of the aggregation, then micro-batches by token budget."""
    packed = []
    for minibatch in minibatches:
        set_weights(minibatch, cfg.algorithm.aggregation, cfg.rollout.max_response_tokens)
        packed.append(pack_minibatch_for(cfg.parallel, minibatch))
    return [[shares[rank] for shares in packed] for rank in range(cfg.parallel.dp)]


def learning_rate(cfg: Config, step: int) -> float:
    """Constant after a linear warm-up, counted in rollout steps (from 1), not in optimizer steps."""
    return cfg.optimizer.lr * min(1.0, step / max(cfg.optimizer.warmup_steps, 1))


async def train(run: Run) -> None:
    """All steps that are left, and the export of the policy."""
    policy, folder = run.cluster.policy, run.folder
    async with run.publisher, run.batches:
        if folder.checkpoint:
            async with run.publisher.checkpoint():
                await folder.load_policy(policy.load)
        await run.publisher.publish(version=folder.resumed_step)
        await take_steps(run)
    if run.cfg.checkpoint.export_hf:
        run.console.phase("export")
        await policy.export_hf(str(folder.path / "hf"))
        run.console.note(f"final policy: {folder.path / 'hf'}")


async def take_steps(run: Run) -> None:
    """With evaluation and checkpoints where the configuration wants them. CutOff if the run was asked to stop."""
    cfg, policy, folder = run.cfg, run.cluster.policy, run.folder
    with folder.metrics() as writer:
        run.guard.resume(writer.last_row)
        if folder.resumed_step == 0 and cfg.eval.every >= 0:
            writer.write(0, await evaluate(run, 0))
        row: dict[str, float] = {}
        for step in range(folder.resumed_step + 1, cfg.run.steps + 1):
            run.phases.begin_step()
            try:
                row = await dapo_step(run, step)
            except StopAsked:  # of this step nothing has been done
                await checkpoint(run, step - 1, row)
                raise CutOff(f"stopped after step {step - 1} as asked to; started again the run goes on there") from None
            if is_due(step, cfg.eval.every, cfg.run.steps):
                row |= await evaluate(run, step)
            row |= run.phases.metrics(row, run.prepared.stream, await policy.peak_memory_gb())
            if is_due(step, cfg.checkpoint.every, cfg.run.steps):
                await checkpoint(run, step, row)
                row |= run.phases.seconds()
            run.console.step(step, row)
            writer.write(step, row)


async def checkpoint(run: Run, step: int, row: dict[str, float]) -> None:
    """The state after `step`, unless that is saved already, or is what a run starts with."""
    if step == run.folder.saved_step:
        return
    with run.phases("rollout"):
        await run.batches.finish()  # what is collected ahead is saved too
    with run.phases("checkpoint"):
        async with run.publisher.checkpoint():
            await run.folder.save_checkpoint(step, row, run.cluster.policy.save, run.batches, run.prepared.stream)


def is_due(step: int, every: int, last: int) -> bool:
    """Every `every` steps (0: only after the last one; negative: never)."""
    return every >= 0 and (step == last or (every > 0 and step % every == 0))


async def evaluate(run: Run, step: int) -> dict[str, float]:
    """The `eval/*` metrics of the published weights."""
    with run.phases("eval"):
        values = await run.evaluator.evaluate(step)
    run.console.evaluation(step, values)
    return values


def main(cfg: Config, resume: str) -> int:
    """The run, from preparation to the end; returns the exit code. Raises ValueError and RuntimeError for users to read, among
    them CutOff."""
    with StopSignal() as stop, RunFolder.open(cfg, resume) as folder, RunConsole(cfg.run.steps) as console:
        prepared = prepare(cfg)
        folder.load_state("stream", prepared.stream)
        console.header(prepared.facts(folder))
        if folder.finished:
            console.note(f"all {cfg.run.steps} steps are done: raise run.steps to go on, or use --resume never")
            return 0
        try:
            with start_cluster(cfg, prepared.model_dir, prepared.eos_ids, folder.path, console.note) as cluster:
                console.header(cluster.policy.kernels() | cluster.places)
                asyncio.run(train(make_run(cluster, prepared, folder, console, stop)))
        except ProcessLost as error:
            if not folder.progressed:
                raise  # what is too much for the machine would be again
            raise CutOff(f"{error}; started again the run goes on after step {folder.saved_step}") from error
        console.summary()
    return 0


def make_run(cluster: Cluster, prepared: Prepared, folder: RunFolder, console: RunConsole, stop: StopSignal) -> Run:
    cfg = prepared.cfg
    batches = Batches(make_sampler(cfg, prepared, cluster), cfg, stop)
    folder.load_state("sampler", batches)
    checks = cfg.publish.check, logprob_tolerance(cfg)
    publisher = Publisher(cluster.policy, cluster.engine, *checks, turns=cluster.turns)
    evaluator = Evaluator(cfg, cluster.engine, cluster.rewards.score, prepared.eval_prompts, prepared.eos_ids)
    guard = NonfiniteGuard(folder.path, cfg.optimizer.max_skipped_updates, console.note)
    return Run(cfg, cluster, prepared, batches, publisher, evaluator, guard, folder, console, Phases(console))
