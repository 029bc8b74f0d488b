"""Problems that are made rather than read: `generator:NAME`."""

import hashlib
import itertools
import json
import operator
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dapo_megatron.data.rows import Row, parse_args, prompt_uid

WHERE = "data source args"
MAX_PROBLEMS = 500_000
OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass
class ArithmeticTask:
    operations: str = "+-*"
    min_operand: int = 0
    max_operand: int = 9
    num_terms: int = 2
    allow_negative: bool = False  # problems with a result below zero
    max_problems: int = 0  # of this task, over both splits; 0: all


@dataclass
class ArithmeticArgs:
    """All distinct problems of some tasks."""

    tasks: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    test_fraction: float = 0.25
    seed: int = 0


def arithmetic(args: dict[str, Any], split: str) -> list[Row]:
    """`What is 3 + 4?` in a seeded order. Problems are split by their unordered operands, so that train and test share
    none: 3 + 4, 4 + 3 and 4 * 3 stand on the same side."""
    values = parse_args(ArithmeticArgs, args, WHERE)
    if not 0 <= values.test_fraction <= 1:
        raise ValueError(f"{WHERE}.test_fraction: {values.test_fraction} must be between 0 and 1")
    golds: dict[str, int] = {}
    sides: dict[str, str] = {}
    for i, task_args in enumerate(values.tasks):
        where = f"{WHERE}.tasks[{i}]"
        task = parse_args(ArithmeticTask, task_args, where)
        problems = sorted(_arithmetic_problems(task, where), key=lambda p: _uniform(values.seed, p[0]))
        for expression, operands, result in problems[: task.max_problems or None]:
            golds[expression] = result
            sides[expression] = _side(values.seed, str(sorted(operands)), values.test_fraction)
    chosen = sorted((e for e in golds if sides[e] == split), key=lambda e: _uniform(values.seed, e))
    return [_row(f"What is {e}?", str(golds[e]), "arithmetic") for e in chosen]


def _arithmetic_problems(task: ArithmeticTask, where: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    if not task.operations or set(task.operations) - set(OPERATORS):
        raise ValueError(f"{where}.operations: {task.operations!r} must be made of {''.join(OPERATORS)}")
    if not 0 <= task.min_operand <= task.max_operand:
        raise ValueError(f"{where}: operands {task.min_operand} to {task.max_operand} are no range from 0 upwards")
    if task.num_terms < 2:
        raise ValueError(f"{where}.num_terms: {task.num_terms} must be at least 2")
    signs = sorted(set(task.operations))
    operands = range(task.min_operand, task.max_operand + 1)
    size = len(operands) ** task.num_terms * len(signs) ** (task.num_terms - 1)
    if size > MAX_PROBLEMS:
        raise ValueError(f"{where}: {size} problems are more than {MAX_PROBLEMS}; lower max_operand or num_terms")
    for terms in itertools.product(operands, repeat=task.num_terms):
        for between in itertools.product(signs, repeat=task.num_terms - 1):
            result = _evaluate(terms, between)
            if result >= 0 or task.allow_negative:
                expression = str(terms[0]) + "".join(f" {s} {t}" for s, t in zip(between, terms[1:], strict=True))
                yield expression, terms, result


def _evaluate(terms: tuple[int, ...], signs: tuple[str, ...]) -> int:
    """Left to right, products first."""
    sums, operations = [terms[0]], []
    for sign, term in zip(signs, terms[1:], strict=True):
        if sign == "*":
            sums[-1] *= term
        else:
            operations.append(sign)
            sums.append(term)
    result = sums[0]
    for sign, term in zip(operations, sums[1:], strict=True):
        result = OPERATORS[sign](result, term)
    return result


@dataclass
class ChoiceArgs:
    num_rows: int = 512
    length: int = 4
    accept: str = string.ascii_lowercase  # a reply is right if it begins with one of these characters
    seed: int = 0


def choice(args: dict[str, Any], split: str) -> list[Row]:
    """Random strings of digits and letters; for models that know nothing: the prompt says nothing about the answer.

    By default a reply has to begin with a letter, which a random model over the built-in tokenizer does two times in
    five.
    """
    values = parse_args(ChoiceArgs, args, WHERE)
    alphabet = string.digits + string.ascii_lowercase
    if not values.accept:
        raise ValueError(f"{WHERE}.accept is empty: no reply could be right; give at least one character")
    # at most an eighth of all strings: the test side holds a quarter, and the last ones would take long to hit
    if not 1 <= values.num_rows <= len(alphabet) ** max(values.length, 0) // 8:
        raise ValueError(f"{WHERE}.num_rows: {values.num_rows} is not from 1 to an eighth of all strings; raise length")
    generator = random.Random(f"{values.seed}:{split}")
    texts: dict[str, None] = {}
    while len(texts) < values.num_rows:
        text = "".join(generator.choices(alphabet, k=values.length))
        if _side(values.seed, text, 0.25) == split:
            texts[text] = None
    return [_row(text, values.accept, "choice") for text in texts]


@dataclass
class ReasoningGymArgs:
    name: str = ""  # of the data set, e.g. chain_sum
    size: int = 1000
    seed: int = 0
    cfg: dict[str, Any] = field(default_factory=dict)  # the data set's own settings


def reasoning_gym(args: dict[str, Any], split: str) -> list[Row]:
    """Items of a reasoning-gym data set. The gold answer is the item as JSON, for the library's scorer (verifier
    reasoning_gym).

    The splits have different seeds, and test leaves out what stands in train.
    """
    try:
        import reasoning_gym as library
    except ImportError as error:
        raise ValueError("generator:reasoning_gym needs the package reasoning-gym; install it") from error
    values = parse_args(ReasoningGymArgs, args, WHERE)

    def items(seed: int) -> list[dict[str, Any]]:
        try:
            return list(library.create_dataset(values.name, size=values.size, seed=seed, **values.cfg))
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"{WHERE}: reasoning-gym made no data set {values.name!r} ({error}); see name and cfg") from error

    train = items(2 * values.seed)
    questions = {item["question"] for item in train}
    chosen = train if split == "train" else [i for i in items(2 * values.seed + 1) if i["question"] not in questions]
    return [_row(item["question"], _item_json(item, values.name), f"reasoning_gym/{values.name}") for item in chosen]


def _item_json(item: dict[str, Any], name: str) -> str:
    try:
        return json.dumps({key: item[key] for key in ("question", "answer", "metadata")}, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"{WHERE}.name: items of {name} hold more than JSON can carry ({error}); choose another") from error


GENERATORS: dict[str, Callable[[dict[str, Any], str], list[Row]]] = {f.__name__: f for f in (arithmetic, choice, reasoning_gym)}


ARGS: dict[str, type] = {"arithmetic": ArithmeticArgs, "choice": ChoiceArgs, "reasoning_gym": ReasoningGymArgs}


def split_args(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments by which generator `name` tells train from test: with others the two splits overlap."""
    defaults = ARGS[name]()
    return {key: args.get(key, getattr(defaults, key)) for key in ("seed", "test_fraction") if hasattr(defaults, key)}


def _row(prompt: str, gold: str, data_source: str) -> Row:
    return Row(prompt_uid(prompt), prompt, gold, data_source)


def _uniform(seed: int, text: str) -> float:
    """A number in [0, 1) that depends on nothing but seed and text."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{text}".encode()).digest()[:7]) / 2**56


def _side(seed: int, text: str, test_fraction: float) -> str:
    return "test" if _uniform(seed, f"side:{text}") < test_fraction else "train"
