"""The table against others' code: mbridge makes the same Megatron tensors under the same names, where it is installed
(`uv sync --extra benchmarks`)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.policy import cpu_backend
from dapo_megatron.weights.hf_folder import HFFolder
from dapo_megatron.weights.mapping import Index, ModelShape, Rule, rules_for, to_hf, to_megatron
from tests.distributed.harness import MODELS, make_model

cpu_backend.prepare_import()
mbridge = pytest.importorskip("mbridge", reason="needs mbridge: uv sync --extra benchmarks")


def te_name(rule: Rule, index: Index) -> str:
    return rule.megatron[-1].format(layer=index.layer, expert=index.expert)


def bridge_of(folder: Path) -> Any:
    """A new class each time: mbridge changes its class's table for tied models."""
    from mbridge.core.bridge import _MODEL_REGISTRY
    from mbridge.core.parallel_states import ParallelStates
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    known = _MODEL_REGISTRY[config.model_type]
    own = type(known.__name__, (known,), {"_DIRECT_MAPPING": dict(known._DIRECT_MAPPING)})
    return own(config, dtype=torch.float32, parallel_states=ParallelStates())


@pytest.mark.parametrize("name", MODELS)
def test_mbridge_makes_the_same_tensors(tmp_path: Path, name: str) -> None:
    folder = HFFolder(make_model(name, tmp_path / name))
    shape = ModelShape.from_hf(folder.config)
    bridge = bridge_of(folder.path)
    num_compared = 0
    for rule in rules_for(shape):
        for index in rule.indices(shape):
            ours = [folder.tensor(hf) for hf in rule.hf_names(index)]
            megatron = to_megatron(rule, ours, shape, 0, 1)
            name_there = te_name(rule, index)
            assert tuple(bridge._weight_name_mapping_mcore_to_hf(name_there)) == rule.hf_names(index)
            assert torch.equal(bridge._weight_to_mcore_format(name_there, ours), megatron), name_there
            names, back = bridge._weight_to_hf_format(name_there, megatron)
            assert all(torch.equal(a, b) for a, b in zip(back, to_hf(rule, [megatron], shape), strict=True)), names
            num_compared += 1
    assert num_compared == sum(len(list(rule.indices(shape))) for rule in rules_for(shape)) > 20
