"""Updates that aren't finite in a whole run: one is skipped and the run goes on, too many in a row end it."""

from pathlib import Path
from typing import Any

import numpy as np

from dapo_megatron.samples_file import load_samples
from dapo_megatron.telemetry.metrics import read_metrics
from tests.integration.solo import SoloRun


def spoil_advantages() -> None:
    """The first response's advantages of the first step become nan, as those of a broken reward would."""
    from dapo_megatron import train

    built = train.build_samples

    def spoiled(groups: Any, *, version: int, **rest: Any) -> Any:
        samples = built(groups, version=version, **rest)
        if version == 0:
            samples[0].advantages[:] = float("nan")
        return samples

    train.build_samples = spoiled


def test_one_is_skipped_and_the_run_goes_on(root: Path, tmp_path: Path) -> None:
    run = SoloRun(root, tmp_path / "runs", "run.steps=2", hook=spoil_advantages)
    output = " ".join(run.finish().split())
    path = run.folder / "nonfinite" / "step_000001_update_0.npz"
    assert "warning: step 1, update 0: loss nan, gradient norm nan; skipped" in output and str(path) in output
    saved = load_samples(path)
    assert len(saved) == 64 and np.isnan(saved[0].advantages).all() and not any(np.isnan(s.advantages).any() for s in saved[1:])
    first, second = read_metrics(run.folder / "metrics.jsonl")
    assert (first["optimizer/updates"], first["optimizer/updates_nonfinite"]) == (1, 1)
    assert (second["optimizer/updates"], second["optimizer/updates_nonfinite"]) == (2, 0)
    # the next update began at the weights that sampled the batch: nothing had changed
    assert first["policy/first_ratio_error_max"] <= 1e-5
    assert first["optimizer/nonfinite_in_a_row"] == second["optimizer/nonfinite_in_a_row"] == 0


def test_too_many_in_a_row_end_the_run(root: Path, tmp_path: Path) -> None:
    """A learning rate that makes the weights overflow in the first update; all others of the step are nan then."""
    run = SoloRun(root, tmp_path / "runs", "run.steps=2", "optimizer.lr=1e30", "optimizer.prompts_per_minibatch=2")
    output = " ".join(run.finish(1).split())
    assert "more than optimizer.max_skipped_updates (3): resume from the last checkpoint with a lower optimizer.lr" in output
    assert "step 1, update 4:" in output and "Traceback" not in output
    saved = sorted(path.name for path in (run.folder / "nonfinite").iterdir())
    assert saved == [f"step_000001_update_{index}.npz" for index in (1, 2, 3, 4)]
    assert read_metrics(run.folder / "metrics.jsonl") == []
