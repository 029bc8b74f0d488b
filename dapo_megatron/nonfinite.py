"""Updates that were skipped because their loss or gradient was nan or infinite: each is said and its mini-batch saved; too many
in a row end the run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dapo_megatron.algo.objective import merge_stats
from dapo_megatron.records import Sample
from dapo_megatron.samples_file import save_samples
from dapo_megatron.telemetry.measure import Stats, was_skipped


class NonfiniteGuard:
    """Looks at every update's statistics. `num_in_a_row` is how many of the last updates were skipped one after the other."""

    def __init__(self, run_dir: Path, max_in_a_row: int, note: Callable[[str], None]) -> None:
        self._folder, self._max_in_a_row, self._note = run_dir / "nonfinite", max_in_a_row, note
        self.num_in_a_row = 0

    def resume(self, row: Mapping[str, float]) -> None:
        """Go on counting where the last step before stopped, by its row of metrics."""
        self.num_in_a_row = int(row.get("optimizer/nonfinite_in_a_row", 0))

    def check(self, step: int, index: int, minibatch: Sequence[Sample], update: list[Stats]) -> None:
        """`update`: the statistics of every model replica. RuntimeError if it is one skipped update too many."""
        if not was_skipped(update):
            self.num_in_a_row = 0
            return
        self.num_in_a_row += 1
        path = self._folder / f"step_{step:06d}_update_{index}.npz"
        save_samples(path, minibatch)
        merged = merge_stats(update)
        what = (
            f"step {step}, update {index}: loss {merged['loss_sum'] / merged['num_tokens']:.3g}, gradient norm "
            f"{merged['grad_norm_max']:.3g}; skipped, neither weights nor optimizer changed; its mini-batch is in {path}"
        )
        if self.num_in_a_row > self._max_in_a_row:
            raise RuntimeError(
                f"{what}. That makes {self.num_in_a_row} in a row, more than optimizer.max_skipped_updates "
                f"({self._max_in_a_row}): resume from the last checkpoint with a lower optimizer.lr or model.dtype=float32, or "
                "raise optimizer.max_skipped_updates"
            )
        self._note(f"warning: {what} ({self.num_in_a_row} in a row; {self._max_in_a_row + 1} end the run)")
