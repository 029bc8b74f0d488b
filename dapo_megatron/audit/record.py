"""What a step leaves behind so that it can be computed again: weights before, first mini-batch, log-probs, loss, gradients."""

import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dapo_megatron.algo.objective import merge_stats
from dapo_megatron.config import Config
from dapo_megatron.config_io import resolved_yaml
from dapo_megatron.layout import sizes_text
from dapo_megatron.records import MicroBatch, Sample
from dapo_megatron.samples_file import load_samples, save_samples
from dapo_megatron.weights.hf_folder import HFFolder

Share = list[list[MicroBatch]]


class StepTrainer(Protocol):
    """The trainer ranks, as a step sees them."""

    async def load_batch(self, shares: list[Share]) -> None: ...
    async def old_logprobs(self) -> list[dict[str, float]]: ...
    async def update(self, index: int, lr: float) -> list[dict[str, float]]: ...


class Trainer(StepTrainer, Protocol):
    """The trainer ranks, as seen from here."""

    async def token_logprobs(self, index: int) -> dict[int, float]: ...
    async def export_hf(self, out: str) -> None: ...
    async def write_gradients(self, out: str) -> None: ...


class RecordedTrainer:
    """Does what `trainer` does and writes down its first mini-batch that is updated with (has a valid token): `folder` appears
    when that update is done. Weights must be set before load_batch. With `after` the weights after it are kept as well."""

    def __init__(
        self, trainer: Trainer, cfg: Config, step: int, folder: Path, minibatches: Sequence[Sequence[Sample]], after: bool
    ) -> None:
        self._trainer, self._cfg, self._step, self._minibatches, self._after = trainer, cfg, step, minibatches, after
        self._index = next((i for i, samples in enumerate(minibatches) if any(s.num_valid for s in samples)), -1)
        self._folder = folder.absolute()
        self._partial = self._folder.with_name(self._folder.name + ".partial")

    async def load_batch(self, shares: list[Share]) -> None:
        if self._index >= 0:
            shutil.rmtree(self._partial, ignore_errors=True)
            save_samples(self._partial / "samples.npz", self._minibatches[self._index])
            await self._trainer.export_hf(str(self._partial / "before"))
        await self._trainer.load_batch(shares)

    async def old_logprobs(self) -> list[dict[str, float]]:
        drift = await self._trainer.old_logprobs()
        if self._index >= 0:
            await self._save_logprobs()
        return drift

    async def update(self, index: int, lr: float) -> list[dict[str, float]]:
        stats = await self._trainer.update(index, lr)
        if index == self._index:
            if self._cfg.algorithm.old_logprobs == "engine":  # the first pass through the mini-batch was the update's
                await self._save_logprobs()
            await self._trainer.write_gradients(str(self._partial / "gradients"))
            if self._after:
                await self._trainer.export_hf(str(self._partial / "after"))
            self._finish(merge_stats(stats), lr)
        return stats

    async def _save_logprobs(self) -> None:
        found = await self._trainer.token_logprobs(self._index)
        mask = np.concatenate([sample.mask for sample in self._minibatches[self._index]])
        logprobs = np.where(mask, np.nan, 0.0).astype(np.float32)  # one that wasn't computed though it counts: a difference
        logprobs[list(found)] = list(found.values())
        np.save(self._partial / "logprobs.npy", logprobs)

    def _finish(self, stats: dict[str, float], lr: float) -> None:
        found = {
            "step": self._step,
            "lr": lr,
            "layout": sizes_text(self._cfg.parallel),
            "loss": stats["loss_sum"] / stats["num_tokens"],
            "num_tokens": stats["num_tokens"],
            "grad_norm": stats["grad_norm_max"],
        }
        # the run's own may have changed by the time of the audit: it can be resumed with other settings
        (self._partial / "config.yaml").write_text(resolved_yaml(self._cfg), encoding="utf-8")
        (self._partial / "record.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._partial.rename(self._folder)


@dataclass
class Record:
    """A recorded mini-batch, read back. Gradients and weights are read tensor by tensor."""

    facts: dict[str, Any]  # see RecordedTrainer._finish
    samples: list[Sample]
    logprobs: list[np.ndarray]  # float32 [L] of each response, by the weights before; 0 where masked
    before: HFFolder
    gradients: HFFolder  # as clipped
    after: HFFolder | None

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """ValueError for a folder that holds no record, or not a whole one."""
        if not folder.is_dir():
            raise ValueError(f"{folder}: nothing was recorded there; set audit.save_every in the run's configuration")
        try:
            facts = json.loads((folder / "record.json").read_text(encoding="utf-8"))
            samples = load_samples(folder / "samples.npz")
            ends = np.cumsum([len(sample.mask) for sample in samples])
            logprobs = np.load(folder / "logprobs.npy")
            if missing := {"step", "lr", "layout", "loss", "grad_norm"} - facts.keys():
                raise ValueError(f"record.json has no {', '.join(sorted(missing))}")
            if len(logprobs) != ends[-1]:
                raise ValueError(f"logprobs.npy has {len(logprobs)} log-probs for {ends[-1]} response tokens")
            return cls(
                facts=facts,
                samples=samples,
                logprobs=np.split(logprobs, ends[:-1]),
                before=HFFolder(folder / "before"),
                gradients=HFFolder(folder / "gradients"),
                after=HFFolder(folder / "after") if (folder / "after").exists() else None,
            )
        except (OSError, ValueError, EOFError, zlib.error) as error:
            raise ValueError(
                f"{folder}: the record is damaged ({error}); restore it from a copy or take another step"
            ) from error
