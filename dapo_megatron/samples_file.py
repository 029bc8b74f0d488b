"""Samples in a file: a batch that can be looked at, recomputed or compared later, without pickle."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from dapo_megatron.records import Sample

# Arrays of a Sample with one entry a response token; token_ids have one a token.
_PER_TOKEN = ("rollout_logprobs", "staleness", "mask", "advantages", "weights")
_PER_SAMPLE = ("prompt_len", "group")


def save_samples(path: Path, samples: Sequence[Sample]) -> None:
    """An .npz with all samples' arrays one after the other. The file appears under its name when it is whole."""
    arrays = {
        "num_tokens": np.array([len(sample.token_ids) for sample in samples], np.int64),
        "token_ids": np.concatenate([np.zeros(0, np.int32), *(sample.token_ids for sample in samples)]).astype(np.int32),
    }
    for name in _PER_SAMPLE:
        arrays[name] = np.array([getattr(sample, name) for sample in samples], np.int64)
    for name in _PER_TOKEN:
        parts = [getattr(sample, name) for sample in samples]
        arrays[name] = np.concatenate(parts) if parts else np.zeros(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    partial.rename(path)


def load_samples(path: Path) -> list[Sample]:
    """What save_samples wrote, bit for bit. ValueError if the file is none of ours or is cut short."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("num_tokens", "token_ids", *_PER_SAMPLE, *_PER_TOKEN)}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path}: not a file of samples ({type(error).__name__}: {error})") from error
    prompt_lens = arrays["prompt_len"]
    starts = np.cumsum([0, *arrays["num_tokens"]])
    response_starts = np.cumsum([0, *(arrays["num_tokens"] - prompt_lens)])
    samples = []
    for i, prompt_len in enumerate(prompt_lens):
        response = slice(response_starts[i], response_starts[i + 1])
        per_token = {name: arrays[name][response] for name in _PER_TOKEN}
        tokens = arrays["token_ids"][starts[i] : starts[i + 1]]
        samples.append(Sample(token_ids=tokens, prompt_len=int(prompt_len), group=int(arrays["group"][i]), **per_token))
    return samples


assert {field.name for field in fields(Sample)} == {"token_ids", *_PER_TOKEN, *_PER_SAMPLE}, "a field of Sample isn't saved"
