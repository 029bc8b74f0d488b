"""Builds the GPTModel of an HF configuration: the one file that knows Megatron's model classes."""

import importlib.util
import logging
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from dapo_megatron.config import Config
from dapo_megatron.policy.attention import PackedAttention, RMSNorm, RotaryByPosition
from dapo_megatron.weights.mapping import ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_kernels(dtype: torch.dtype) -> str:
    """ "transformer_engine" where it and a GPU are there, else "torch". (NVIDIA's apex only adds a fused optimizer, which
    Megatron picks by itself; PyPI's apex is another package.) In float32 Transformer Engine has but an attention that holds
    whole score matrices and refuses context parallelism, so that torch is the better one."""
    found = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    return "transformer_engine" if found and dtype is torch.bfloat16 else "torch"


def optimizer_kernels() -> str:
    """Which Adam Megatron's optimizer module has picked: TE's, apex's or torch's."""
    from megatron.core import optimizer

    adam = optimizer.Adam.__module__.split(".")[0]
    return {"transformer_engine": "transformer_engine", "apex": "apex"}.get(adam, "torch")


def _rope(hf: dict[str, Any]) -> tuple[float, float | None]:
    """(theta, Llama-3 scaling factor or None) from either spelling of HF's configuration."""
    params = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    thetas = {float(place["rope_theta"]) for place in (hf, params) if place.get("rope_theta")}
    if len(thetas) > 1:
        raise ValueError(f"config.json: rope_theta is given twice, as {' and '.join(map(str, thetas))}; remove the wrong one")
    theta = thetas.pop() if thetas else 10000.0
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind == "default":
        return theta, None
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(params.get(k, v) == v for k, v in fixed.items()):
        return theta, float(params["factor"])
    raise ValueError(f"rope scaling {params}: only default and Llama 3's (low 1, high 4, original length 8192) are supported")


def _experts(hf: dict[str, Any], shape: ModelShape, ep: int, fused: bool) -> dict[str, Any]:
    """What the configuration of a model with experts says besides; {} for a dense one."""
    if not shape.num_experts:
        return {}
    return {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.ffn_size,
        "moe_router_topk": hf["num_experts_per_tok"],
        # softmax over the chosen experts is what HF gets by dividing their probabilities by their sum
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
    }


def transformer_config(cfg: Config, hf: dict[str, Any], shape: ModelShape) -> TransformerConfig:
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act: {hf['hidden_act']!r}: only silu is supported")
    if hf.get("use_sliding_window"):
        raise ValueError("use_sliding_window: true: sliding-window attention is not supported")
    parallel, dtype = cfg.parallel, DTYPES[cfg.model.dtype]
    on_gpu = torch.cuda.is_available()
    fused = choose_kernels(dtype) == "transformer_engine"
    recompute: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": list(parallel.recompute_modules)},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.get("rms_norm_eps", 1e-6),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.family == "qwen2",
        qk_layernorm=shape.family in ("qwen3", "qwen3_moe"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,  # with two stages the interleaved schedule mustn't
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=True,  # packed micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # the default refuses variable_seq_lengths even for dense models
        perform_initialization=False,  # every weight is loaded
        use_cpu_initialization=not on_gpu,
        calculate_per_token_loss=True,
        attention_softmax_in_fp32=True,
        apply_rope_fusion=fused and not parallel.share_prompts,  # it knows no positions but 0, 1, ... in every tree
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=fused,
        **recompute[parallel.recompute],
        **_experts(hf, shape, parallel.ep, fused),
    )


def layer_spec(config: TransformerConfig, chunk: int | None, share_prompts: bool) -> ModuleSpec:
    """The layers of this pipeline stage (or one of its model chunks): Transformer Engine's, with our core attention for shared
    prompts, which theirs has no masks for; or the local spec with our norm and core attention."""
    if choose_kernels(config.params_dtype) == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
        )
        if share_prompts:
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
        return layer
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
    )
    if config.num_moe_experts:  # a checkpoint would have another name for this norm than Transformer Engine's layers
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config, chunk), layer_norm=RMSNorm)


def build_model(cfg: Config, hf: dict[str, Any], shape: ModelShape) -> list[GPTModel]:
    """This rank's part of the model, weights not yet loaded: parallel.vpp chunks. parallel_state must be initialised."""
    config = transformer_config(cfg, hf, shape)
    theta, rope_factor = _rope(hf)
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)  # GPTModel's deprecation note
    chunks = []
    for number in range(cfg.parallel.vpp):
        chunk = number if cfg.parallel.vpp > 1 else None
        model = GPTModel(
            config,
            layer_spec(config, chunk, cfg.parallel.share_prompts),
            vocab_size=shape.padded_vocab(cfg.parallel.tp),
            max_sequence_length=hf.get("max_position_embeddings", 2048),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=theta,
            rope_scaling=rope_factor is not None,
            rope_scaling_factor=rope_factor or 8.0,
            vp_stage=chunk,
        )
        if not config.apply_rope_fusion:
            model.rotary_pos_emb = RotaryByPosition(model.rotary_pos_emb.inv_freq)
        chunks.append(model.cuda(torch.cuda.current_device()) if torch.cuda.is_available() else model)
    return chunks
