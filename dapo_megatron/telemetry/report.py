"""One markdown table, and learning curves, over the folders of several runs. It only reads them: the runs may be going on."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dapo_megatron.telemetry.metrics import read_metrics

NUM_LAST = 10  # steps at a run's end that means are over
MISSING = "-"
PLOT_FORMATS = (".png", ".pdf", ".svg")

Row = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder tells. `config` is {} and `rows` is [] before the run has begun; `problem`: why it can't be read."""

    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    problem: str = ""


@dataclass(frozen=True)
class Curve:
    """A metric over the steps: its share of `of` if that is named, its sum so far if `total`."""

    title: str
    metric: str
    of: str = ""
    total: bool = False


# What the paper shows, and what it cost.
CURVES = (
    Curve("held-out accuracy (avg@k)", "eval/avg_at_k"),
    Curve("accuracy of training samples", "reward/accuracy"),
    Curve("reward", "reward/mean"),
    Curve("response length, tokens", "response/length_mean"),
    Curve("entropy, nats", "policy/entropy"),
    Curve("probability of sampled tokens", "policy/prob_mean"),
    Curve("share of tokens clipped from above", "policy/clip_high_share"),
    Curve("share of groups all correct", "sampling/groups_all_correct", of="sampling/groups_resolved"),
    Curve("tokens generated so far", "tokens/generated", total=True),
)


def no_run(folder: Path) -> str:
    """Why this is no run's folder; "" if it is one."""
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "is a file; give a run's folder, such as runs/quickstart"
    if any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl", ".lock")):
        return ""
    inside = sorted(path.parent.name for path in folder.glob("*/config.yaml"))
    return "is no run's folder: no config.yaml in it" + (f"; runs within it: {', '.join(inside)}" if inside else "")


def read_run(folder: Path) -> RunRecord:
    """A folder that doesn't exist is a run that hasn't begun."""
    config: dict[str, Any] = {}
    try:
        if (folder / "config.yaml").exists():
            with (folder / "config.yaml").open(encoding="utf-8") as file:  # whose name YAML's errors then have
                content = yaml.safe_load(file)
            if not isinstance(content, dict):
                raise ValueError(f"{folder / 'config.yaml'}: holds no sections; restore the file")
            config = content
        return RunRecord(folder, config, read_metrics(folder / "metrics.jsonl"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        return RunRecord(folder, config, [], " ".join(str(error).split()))


def report_table(runs: Sequence[RunRecord]) -> str:
    """A row a run, and a line that says what the columns are."""
    ks = {f"{row['eval/k']:.0f}" for run in runs for row in run.rows if row.get("eval/k") is not None}
    k = ks.pop() if len(ks) == 1 else "k"
    header = [
        "run", "steps", "state", f"avg@{k}, last (step)", f"avg@{k}, best (step)", "accuracy", "length", "tokens/s", "s/step",
        "peak GB", "starts", "server restarts",
    ]  # fmt: skip
    lines = [header, ["---"] * 3 + ["---:"] * (len(header) - 3)]
    lines += [[name, *_cells(run)] for name, run in zip(run_names(runs), runs, strict=True)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"""{table}

avg@{k}: on held-out prompts. Of the last {NUM_LAST} steps: accuracy of the training samples, response length in tokens,
generated tokens a second of sampling, seconds a step with evaluation and checkpoint. Peak memory of the largest trainer
rank. Starts of the run after which it got a step further; restarts of its rollout servers. {MISSING}: not measured.
"""


def run_names(runs: Sequence[RunRecord]) -> list[str]:
    """The folders' names; their paths, where two have the same name."""
    names = [run.folder.resolve().name for run in runs]
    return [str(run.folder) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]


def _cells(run: RunRecord) -> list[str]:
    """All columns but the run's name."""
    evals = [(row["eval/avg_at_k"], row["step"]) for row in run.rows if row.get("eval/avg_at_k") is not None]
    best = max(evals, key=lambda pair: pair[0]) if evals else None  # the first of equals
    last_steps = run.rows[-NUM_LAST:]
    accuracy = _mean(last_steps, "reward/accuracy")
    return [
        _steps(run),
        state(run),
        *(MISSING if pair is None else f"{pair[0]:.3f} ({pair[1]})" for pair in (evals[-1] if evals else None, best)),
        MISSING if accuracy is None else f"{accuracy:.3f}",
        _short(_mean(last_steps, "response/length_mean")),
        _short(_rate(last_steps, "tokens/generated", "time/collect_s")),
        _short(_mean(last_steps, "time/step_s")),
        _short(max(_values(run.rows, "memory/peak_gb"), default=None)),
        _short(len(_values(run.rows, "time/startup_s")) or None),
        _short(_counted(run.rows, "engine/restarts")),
    ]


def state(run: RunRecord) -> str:
    """unreadable, not started, done, unfinished, or not exported (starting it again does only that)."""
    if run.problem:
        return "unreadable"
    if not run.config and not run.rows:
        return "not started"
    wanted = _setting(run, "run", "steps")
    if wanted is None:
        return MISSING
    if _steps_done(run) < wanted:
        return "unfinished"
    missing = _setting(run, "checkpoint", "export_hf") and not (run.folder / "hf").exists()
    return "not exported" if missing else "done"


def _steps(run: RunRecord) -> str:
    if run.problem or (not run.config and not run.rows):
        return MISSING
    wanted = _setting(run, "run", "steps")
    return f"{_steps_done(run)} of {MISSING if wanted is None else wanted}"


def _steps_done(run: RunRecord) -> int:
    return int(run.rows[-1]["step"]) if run.rows else 0


def _setting(run: RunRecord, section: str, key: str) -> Any:
    return (run.config.get(section) or {}).get(key)


def _values(rows: Sequence[Row], name: str) -> list[float]:
    """Without the steps that haven't got it, or where it was nan or infinite."""
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = _values(rows, name)
    return sum(values) / len(values) if values else None


def _rate(rows: Sequence[Row], amount: str, seconds: str) -> float | None:
    """Over all the steps together: a mean of the steps' rates would give short steps too much weight."""
    both = [(row[amount], row[seconds]) for row in rows if row.get(amount) is not None and row.get(seconds) is not None]
    time = sum(pair[1] for pair in both)
    return sum(pair[0] for pair in both) / time if time else None


def _counted(rows: Sequence[Row], name: str) -> float | None:
    """The end of a counter that begins at 0 again whenever the run is started again."""
    values = _values(rows, name)
    again = [value if value < before else value - before for before, value in zip([0.0, *values], values, strict=False)]
    return sum(again) if values else None


def _short(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def plot_runs(runs: Sequence[RunRecord], path: Path) -> None:
    """Learning curves of all runs in one picture, a panel for every one of CURVES that any run has.

    ValueError if there is nothing to draw yet.
    """
    from matplotlib.figure import Figure  # here: it takes half a second
    from matplotlib.ticker import EngFormatter

    shown = [curve for curve in CURVES if any(_points(run.rows, curve) for run in runs)]
    if not shown:
        raise ValueError(f"--plot: no step is done yet in {', '.join(run_names(runs))}; there is nothing to draw")
    num_columns = min(3, len(shown))
    num_rows = -(-len(shown) // num_columns)
    names = run_names(runs)
    figure = Figure(figsize=(4.2 * num_columns, 2.8 * num_rows + 0.25 * -(-len(names) // num_columns)), layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for curve, panel in zip(shown, panels, strict=False):  # in this order: zip drops what it took from the longer one
        for number, run in enumerate(runs):
            points = _points(run.rows, curve)
            style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3], "linewidth": 1.2}
            marker = {"marker": "o", "markersize": 3.5} if len(points) <= 25 else {}
            panel.plot(*zip(*points, strict=True) if points else ((), ()), label=names[number], **style, **marker)
        panel.set_title(curve.title, fontsize=10)
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=8)
        panel.set_xlabel("step", fontsize=8)
        panel.xaxis.get_major_locator().set_params(integer=True)
        if curve.total:
            panel.yaxis.set_major_formatter(EngFormatter(sep=""))  # 6M
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels:  # those that are left
        panel.set_visible(False)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=num_columns, fontsize=9, frameon=False)
    with replacing(path) as new:
        figure.savefig(new, format=path.suffix.removeprefix("."), dpi=130)


def _points(rows: Sequence[Row], curve: Curve) -> list[tuple[int, float]]:
    """(step, value) of the steps that have it."""
    points, so_far = [], 0.0
    for row in rows:
        value, whole = row.get(curve.metric), row.get(curve.of) if curve.of else 1.0
        if value is None or not whole:
            continue
        so_far += value
        points.append((int(row["step"]), so_far if curve.total else value / whole))
    return points


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file's path, which takes the place of `path` at the end: others see the old content or all of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        new = Path(folder) / path.name
        yield new
        new.replace(path)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")
