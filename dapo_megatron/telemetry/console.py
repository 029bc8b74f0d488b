"""What a run shows on the terminal: a header, one readable line a step, evaluation lines, a summary.

On a terminal a progress bar with the current phase stays at the bottom; elsewhere (a log file, CI) only plain lines
come out.
"""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

PHASES = ("rollout", "reward", "old_logprobs", "update", "publish", "checkpoint", "eval")  # as in METRICS, time/*_s


class RunConsole:
    """Use as a context manager around the run, so that the terminal is restored whatever happens."""

    def __init__(self, num_steps: int, file: IO[str] | None = None):
        file = file or sys.stdout
        # Off a terminal rich would cut lines at 80 characters.
        self.console = Console(file=file, highlight=False, width=None if file.isatty() else 200, soft_wrap=True)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[phase]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("run", total=num_steps, phase="starting")
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._evals: list[tuple[int, dict[str, float]]] = []
        self._peak_gb = 0.0
        self._steps = 0
        self._start = time.monotonic()

    def __enter__(self) -> "RunConsole":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def header(self, lines: Mapping[str, object]) -> None:
        """Facts about the run: run folder, model, layout, kernels chosen ..."""
        width = max(map(len, lines), default=0)
        for name, text in lines.items():
            self._print(f"{name:<{width}}  {text}")

    def note(self, text: str) -> None:
        self._print(text)

    def phase(self, name: str, detail: str = "") -> None:
        """Show what is going on now, e.g. phase("rollout", "12/16 groups")."""
        self._progress.update(self._task, phase=f"{name} {detail}".strip())

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """One finished step, by the metrics of METRICS; what is absent is left out of the line."""
        self._progress.update(self._task, completed=step)
        self._steps += 1
        for phase in PHASES:
            self._seconds[phase] += values.get(f"time/{phase}_s", 0.0)
        self._peak_gb = max(self._peak_gb, values.get("memory/peak_gb", 0.0))
        self._print(step_line(step, values))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """The `eval/*` metrics of the weights after `step` (0: before training)."""
        self._evals.append((step, dict(values)))
        self._print(f"eval after step {step}: {_eval_text(values)}")

    def summary(self) -> None:
        """Accuracy before and after, seconds per phase, peak memory."""
        table = Table(title=f"{self._steps} steps in {_duration(time.monotonic() - self._start)}", title_justify="left")
        table.add_column("what")
        table.add_column("total", justify="right")
        table.add_column("per step", justify="right")
        for step, values in [self._evals[0], self._evals[-1]] if len(self._evals) > 1 else self._evals:
            when = "before training" if step == 0 else f"after step {step}"
            table.add_row(f"accuracy {when}", _eval_text(values), "")
        for phase, seconds in self._seconds.items():
            if seconds:
                # Rewards are computed while the rollout goes on.
                name = f"{phase} (beside rollout)" if phase == "reward" else phase
                table.add_row(name, f"{seconds:.1f} s", f"{seconds / max(self._steps, 1):.2f} s")
        if self._peak_gb:
            table.add_row("peak memory of a rank", f"{self._peak_gb:.2f} GB", "")
        self.console.print(table)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False)


def step_line(step: int, v: Mapping[str, float]) -> str:
    """One line with the step's most telling metrics and the seconds of its phases."""
    kept_of = "{:.0f}/{:.0f}"
    parts = [
        ("reward", "{:+.3f}", ["reward/mean"]),
        ("acc", "{:.3f}", ["reward/accuracy"]),
        ("kept", kept_of, ["sampling/groups_kept", "sampling/groups_resolved"]),
        ("len", "{:.1f}", ["response/length_mean"]),
        ("cut", "{:.1%}", ["response/cut_share"]),
        ("entropy", "{:.3f}", ["policy/entropy"]),
        ("clip+", "{:.2%}", ["policy/clip_high_share"]),
        ("clip-", "{:.2%}", ["policy/clip_low_share"]),
        ("grad", "{:.3g}", ["optimizer/grad_norm"]),
        ("diff", "{:.1e}", ["sync/logprob_diff_mean"]),
        ("ess", "{:.3f}", ["sync/effective_sample_size"]),
        ("tok/s", "{:.0f}", ["throughput/generated_tokens_per_s"]),
    ]
    texts = [f"{name} {form.format(*(v[key] for key in keys))}" for name, form, keys in parts if all(k in v for k in keys)]
    seconds = [f"{phase} {v[f'time/{phase}_s']:.1f}" for phase in PHASES if v.get(f"time/{phase}_s", 0) >= 0.05]
    total = f"{v['time/step_s']:.1f} s" if "time/step_s" in v else ""
    timing = f" | {total} ({', '.join(seconds)})" if total else ""
    return f"step {step:>4} | " + "  ".join(texts) + timing


def _eval_text(values: Mapping[str, float]) -> str:
    texts = []
    if "eval/avg_at_k" in values:
        texts.append(f"avg@{values.get('eval/k', 0):.0f} {values['eval/avg_at_k']:.3f}")
    if "eval/greedy" in values:
        texts.append(f"greedy {values['eval/greedy']:.3f}")
    if "eval/prompts" in values:
        texts.append(f"on {values['eval/prompts']:.0f} prompts")
    return ", ".join(texts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
