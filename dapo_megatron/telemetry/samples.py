"""The sampled responses of each step, one JSON object a response, for reading what the policy actually says."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dapo_megatron.records import Group


def write_samples(
    run_dir: str | Path,
    step: int,
    kept: Sequence[Group],
    filtered: Sequence[Group] = (),
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Path:
    """Write `run_dir/samples/step_NNNNNN.jsonl`, whole or not at all, and return its path.

    Rows are in the order of the prompt stream. `decode` turns prompt ids into text; without it `prompt` is left out.
    """
    path = Path(run_dir) / "samples" / f"step_{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    groups = [(group, "kept") for group in kept] + [(group, _why_filtered(group)) for group in filtered]
    groups.sort(key=lambda pair: pair[0].prompt.index)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for group, fate in groups:
            prompt = {"prompt": decode(group.prompt.token_ids)} if decode else {}
            for row in _rows(group):
                file.write(json.dumps({"step": step, "fate": fate, **row, **prompt}, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def _why_filtered(group: Group) -> str:
    if group.correct.all():
        return "filtered_correct"
    return "filtered" if group.correct.any() else "filtered_wrong"


def _rows(group: Group) -> Iterator[dict[str, Any]]:
    for i, completion in enumerate(group.completions):
        yield {
            "index": group.prompt.index,
            "uid": group.prompt.uid,
            "sample": i,
            "gold": group.prompt.gold,
            "extracted": group.extracted[i] if group.extracted else None,
            "correct": bool(group.correct[i]),
            "reward": float(group.reward[i]),
            "raw_reward": float(group.raw_reward[i]),
            "overlong_penalty": float(group.overlong_penalty[i]),
            "length": len(completion),
            "finish_reason": completion.finish_reason,
            "version": int(completion.versions[-1]) if len(completion) else None,
            "text": group.texts[i],
        }
