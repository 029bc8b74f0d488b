"""Time and peak memory of log-prob losses over a large vocabulary, forward and backward: ours beside what others do, in one
run.

    uv run --extra benchmarks python benchmarks/fused_logprob.py [--hidden 896 1536 5120] [--tokens 2048] [--rounds 2]

Shapes are Qwen2.5's (0.5B, 1.5B, 32B; vocabulary 151,936). The loss is DAPO's, of every token. Each case runs in a process of
its own, in rounds through all of them; of a case's rounds the fastest counts. `limit` is the three matrix products alone:
logits, gradient of hidden, gradient of the weight. Memory is what a case takes beyond its inputs: hidden, weight and, for ours,
the main_grad that Megatron has anyway. The others' gradient of the weight is a tensor of its own, as in Megatron without fused
accumulation. What isn't installed, or wants a GPU, is left out with a line.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

VOCAB = 151_936
Case = Callable[[Any, Any, Any, Any], Any]  # (hidden, weight, targets, objective) -> loss

NEEDS = {  # module, needs a GPU
    "TRL selective_log_softmax": ("trl", False),
    "Liger fused linear GRPO": ("liger_kernel", True),
    "cut-cross-entropy": ("cut_cross_entropy", True),
}
CASES = (
    "limit",
    "ours",
    "ours, entropy gradient",
    "plain log_softmax",
    "TRL selective_log_softmax",
    "Megatron vocab-parallel",
    "Liger fused linear GRPO",
    "cut-cross-entropy",
)


def objective_of(num_tokens: int, device: Any) -> Callable[..., Any]:
    """DAPO's loss sum of all tokens' log-probs: half of them on policy, the others up to clipping away from it."""
    import torch

    from dapo_megatron.algo.objective import dapo_objective

    generator = torch.Generator().manual_seed(1)
    shift = (torch.rand(num_tokens, generator=generator) - 0.5).to(device)
    advantages = torch.randn(num_tokens, generator=generator).to(device)
    ones = torch.ones(num_tokens, device=device)

    def objective(rows: slice, logprob: Any, entropy: Any = None, entropy_coef: float = 0.0) -> Any:
        old = logprob.detach() + shift[rows]
        settings = {"clip_low": 0.2, "clip_high": 0.28, "entropy": entropy, "entropy_coef": entropy_coef}
        return dapo_objective(logprob, old, advantages[rows], ones[rows], ones[rows].bool(), **settings)

    return objective


def ours(hidden: Any, weight: Any, targets: Any, objective: Any, entropy_coef: float = 0.0) -> Any:
    from dapo_megatron.ops.linear_logprob import linear_loss

    def loss_fn(rows: slice, logprob: Any, entropy: Any) -> Any:
        return objective(rows, logprob, entropy, entropy_coef)

    return linear_loss(hidden, weight, targets, loss_fn)[0]


def ours_with_entropy(hidden: Any, weight: Any, targets: Any, objective: Any) -> Any:
    return ours(hidden, weight, targets, objective, entropy_coef=0.01)


def plain(hidden: Any, weight: Any, targets: Any, objective: Any) -> Any:
    logp = (hidden @ weight.t()).float().log_softmax(-1)
    return objective(slice(None), logp.gather(1, targets[:, None])[:, 0])[0]


def trl(hidden: Any, weight: Any, targets: Any, objective: Any) -> Any:
    from trl.trainer.utils import selective_log_softmax

    return objective(slice(None), selective_log_softmax(hidden @ weight.t(), targets))[0]


def megatron(hidden: Any, weight: Any, targets: Any, objective: Any) -> Any:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = (hidden @ weight.t()).float()
    return objective(slice(None), -vocab_parallel_cross_entropy(logits[:, None], targets[:, None])[:, 0])[0]


def liger(hidden: Any, weight: Any, targets: Any, objective: Any) -> Any:
    """Its own loss, as it can't be given one: DAPO's clips, on policy. A sequence of 1024 tokens has logits at a time."""
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    settings = {"epsilon_low": 0.2, "epsilon_high": 0.28, "loss_type": "dapo", "use_ref_model": False}
    loss = LigerFusedLinearGRPOLoss(beta=0.0, chunk_size=1, **settings)
    num = max(1, len(targets) // 1024)
    targets = targets.view(num, -1)
    advantages = torch.linspace(-1, 1, num, device=hidden.device)
    return loss(hidden.view(num, -1, hidden.shape[1]), weight, targets, torch.ones_like(targets), advantages)[0]


def cut_cross_entropy(hidden: Any, weight: Any, targets: Any, objective: Any) -> Any:
    from cut_cross_entropy import linear_cross_entropy

    return objective(slice(None), -linear_cross_entropy(hidden, weight, targets, reduction="none"))[0]


RUN: dict[str, Case] = {
    "ours": ours,
    "ours, entropy gradient": ours_with_entropy,
    "plain log_softmax": plain,
    "TRL selective_log_softmax": trl,
    "Megatron vocab-parallel": megatron,
    "Liger fused linear GRPO": liger,
    "cut-cross-entropy": cut_cross_entropy,
}


class PeakMemory:
    """Bytes beyond what was held at `begin`: of the allocator on a GPU, else of the process by the kernel's high-water mark."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    def _status(self, key: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    def begin(self) -> None:
        if self.on_gpu:
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the mark starts anew
            self.held = self._status("VmRSS")

    def end(self) -> int:
        if self.on_gpu:
            import torch

            return torch.cuda.max_memory_allocated() - self.held
        return self._status("VmHWM") - self.held


def measure(name: str, hidden_size: int, num_tokens: int, dtype: str) -> dict[str, float]:
    """One case in this process: seconds and peak bytes."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    hidden = torch.randn(num_tokens, hidden_size).to(device, kind).requires_grad_()
    weight = (0.02 * torch.randn(VOCAB, hidden_size)).to(device, kind).requires_grad_()
    targets = torch.randint(0, VOCAB, (num_tokens,)).to(device)
    if name.startswith("ours"):
        weight.main_grad = torch.full(weight.shape, 0.0, dtype=torch.float32, device=device)
        weight.grad_added_to_main_grad = False
    memory, seconds = PeakMemory(on_gpu), []

    def run(count: int) -> None:
        hidden.grad = weight.grad = None
        if name == "limit":
            with torch.no_grad():
                logits = hidden[:count] @ weight.t()
                _ = logits @ weight, logits.t() @ hidden[:count]
        else:
            RUN[name](hidden[:count], weight, targets[:count], objective_of(count, device)).backward()
        if on_gpu:
            torch.cuda.synchronize()

    run(64)  # threads, libraries and kernels are ready before the clock runs
    hidden.grad = weight.grad = None
    memory.begin()
    for _ in range(2 if on_gpu else 1):
        begin = time.perf_counter()
        run(num_tokens)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": min(seconds), "bytes": memory.end()}


@contextmanager
def megatron_rank() -> Iterator[None]:
    from megatron.core import parallel_state

    from dapo_megatron.policy.scorer import single_rank

    with single_rank():
        parallel_state.initialize_model_parallel()
        yield


def why_not(name: str, on_gpu: bool) -> str:
    module, needs_gpu = NEEDS.get(name, ("", False))
    if needs_gpu and not on_gpu:
        return "needs a GPU"
    if module and importlib.util.find_spec(module) is None:
        return f"{module} isn't installed (the extra `benchmarks` has it)"
    return ""


def in_process(name: str, hidden: int, tokens: int, dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", name, "--hidden", str(hidden), "--tokens", str(tokens), "--dtypes", dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"seconds": float("nan"), "bytes": float("nan"), "error": done.stderr.strip().splitlines()[-1][:200]}  # type: ignore[dict-item]
    return json.loads(done.stdout.splitlines()[-1])


def table(hidden: int, tokens: int, dtype: str, names: list[str], rounds: int) -> None:
    print(f"\nhidden {hidden}, vocabulary {VOCAB}, {tokens} tokens, {dtype}\n", flush=True)
    found: dict[str, dict[str, float]] = {}
    for number in range(rounds):
        for name in names:
            print(f"round {number + 1}: {name} ...", end="\r", file=sys.stderr, flush=True)
            result = in_process(name, hidden, tokens, dtype)
            if name not in found or result["seconds"] < found[name]["seconds"]:
                found[name] = result
    limit = found["limit"]["seconds"]
    print("| case | seconds | against the limit | peak memory beyond the inputs |")
    print("|---|---|---|---|")
    for name, result in found.items():
        if "error" in result:
            print(f"| {name} | failed: {result['error']} | | |")
        else:
            print(f"| {name} | {result['seconds']:.3f} | {result['seconds'] / limit:.2f} | {result['bytes'] / 1e6:,.0f} MB |")
    flops = 3 * 2 * tokens * hidden * VOCAB
    print(f"\n(the limit is {flops / limit / 1e12:.2f} TFLOP/s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[896, 1536, 5120])
    parser.add_argument("--tokens", type=int, nargs="+", default=[], help="default: 2048 on CPU, 4096 to 32768 on a GPU")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        with megatron_rank() if args.case.startswith("Megatron") else nullcontext():
            print(json.dumps(measure(args.case, args.hidden[0], args.tokens[0], args.dtypes[0])))
        return
    import torch

    on_gpu = torch.cuda.is_available()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if on_gpu else f'{torch.get_num_threads()} threads'}")
    names = [name for name in CASES if not why_not(name, on_gpu)]
    for name in CASES:
        if reason := why_not(name, on_gpu):
            print(f"left out: {name}: {reason}")
    for dtype in args.dtypes:
        for hidden in args.hidden:
            for tokens in args.tokens or ([4096, 8192, 16384, 32768] if on_gpu else [2048]):
                table(hidden, tokens, dtype, names, args.rounds)


if __name__ == "__main__":
    main()
