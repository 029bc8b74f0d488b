"""The `math_verify` verifier: symbolic equality by the math-verify library, made safe for a reward.

The library's time limits use signal.alarm, which fails outside the main thread, so they are off; instead expressions
that could burn seconds are refused before they are parsed. It is also lenient in ways that a policy learns to exploit;
those are refused as well.
"""

import logging
import math
import re
from typing import Any

from dapo_megatron.reward.answers import (
    canonical_number,
    last_answer_line,
    last_boxed,
    normalize_answer,
    strip_decoration,
    value_of,
)

MAX_CHARACTERS = 300
MAX_DEPTH = 10
MAX_EXPONENT = 1000
MAX_FACTORIAL = 200
UNBOUNDED = re.compile(r"\\(?:sum|prod|i*int|oint|lim|binom|dbinom|tbinom)\b|\*\*")
SUBSCRIPTED_NUMBER = re.compile(r"\d\s*_")
UNIT = re.compile(r"\\(?:text\w*|mathrm|mbox)\{[^{}]*\}|\^\{?\\circ\}?|\\[$%,;:! ]|[%~$]|(?<=\d)\s*[a-zA-Z]+$")
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|,)(?=\d{3}(?!\d))")
NUMERAL = r"(?:\d+\.?\d*|\.\d+)"
TERM = rf"\s*[+-]?\s*(?:{NUMERAL}\s*#?|#)\s*"  # `#`: a fraction or root
QUOTIENT = re.compile(rf"{TERM}(?:/{TERM})?")
ARGUMENT = rf"\s*(?:\{{{TERM}(?:/{TERM})?\}}|\d|#)"
FRACTION_OR_ROOT = re.compile(rf"\\[dt]?frac{ARGUMENT}{ARGUMENT}|\\sqrt\s*(?:\[\d+\])?{ARGUMENT}")
ALTERNATIVES = re.compile(r"(?i)\bor\b|\bpm\b|\band/or\b|\u00b1")


def is_expensive(expression: str) -> bool:
    """True if evaluating `expression` may take long: power towers, large exponents or factorials, sums, nesting."""
    if len(expression) > MAX_CHARACTERS or UNBOUNDED.search(expression):
        return True
    depth = 0
    for character in expression:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_DEPTH:
            return True
    # a factorial of anything but a small number: 1000000!, (10^9)!, 5!!
    factorials = expression.count("!") - len(re.findall(r"\\!", expression))
    small = [n for n in re.findall(r"(?<!\d)(\d+)\s*!(?!\s*!)", expression) if int(n[:4]) <= MAX_FACTORIAL and len(n) < 4]
    if factorials > len(small):
        return True
    # Exponents of a compound base multiply, as in ((9^{999})^{999})^{999}; those of plain bases stand side by side.
    compound, plain = 1, 1
    for match in re.finditer(r"\^", expression):
        exponent = _exponent(expression[match.end() :].lstrip())
        numbers = [int(n) if len(n) < 9 else MAX_EXPONENT + 1 for n in re.findall(r"\d+", exponent)]
        size = math.prod(max(n, 1) for n in numbers)
        if "^" in exponent or "!" in exponent:
            return True
        if re.search(r"[)}\]]\s*$", expression[: match.start()]):
            compound *= size
        else:
            plain = max(plain, size)
    return compound * plain > MAX_EXPONENT


def _exponent(rest: str) -> str:
    """The exponent at the start of `rest`: a group, or a token with what is raised to in turn."""
    if not rest.startswith(("{", "(")):
        return re.match(r"-?(?:\\?[a-zA-Z]+|\d+|.)?\s*\^?", rest, re.DOTALL)[0]  # type: ignore[index]
    depth = 0
    for end, character in enumerate(rest):
        depth += (character in "{(") - (character in "})")
        if depth == 0:
            return rest[1:end]
    return rest[1:]


def extract_expression(text: str) -> str | None:
    """The final answer of a response: its last box, or else its last `Answer:` line; None without either."""
    answer = last_boxed(text)
    if answer is None:
        answer = last_answer_line(text)
    return strip_decoration(answer) if answer else None


def parse_expression(expression: str) -> list:
    """math-verify's reading of one LaTeX expression without delimiters; empty if it can't be read."""
    import latex2sympy2_extended  # noqa: F401 - math-verify swallows all errors, a broken import would be "unreadable"
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    return math_verify.parse(
        f"${expression}$",
        extraction_config=[math_verify.LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )


def is_evaluated(expression: str) -> bool:
    """True for one number, fraction, root, or multiple of them: nothing that is left to be worked out."""
    text, before = UNIT.sub(" ", THOUSANDS.sub("", expression)).strip(), ""
    while text != before:  # from the inside out
        text, before = FRACTION_OR_ROOT.sub("#", text), text
    return bool(QUOTIENT.fullmatch(text))


def equivalent(gold: str, answer: str) -> bool:
    """Whether `answer` is `gold`, both without delimiters, as text, as a number or symbolically.

    Of `variable = value` only the value counts. If the gold is a number, a fraction or a root, the answer must be one as
    well: 17 * 2 isn't 34, and neither are 34 + 0, 34^1 and 33 = 34. A decimal must have exactly the gold's value.
    """
    gold, answer = value_of(gold), value_of(answer)
    if normalize_answer(gold) == normalize_answer(answer):
        return True
    if canonical_number(gold) and canonical_number(answer):
        return False  # two different plain numbers; parsing would round long ones
    if is_expensive(answer) or is_expensive(gold):
        return False
    # A percent sign makes the library accept both 50 and 0.5; a number's base is dropped; alternatives become a set.
    for sign in (lambda s: "%" in s, SUBSCRIPTED_NUMBER.search, ALTERNATIVES.search):
        if bool(sign(gold)) != bool(sign(answer)):
            return False
    if (is_evaluated(gold) and not is_evaluated(answer)) or ("=" in gold) != ("=" in answer):
        return False
    import math_verify

    parsed_gold, parsed_answer = parse_expression(gold), parse_expression(answer)
    if not parsed_gold or not parsed_answer or _differ_as_numbers(parsed_gold[0], parsed_answer[0]):
        return False
    return math_verify.verify(parsed_gold, parsed_answer, timeout_seconds=None)


def _differ_as_numbers(a: Any, b: Any) -> bool:
    """True for two different numbers of which at least one is a decimal or rational.

    The library rounds: to it 0.33333333 is 1/3 and 7.141428 is sqrt(51). Decimals count as the rationals they are.
    """
    import sympy

    numbers = [x for x in (a, b) if isinstance(x, sympy.Expr) and x.is_number]
    if len(numbers) < 2:
        return False
    a, b = (x.replace(lambda e: e.is_Float, lambda e: sympy.Rational(str(e))) for x in numbers)
    ratio = a / b if b else a
    return bool(ratio.is_Rational and ratio != 1) or {a.is_rational, b.is_rational} == {True, False}
