"""One server of each kind on a tiny random model for the whole session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo_megatron.addresses import free_port
from dapo_megatron.config import ModelConfig
from dapo_megatron.rollout.sglang_server import SGLangServer
from dapo_megatron.rollout.vllm_server import VLLMServer
from dapo_megatron.weights.source import resolve_model

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

# Biases, tied embeddings and a vocabulary that SGLang pads (70 to 128). Wide weights: the distributions are not flat.
TINY_QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model(ModelConfig(path="random", random_model=TINY_QWEN2), tmp_path_factory.mktemp("models"))


@pytest.fixture
def unused_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def sglang_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    log_path = tmp_path_factory.mktemp("sglang") / "server.log"
    with SGLangServer(tiny_model_dir, dtype="float32", log_path=log_path, startup_timeout_s=300) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("DAPO_VLLM_PYTHON", "")
    if not python:
        pytest.skip("DAPO_VLLM_PYTHON names no interpreter whose environment has vLLM")
    return python


@pytest.fixture(scope="session")
def vllm_server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    random_model = {**TINY_QWEN2, "hidden_size": 128}  # heads of 32: vLLM's attention on CPU has none of 16
    model_dir = resolve_model(ModelConfig(path="random", random_model=random_model), tmp_path_factory.mktemp("vllm_models"))
    log_path = tmp_path_factory.mktemp("vllm") / "server.log"
    extension = ["--worker-extension-cls", "vllm_test_extension.SlowUpdates"]
    server = VLLMServer(
        model_dir, dtype="float32", python=vllm_python, log_path=log_path, startup_timeout_s=300, extra_args=extension
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        server.start()
    yield server
    server.stop()
