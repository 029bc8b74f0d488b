"""Converted checkpoints and real Megatron: what is imported it loads on every layout, what it saves is exported; bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools.cli import main
from tests.distributed.harness import LAYOUTS, RankPool, make_config
from tests.distributed.test_checkpoint_files import save
from tests.distributed.test_state import all_tensors

SLOW = pytest.mark.slow
FAMILIES = ("llama_untied", "qwen2_tied", "qwen3_untied")


@pytest.fixture(scope="module")
def imported(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each cut for another layout."""
    root = tmp_path_factory.mktemp("imported")
    for name, options in zip(FAMILIES, ((), ("--tp", "2"), ("--tp", "2", "--pp", "4")), strict=True):
        assert main(["hf-to-megatron", str(models[name]), str(root / name), *options]) == 0
    return {name: root / name for name in FAMILIES}


def differences(rank: int, cfg: Any, cases: list[tuple[str, str]]) -> list[str]:
    """Parameters that Megatron loads from the checkpoint otherwise than this rank's part of the HF folder is."""
    from megatron.core import dist_checkpointing, parallel_state

    from dapo_megatron.policy.policy import Policy

    found = []
    for model_dir, folder in cases:
        policy = Policy(cfg, model_dir)
        for chunk in policy.gpt:
            loaded = dist_checkpointing.load(chunk.sharded_state_dict(), folder)
            params = dict(chunk.named_parameters())
            assert params and params.keys() <= loaded.keys()
            # an output layer that is the embedding's copy isn't stored a second time
            found += [f"{folder}: {n}" for n, p in params.items() if not torch.equal(p, loaded[n].reshape(p.shape))]
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("layout", [pytest.param("one rank", marks=SLOW), pytest.param("TP2+SP", marks=SLOW), "PP2", "TP2xPP2"])
def test_megatron_loads_what_was_imported(
    ranks: RankPool, models: dict[str, Path], imported: dict[str, Path], layout: str
) -> None:
    cfg = make_config(**LAYOUTS[layout])
    cases = [(str(models[name]), str(imported[name])) for name in FAMILIES]
    assert ranks.run(differences, cfg.world_size, cfg, cases) == [[]] * cfg.world_size


@pytest.mark.parametrize(
    "layout", [pytest.param("one rank", marks=SLOW), "EP2", "TP2xEP2", pytest.param("PP2xEP2", marks=SLOW)]
)
def test_megatron_loads_imported_experts(ranks: RankPool, models: dict[str, Path], tmp_path: Path, layout: str) -> None:
    cfg = make_config(**LAYOUTS[layout])
    assert main(["hf-to-megatron", str(models["qwen3_moe"]), str(tmp_path / "out"), "--tp", "2", "--ep", "2"]) == 0
    cases = [(str(models["qwen3_moe"]), str(tmp_path / "out"))]
    assert ranks.run(differences, cfg.world_size, cfg, cases) == [[]] * cfg.world_size


@pytest.mark.parametrize(("layout", "model"), [("TP2xPP2", "qwen3_untied"), ("TP2xEP4", "qwen3_moe")])
def test_what_a_policy_saves_is_exported_without_naming_its_layout(
    ranks: RankPool, models: dict[str, Path], tmp_path: Path, layout: str, model: str
) -> None:
    cfg = make_config(**LAYOUTS[layout])
    (tmp_path / "saved").mkdir()
    assert ranks.run(save, 4, str(models[model]), cfg, [str(tmp_path / "saved")]) == [[""]] * 4
    assert main(["megatron-to-hf", str(tmp_path / "saved"), str(tmp_path / "out"), "--hf", str(models[model])]) == 0
    before, after = all_tensors(models[model]), all_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
