"""How fast checkpoint_tools converts, against a plain copy of the files (the limit) and against mbridge, in one run.

    uv run --extra benchmarks python benchmarks/convert.py [--layers 16] [--dir /fast/disk]

Makes a synthetic bf16 model (about one billion parameters) in a temporary folder, then runs each case in a process of its own:
seconds from the first byte read to the last one on the disk (imports not counted, files in the page cache), and the process's
peak memory beyond what it held when it began. mbridge (without it: left out) has no files of its own: its case is what one does
with it, a GPTModel in memory and Megatron's dist_checkpointing.
"""

import argparse
import gc
import importlib.util
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 65536,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def make_model(folder: Path, num_layers: int) -> None:
    import torch

    from dapo_megatron.weights.hf_folder import finish_folder, write_shards
    from dapo_megatron.weights.mapping import ModelShape, expected_hf_shapes

    folder.mkdir()
    config = {**CONFIG, "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = (
        (name, torch.randn(shape, dtype=torch.float32).to(torch.bfloat16))
        for name, shape in expected_hf_shapes(ModelShape.from_hf(config)).items()
    )
    finish_folder(folder, list(write_shards(folder, "model", tensors, 10**9).items()))


def copy(source: Path, out: Path) -> None:
    """What a conversion can't be faster than: the same bytes read, written and brought to the disk."""
    out.mkdir()
    for file in source.iterdir():
        with file.open("rb") as read, (out / file.name).open("wb") as write:
            shutil.copyfileobj(read, write, 16 * 2**20)
            write.flush()
            os.fsync(write.fileno())


def tool(*arguments: str) -> None:
    from checkpoint_tools.cli import main

    assert main(arguments) == 0


@contextmanager
def megatron_model(source: Path) -> Iterator[tuple[Any, Any]]:
    """(mbridge's bridge, an empty GPTModel of the same model). mbridge knows two norms by Transformer
    Engine's names only, which the layers for CPUs have under others: they are added to its table."""
    import torch
    from mbridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from dapo_megatron.config import Config, ModelConfig
    from dapo_megatron.policy import model
    from dapo_megatron.policy.policy import init_distributed
    from dapo_megatron.weights.hf_folder import HFFolder
    from dapo_megatron.weights.mapping import ModelShape

    filesystem_async._results_queue = queue.Queue()  # else Megatron starts a process that imports all of this
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    init_distributed(0, 1, f"127.0.0.1:{port}")
    parallel_state.initialize_model_parallel()
    bridge = AutoBridge.from_pretrained(str(source), dtype=torch.bfloat16)
    bridge._OTHER_MAPPING["input_layernorm.weight"] = ["model.layers.{layer_number}.input_layernorm.weight"]
    bridge._MLP_MAPPING["pre_mlp_layernorm.weight"] = ["model.layers.{layer_number}.post_attention_layernorm.weight"]
    folder = HFFolder(source)
    cfg = Config(model=ModelConfig(path=str(source), dtype="bfloat16"))
    (gpt,) = model.build_model(cfg, folder.config, ModelShape.from_hf(folder.config))
    yield bridge, gpt.bfloat16()
    torch.distributed.destroy_process_group()


def mbridge_import(source: Path, out: Path) -> None:
    from megatron.core import dist_checkpointing

    with megatron_model(source) as (bridge, gpt):
        bridge.load_weights([gpt], str(source))
        out.mkdir()
        dist_checkpointing.save(gpt.sharded_state_dict(), str(out))


def mbridge_export(source: Path, checkpoint: Path, out: Path) -> None:
    from megatron.core import dist_checkpointing

    with megatron_model(source) as (bridge, gpt):
        gpt.load_state_dict(dist_checkpointing.load(gpt.sharded_state_dict(), str(checkpoint)))
        bridge.safetensor_io = bridge._get_safetensor_io(str(source))
        bridge.save_weights([gpt], str(out))


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "copy": (lambda d: copy(d / "hf", d / "copy"), "copy of the files"),
    "import": (lambda d: tool("hf-to-megatron", str(d / "hf"), str(d / "megatron")), "hf-to-megatron"),
    "export": (lambda d: tool("megatron-to-hf", str(d / "megatron"), str(d / "back")), "megatron-to-hf"),
    "mbridge_import": (lambda d: mbridge_import(d / "hf", d / "mbridge"), "mbridge, HF to Megatron"),
    "mbridge_export": (lambda d: mbridge_export(d / "hf", d / "mbridge", d / "mbridge_back"), "mbridge, Megatron to HF"),
}
OUTPUTS = {
    "copy": "copy",
    "import": "megatron",
    "export": "back",
    "mbridge_import": "mbridge",
    "mbridge_export": "mbridge_back",
}
IMPORTS = {
    "import": ("checkpoint_tools.hf_to_megatron",),
    "export": ("checkpoint_tools.megatron_to_hf",),
    "mbridge_import": ("mbridge", "dapo_megatron.policy.policy"),
    "mbridge_export": ("mbridge", "dapo_megatron.policy.policy"),
}


def resident_bytes() -> int:
    """Of this process, without the files that it has mapped."""
    status = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))


def run_case(name: str, folder: Path) -> None:
    """In a process of its own: prints seconds and peak memory as JSON."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    for module in ("dapo_megatron.policy", *IMPORTS.get(name, ())):
        importlib.import_module(module)
    gc.collect()
    # Here, not earlier: all cases write into memory that was just freed. On a virtual machine fresh memory is several times
    # slower, and in the cases' unequal times for imports freed memory goes back to the host.
    shutil.rmtree(folder / OUTPUTS[name], ignore_errors=True)
    before, peak, done = resident_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    CASES[name][0](folder)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    print(json.dumps({"seconds": seconds, "peak_bytes": max(peak - before, 0)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=16, help="of the model: 51 million parameters each, beside 268 million")
    parser.add_argument("--dir", help="where the temporary folder is made, with room for five times the model")
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of so many runs counts")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        run_case(args.case, Path(args.dir))
        return
    chosen = [name for name in CASES if importlib.util.find_spec("mbridge") or not name.startswith("mbridge")]
    with tempfile.TemporaryDirectory(dir=args.dir) as temporary:
        folder = Path(temporary)
        make_model(folder / "hf", args.layers)
        size = sum(file.stat().st_size for file in (folder / "hf").iterdir())
        results: dict[str, dict[str, float]] = {}
        for _ in range(args.repeat):  # in turns: a shared disk is not always as fast
            for name in chosen:
                command = [sys.executable, __file__, "--case", name, "--dir", str(folder)]
                done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                if done.returncode:
                    sys.exit(f"{name} failed:\n{done.stdout}{done.stderr}")
                result = json.loads(done.stdout.splitlines()[-1])
                if name not in results or result["seconds"] < results[name]["seconds"]:
                    results[name] = result
    print(f"{size / 1e9:.2f} GB of bf16, fastest of {args.repeat}\n")
    print("| what | seconds | GB/s | speed against the copy | peak memory |\n|---|---|---|---|---|")
    for name, result in results.items():
        ratio = results["copy"]["seconds"] / result["seconds"]
        print(
            f"| {CASES[name][1]} | {result['seconds']:.2f} | {size / result['seconds'] / 1e9:.2f} | {ratio:.2f} | "
            f"{result['peak_bytes'] / 1e9:.2f} GB |"
        )


if __name__ == "__main__":
    main()
