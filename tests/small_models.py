"""Small random models of every family in odd sizes, with a tokenizer, as HF folders; and changes to one of their tensors."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dapo_megatron.config import ModelConfig
from dapo_megatron.weights.source import resolve_model

_COMMON = {
    "hidden_size": 48,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 131,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_tied": {"model_type": "qwen2", **_COMMON, "tie_word_embeddings": True},
    "qwen2_untied": {"model_type": "qwen2", **_COMMON, "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", **_COMMON, "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_COMMON,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 28,
    },
    "smollm2": {"model_type": "llama", **_COMMON, "tie_word_embeddings": True},
    "llama3": {
        "model_type": "llama",
        **_COMMON,
        "max_position_embeddings": 65536,
        "rope_parameters": {**_LLAMA3, "rope_theta": 20000.0, "original_max_position_embeddings": 8192},
    },
}


def make_small_model(name: str, folder: Path) -> Path:
    cached = resolve_model(ModelConfig(path="random", random_model=FAMILIES[name]), folder.parent / "cache")
    shutil.copytree(cached, folder)
    generator = torch.Generator().manual_seed(5)

    def away_from_one_and_zero(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            if tensor.ndim == 1:  # norms and biases, so that swapping them is seen
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))

    change_tensors(folder, away_from_one_and_zero)
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Of a folder with one file, in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
