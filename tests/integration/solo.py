"""A whole run in one process, without Ray: for tests that start many. Only the processes are missing: command line, controller,
Megatron rank, local engine, rewards and files are the product's own."""

import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.forking import CONTEXT, preload

preload(
    "dapo_megatron.cli",
    "dapo_megatron.train",
    "dapo_megatron.policy.worker",
    "dapo_megatron.rollout.local_engine",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
_numbers = itertools.count()  # of the runs' outputs, which don't lie in their folders: those may be full
ONE_RANK = ("rollout.engine=local", "parallel.tp=1", "parallel.sequence_parallel=false")


class SoloRun:
    """One run of configs/tiny_cpu.yaml on one rank. `hook` is called in its process before the run starts."""

    def __init__(
        self, root: Path, folder: Path, *overrides: str, resume: str = "auto", hook: Callable[[], None] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._output = folder / "tiny_cpu", folder.with_name(f"{folder.name}.{next(_numbers)}.txt")
        command = ["train", str(root / "configs/tiny_cpu.yaml"), "--resume", resume]
        arguments = [*command, f"run.dir={folder}", *ONE_RANK, *overrides]
        self.process = CONTEXT.Process(target=_main, args=(arguments, hook, self._output))
        self.process.start()

    def finish(self, code: int = 0) -> str:
        """Its output, when it has ended with this exit code (-signal if it was killed)."""
        self.process.join(timeout=120)
        output = self._output.read_text() if self._output.exists() else ""
        assert self.process.exitcode == code, f"{self.process.exitcode}: {output}"
        return output


def die() -> None:
    """The whole job, at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def _main(arguments: list[str], hook: Callable[[], None] | None, output: Path) -> None:
    with output.open("w", buffering=1) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    from dapo_megatron import cli, train

    train.start_cluster = start_solo  # type: ignore[assignment]
    if hook:
        hook()
    code = cli.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def start_solo(cfg: Any, model_dir: Path, eos_ids: tuple[int, ...], run_dir: Path, note: Any) -> Iterator[Any]:
    """Takes the place of cluster.start_cluster. Groups in flight interleave token by token, in the same order in every run."""
    from dapo_megatron.addresses import free_port
    from dapo_megatron.cluster import rewards
    from dapo_megatron.cluster.cluster import Cluster
    from dapo_megatron.policy.worker import PolicyWorker
    from dapo_megatron.rollout.local_engine import LocalEngine

    rewards.redirect_output = lambda log: None  # type: ignore[assignment]
    rewards.RewardPool._new_worker = _reward_worker  # type: ignore[method-assign]
    PolicyWorker._bucket_bytes = 1  # type: ignore[assignment, method-assign] # every tensor is a bucket of the publish
    worker = PolicyWorker(cfg, str(model_dir), 0, 1, f"127.0.0.1:{free_port()}")
    engine = LocalEngine(model_dir, dtype=cfg.model.dtype, eos_ids=eos_ids)
    engine.max_inflight_groups = cfg.rollout.max_inflight_groups
    yield Cluster(_policy(worker, cfg, str(model_dir)), engine, rewards.RewardPool(cfg, str(model_dir), ""))


class _Here:
    """Like a Ray actor's method, `remote` and then awaited, but called in this process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def remote(self, *args: Any) -> Any:
        return self._function(*args)


def _policy(worker: Any, cfg: Any, model_dir: str) -> Any:
    from dapo_megatron.cluster.placement import Place
    from dapo_megatron.cluster.trainer import PolicyGroup

    class Policy(PolicyGroup):
        async def load_batch(self, shares: list[Any]) -> None:
            worker.load_batch(*shares)

    actor = SimpleNamespace(call=_Here(lambda method, *args: getattr(worker, method)(*args)))
    policy = Policy([actor], cfg, model_dir)
    policy.end_start([{**worker.describe(), "place": Place("", "here")}])
    return policy


def _reward_worker(pool: Any) -> Any:
    from dapo_megatron.cluster.rewards import RewardWorker

    worker = RewardWorker.__ray_metadata__.modified_class(*pool._args)  # type: ignore[attr-defined]
    return SimpleNamespace(ready=_Here(worker.ready), verify=_Here(worker.verify))
