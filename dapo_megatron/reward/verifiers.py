"""Verifiers by name: each takes a response's text and the gold answer and gives a verdict.

They are pure Python without signals, so they run in threads and worker processes, and they can be pickled. A time limit
is the business of whoever runs them.
"""

import difflib
import functools
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dapo_megatron.reward import symbolic
from dapo_megatron.reward.answers import (
    HEDGE,
    canonical_number,
    last_answer_line,
    last_boxed,
    normalize_answer,
    strip_special_tokens,
)

# The published rule looks for the answer in the last 300 characters of a response.
TAIL_CHARACTERS = 300
# gsm8k: one number among words (of letters) and punctuation; words that multiply it; what makes `=` no computation.
AROUND = r"(?:[^\W\d_]|[\s.,:;?'\"()*{}/])*"
LONE_NUMBER = re.compile(rf"{AROUND}?([+-]?(?:\d[\d,]*(?:\.\d+)?|(?<![a-zA-Z])\.\d+)){AROUND}")
CURRENCY = re.compile(r"[$\u20ac\u00a3\u00a5\u20b9\\]")
MAGNITUDE = re.compile(
    r"(?i:\b(?:dozens?|hundred|thousand|million|billion|percent|half|thirds?|quarters?)\b)|\d\s*(?:[kK]|M|B|bn)\b"
)
RELATION = re.compile(r"[!<>~\u2260\u2264\u2265,;]")


@dataclass(frozen=True)
class Verdict:
    """`extracted` is the answer as the verifier read it, None if the response holds none. `error` is the exception that
    a verifier died of, as text; the response then counts as incorrect."""

    correct: bool
    extracted: str | None
    error: str = ""


Verifier = Callable[[str, str], Verdict]


def math_dapo(text: str, gold: str, *, strict: bool = True) -> Verdict:
    """The rule published with DAPO: the last `Answer:` line in the last 300 characters, normalised, equals the gold.

    More lenient than the published code: decoration (bold, delimiters, a box, a period, special tokens at the end) and
    spellings of the same number don't make an answer wrong; strict=False also takes the last `\\boxed{}` of a response
    without an `Answer:` line.
    Stricter: the published code takes whatever follows the last `=` and what stands between the first two `$`, and
    deletes blanks and words like "ways" even between digits. Here the right side of `=` counts only after one variable
    (`x = 34`; not `x != 34`, `34 or 35 = 34`, `2 + 32 = 34`, `x = 33, y = 34`), a formula in a sentence only if the
    sentence has no other digit and takes nothing back (not `It is $34$, not 35`), and `3 4` or `3 ways 4` isn't 34.
    """
    tail = text[-TAIL_CHARACTERS:]
    answer = last_answer_line(tail)
    if answer is None and not strict:
        answer = last_boxed(tail)
    if answer is None:
        return Verdict(False, None)
    extracted = normalize_answer(answer)
    return Verdict(bool(extracted) and extracted == normalize_answer(gold), extracted)


def math_verify(text: str, gold: str) -> Verdict:
    """Symbolic equality of the last box (or else the last `Answer:` line) with a LaTeX gold answer; see symbolic.py."""
    extracted = symbolic.extract_expression(text)
    if not extracted:
        return Verdict(False, None)
    return Verdict(symbolic.equivalent(_bare_latex(gold), extracted), extracted)


def gsm8k(text: str, gold: str) -> Verdict:
    """The number after the last `####`, or else on the last `Answer:` line, or what it is computed to there (`5 + 3 = 8`).

    Around it only currency signs, words for units and punctuation may stand: `34 apples`, but not `34%`, `34k` or `not 34`.
    """
    marked = re.findall(r"####\s*([^#\n]+)", text)
    answer = marked[-1] if marked else last_answer_line(text) or ""
    computation, equals, value = strip_special_tokens(answer).rpartition("=")
    if equals and (HEDGE.search(computation) or RELATION.search(computation) or canonical_number(computation)):
        return Verdict(False, None)  # `x != 34`, `34 or 35 = 34`, `33 = 34`
    value = CURRENCY.sub("", value.replace("\u2212", "-"))
    value = re.sub(r"(?<=[a-zA-Z])-(?=[a-zA-Z])", "", value)  # half-hours
    match = LONE_NUMBER.fullmatch(value)
    if match is None or HEDGE.search(value) or MAGNITUDE.search(value):
        return Verdict(False, None)
    extracted = canonical_number(match[1].rstrip(","))
    return Verdict(extracted is not None and extracted == canonical_number(gold), extracted)


def exact_answer(text: str, gold: str) -> Verdict:
    """The response holds exactly one `Answer: N`, N an integer, and ends with it."""
    text = strip_special_tokens(text)
    match = re.search(r"(?i)Answer:\s*([+-]?\d+)\s*\Z", text)
    if match is None or len(re.findall(r"(?i)Answer\s*:", text)) != 1:
        return Verdict(False, None)
    extracted = canonical_number(match[1])
    return Verdict(extracted == canonical_number(gold), extracted)


def choice(text: str, gold: str) -> Verdict:
    """The response's first character is one of the gold answer's characters."""
    return Verdict(bool(text) and text[0] in gold, text[0] if text else None)


def reasoning_gym(text: str, gold: str) -> Verdict:
    """reasoning-gym's own scorer on the extracted answer gives exactly 1.0.

    `gold` is JSON with the item's question, answer and metadata. The answer is the only `<answer>...</answer>`, or else
    all that follows the only `Answer:`; two of a kind are two attempts. It is extracted first as scorers give partial
    credit for any text that holds it.
    """
    item = json.loads(gold)
    tagged = text.split("<answer>")
    lines = re.split(r"(?i)Answer\s*:", strip_special_tokens(text))
    if len(tagged) == 2 and tagged[1].count("</answer>") == 1:
        extracted = tagged[1].partition("</answer>")[0].strip()
    elif len(tagged) == 1 and len(lines) == 2:
        extracted = lines[1].strip()
    else:
        return Verdict(False, None)
    if extracted == item["answer"]:
        return Verdict(True, extracted)
    from reasoning_gym.factory import get_score_answer_fn

    return Verdict(get_score_answer_fn(item["metadata"]["source_dataset"])(extracted, item) == 1.0, extracted)


VERIFIERS: dict[str, Callable[..., Verdict]] = {
    f.__name__: f for f in (math_dapo, math_verify, gsm8k, exact_answer, choice, reasoning_gym)
}


def make_verifier(name: str, args: dict[str, Any] | None = None) -> Verifier:
    """The verifier `name` with its keyword arguments bound. ValueError for an unknown name or argument or a wrong type."""
    function = VERIFIERS[_known("reward.verifier", name, list(VERIFIERS))]
    keywords = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    for key, value in (args or {}).items():
        default = keywords[_known(f"reward.verifier_args of {name}", key, list(keywords))]
        if type(value) is not type(default):
            raise ValueError(
                f"reward.verifier_args.{key}: {value!r} must be of type {type(default).__name__}, as {default!r} is"
            )
    return functools.partial(function, **(args or {}))


def validate_gold(name: str, gold: str) -> None:
    """ValueError if no response could ever match `gold` under verifier `name`."""
    checks: dict[str, tuple[Callable[[str], Any], str]] = {
        "math_dapo": (normalize_answer, "an answer that is not empty"),
        "math_verify": (_readable_latex, "an expression that math-verify can read"),
        "gsm8k": (canonical_number, "a number"),
        "exact_answer": (lambda g: "." not in (canonical_number(g) or "."), "an integer"),
        "choice": (len, "at least one character"),
        "reasoning_gym": (_is_item, "a reasoning-gym item as JSON with answer and metadata"),
    }
    check, expected = checks[_known("reward.verifier", name, list(VERIFIERS))]
    if not check(gold):
        raise ValueError(f"gold answer {gold!r}: verifier {name} needs {expected}; correct the data or the verifier")


def _known(field: str, value: str, known: list[str]) -> str:
    if value in known:
        return value
    close = difflib.get_close_matches(value, known, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ValueError(f"{field}: {value!r} is unknown; {hint}known: {', '.join(known) or 'none'}")


def _bare_latex(gold: str) -> str:
    boxed = last_boxed(gold)
    return gold.strip().strip("$") if boxed is None else boxed


def _readable_latex(gold: str) -> bool:
    bare = _bare_latex(gold)
    if canonical_number(bare):  # most of them; parsing takes milliseconds
        return True
    return not symbolic.is_expensive(bare) and bool(symbolic.parse_expression(bare))


def _is_item(gold: str) -> bool:
    try:
        item = json.loads(gold)
    except ValueError:
        return False
    # some data sets have no single answer (null): their scorers judge by the metadata
    return isinstance(item, dict) and "answer" in item and "source_dataset" in item.get("metadata", {})
