"""HF folders of small random models with odd sizes, of which no two that could be mixed up are equal."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dapo_megatron.weights.mapping import ModelShape, expected_hf_shapes

_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 42,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_tied": {**_COMMON, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_untied": {**_COMMON, "model_type": "qwen2", "num_key_value_heads": 3},
    "qwen3": {**_COMMON, "model_type": "qwen3", "head_dim": 10},
    "llama3": {**_COMMON, "model_type": "llama", "head_dim": 10, "rope_parameters": _LLAMA3_ROPE},
    "smollm2": {**_COMMON, "model_type": "llama", "num_key_value_heads": 3, "tie_word_embeddings": True},
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "head_dim": 10,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
    },
}


def random_tensors(config: dict[str, Any], dtype: torch.dtype, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_hf_shapes(ModelShape.from_hf(config))
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in shapes.items()}


def write_model(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None, num_files: int = 1
) -> Path:
    """The folder, with a tokenizer's file. Of several files each has every num_files-th tensor."""
    tensors = random_tensors(config, torch.bfloat16) if tensors is None else tensors
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "tokenizer.json").write_text("{}")
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(num_files):
        file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::num_files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
