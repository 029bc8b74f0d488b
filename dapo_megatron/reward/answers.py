"""Finding the answer in a response and its canonical form. Only strings: a float would round long integers."""

import re

# What a decoder may leave at the end of a text when special tokens aren't skipped.
LAST_TOKEN = re.compile(r"(?:</s>|<eos>|<pad>|<\|[^|<>]{1,40}\|>)\Z")
NUMBER = re.compile(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+)?(?:\.(\d*))?")
# Words of someone who hasn't made up his mind, or means another answer.
HEDGE = re.compile(
    r"(?i)\b(?:or|but|not|nor|never|either|neither|maybe|perhaps|except|cannot|wrong|incorrect|false|minus|negative)\b"
    r"|n['\u2019]t\b|\\(?:neq?|not|l(?:t|eq?|eqslant)|g(?:t|eq?|eqslant)|pm|mp|approx)(?![a-zA-Z])"
)
SUBSCRIPT_OR_ARGUMENTS = re.compile(r"_(?:\{[^{}]*\}|\w)|(?<=[a-zA-Z}])\([^()=,]*\)")
NAME = re.compile(r"(?=[^a-zA-Z]*[a-zA-Z])[a-zA-Z\\{}()|'$*+\-/\s]+")
# `Answer:`, `**Answer:**`, `**Answer**:`; the answer is the rest of the line, or the next line.
ANSWER_LINE = re.compile(r"(?i)Answer\s*(?:\*\*|__)?\s*:\s*([^\n]+)")

# The normalisation published with the recipe (after Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1).
SPACES = ("an ", "a ", "\\$", "\\ ")
SUBSTITUTIONS = (
    (".$", "$"), ("mbox", "text"), (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", '"', "\\dots",
)  # fmt: skip


def canonical_number(text: str) -> str | None:
    """`text` as the shortest plain decimal: "034", "34.0", "+34" -> "34"; None for "3,4" (no thousands group)."""
    match = NUMBER.fullmatch(text.strip().replace("\u2212", "-"))
    if not match or not (match[2] or match[3]):
        return None
    whole = (match[2] or "").replace(",", "").lstrip("0") or "0"
    fraction = (match[3] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if match[1] == "-" and number != "0" else number


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}` with balanced braces, None without one."""
    for start in reversed([m.end() for m in re.finditer(r"\\f?boxed\s*\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start:i].strip()
    return None


def last_answer_line(text: str) -> str | None:
    """What follows the last `Answer:` (any case, also in bold), None without one."""
    matches = ANSWER_LINE.findall(text)
    return matches[-1].strip() if matches else None


def strip_special_tokens(text: str) -> str:
    """`text` without the special tokens at its end; elsewhere they stay, as `1<|x|>4` is not 14."""
    text = text.rstrip()
    while match := LAST_TOKEN.search(text[-44:]):
        text = text[: -len(match[0])].rstrip()
    return text


def value_of(answer: str) -> str:
    """The right side of `variable = value`; any other answer as it is.

    A variable is made of letters: `x`, `x_1`, `f(3)`, `m + n`, `the area`. Neither `33 = 34` nor `2x = 34`, `x != 34` or
    `x = 33, y = 34` says that something is 34.
    """
    left, equals, right = answer.partition("=")
    name = SUBSCRIPT_OR_ARGUMENTS.sub("", left)
    if not equals or "=" in right or HEDGE.search(name) or not NAME.fullmatch(name):
        return answer
    return right.strip()


def strip_decoration(answer: str) -> str:
    """The answer without what is around it: special tokens, bold marks, math delimiters, a final period, a box."""
    previous = None
    while answer != previous:
        previous = answer
        answer = strip_special_tokens(answer).strip().strip("*`").strip()
        answer = answer.removeprefix("__").removesuffix("__")
        for left, right in ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$")):
            if len(answer) >= len(left) + len(right) and answer.startswith(left) and answer.endswith(right):
                inner = answer[len(left) : -len(right)]
                if left not in inner:  # `$3$ or $4$` is no single formula
                    answer = inner.strip()
        if answer.endswith(".") and not answer.endswith(".."):
            answer = answer[:-1].strip()
        content = last_boxed(answer)
        if content is not None and re.fullmatch(r"\\f?boxed\s*\{\s*" + re.escape(content) + r"\s*\}", answer):
            answer = content
    return answer


def normalize_answer(answer: str) -> str:
    """The published normalisation, on an answer stripped of decoration, with numbers in canonical form.

    Where the published one deletes, this one leaves the gap between two digits: `3 4` and `3 ways 4` aren't 34.
    """
    answer = strip_decoration(value_of(strip_decoration(answer))).replace("\u2212", "-")
    around, _, rest = answer.partition("$")
    formula, closing, after = rest.partition("$")
    if closing and "$" not in after and not HEDGE.search(around + after) and not re.search(r"\d", around + after):
        answer = strip_decoration(value_of(formula))  # the formula in a sentence that names no other answer
    answer = re.sub(r",\\!|\{,\}", ",", answer)  # thousands
    answer = re.sub(r"frac\s*(\d)\s+(\d)", r"frac\1\2", answer)
    for expression in SPACES:
        answer = answer.replace(expression, " ")
    answer = _without_spaces(answer)
    for before, after in SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in REMOVED:
        answer = answer.replace(expression, " ")
    answer = re.sub(r"\\(?:text|textbf|overline)\{(.*?)\}", r" \1 ", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r" \1 ", answer)
    answer = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", _without_spaces(answer))
    answer = re.sub(r"(sqrt)([^{])", r"sqrt{\2}", answer)
    answer = strip_decoration(_without_spaces(answer.replace("$", " ")))
    return canonical_number(answer) or answer


def _without_spaces(text: str) -> str:
    """Without white space, but for one blank wherever digits would join."""
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(text.split()))
