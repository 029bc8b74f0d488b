"""A model's parameters in the order in which they are converted."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dapo_megatron.weights.mapping import Index, ModelShape, Rule, rules_for


@dataclass(frozen=True)
class Parameter:
    rule: Rule
    index: Index
    at_end: bool  # comes after the layers: with the last pipeline stage

    @property
    def hf_names(self) -> tuple[str, ...]:
        return self.rule.hf_names(self.index)


def in_order(shape: ModelShape) -> Iterator[Parameter]:
    """The embedding, then layer by layer (a pipeline stage and a reader of the files want whole layers), then the rest."""
    all_of = [Parameter(rule, index, False) for rule in rules_for(shape) for index in rule.indices(shape)]
    within = sorted((p for p in all_of if p.index.layer is not None), key=lambda p: p.index.layer or 0)  # stable
    outside = [p for p in all_of if p.index.layer is None]
    first = [p for p in outside if p.rule.megatron[0].startswith("embedding.")]
    yield from first
    yield from within
    yield from (replace(p, at_end=True) for p in outside if p not in first)
