"""The list that every check adds to."""

from typing import Any

from dapo_megatron.config import Config
from dapo_megatron.config_io import Problem, Severity


class Report:
    """The problems found so far; a field's value is looked up by its dotted name."""

    def __init__(self, config: Config):
        self.config = config
        self.problems: list[Problem] = []

    def value(self, field: str) -> Any:
        value: Any = self.config
        for part in field.split("."):
            value = getattr(value, part)
        return value

    def add(self, field: str, message: str, severity: Severity = "error") -> None:
        self.problems.append(Problem(field, self.value(field), message, severity))
