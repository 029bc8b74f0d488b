"""YAML files and `key=value` overrides to a `Config`, and back to YAML.

A file may name others: `base: [common.yaml, more.yaml]`, relative to itself. Order of precedence, weakest first: the
defaults, the bases in their order, the file, the command line. Free-form mappings (data.*.args, reward.verifier_args,
model.random_model) aren't merged: a later file replaces an earlier one's whole, as does `key={...}` on the command line;
`data.train.args.seed=3` there changes one entry. Every fault of the structure is collected; values are
judged in `validation/`. Imports neither torch, ray nor megatron.
"""

import difflib
import hashlib
import re
import typing
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dapo_megatron.config import Config

# An error ends the program; "machine" does too, unless it is a dry run of a job for another machine.
Severity = typing.Literal["error", "machine", "warning"]


@dataclass(frozen=True)
class Problem:
    """What is wrong with one field, and what to do about it."""

    field: str
    value: Any
    message: str
    severity: Severity = "error"

    def __str__(self) -> str:
        where = self.field if self.value is None else f"{self.field} = {self.value!r}"
        return f"{where}: {self.message}"


class ConfigError(ValueError):
    """All errors of a configuration at once, in `problems`."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))

    def text(self, source: str | Path) -> str:
        """For the terminal: all of them, found in `source`."""
        return "\n  ".join([f"{source}: {len(self.problems)} error(s), nothing was started", *map(str, self.problems)])


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a configuration whose structure is right: keys, types, choices. Raises ConfigError with every fault."""
    config, problems = read_config(path, overrides)
    if problems:
        raise ConfigError(problems)
    return config


def read_config(path: str | Path, overrides: list[str] | None = None) -> tuple[Config, list[Problem]]:
    """Like `load_config`, but gives the faults back; a faulty key keeps its default, so that validation can go on."""
    problems: list[Problem] = []
    node = OmegaConf.structured(Config)
    for source, layer in _layers(Path(path), (), problems):
        _apply(node, Config, "", layer, source, problems)
    for override in overrides or []:
        _apply_override(node, override, problems)
    return typing.cast(Config, OmegaConf.to_object(node)), problems


def resolved_yaml(config: Config) -> str:
    """Every field with its final value; loading it gives the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def config_hash(config: Config) -> str:
    """12 hex digits that change with any field."""
    return hashlib.sha256(resolved_yaml(config).encode()).hexdigest()[:12]


def _layers(path: Path, parents: tuple[Path, ...], problems: list[Problem]) -> list[tuple[str, dict[str, Any]]]:
    """(file, its content without `base`) of the file and everything it builds on, weakest first."""
    if path.resolve() in parents:
        chain = " -> ".join(p.name for p in (*parents, path))
        problems.append(Problem("base", str(path), f"the files build on each other in a circle ({chain}); drop one `base`"))
        return []
    content = _read_yaml(path, problems)
    bases = content.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
        problems.append(Problem("base", bases, f"in {path}: must be a list of file names"))
        bases = []
    below = [layer for b in bases for layer in _layers(path.parent / b, (*parents, path.resolve()), problems)]
    return [*below, (str(path), content)]


def _read_yaml(path: Path, problems: list[Problem]) -> dict[str, Any]:
    try:
        node = OmegaConf.load(path)
        content = OmegaConf.to_container(node, resolve=True)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "check the path"
        problems.append(Problem("configuration file", str(path), f"there is no such file; {hint}"))
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        problems.append(Problem("configuration file", str(path), f"cannot be read as YAML: {reason}"))
        return {}
    if not isinstance(content, dict):
        problems.append(Problem("configuration file", str(path), "must hold `section:` mappings, not a list or a value"))
        return {}
    return {str(k): v for k, v in content.items()}


def _apply(
    node: Any, schema: type, prefix: str, values: dict[str, Any], source: str, problems: list[Problem], *, merge: bool = False
) -> None:
    """Set every value of a nested mapping, field by field, so that one fault doesn't hide the next.

    `merge`: a free-form mapping is added to what is there rather than put in its place.
    """
    hints = typing.get_type_hints(schema)
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in hints:
            problems.append(Problem(name, value, f"unknown key in {source}; {_nearest(name)}"))
        elif not is_dataclass(hints[key]):
            _set(node, name, hints[key], value, source, problems, merge)
        elif isinstance(value, dict):
            section = {str(k): v for k, v in value.items()}
            _apply(node, typing.cast(type, hints[key]), f"{name}.", section, source, problems, merge=merge)
        elif value is not None:  # an empty section is harmless
            example = f"{name}.{next(iter(typing.get_type_hints(hints[key])))}"
            problems.append(Problem(name, value, f"in {source}: a section with keys is expected, such as {example}"))


def _apply_override(node: Any, override: str, problems: list[Problem]) -> None:
    source = "the command line"
    key, equals, text = override.partition("=")
    if not equals or not key:
        problems.append(Problem("command line", override, "an override is written key=value, such as run.steps=10"))
        return
    try:
        content = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problems.append(Problem(key, text, f"cannot be read as a YAML value: {' '.join(str(error).split())}"))
        return
    *sections, last = key.split(".")
    nested = {last: typing.cast(dict[str, Any], content)["value"] if text else ""}
    for part in reversed(sections):
        nested = {part: nested}
    _apply(node, Config, "", nested, source, problems, merge=_within_mapping(sections))


def _within_mapping(sections: list[str]) -> bool:
    """Whether these keys lead into a free-form mapping."""
    schema: Any = Config
    for key in sections:
        schema = typing.get_type_hints(schema).get(key)
        if not is_dataclass(schema):
            return typing.get_origin(schema) is dict
    return False


def _set(node: Any, name: str, hint: Any, value: Any, source: str, problems: list[Problem], merge: bool) -> None:
    try:
        if hint is bool and not isinstance(value, bool):  # OmegaConf would take 2 for true
            raise OmegaConfBaseException("")
        if isinstance(value, float) and hint is str:  # 1.10 would become "1.1"
            raise OmegaConfBaseException("")
        OmegaConf.update(node, name, value, merge=merge)
    except OmegaConfBaseException:
        problems.append(Problem(name, value, f"in {source}: {_expected(hint, value)}"))


def _expected(hint: Any, value: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        choices = [str(c) for c in typing.get_args(hint)]
        near = difflib.get_close_matches(str(value), choices, n=1)
        return f"must be one of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text (put it in quotes)"}
    if hint in words:
        return f"must be {words[hint]}"
    kind = re.sub(r"typing\.|<class '|'>", "", str(hint))
    return f"must be of the form {kind}"


def _nearest(name: str) -> str:
    """The known key that looks most like `name`; the same last word in another section counts as close."""
    known = _known_keys(Config, "")
    same_leaf = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    near = same_leaf or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    section = name.partition(".")[0]
    siblings = [k for k in known if k.startswith(f"{section}.")] or [f.name for f in fields(Config)]
    return f"known here: {', '.join(siblings)}"


def _known_keys(schema: type, prefix: str) -> list[str]:
    keys = []
    for key, hint in typing.get_type_hints(schema).items():
        name = f"{prefix}{key}"
        keys += [name, *_known_keys(typing.cast(type, hint), f"{name}.")] if is_dataclass(hint) else [name]
    return keys
