from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from dapo_megatron.records import Sample
from dapo_megatron.samples_file import load_samples, save_samples
from tests.distributed.harness import make_samples


def test_samples_come_back_bit_for_bit(tmp_path: Path) -> None:
    samples = make_samples()
    samples[0].rollout_logprobs[0] = np.nan
    save_samples(tmp_path / "a" / "batch.npz", samples)
    again = load_samples(tmp_path / "a" / "batch.npz")
    assert len(again) == len(samples)
    for before, after in zip(samples, again, strict=True):
        for field in fields(Sample):
            a, b = np.asarray(getattr(before, field.name)), np.asarray(getattr(after, field.name))
            assert a.tobytes() == b.astype(a.dtype).tobytes() and a.shape == b.shape, field.name
            if isinstance(getattr(before, field.name), np.ndarray):
                assert a.dtype == b.dtype, field.name
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["batch.npz"]


def test_no_samples(tmp_path: Path) -> None:
    save_samples(tmp_path / "batch.npz", [])
    assert load_samples(tmp_path / "batch.npz") == []


@pytest.mark.parametrize("damage", ["cut", "other", "pickle", "missing"])
def test_a_bad_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "batch.npz"
    save_samples(path, make_samples())
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage == "other":
        path.write_text("hello")
    elif damage == "pickle":
        with path.open("wb") as file:
            np.savez(file, token_ids=np.array([{}], dtype=object))
    else:
        path.unlink()
    with pytest.raises(ValueError, match=r"batch\.npz: not a file of samples"):
        load_samples(path)
