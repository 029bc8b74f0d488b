"""Reading problems: local files, hub data sets, generators."""

import gzip
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from dapo_megatron.config import SourceConfig
from dapo_megatron.data.generators import GENERATORS
from dapo_megatron.data.rows import Row, Rows, prompt_uid, without_duplicates

log = logging.getLogger(__name__)
BATCH_ROWS = 4096
FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
ROLES = ("system", "user", "assistant")


def source_kind(path: str) -> Literal["generator", "file", "folder", "hub"] | None:
    """What a source's path means; None if it can be none of them. What exists here is never taken for a hub id."""
    place = Path(path).expanduser()
    if path.startswith("generator:"):
        return "generator"
    if path.endswith(FILE_SUFFIXES) or place.is_file():
        return "file"
    if place.is_dir():
        return "folder"
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        return "file" if place.suffix else "folder"
    return "hub" if re.fullmatch(r"[\w.-]+/[\w.-]+", path) else None


def source_faults(source: SourceConfig) -> dict[str, str]:
    """What is wrong with a source's fields, by field, before anything is read."""
    if not source.path:
        return {"path": "is empty: give a .jsonl, .jsonl.gz or .parquet file, a hub id, or generator:NAME"}
    kind, default, faults = source_kind(source.path), SourceConfig(), {}
    if kind is None:
        known = ", ".join(GENERATORS)
        faults["path"] = f"is no file ({', '.join(FILE_SUFFIXES)}), folder, hub id (owner/name) or generator:NAME ({known})"
    if kind == "file" and not source.path.endswith(FILE_SUFFIXES):
        faults["path"] = f"unknown kind of file: its name must end with one of {', '.join(FILE_SUFFIXES)}"
    if kind == "generator" and source.path.removeprefix("generator:") not in GENERATORS:
        faults["path"] = f"unknown generator; known: {', '.join(GENERATORS)}"
    if kind == "generator" and source.split not in ("train", "test"):
        faults["split"] = "must be train or test"
    if kind == "file" and source.split not in ("train", "test"):  # the defaults of data.train and data.eval
        faults["split"] = "a file has no splits; remove it, and give the split's own file"
    if kind in ("generator", "file") and source.subset:
        faults["subset"] = "only hub data sets have subsets; remove it"
    if kind != "generator" and source.args:
        faults["args"] = "are arguments of generators; remove them"
    for key in ("prompt_key", "answer_key", "answer_pattern", "id_key"):
        if kind == "generator" and getattr(source, key) != getattr(default, key):
            faults[key] = "is read with files and hub data sets only; remove it"
    try:
        if source.answer_pattern and not re.compile(source.answer_pattern).groups:
            faults["answer_pattern"] = "needs a group (...) around the gold answer"
    except re.error as error:
        faults["answer_pattern"] = f"is no regular expression: {error}"
    return faults


def load_rows(source: SourceConfig, check_gold: Callable[[str], None] | None = None) -> Rows:
    """The distinct problems of a source, in its order; see SourceConfig for what a source may be.

    ValueError, naming the source, row (from 1) and key, for a source that is missing, empty, or holds a row without a
    prompt or gold answer, or two problems with the same id. `check_gold` raises ValueError for a gold answer that no
    response could match; the source and the problem are added to it.
    """
    if source.limit < 0:
        raise ValueError(f"data source limit: {source.limit} must not be negative; 0 takes all rows")
    for key, fault in source_faults(source).items():
        raise ValueError(f"data source {source.path}: {key} {'' if key == 'path' else repr(getattr(source, key)) + ' '}{fault}")
    if source_kind(source.path) == "generator":
        name = source.path.removeprefix("generator:")
        rows = without_duplicates(GENERATORS[name](dict(source.args), source.split), source.limit)
    else:
        rows = without_duplicates(_read(source), source.limit)
    log.info("%s: %s", source.path, rows.summary())
    if not rows:
        raise ValueError(
            f"data source {source.path}: no problem in it ({rows.num_read} rows read, "
            f"{rows.num_conflicting} dropped for conflicting gold answers); check path, split and args"
        )
    if check_gold is None:
        return rows
    for row in rows:
        try:
            check_gold(row.gold)
        except ValueError as error:
            raise ValueError(f"data source {source.path}, problem {row.uid} ({row.start!r}...): {error}") from error
    return rows


def _read(source: SourceConfig) -> Iterator[Row]:
    pattern = re.compile(source.answer_pattern) if source.answer_pattern else None
    name = Path(source.path).name
    ids: dict[tuple[str, str], tuple[Row, int]] = {}  # (data source, id) -> its first row, and that row's number
    for number, record in enumerate(_records(source), 1):
        where = f"data source {source.path}, row {number}"
        prompt = _prompt(_lookup(record, source.prompt_key, where), f"{where}, {source.prompt_key}")
        gold = _gold(_lookup(record, source.answer_key, where), pattern, f"{where}, {source.answer_key}")
        row = Row(prompt_uid(prompt), prompt, gold, str(record.get("data_source") or name))
        own_id = _own_id(record, source.id_key, where)
        if own_id is not None:
            first, first_number = ids.setdefault((row.data_source, own_id), (row, number))
            if first.uid != row.uid:
                raise ValueError(
                    f"{where}, {source.id_key}: {own_id!r} is the id of another problem in row {first_number}: "
                    f"{first.start!r} there, {row.start!r} here; give every problem an id of its own, or set id_key to the "
                    "column that holds one (empty: ids are not looked at)"
                )
        yield row


def _records(source: SourceConfig) -> Iterator[dict[str, Any]]:
    path, kind = Path(source.path).expanduser(), source_kind(source.path)
    if kind == "hub":
        return _hub(source)
    if not path.exists():
        raise ValueError(f"data source {path}: no such {kind}; check the path (relative paths start from the current folder)")
    if path.is_dir():
        return _hub(source)
    return _parquet(path, source) if path.suffix == ".parquet" else _json_lines(path)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"data source {path}, line {number}: not JSON ({error}); correct the line") from error
                if not isinstance(record, dict):
                    raise ValueError(f"data source {path}, line {number}: not a JSON object; correct the line")
                yield record
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"data source {path}: can't be read ({error}); is it complete?") from error


def _parquet(path: Path, source: SourceConfig) -> Iterator[dict[str, Any]]:
    """Batch by batch, and only the columns that are used: the published DAPO-Math-17k has 1.79 million rows."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"data source {path}: not a parquet file ({error})") from error
    keys = (source.prompt_key, source.answer_key, source.id_key)
    used = {key if key in file.schema_arrow.names else key.partition(".")[0] for key in keys}
    columns = [name for name in file.schema_arrow.names if name in used | {"data_source"}]
    for batch in file.iter_batches(BATCH_ROWS, columns=columns):
        yield from batch.to_pylist()


def _hub(source: SourceConfig) -> Iterator[dict[str, Any]]:
    """A data set by hub id, or a local folder that `datasets` can read."""
    import datasets

    try:
        data = datasets.load_dataset(str(Path(source.path).expanduser()), name=source.subset or None, split=source.split)
    except Exception as error:  # offline, not found, unknown split, script data set: as many exception types
        raise ValueError(
            f"data source {source.path}, subset {source.subset or 'default'}, split {source.split}: datasets can't load it "
            f"({type(error).__name__}: {error}). Check path, subset, split and the network, or download it and give its path"
        ) from error
    yield from data


def _lookup(record: dict[str, Any], key: str, where: str) -> Any:
    """record["a.b"], or else record["a"]["b"]."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"{where}: no key {key!r}; it has {', '.join(record)}: set prompt_key, answer_key or id_key")
        value = value[part]
    return value


def _own_id(record: dict[str, Any], key: str, where: str) -> str | None:
    """The id that a row brings; without a value, or without the default's column, it has none."""
    if not key or (key == SourceConfig.id_key and key not in record):
        return None
    value = _lookup(record, key, where)
    return None if value is None else str(value)


def _prompt(value: Any, where: str) -> str | tuple[tuple[str, str], ...]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        turns = tuple((turn.get("role"), turn.get("content")) for turn in value)
        if all(role in ROLES and isinstance(content, str) for role, content in turns):
            if turns[-1][0] == "user" and turns[-1][1].strip():
                return turns
            raise ValueError(f"{where}: the last chat turn must be the user's and not empty; correct the row")
    raise ValueError(
        f"{where}: {str(value)[:80]!r} is neither a text nor a list of turns "
        f"{{role: {'|'.join(ROLES)}, content: text}}; correct the row or set prompt_key"
    )


def _gold(value: Any, pattern: re.Pattern[str] | None, where: str) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # AIME files hold 70.0
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)  # JSON may hold NaN
    if not number and not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{where}: {value!r} is no gold answer; correct or remove the row, or set answer_key")
    text = str(value)
    if pattern is not None:
        match = pattern.search(text)
        if match is None or not (match[1] or "").strip():
            raise ValueError(f"{where}: answer_pattern {pattern.pattern!r} finds nothing in {text[-80:]!r}; correct either")
        text = match[1]
    return text.strip()
