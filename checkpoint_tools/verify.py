"""`verify`: are two models the same, tensor by tensor and by the log-probs of real text?"""

import argparse
import copy
import json
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from checkpoint_tools import UsageError
from checkpoint_tools.dtypes import name_of
from checkpoint_tools.output import say
from checkpoint_tools.parameters import Parameter, in_order
from checkpoint_tools.progress import ByteProgress
from checkpoint_tools.sides import Side, Texts, side_of

TOLERANCE = 1e-4  # of a log-prob, absolute: what two ways of computing it in fp32 may differ by
MAX_TOKENS = 512  # of a text; the rest is cut off, since transformers holds the logits of all tokens at once
MAX_SHOWN = 5
TEXTS = (
    "The quick brown fox jumps over the lazy dog, while the old man reads yesterday's newspaper in the garden.",
    "Let x + 3 = 12. Then x = 9, so x^2 = 81 and the sum of its digits is 8 + 1 = 9. Answer: 9",
    "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
)
# What a configuration says that changes no log-prob.
_NOT_COMPARED = {
    *(
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "dtype",
        "initializer_range",
        "torch_dtype",
        "transformers_version",
    ),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
}
_INTEGERS = {2: torch.int16, 4: torch.int32}  # with as many bytes as a float


class Outcome(NamedTuple):
    """Of one comparison: a line for the report, and what is wrong, each in a line of its own."""

    name: str
    line: str
    problems: Sequence[str] = ()


def run(args: argparse.Namespace) -> int:
    warnings.simplefilter("ignore")  # Megatron's, of a dozen things that aren't installed
    a, b = side_of(args.a), side_of(args.b)
    say(f"A  {a.title}\nB  {b.title}")
    outcomes = [compare_configs(a, b)]
    texts: list[list[int]] = []
    if not args.tensors_only:  # before the tensors, so that wrong use is said at once
        outcome, texts = tokenize(a, b, read_texts(args.prompts))
        outcomes.append(outcome)
    if problems := unfit(a, b):
        outcomes.append(Outcome("tensors", "not compared, and no log-probs", problems))
    else:
        outcome, dtype = compare_tensors(a, b)
        outcomes.append(outcome)
        if not args.tensors_only:
            outcomes.append(compare_logprobs(a, b, texts, dtype))
    print(report(outcomes))
    return 1 if any(outcome.problems for outcome in outcomes) else 0


def report(outcomes: Sequence[Outcome]) -> str:
    width = max(len(outcome.name) for outcome in outcomes)
    lines = []
    for name, line, problems in outcomes:
        lines += [f"{name:<{width}}  {line}", *(f"{'':<{width}}  - {problem}" for problem in problems)]
    wrong = [outcome.name for outcome in outcomes if outcome.problems]
    return "\n".join([*lines, f"DIFFERENT: {', '.join(wrong)}" if wrong else "EQUAL"])


# --- configuration and tokenizer ---


def compare_configs(a: Side, b: Side) -> Outcome:
    """As transformers understands them, so that another spelling, or a default left out, is no difference. A side without a
    configuration is taken for the other's model. UsageError if both are without."""
    if a.folder is None and b.folder is None:
        raise UsageError(f"neither {a.title} nor {b.title} says what model it is (hf/config.json); compare with an HF folder")
    if a.folder is None or b.folder is None:
        a.folder = b.folder = a.folder or b.folder
        return Outcome("configuration", f"taken from {a.folder}, the other side has none")
    ours, theirs = _understood(a.config, a.folder), _understood(b.config, b.folder)
    different = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    problems = [f"{name}: {ours.get(name)} in A, {theirs.get(name)} in B" for name in different]
    return Outcome("configuration", "different" if problems else "equal", problems)


def _understood(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = config.get("model_type", "")
    if family not in CONFIG_MAPPING:
        return config
    try:
        found = CONFIG_MAPPING[family].from_dict(copy.deepcopy(config)).to_dict()  # it writes into what it is given
    except Exception as error:  # of several types
        raise ValueError(f"{folder}/config.json: transformers refuses it ({error})") from error
    theta = config.get("rope_theta")  # its place in older files, which Megatron's side reads first
    if theta is not None and isinstance(found.get("rope_parameters"), dict):
        found["rope_parameters"] = {**found["rope_parameters"], "rope_theta": theta}
    return {name: value for name, value in found.items() if name not in _NOT_COMPARED}


def read_texts(file: str | None) -> list[str]:
    """One text a line; of a .jsonl file each line's "prompt" or "text", which may be a list of turns. Without a file our own
    texts. UsageError that names the line."""
    if file is None:
        return list(TEXTS)
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompts {file}: can't be read ({error})") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not file.endswith(".jsonl"):
        return [line for _, line in numbered]
    return [_text_of_json(line, f"--prompts {file}, line {number}") for number, line in numbered]


def _text_of_json(line: str, where: str) -> str:
    try:
        row = json.loads(line)
        text = row.get("prompt", row.get("text"))
        if isinstance(text, list):
            text = "\n".join(turn["content"] for turn in text)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"{where}: is no JSON object with a text or a list of turns ({error})") from error
    if not isinstance(text, str):
        raise UsageError(f'{where}: has no text under "prompt" or "text"')
    return text


def tokenize(a: Side, b: Side, texts: Sequence[str]) -> tuple[Outcome, list[list[int]]]:
    """The token ids of the texts that have at least two; if both sides have a tokenizer, they must give the same. UsageError if
    none has, or no text is left."""
    from transformers import AutoTokenizer

    folders = [folder for folder in (a.tokenizer, b.tokenizer) if folder]
    if not folders:
        raise UsageError("neither side has a tokenizer, which log-probs of text need; use --tensors-only")
    found = [[AutoTokenizer.from_pretrained(folder)(text).input_ids[:MAX_TOKENS] for text in texts] for folder in folders]
    pairs = zip(texts, found[0], found[-1], strict=True)
    problems = [f"{text[:40]!r} becomes other tokens in B than in A" for text, ours, theirs in pairs if ours != theirs]
    ids = [tokens for tokens in found[0] if len(tokens) > 1]
    if not ids:
        raise UsageError("no text has two tokens, and the first has no log-prob; give longer ones with --prompts")
    if (largest := max(map(max, ids))) >= (size := min(a.shape.vocab_size, b.shape.vocab_size)):
        raise UsageError(f"the tokenizer gives token {largest}, the vocabulary has {size}: not the model's; use --tensors-only")
    line = "equal on these texts" if len(folders) == 2 else f"from {folders[0]}, the other side has none"
    return Outcome("tokenizer", "different" if problems else line, problems[:MAX_SHOWN]), ids


# --- tensors ---


def unfit(a: Side, b: Side) -> list[str]:
    """Why there is nothing to compare: models of other sizes, tensors missing or unknown."""
    if a.shape != b.shape:
        return ["the models are of different sizes or families: see the configuration"]
    problems = []
    for name, side in (("A", a), ("B", b)):
        try:
            side.check()
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return problems


def compare_tensors(a: Side, b: Side) -> tuple[Outcome, torch.dtype | None]:
    """Bit by bit, one parameter of each side in memory. If dtypes differ: after rounding, which is what a conversion to another
    dtype does; then also the dtype that was rounded to."""
    dtypes: Counter[tuple[torch.dtype, torch.dtype, torch.dtype]] = Counter()
    differences: list[str] = []
    number = 0
    parameters = list(in_order(a.shape))
    with ByteProgress("verify", sum(side.nbytes(p) for side in (a, b) for p in parameters)) as progress:
        for parameter in parameters:
            for name, ours, theirs in zip(parameter.hf_names, a.tensors(parameter), b.tensors(parameter), strict=True):
                number += 1
                what, dtype = difference(ours, theirs)
                dtypes[ours.dtype, theirs.dtype, dtype] += 1
                if what:
                    differences.append(f"{name}{what}{_key(a, b, parameter)}")
            progress.advance(a.nbytes(parameter) + b.nbytes(parameter))
    rounded = [f"{name_of(x)} in A, {name_of(y)} in B, compared as {name_of(z)}" for x, y, z in dtypes if x != y]
    line = f"{number} compared bit by bit, {f'{len(differences)} differ' if differences else 'all equal'}"
    more = [f"and {len(differences) - MAX_SHOWN} more"] if len(differences) > MAX_SHOWN else []
    (x, y, z), _ = dtypes.most_common(1)[0]
    return Outcome("tensors", "; ".join([line, *rounded]), differences[:MAX_SHOWN] + more), (z if x != y else None)


def difference(a: Tensor, b: Tensor) -> tuple[str, torch.dtype]:
    """("" or where and how much two tensors differ, dtype in which they were compared). NaNs with the same bits are equal."""
    if a.shape != b.shape:
        return f": shape {tuple(a.shape)} in A, {tuple(b.shape)} in B", a.dtype
    found = []
    for dtype in _common_dtypes(a.dtype, b.dtype):
        x, y = a.to(dtype).contiguous(), b.to(dtype).contiguous()
        bits = _INTEGERS[dtype.itemsize]
        if torch.equal(x.view(bits), y.view(bits)):
            return "", dtype
        wrong = x.view(bits) != y.view(bits)
        found.append((int(wrong.sum()), dtype, x, y, wrong))
    count, dtype, x, y, wrong = min(found, key=lambda item: item[0])
    first = tuple(int(i) for i in np.unravel_index(int(wrong.view(-1).to(torch.uint8).argmax()), a.shape))
    largest = (x[wrong].float() - y[wrong].float()).abs().max().item()
    values = f"{_value(a[first])} in A, {_value(b[first])} in B"
    return f" at {list(first)}: {values}; {count} of {a.numel()} elements differ, by at most {largest:.3g}", dtype


def _common_dtypes(a: torch.dtype, b: torch.dtype) -> list[torch.dtype]:
    """The narrower one; of float16 and bfloat16 either may have been rounded to."""
    if a.itemsize != b.itemsize:
        return [min(a, b, key=lambda dtype: dtype.itemsize)]
    return list(dict.fromkeys((a, b)))


def _value(element: Tensor) -> str:
    return f"{element.item():.9g}"


def _key(a: Side, b: Side, parameter: Parameter) -> str:
    key = a.key(parameter) or b.key(parameter)
    index = [f"{what} {i}" for what, i in zip(("layer", "expert"), parameter.index, strict=True) if i is not None]
    return f" (Megatron: {', '.join([key, *index])})" if key else ""


# --- log-probs ---


def compare_logprobs(a: Side, b: Side, texts: Texts, dtype: torch.dtype | None) -> Outcome:
    """Each side by its own program, transformers or Megatron, in fp32, with weights rounded to `dtype` if the sides' dtypes
    differ. NaN on both sides is equal."""
    found = {}
    # transformers first: what stands in for torch.cuda under Megatron on a CPU is more than its imports bear
    for name, side in sorted({"A": a, "B": b}.items(), key=lambda item: item[1].is_megatron):
        say(f"log-probs of {name} ...")
        found[name] = side.logprobs(texts, dtype)
    largest, problems, num_nan = 0.0, [], 0
    for number, (ours, theirs) in enumerate(zip(found["A"], found["B"], strict=True)):
        both = np.isnan(ours) & np.isnan(theirs)
        apart = np.where(both, 0.0, np.nan_to_num(np.abs(ours.astype(np.float64) - theirs), nan=np.inf))
        num_nan, largest = num_nan + int(both.sum()), max(largest, float(apart.max()))
        wrong = np.flatnonzero(apart > TOLERANCE)
        if len(wrong):
            place = int(wrong[0])
            problems.append(
                f"text {number + 1}, token {place + 2} of {len(ours) + 1} ({_token(a, b, texts[number][place + 1])}): "
                f"{ours[place]:.6f} in A, {theirs[place]:.6f} in B; {len(wrong)} tokens of this text differ"
            )
    count = sum(map(len, found["A"]))
    line = f"of {count} tokens in {len(texts)} texts, in float32, differ by at most {largest:.2g} (tolerance {TOLERANCE:g})"
    nan = f"; {num_nan} are NaN on both sides" if num_nan else ""
    return Outcome("log-probs", line + nan, problems[:MAX_SHOWN])


def _token(a: Side, b: Side, token: int) -> str:
    from transformers import AutoTokenizer

    return repr(AutoTokenizer.from_pretrained(a.tokenizer or b.tokenizer).decode([token]))
