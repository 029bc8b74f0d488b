"""Transformer Engine's layers without a GPU: is every weight known to the mapping, what is its attention asked for, and is its
split of packed sequences ours? Only its Python side runs here (nothing of it can compute), in a process of its own, since
Megatron decides at import whether there is a Transformer Engine. Where that isn't installed, a folder with it will do:

    uv pip install --no-deps --target DIR transformer-engine==2.20.2 onnxscript onnx onnx-ir nvdlfw-inspect
    PYTHONPATH=DIR pytest tests/unit/test_te_spec.py
"""

import enum
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dapo_megatron.algo.packing import concatenate, zigzag_indices
from dapo_megatron.weights.mapping import ModelShape, expected_hf_shapes
from tests.distributed.harness import MODELS, make_config, make_model
from tests.unit.test_packing import sized

TE = importlib.util.find_spec("transformer_engine")
pytestmark = pytest.mark.skipif(TE is None, reason="needs Transformer Engine's Python side; this file says how to get it")
LAYOUT: dict[str, Any] = {"tp": 2, "cp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True}
WORLD = 8
SPLITS = [([0, 8, 12], 2), ([0, 16, 24, 64], 4)]  # cu_seqlens, cp


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        make_model(name, folder / name)
    command = [sys.executable, "-m", "tests.unit.test_te_spec", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_known_and_loaded(report: dict[str, Any], name: str) -> None:
    shape = ModelShape.from_hf(MODELS[name])
    assert set(report["hf_names"][name]) == expected_hf_shapes(shape).keys()
    assert "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight" in report["megatron_names"][name]  # it is TE's spec
    assert report["odd_layer_norms"][name] == []


@pytest.mark.parametrize("name", MODELS)
def test_an_imported_checkpoint_has_every_object_that_is_wanted(report: dict[str, Any], name: str) -> None:
    """Of what Transformer Engine's modules keep beside weights; Megatron refuses a checkpoint that lacks one."""
    assert report["num_objects"][name] > 5 and report["objects_missing"][name] == []


def test_single_precision_keeps_to_torch(report: dict[str, Any]) -> None:
    assert report["kernels"] == {"bfloat16": "transformer_engine", "float32": "torch"}


def test_attention_is_asked_for_packed_causal_sequences(report: dict[str, Any]) -> None:
    assert report["attention"] == {
        "attn_mask_type": "padding_causal",
        "qkv_format": "thd",
        "cu_seqlens_q": [0, 8, 12],
        "cu_seqlens_kv": [0, 8, 12],
        "cu_seqlens dtype": "torch.int32",
        "max_seqlen_q": 8,
        "max_seqlen_kv": 8,
        "pad_between_seqs": None,  # then Transformer Engine takes every sequence as whole
        "cu_seqlens_q_padded": None,
        "cu_seqlens_kv_padded": None,
        "cp_comm_type": "p2p",
        "context-parallel ranks": 2,
    }


def test_shared_prompts_have_our_attention_and_every_tokens_own_angle(report: dict[str, Any]) -> None:
    assert report["shared prompts"] == {
        "core attention": "PackedAttention",
        "linear_qkv": "TELayerNormColumnParallelLinear",  # all else is Transformer Engine's
        "rotary": "RotaryByPosition",
        "fused rotation": False,
    }


@pytest.mark.parametrize("case", range(len(SPLITS)))
def test_split_and_positions_are_transformer_engines(report: dict[str, Any], case: int) -> None:
    cu_seqlens, cp = np.array(SPLITS[case][0]), SPLITS[case][1]
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    for rank in range(cp):
        held = zigzag_indices(cu_seqlens, cp, rank)
        assert report["split"][case][rank] == held.tolist()
        assert report["angles"][case][rank] == pytest.approx([math.cos(p) for p in positions[held]], abs=1e-6)  # fp32


# --- what follows runs in the process of its own ---


class _Stub(types.ModuleType):
    """Transformer Engine's compiled half: names without a function."""

    __file__ = "<stub>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, mock.MagicMock(name=name))
        return getattr(self, name)


def _stub_compiled_half() -> None:
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # then no shared object is loaded
    stub = _Stub("transformer_engine_torch")
    sys.modules["transformer_engine_torch"] = stub
    root = Path(TE.origin).parent / "pytorch"  # type: ignore[union-attr,arg-type]
    # Transformer Engine asserts that its mirrors of these enums have the same members
    for name, source, pattern in (
        ("DType", "constants.py", r"int\(tex\.DType\.(k\w+)\)"),
        ("NVTE_Fused_Attn_Backend", "cpp_extensions/fused_attn.py", r"NVTE_Fused_Attn_Backend\.(NVTE_\w+)"),
    ):
        members = dict.fromkeys(re.findall(pattern, (root / source).read_text()))
        setattr(stub, name, enum.IntEnum(name, list(members), start=0))  # type: ignore[misc]
    import transformer_engine.common as common

    common.load_framework_extension = lambda name: None


def _models(folder: Path) -> dict[str, Any]:
    """Every test model on LAYOUT's first and last rank with the weights of its HF folder, and the attention's call."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dapo_megatron.policy import model as model_builder
    from dapo_megatron.policy import weights_io
    from dapo_megatron.policy.torch_dist import objects_beside
    from dapo_megatron.weights.hf_folder import HFFolder
    from dapo_megatron.weights.mapping import rule_of, rules_for

    cfg = make_config(**LAYOUT, model__dtype="bfloat16", parallel__recompute="selective")
    cfg.parallel.recompute_modules = ["core_attn", "mlp"]
    dtypes = ("bfloat16", "float32")
    out: dict[str, Any] = {"hf_names": {}, "megatron_names": {}, "odd_layer_norms": {}}
    out |= {"objects_missing": {}, "num_objects": {}}
    out["kernels"] = {dtype: model_builder.choose_kernels(getattr(torch, dtype)) for dtype in dtypes}
    for rank in (0, WORLD - 1):
        torch.distributed.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        parallel_state.initialize_model_parallel(
            2, 2, 2, context_parallel_size=2, expert_tensor_parallel_size=1, create_gloo_process_groups=False
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        for name in MODELS:
            hf = HFFolder(folder / name)
            shape = ModelShape.from_hf(hf.config)
            chunks = model_builder.build_model(cfg, hf.config, shape)
            weights_io.load_hf_weights(chunks, hf, shape)
            for key, param, _ in weights_io.named_parameters(chunks, shape):
                rule, index = rule_of(key, rules_for(shape))
                out["megatron_names"].setdefault(name, []).append(key)
                out["hf_names"].setdefault(name, []).extend(rule.hf_names(index))
                norms = out["odd_layer_norms"].setdefault(name, [])
                if "norm" in key and not getattr(param, "sequence_parallel", False):
                    norms.append(key)  # finalize_model_grads would not sum its gradient over the tensor-parallel ranks
            stored = [item for chunk in chunks for item in nested_values(chunk.sharded_state_dict())]
            wanted = {item.unique_key for item in stored if isinstance(item, ShardedObject)}
            out["objects_missing"].setdefault(name, []).extend(sorted(wanted - objects_beside(shape).keys()))
            out["num_objects"][name] = len(wanted)
            cfg.parallel.share_prompts = True
            out["shared prompts"] = _shared_prompts(model_builder.build_model(cfg, hf.config, shape)[0])
            cfg.parallel.share_prompts = False
            out["attention"] = _attention_call(chunks[0].decoder.layers[0].self_attention.core_attention)
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    return out


def _shared_prompts(gpt: Any) -> dict[str, Any]:
    attention = gpt.decoder.layers[0].self_attention
    return {
        "core attention": type(attention.core_attention).__name__,
        "linear_qkv": type(attention.linear_qkv).__name__,
        "rotary": type(gpt.rotary_pos_emb).__name__,
        "fused rotation": gpt.config.apply_rope_fusion,
    }


def _attention_call(core_attention: Any) -> dict[str, Any]:
    """What Transformer Engine's attention gets from Megatron for our packed_seq_params; its signature is checked as well."""
    import torch
    import transformer_engine.pytorch as te
    from megatron.core.transformer.enums import AttnMaskType

    from dapo_megatron.policy.attention import PackedTrees

    micro_batch = concatenate(sized(8, 4), [[0], [1]], 4, 4)
    qkv = [torch.zeros(6, 2, 16)] * 3
    with mock.patch.object(te.DotProductAttention, "forward", autospec=True) as forward:
        core_attention(*qkv, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=PackedTrees(micro_batch, 2, 0, "cpu"))
    call = {k: v for k, v in forward.call_args.kwargs.items() if not k.startswith("core_attention_bias")}
    dtypes = {str(call[key].dtype) for key in ("cu_seqlens_q", "cu_seqlens_kv")}
    call = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    return call | {
        "cu_seqlens dtype": "/".join(dtypes),
        "cp_comm_type": core_attention.cp_comm_type,
        "context-parallel ranks": core_attention.cp_group.size(),
    }


def _splits() -> dict[str, Any]:
    """Its split for data loaders, and by its rotary embedding (the plain one: same arguments as the fused) the positions."""
    import torch
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    out: dict[str, Any] = {"split": [], "angles": []}
    for lengths, cp in SPLITS:
        cu_seqlens = torch.tensor(lengths, dtype=torch.int32)
        ids = torch.arange(lengths[-1])
        freqs = torch.arange(float(lengths[-1]))[:, None, None, None].expand(-1, 1, 1, 2)
        out["split"].append([])
        out["angles"].append([])
        for rank in range(cp):
            sizes = {"get_world_size.return_value": cp, "get_rank.return_value": rank}
            with mock.patch.object(torch, "distributed", **sizes):
                held = context_parallel.get_batch_on_this_cp_rank(cu_seqlens, ids, ids, ids)[0]
            t = torch.tensor([1.0, 0.0]).expand(len(held), 1, 2)
            turned = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=cu_seqlens, cp_size=cp, cp_rank=rank)
            out["split"][-1].append(held.tolist())
            out["angles"][-1].append(turned[:, 0, 0].tolist())
    return out


def _main(folder: Path) -> None:
    import torch

    _stub_compiled_half()
    from dapo_megatron.policy import cpu_backend  # imports Megatron

    cpu_backend.install()  # tensors for "cuda" are made on the CPU
    with mock.patch("torch.cuda.is_available", return_value=True):
        result = _models(folder) | _splits()
    assert not torch.cuda.is_initialized()
    print(json.dumps(result))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
