"""Does what the tests on CPU can't reach work on this GPU, and how fast is it? For one H100 or H200, in under eight minutes.

    uv run python benchmarks/gpu_check.py [--minutes 8] [--json FILE]

1. `kernels`: the Triton kernels and the log-prob operator built from them against fp64.
2. `speed`: log-probs alone, by linear_stats and by cuBLAS with block_stats.
3. `layers`: log-probs of a small model by Transformer Engine's layers, by the local ones and with shared prompts, against
   transformers in fp64.
4. `step`: one step of configs/tiny_cpu.yaml on the GPU.
5. `table`: benchmarks/fused_logprob.py in short.

1 and 2 need torch and triton only. A part that misses a package, or comes when the time is up, is left out with a line. Each
check prints `ok` or `FAILED`, its figure and its limit; a failure doesn't stop the others. At the end stands a summary for the
README. Exit code 1 if anything failed.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a python without the package installed will do
from benchmarks.gpu_kernels import check_kernels, check_speed  # noqa: E402
from benchmarks.gpu_report import Report  # noqa: E402

# Mean difference of a bf16 model's log-probs; the README's figures for whole models are 0.01 to 0.03.
LAYERS_LIMIT = 0.03


# --- layers ---

SMALL = {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512, "tie_word_embeddings": False,
         "initializer_range": 0.05}  # fmt: skip


def small_samples() -> list[Any]:
    """Two groups of three responses, each group behind one prompt."""
    import numpy as np

    from dapo_megatron.records import Sample

    rng, samples = np.random.default_rng(0), []
    for group, lengths in enumerate(((5, 90, 33), (1, 64, 17))):
        prompt = rng.integers(0, 1000, 40 + group)
        for length in lengths:
            zeros = np.zeros(length, np.float32)
            ids = np.concatenate([prompt, rng.integers(0, 1000, length)]).astype(np.int32)
            samples.append(
                Sample(ids, len(prompt), zeros, zeros.astype(np.int32), zeros == 0, zeros, zeros.astype(np.float64), group)
            )
    return samples


def layers_main(kernels: str, share: bool, folder: str) -> None:
    """A process's work: prints the response tokens' log-probs as a list, and which layers made them."""
    from unittest import mock

    from dapo_megatron.policy import cpu_backend

    cpu_backend.prepare_import()
    from dapo_megatron.algo.packing import pack_minibatch_for
    from dapo_megatron.config import Config, ModelConfig
    from dapo_megatron.policy import model
    from dapo_megatron.policy.policy import Policy
    from dapo_megatron.policy.scorer import single_rank

    cfg = Config(model=ModelConfig(path=folder, dtype="bfloat16"))
    cfg.parallel.share_prompts = share
    with single_rank(), mock.patch.object(model, "choose_kernels", lambda dtype: kernels):
        policy = Policy(cfg, folder)
        policy.load_batch(pack_minibatch_for(cfg.parallel, small_samples()))
        policy.old_logprobs()
        found = policy.token_logprobs(0)
    print(json.dumps([found[number] for number in sorted(found)]))


def check_layers(report: Report, device: str) -> None:
    import numpy as np

    from dapo_megatron.audit.reference import ReferencePolicy
    from dapo_megatron.config import AlgorithmConfig, ModelConfig
    from dapo_megatron.weights.source import resolve_model

    wanted = [("torch", False), ("torch", True)]
    if device == "cuda" and importlib.util.find_spec("transformer_engine"):
        wanted += [("transformer_engine", False), ("transformer_engine", True)]
    else:
        report.say("left out  Transformer Engine's layers: it isn't installed, or this is no GPU")
    with tempfile.TemporaryDirectory() as temporary:
        folder = resolve_model(ModelConfig(path="random", random_model=SMALL), Path(temporary))
        reference = ReferencePolicy(folder, AlgorithmConfig(), 1.0, torch.bfloat16).logprobs(small_samples())
        exact, local = np.concatenate(reference), None
        for kernels, share in wanted:
            name = f"layers of {kernels}, bf16{', shared prompts' if share else ''}: log-probs against"
            with report.going_on(name):
                command = [sys.executable, __file__, "--layers", kernels, str(int(share)), str(folder), "--device", device]
                mine = np.array(json.loads(child(command, report, device).splitlines()[-1]))
                report.check(f"{name} fp64", float(np.abs(mine - exact).mean()), LAYERS_LIMIT)
                if local is None:
                    local = mine  # the first: torch's, not shared
                else:
                    report.check(f"{name} torch's", float(np.abs(mine - local).mean()), LAYERS_LIMIT)


# --- what other programs do ---


def child(command: list[str], report: Report, device: str) -> str:
    """Its output. It ends with the time."""
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, **hidden, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=max(report.left_s(), 1.0))
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def check_step(report: Report, device: str) -> None:
    where = ["cluster.device=auto", "cluster.colocate=true", "cluster.gpus_per_node=1"] if device == "cuda" else []
    with report.going_on("a step of configs/tiny_cpu.yaml"), tempfile.TemporaryDirectory() as folder:
        settings = [
            "run.steps=1",
            f"run.dir={folder}",
            "rollout.engine=local",
            "parallel.tp=1",
            "parallel.sequence_parallel=false",
        ]
        command = [sys.executable, "-m", "dapo_megatron.cli", "train", "configs/tiny_cpu.yaml", *settings, *where]
        lines = [line for line in child(command, report, device).splitlines() if line.startswith(("kernels", "step"))]
        for line in lines:
            report.say(f"        {line}")
        report.check_true("a step of configs/tiny_cpu.yaml", any(line.startswith("step    1") for line in lines))


def check_table(report: Report, device: str) -> None:
    for hidden in (1536, 5120) if device == "cuda" else (8,):
        with report.going_on(f"fused_logprob.py, hidden {hidden}"):
            tokens = "8192" if device == "cuda" else "64"
            short = ["--hidden", str(hidden), "--tokens", tokens, "--dtypes", "bfloat16", "--rounds", "1"]
            lines = child([sys.executable, "benchmarks/fused_logprob.py", *short], report, device).splitlines()
            for line in lines:
                report.say(line)
            done = any(line.startswith("| ours |") and "failed" not in line for line in lines)
            report.check_true(f"fused_logprob.py, hidden {hidden}", done)


PARTS: dict[str, tuple[Callable[[Report, str], None], tuple[str, ...], float]] = {  # what it needs, and seconds
    "kernels": (check_kernels, ("triton",), 30),
    "speed": (check_speed, ("triton",), 20),
    "layers": (check_layers, ("megatron", "transformers", "omegaconf"), 60),
    "step": (check_step, ("megatron", "transformers", "omegaconf", "ray", "rich"), 60),
    "table": (check_table, ("megatron",), 60),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="parts that would begin later are left out")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, help="every figure, into this file")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the same in small, to test this program"
    )
    parser.add_argument("--layers", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.layers:
        layers_main(args.layers[0], args.layers[1] == "1", args.layers[2])
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda: torch finds no GPU here; on a machine without one --device cpu runs the same in small")
    report = Report(args.minutes)
    begin = time.monotonic()
    versions = []
    for package in ("triton", "transformer_engine", "megatron-core"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    report.say(f"{gpu}, torch {torch.__version__}, CUDA {torch.version.cuda}, {', '.join(versions)}")
    for name in args.parts:
        part, needs, least_s = PARTS[name]
        missing = [module for module in needs if importlib.util.find_spec(module) is None]
        if missing or report.left_s() < least_s:
            report.say(f"left out  {name}: {f'needs {", ".join(missing)}' if missing else 'no time is left'}")
            continue
        with report.going_on(name):
            part(report, args.device)
    report.say(f"{'FAILED' if report.failed else 'all ok'}, {time.monotonic() - begin:.0f} s")
    print("\n--- summary ---\n" + "\n".join(line for line in report.lines if not line.startswith("ok")))
    if args.json:
        args.json.write_text(json.dumps({"ok": not report.failed, "checks": report.found, "lines": report.lines}, indent=2))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
