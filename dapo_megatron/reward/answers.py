"""Finding the answer in a response and its canonical form. Only strings: a float would round long integers."""

import re

# What a decoder may leave at the end of a text when special tokens aren't skipped.
SPECIAL_TOKEN = re.compile(r"</s>|<eos>|<pad>|<\|[^|<>]{1,40}\|>")
NUMBER = re.compile(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+)?(?:\.(\d*))?")
# `Answer:`, `**Answer:**`, `**Answer**:`; the answer is the rest of the line, or the next line.
ANSWER_LINE = re.compile(r"(?i)Answer\s*(?:\*\*|__)?\s*:\s*([^\n]+)")

# The normalisation published with the recipe (after Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1).
SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""),
    ("mbox", "text"), (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
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


def strip_decoration(answer: str) -> str:
    """The answer without what is around it: special tokens, bold marks, math delimiters, a final period, a box."""
    previous = None
    while answer != previous:
        previous = answer
        answer = SPECIAL_TOKEN.sub("", answer).strip().strip("*`").strip()
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
    """The published normalisation, on an answer stripped of decoration, with numbers in canonical form."""
    answer = strip_decoration(answer).rpartition("=")[2].replace("\u2212", "-")
    for before, after in SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in REMOVED:
        answer = answer.replace(expression, "")
    if answer.count("$") == 2:  # the formula in a sentence; of two formulas the published rule takes the first, a hedge
        answer = answer.split("$")[1]
    answer = re.sub(r"\\text(?:bf)?\{(.*?)\}", r"\1", answer)
    answer = re.sub(r"\\overline\{(.*?)\}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", answer)
    answer = re.sub(r"(sqrt)([^{])", r"sqrt{\2}", answer)
    answer = strip_decoration(answer.replace("$", ""))
    return canonical_number(answer) or answer
