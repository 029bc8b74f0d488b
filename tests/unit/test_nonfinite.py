"""What the controller does about updates that the policy skipped."""

import asyncio
import math
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

from dapo_megatron.config import Config
from dapo_megatron.nonfinite import NonfiniteGuard
from dapo_megatron.samples_file import load_samples
from dapo_megatron.telemetry.metrics import MetricsWriter
from tests.distributed.harness import make_samples

GOOD = [{"grad_norm_max": 2.0, "loss_sum": 4.0, "num_tokens": 8.0}]
NAN = [{"grad_norm_max": math.nan, "loss_sum": loss, "num_tokens": 8.0} for loss in (math.nan, 1.0)]  # of two replicas
INF = [{"grad_norm_max": math.inf, "loss_sum": 4.0, "num_tokens": 8.0}]


def make_guard(tmp_path: Path, limit: int) -> tuple[NonfiniteGuard, list[str]]:
    notes: list[str] = []
    return NonfiniteGuard(tmp_path, limit, notes.append), notes


def test_a_skipped_update_is_said_and_its_minibatch_saved(tmp_path: Path) -> None:
    guard, notes = make_guard(tmp_path, 3)
    samples = make_samples()
    guard.check(4, 0, samples, GOOD)
    assert notes == [] and not (tmp_path / "nonfinite").exists()
    guard.check(4, 1, samples, NAN)
    path = tmp_path / "nonfinite" / "step_000004_update_1.npz"
    assert len(load_samples(path)) == len(samples)
    [note] = notes
    assert "step 4, update 1: loss nan, gradient norm nan; skipped" in note and str(path) in note and "1 in a row" in note


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    guard, notes = make_guard(tmp_path, 2)
    for step, update in enumerate([NAN, INF, GOOD, INF, NAN], 1):  # a good one starts the count anew
        guard.check(step, 0, make_samples(), update)
    assert len(notes) == 4 and guard.num_in_a_row == 2
    with pytest.raises(RuntimeError, match=r"gradient norm inf.*3 in a row, more than optimizer.max_skipped_updates \(2\)"):
        guard.check(6, 0, make_samples(), INF)
    assert (tmp_path / "nonfinite" / "step_000006_update_0.npz").exists()


def test_none_is_allowed_with_a_limit_of_0(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path, 0)
    with pytest.raises(RuntimeError, match="1 in a row"):
        guard.check(1, 0, make_samples(), NAN)


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    guard, _ = make_guard(tmp_path, 3)
    guard.check(1, 0, make_samples(), NAN)
    resumed, _ = make_guard(tmp_path, 1)
    resumed.resume({"step": 1, "optimizer/nonfinite_in_a_row": guard.num_in_a_row})
    with pytest.raises(RuntimeError, match="2 in a row"):
        resumed.check(2, 0, make_samples(), NAN)
    resumed.resume({"step": -1})  # a new run
    resumed.check(1, 0, make_samples(), NAN)


def test_the_loop_takes_the_count_from_the_resumed_step(tmp_path: Path) -> None:
    from dapo_megatron.train import train

    writer = MetricsWriter(tmp_path)
    writer.write(7, {"optimizer/nonfinite_in_a_row": 2.0})
    run = MagicMock(cfg=Config(), guard=make_guard(tmp_path, 3)[0])
    run.cfg.run.steps, run.folder.resumed_step, run.cfg.checkpoint.export_hf = 7, 7, False  # nothing is left to do
    run.folder.load_policy, run.publisher.connect, run.publisher.publish = AsyncMock(), AsyncMock(), AsyncMock()
    run.folder.metrics.return_value.__enter__.return_value = writer
    asyncio.run(train(run))
    assert run.guard.num_in_a_row == 2
