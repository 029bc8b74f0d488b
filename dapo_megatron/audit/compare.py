"""Differences between a recorded mini-batch and its reference, judged by stated tolerances, as a table and as JSON."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from dapo_megatron.audit.record import Record
from dapo_megatron.audit.reference import ReferenceStep, clip_scale
from dapo_megatron.config import OptimizerConfig
from dapo_megatron.records import Sample

# By the dtype of forward and backward. "loss" and "logprob" are absolute, all else relative: "gradient" and "update" for every
# tensor by norm, "all grads" for all tensors together.
TOLERANCES: dict[str, dict[str, float]] = {
    "float32": {"loss": 1e-5, "logprob": 1e-4, "grad norm": 1e-4, "all grads": 5e-5, "gradient": 1e-4, "update": 1e-3},
    "bfloat16": {"loss": 2e-2, "logprob": 0.5, "grad norm": 5e-2, "all grads": 0.2, "gradient": 0.5, "update": 5e-2},
}
# bf16 rounds a single norm's gradient by a third, as much as some faults of a layout change it. What a tensor may differ by on
# a layout is therefore this many times what it differs by on a single rank, but at least the tolerance divided by FLOOR.
TIMES_SINGLE, FLOOR = 2.0, 3.0
# A tensor whose gradient is nearly 0 by symmetry (a key's bias under softmax) is all rounding: its difference is measured
# against this share of the whole gradient's norm at least.
SMALLEST_SHARE = 1e-3
NUM_SHOWN = 8


@dataclass
class Difference:
    what: str  # a key of TOLERANCES
    name: str  # the parameter; "" for scalars
    value: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.value <= self.tolerance  # nan is not


@dataclass
class FirstToken:
    """The first token, in the samples' order, whose log-prob differs by more than is tolerated."""

    sample: int
    place: int  # within the response
    token_id: int
    recorded: float
    reference: float


@dataclass
class Comparison:
    """One recorded computation against the reference."""

    title: str
    differences: list[Difference] = field(default_factory=list)
    first_token: FirstToken | None = None

    @property
    def ok(self) -> bool:
        return all(difference.ok for difference in self.differences)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def compare(
    title: str,
    record: Record,
    reference: ReferenceStep,
    settings: OptimizerConfig,
    dtype: str,
    single: Comparison | None = None,
) -> Comparison:
    """Every figure and every tensor. `reference` was computed with the record's weights, samples and old log-probs. With the
    comparison of a single rank at hand, a layout's gradients are judged by it (TIMES_SINGLE)."""
    tolerance = TOLERANCES[dtype]
    result = Comparison(title)

    def add(what: str, value: float, name: str = "") -> None:
        result.differences.append(Difference(what, name, value, tolerance[what]))

    add("loss", abs(record.facts["loss"] - reference.loss))
    add("grad norm", _ratio(abs(record.facts["grad_norm"] - reference.grad_norm), reference.grad_norm))
    result.first_token = _first_token(record, reference.logprobs, tolerance["logprob"])
    tokens = zip(record.samples, record.logprobs, reference.logprobs, strict=True)
    add("logprob", max(_token_differences(*token).max() for token in tokens))
    scale = clip_scale(reference.grad_norm, settings.clip_grad)
    smallest = SMALLEST_SHARE * scale * reference.grad_norm
    alone = {d.name: d.value for d in single.differences if d.what == "gradient"} if single else {}
    errors = []
    for name, gradient in _same_names(reference.gradients, record.gradients.names(), title).items():
        want = gradient * scale
        errors.append(float((record.gradients.tensor(name).double() - want).norm()))
        add("gradient", _ratio(errors[-1], max(float(want.norm()), smallest)), name)
        if single:
            allowed = max(tolerance["gradient"] / FLOOR, TIMES_SINGLE * alone[name])
            result.differences[-1].tolerance = min(tolerance["gradient"], allowed)
    add("all grads", _ratio(float(np.linalg.norm(errors)), scale * reference.grad_norm))
    if record.after is not None:
        for name in record.gradients.names():
            add("update", _update_difference(record, name, settings), name)
    return result


def _ratio(error: float, size: float) -> float:
    return error / size if size > 0 else (0.0 if error == 0 else float("inf"))


def _token_differences(sample: Sample, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| of a response's tokens, 0 where masked, with nan counted as infinitely far."""
    return np.where(sample.mask, np.nan_to_num(np.abs(a - b), nan=np.inf), 0.0)


def _first_token(record: Record, reference: list[np.ndarray], tolerance: float) -> FirstToken | None:
    for number, (sample, have, want) in enumerate(zip(record.samples, record.logprobs, reference, strict=True)):
        off = np.flatnonzero(_token_differences(sample, have, want) > tolerance)
        if len(off):
            place = int(off[0])
            token = int(sample.token_ids[sample.prompt_len + place])
            return FirstToken(number, place, token, float(have[place]), float(want[place]))
    return None


def _same_names(reference: Mapping[str, Tensor], recorded: list[str], title: str) -> Mapping[str, Tensor]:
    odd = sorted(reference.keys() ^ set(recorded))
    if odd:
        raise ValueError(f"{title}: {len(odd)} parameters are on one side only: {', '.join(odd[:4])}")
    return reference


def _update_difference(record: Record, name: str, settings: OptimizerConfig) -> float:
    """Of the weights' change by Adam's first step with the record's own gradients, relative by norm. That step is
    -lr * (decay * w + g / (|g| + eps)): both moments are their corrected estimates, g and g^2. The weights are the master
    weights rounded to the model's dtype, and so is what they should be: a change of 0.01 is two steps of bf16 at 1."""
    assert record.after is not None
    after = record.after.tensor(name)
    before, g = (f.tensor(name).double() for f in (record.before, record.gradients))
    decay = settings.weight_decay if before.ndim > 1 else 0.0
    want = -record.facts["lr"] * (decay * before + g / (g.abs() + settings.eps))
    error = after.double() - (before + want).to(after.dtype).double()
    return _ratio(float(error.norm()), float(want.norm()))


def table(comparison: Comparison, describe_token: Callable[[int], str]) -> str:
    """For people: figures, the tensors that differ most, the first token that is off, the verdict."""
    lines = [comparison.title, f"  {'':<10} {'difference':>11} {'tolerance':>10}"]
    by_what: dict[str, list[Difference]] = {}
    for difference in comparison.differences:
        by_what.setdefault(difference.what, []).append(difference)
    for what, found in by_what.items():
        found = sorted(found, key=lambda d: -d.value / d.tolerance if d.value == d.value else -float("inf"))
        named = found[: NUM_SHOWN if what == "gradient" else 3] if found[0].name else found
        for i, d in enumerate(named):
            label = what if i == 0 else ""
            more = f"   (of {len(found)} tensors, worst first)" if i == 0 and d.name else ""
            mark = "" if d.ok else "OFF"
            lines.append(f"  {label:<10} {d.value:>11.2e} {d.tolerance:>10.1e} {mark:<4}{d.name}{more}".rstrip())
    token = comparison.first_token
    if token is not None:
        lines.append(
            f"  first token that is off: {token.token_id} {describe_token(token.token_id)!r}, place {token.place} of response "
            f"{token.sample}: log-prob {token.recorded:.5f} instead of {token.reference:.5f}"
        )
    lines.append(f"  -> {'equal within the tolerances' if comparison.ok else 'DIFFERENT'}")
    return "\n".join(lines)
