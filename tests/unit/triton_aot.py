"""Compiles for sm_90, without a GPU, what the launchers of ops.triton_kernels would launch. Run as a program it prints JSON.

The launchers run on CPU tensors with Triton's own specialisation of their arguments; only the launch itself is left out. So
tiles, warps, descriptors and divisibility are those of a GPU run, without a second list of them.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from dapo_megatron.ops import triton_kernels as kernels
from dapo_megatron.ops.parts import Softmax

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
COUNTED = {"wgmma": r"wgmma\.mma_async", "tma": r"cp\.async\.bulk\.tensor", "fma": r"\bfma\.", "atomics": r"\b(red|atom)\."}


class NoDevice:
    """Stands in for Triton's driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """Everything compiled so far, in place of launches."""

    kernels: ClassVar[list[Any]] = []
    original = JITFunction.run

    @staticmethod
    def instead_of_run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        Compiled.kernels.append(Compiled.original(function, *args, grid=grid, warmup=True, **options))


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of stack and local memory (where spills go), of one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL")}  # type: ignore[index]


def barriers_in_loops(ptx: str) -> int:
    """How often threads wait for each other between a label and the jump back to it."""
    loops = re.findall(r"^(\$L__BB\w+):(.*?)\bbra(?:\.uni)?\s+\1;", ptx, re.DOTALL | re.MULTILINE)
    return sum(body.count("bar.sync") for _, body in loops)


def call(name: str, tokens: int, rows: int, width: int, dtype: torch.dtype) -> None:
    index = torch.empty(tokens, dtype=torch.int64)
    column = torch.zeros(tokens)
    if name == "linear_stats":
        hidden, weight = (torch.empty(size, width, dtype=dtype) for size in (tokens, rows))
        kernels.linear_stats(hidden, weight, index, 1.0)
        return
    block = torch.empty(rows, tokens, dtype=dtype)
    if name == "block_stats":
        kernels.block_stats(block, index, 1.0)
    else:
        d_entropy = column if name == "block_gradient with entropy" else None
        softmax = Softmax(column, column, column, column)
        kernels.block_gradient(block, softmax, index, column, d_entropy, 1.0, torch.bfloat16)


def main() -> None:
    """One line a compilation: what, instructions counted, registers, bytes of stack, local and shared memory."""
    triton.runtime.driver.set_active(NoDevice())
    JITFunction.run = Compiled.instead_of_run
    names = ("block_stats", "block_gradient", "block_gradient with entropy", "linear_stats")
    wide, ones, odd = (4096, 16384, 128), (1, 1, 1), (33, 75, 7)  # Triton makes integers of 1 constants
    cases = [(name, sizes, dtype) for sizes in (wide, ones, odd) for name in names for dtype in (torch.float32, torch.bfloat16)]
    for name, sizes, dtype in [*cases, ("linear_stats", wide, torch.float16)]:
        call(name, *sizes, dtype)
        (compiled,) = Compiled.kernels
        Compiled.kernels.clear()
        ptx = compiled.asm["ptx"]
        found = {key: len(re.findall(pattern, ptx)) for key, pattern in COUNTED.items()}
        found |= {"loop barriers": barriers_in_loops(ptx), "shared": compiled.metadata.shared}
        what = {"name": name, "tokens": sizes[0], "dtype": str(dtype).removeprefix("torch.")}
        print(json.dumps(what | found | resources(compiled.asm["cubin"])))


if __name__ == "__main__":
    main()
