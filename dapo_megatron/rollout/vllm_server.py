"""vLLM as a server process, on CPU or GPU, usually in an environment of its own (`python`)."""

import json
import os
from pathlib import Path

from dapo_megatron.rollout.server_process import ServerProcess

EXTENSION = Path(__file__).parent / "vllm_extension"
_BLOCK_TOKENS = 32  # of the cache on CPU: the smallest that its attention takes; only full blocks are shared
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # with others its workers die of the first request
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class VLLMServer(ServerProcess):
    """See ServerProcess. On CPU each matrix is held twice: as it is, and packed for oneDNN."""

    module, kind = "vllm.entrypoints.openai.api_server", "vLLM"

    def command(self) -> list[str]:
        args = ["--model", str(self.model_dir), "--host", self.host, "--port", str(self.port)]
        args += ["--tensor-parallel-size", str(self.tp), "--dtype", self.dtype, "--seed", str(self.seed)]
        # Token ids in, token ids out, and nothing of generation_config.json in between.
        args += ["--skip-tokenizer-init", "--tokens-only", "--generation-config", "vllm"]
        # Log-probs of the distribution that tokens are sampled from, that is after the temperature.
        args += ["--logprobs-mode", "processed_logprobs"]
        args += ["--worker-extension-cls", "dapo_vllm_extension.WeightUpdates"]
        if self.device == "cpu":
            args += ["--enforce-eager", "--block-size", str(_BLOCK_TOKENS), "--kv-cache-memory-bytes", str(self._cache_bytes())]
            args += ["--max-model-len", str(min(self._config()["max_position_embeddings"], self.max_total_tokens))]
        else:
            args += ["--gpu-memory-utilization", str(self.mem_fraction)]
        return args + self.extra_args

    def _cache_bytes(self) -> int:
        """Of one tensor-parallel rank. ValueError if vLLM can't run the model on CPU."""
        config = self._config()
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if head_dim not in _CPU_HEAD_DIMS:
            raise ValueError(
                f"rollout.engine: vLLM's attention on CPU has no heads of size {head_dim}, only {_CPU_HEAD_DIMS}; use sglang"
            )
        dtype = config.get("dtype", "float32") if self.dtype == "auto" else self.dtype
        token = 2 * config["num_hidden_layers"] * max(1, heads // self.tp) * head_dim * _DTYPE_BYTES[dtype]
        return token * (self.max_total_tokens // _BLOCK_TOKENS + 2) * _BLOCK_TOKENS  # one block is never used

    def _config(self) -> dict:
        return json.loads((self.model_dir / "config.json").read_text())

    def environment(self) -> dict[str, str]:
        env = dict(os.environ, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
        env["VLLM_SERVER_DEV_MODE"] = "1"  # pausing, versions and our extension are called by routes that it opens
        env["PYTHONPATH"] = os.pathsep.join([str(EXTENSION), *([env["PYTHONPATH"]] if env.get("PYTHONPATH") else [])])
        if self.device == "cpu":
            # Compiling the sampler's few lines takes 20 s and more of the first request.
            env.update(VLLM_TARGET_DEVICE="cpu", TORCHDYNAMO_DISABLE="1")
            env.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(self.num_threads))
        return env
