"""A problem as the data set gives it, before it is rendered and tokenised."""

import difflib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Row:
    """`prompt` is the problem's text, or its chat turns as (role, content) pairs, the last of them the user's.

    `uid` is a hash of the prompt: the same problem has the same uid wherever it stands.
    """

    uid: str
    prompt: str | tuple[tuple[str, str], ...]
    gold: str
    data_source: str

    @property
    def start(self) -> str:
        """The beginning of the problem's text, for messages."""
        problem = self.prompt if isinstance(self.prompt, str) else self.prompt[-1][1]
        return " ".join(problem.split())[:60]


class Rows(list[Row]):
    """Rows without duplicates, and how many were read and dropped to get there."""

    num_read: int = 0
    num_duplicates: int = 0  # further rows of a problem with the same gold answer
    num_conflicting: int = 0  # rows of problems with several gold answers: all of them are dropped
    num_over_limit: int = 0  # distinct problems beyond the source's limit

    def summary(self) -> str:
        """One line: what was read, kept and dropped."""
        return (
            f"{self.num_read} rows read, {len(self)} problems kept; dropped: {self.num_duplicates} duplicates, "
            f"{self.num_conflicting} rows with conflicting golds, {self.num_over_limit} over the limit"
        )


def prompt_uid(prompt: str | tuple[tuple[str, str], ...]) -> str:
    """16 hex digits of a hash of the prompt, blind to how white space is laid out."""
    turns = [prompt] if isinstance(prompt, str) else [part for turn in prompt for part in turn]
    text = "\x1f".join(" ".join(turn.split()) for turn in turns)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def overlap(train: Iterable[Row], held_out: Iterable[Row]) -> int:
    """How many of the held-out problems are trained on."""
    return len({row.uid for row in train} & {row.uid for row in held_out})


def without_duplicates(rows: Iterable[Row], limit: int = 0) -> Rows:
    """The first row of every problem, in order; at most `limit` (0: all). Only distinct problems are held in memory."""
    first: dict[str, Row] = {}
    copies: dict[str, int] = {}
    conflicting: set[str] = set()
    result = Rows()
    for row in rows:
        result.num_read += 1
        seen = first.setdefault(row.uid, row)
        copies[row.uid] = copies.get(row.uid, 0) + 1
        if seen.gold != row.gold:
            conflicting.add(row.uid)
    kept = [row for uid, row in first.items() if uid not in conflicting]
    result.extend(kept[:limit] if limit else kept)
    result.num_over_limit = len(kept) - len(result)
    result.num_conflicting = sum(copies[uid] for uid in conflicting)
    result.num_duplicates = result.num_read - result.num_conflicting - len(kept)
    return result


def parse_args[T](cls: type[T], values: Any, where: str) -> T:
    """`cls`, a dataclass of plain fields with defaults, from a mapping. ValueError for an unknown key or wrong type."""
    if not isinstance(values, dict):
        raise ValueError(f"{where}: {values!r} must be a mapping of arguments")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    default = cls()
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(f"{where}.{key} is unknown; {hint}known: {', '.join(known)}")
        expected = type(getattr(default, key))
        right = isinstance(value, int | float if expected is float else expected)
        if not right or (isinstance(value, bool) and expected is not bool):
            raise ValueError(f"{where}.{key}: {value!r} must be of type {expected.__name__}")
    return cls(**values)
