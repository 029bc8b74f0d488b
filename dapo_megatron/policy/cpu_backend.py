"""What Megatron-Core asks of torch.cuda, answered for the CPU. On a machine with a GPU nothing here does anything.

Megatron writes `device=torch.cuda.current_device()`, `.cuda()`, CUDA streams and RNG states without a CPU branch. Every answer
below is the CPU's own (its device, its RNG, no streams); no arithmetic is replaced.
"""

import importlib
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed: list[TorchFunctionMode] = []


class _CudaToCpu(TorchFunctionMode):
    """Redirects device="cuda" arguments. Thread-local, as every TorchFunctionMode: install it in the thread that computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **(kwargs or {}))


class _NullStream(nullcontext):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> "_NullStream":
        return self  # as an event it has but synchronize


def prepare_import() -> None:
    """Before megatron is imported. Without a GPU it is imported here, without what takes seconds and serves GPUs only.

    SGLang brings flash_mla, which fails without libcuda in a way Megatron doesn't expect, flashinfer and flash_attn. And
    Megatron has some functions compiled, which loads torch's compilers; the few that run here do so as they are written.
    """
    if torch.cuda.is_available():
        return
    for name in ("flash_mla", "flashinfer", "flash_attn"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None makes the import an ordinary ImportError
    compiler = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core.jit")
    finally:
        torch.compile = compiler


def install() -> None:
    """Idempotent. Call after prepare_import and before a model is built."""
    if torch.cuda.is_available() or _installed:
        return
    import megatron.core.tensor_parallel.random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    tensor_type = torch.Tensor.type

    def cuda_type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # DistributedOptimizer sorts parameters by the type names torch.cuda.*Tensor
        if args or kwargs:
            return tensor_type(self, *args, **kwargs)
        return "torch.cuda." + tensor_type(self).rsplit(".", 1)[1]

    def set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    def numbers_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # Megatron only converts what was on a GPU, and all_to_all wants numbers
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    overrides: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "type", cuda_type_name),
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.nn.Module, "cuda", lambda self, *_, **__: self),
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda *_, **__: None),
        (torch.cuda, "current_stream", lambda *_, **__: _NullStream()),
        (torch.cuda, "Stream", _NullStream),  # a class, which transformers' annotations need
        (torch.cuda, "stream", lambda *_, **__: _NullStream()),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", set_rng_state),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (mcore_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (mcore_random, "_set_cuda_rng_state", set_rng_state),
        (token_dispatcher, "maybe_move_tensor_to_cpu", numbers_to_cpu),
    ]
    for owner, name, value in overrides:
        setattr(owner, name, value)
    mode = _CudaToCpu()
    mode.__enter__()
    _installed.append(mode)
