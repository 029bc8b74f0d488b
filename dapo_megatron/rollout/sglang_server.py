"""SGLang as a server process, on CPU or GPU."""

import os
from pathlib import Path
from typing import Any

from dapo_megatron.rollout.server_process import ServerProcess

CPU_STUB = Path(__file__).parent / "cpu_stub"


class SGLangServer(ServerProcess):
    """Args, beside ServerProcess's:
    weight_version: reported with completions until the first publish.
    """

    module, kind = "sglang.launch_server", "SGLang"

    def __init__(self, *args: Any, weight_version: int = 0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.weight_version = weight_version

    def command(self) -> list[str]:
        args = ["--model-path", str(self.model_dir), "--host", self.host, "--port", str(self.port)]
        args += ["--tp-size", str(self.tp), "--dtype", self.dtype, "--random-seed", str(self.seed)]
        args += ["--weight-version", str(self.weight_version)]
        # Token ids in, token ids out. Sampling defaults of generation_config.json (a repetition penalty, say) would
        # make the sampled log-probs those of another distribution than the policy's.
        args += ["--skip-tokenizer-init", "--sampling-defaults", "openai"]
        if self.device == "cpu":
            args += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            args += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
            # An idle server otherwise polls with a whole core, which the trainer needs.
            args += ["--max-total-tokens", str(self.max_total_tokens), "--sleep-on-idle"]
        else:
            args += ["--mem-fraction-static", str(self.mem_fraction)]
        return args + self.extra_args

    def environment(self) -> dict[str, str]:
        env = dict(os.environ, HF_HUB_OFFLINE="1")  # the model is a local folder
        # With it, log-probs would be those before the temperature.
        env.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
        if self.device == "cpu":
            path = [str(CPU_STUB)] + [p for p in [env.get("PYTHONPATH")] if p]
            env.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS=str(self.num_threads), PYTHONPATH=os.pathsep.join(path))
            # Weights come in buckets into fresh memory, whose pages cost more than the transfer unless what was freed is kept.
            env.setdefault("MALLOC_MMAP_MAX_", "0")
            env.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**40))
            if self.tp > 1:  # SGLang wants a NUMA node for each rank unless it is told their cores
                cores = sorted(os.sched_getaffinity(0))
                of_ranks = [cores[rank :: self.tp] or [cores[rank % len(cores)]] for rank in range(self.tp)]
                env["SGLANG_NCCL_SO_PATH"] = "none on CPU"  # else it would look for a GPU with the one that torch brings
                env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, some)) for some in of_ranks))
        return env
