"""Reading problems: local files, hub data sets, generators."""

import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dapo_megatron.config import SourceConfig
from dapo_megatron.data.generators import GENERATORS
from dapo_megatron.data.rows import Row, Rows, prompt_uid, without_duplicates

log = logging.getLogger(__name__)
BATCH_ROWS = 4096
FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
ROLES = ("system", "user", "assistant")


def load_rows(source: SourceConfig) -> Rows:
    """The distinct problems of a source, in its order; see SourceConfig for what a source may be.

    Files have no splits, so source.split picks from generators and hub data sets only. ValueError, naming the source,
    row (from 1) and key, for a source that is missing, empty, or holds a row without a prompt or gold answer.
    """
    if source.limit < 0:
        raise ValueError(f"data source limit: {source.limit} must not be negative; 0 takes all rows")
    if source.path.startswith("generator:"):
        name = source.path.removeprefix("generator:")
        if name not in GENERATORS:
            raise ValueError(f"data source {source.path}: unknown generator; known: {', '.join(GENERATORS)}")
        if source.split not in ("train", "test"):
            raise ValueError(f"data source {source.path}: split {source.split!r} must be train or test")
        rows = without_duplicates(GENERATORS[name](dict(source.args), source.split), source.limit)
    else:
        rows = without_duplicates(_read(source), source.limit)
    log.info(
        "%s: %d rows read, %d problems kept; dropped: %d duplicates, %d rows with conflicting golds, %d over the limit",
        *(source.path, rows.num_read, len(rows), rows.num_duplicates, rows.num_conflicting, rows.num_over_limit),
    )
    if not rows:
        raise ValueError(
            f"data source {source.path}: no problem in it ({rows.num_read} rows read, "
            f"{rows.num_conflicting} dropped for conflicting gold answers); check path, split and args"
        )
    return rows


def _read(source: SourceConfig) -> Iterator[Row]:
    try:
        pattern = re.compile(source.answer_pattern) if source.answer_pattern else None
    except re.error as error:
        raise ValueError(f"data source answer_pattern: {source.answer_pattern!r} is no regular expression: {error}") from error
    if pattern is not None and not pattern.groups:
        raise ValueError(f"data source answer_pattern: {source.answer_pattern!r} needs a group (...) around the gold answer")
    name = Path(source.path).name
    for number, record in enumerate(_records(source), 1):
        where = f"data source {source.path}, row {number}"
        prompt = _prompt(_lookup(record, source.prompt_key, where), f"{where}, {source.prompt_key}")
        gold = _gold(_lookup(record, source.answer_key, where), pattern, f"{where}, {source.answer_key}")
        yield Row(prompt_uid(prompt), prompt, gold, str(record.get("data_source") or name))


def _records(source: SourceConfig) -> Iterator[dict[str, Any]]:
    if not source.path:
        raise ValueError("data source path is empty: give a file, a hub data set id or generator:NAME")
    path = Path(source.path).expanduser()
    if path.is_file():
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            return _json_lines(path)
        if path.suffix == ".parquet":
            return _parquet(path, source)
        raise ValueError(f"data source {path}: unknown kind of file; use .jsonl, .jsonl.gz or .parquet")
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", source.path) and not path.name.endswith(FILE_SUFFIXES)
    if path.is_dir() or is_hub_id:
        return _hub(source)
    raise ValueError(f"data source {path}: no such file; check the path (relative paths start from the current folder)")


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
    used = {key if key in file.schema_arrow.names else key.partition(".")[0] for key in (source.prompt_key, source.answer_key)}
    columns = [name for name in file.schema_arrow.names if name in used | {"data_source"}]
    for batch in file.iter_batches(BATCH_ROWS, columns=columns):
        yield from batch.to_pylist()


def _hub(source: SourceConfig) -> Iterator[dict[str, Any]]:
    """A data set by hub id, or a local folder that `datasets` can read."""
    import datasets

    try:
        data = datasets.load_dataset(str(Path(source.path).expanduser()), split=source.split)
    except Exception as error:  # offline, not found, unknown split, script data set: as many exception types
        raise ValueError(
            f"data source {source.path}, split {source.split}: datasets can't load it "
            f"({type(error).__name__}: {error}). Check the spelling and the network, or download it and give its path"
        ) from error
    yield from data


def _lookup(record: dict[str, Any], key: str, where: str) -> Any:
    """record["a.b"], or else record["a"]["b"]."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"{where}: no key {key!r}; it has {', '.join(record)}: set prompt_key and answer_key")
        value = value[part]
    return value


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
    if value is None or isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError(f"{where}: {value!r} is no gold answer; correct or remove the row, or set answer_key")
    text = str(value)
    if pattern is not None:
        match = pattern.search(text)
        if match is None or not (match[1] or "").strip():
            raise ValueError(f"{where}: answer_pattern {pattern.pattern!r} finds nothing in {text[-80:]!r}; correct either")
        text = match[1]
    return text.strip()
