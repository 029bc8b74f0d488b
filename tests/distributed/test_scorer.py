"""A Megatron model loaded from an imported checkpoint gives the log-probs of plain transformers, family by family."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint_tools.cli import main
from checkpoint_tools.sides import HFSide
from checkpoint_tools.verify import TOLERANCE
from tests.distributed.harness import RankPool
from tests.small_models import FAMILIES, change_tensors, make_small_model

TEXTS = [np.random.default_rng(11).integers(0, 131, length).tolist() for length in (2, 5, 41, 90)]


def score(rank: int, jobs: list[tuple[str, dict[str, Any]]]) -> list[list[np.ndarray]]:
    """Of each (checkpoint, configuration)."""
    from megatron.core import parallel_state

    from dapo_megatron.policy.scorer import Scorer

    found = []
    for folder, config in jobs:
        found.append(Scorer(Path(folder), config).logprobs(TEXTS))
        parallel_state.destroy_model_parallel()
    return found


def imported(hf: Path, *options: str) -> str:
    out = hf.with_name(f"{hf.name}.megatron{''.join(options)}")
    assert main(["hf-to-megatron", str(hf), str(out), *options]) == 0
    return str(out)


def config_of(hf: Path) -> dict[str, Any]:
    return json.loads((hf / "config.json").read_text())


def largest(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    assert [len(some) for some in ours] == [len(text) - 1 for text in TEXTS]
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("scored")
    return {name: make_small_model(name, root / name) for name in FAMILIES}


def test_every_family_scores_as_transformers_does(ranks: RankPool, folders: dict[str, Path]) -> None:
    (found,) = ranks.run(score, 1, [(imported(hf), config_of(hf)) for hf in folders.values()])
    for (name, hf), ours in zip(folders.items(), found, strict=True):
        assert largest(ours, HFSide(hf).logprobs(TEXTS, None)) < TOLERANCE / 5, name


def test_rounded_weights_are_compared_as_rounded(ranks: RankPool, folders: dict[str, Path]) -> None:
    """A conversion to bf16: equal to the rounded source, far from the source itself."""
    hf = folders["qwen3"]
    ((ours,),) = ranks.run(score, 1, [(imported(hf, "--dtype", "bfloat16"), config_of(hf))])
    side = HFSide(hf)
    assert largest(ours, side.logprobs(TEXTS, torch.bfloat16)) < TOLERANCE / 5
    assert largest(ours, side.logprobs(TEXTS, None)) > 10 * TOLERANCE


def test_faults_of_a_conversion_show(ranks: RankPool, folders: dict[str, Path], tmp_path: Path) -> None:
    """Gate and up swapped in one layer, another rope theta, no rope scaling."""
    hf, swapped = folders["llama3"], tmp_path / "swapped"
    shutil.copytree(hf, swapped)

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        gate, up = (f"model.layers.1.mlp.{x}_proj.weight" for x in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]

    change_tensors(swapped, swap)
    good, config = tmp_path / "good", config_of(hf)
    assert main(["hf-to-megatron", str(hf), str(good)]) == 0
    theta = {**config, "rope_theta": 21000.0, "rope_parameters": {**config["rope_parameters"], "rope_theta": 21000.0}}
    unscaled = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    (found,) = ranks.run(score, 1, [(imported(swapped), config), (str(good), theta), (str(good), unscaled)])
    right = HFSide(hf).logprobs(TEXTS, None)
    for name, ours in zip(("swapped", "theta", "unscaled"), found, strict=True):
        assert largest(ours, right) > 10 * TOLERANCE, name
