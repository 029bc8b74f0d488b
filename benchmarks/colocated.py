"""What benchmarks/publish.py measures where trainer and server share their devices: CUDA IPC on GPUs, the call itself on CPU.

Trainer rank i and the server's tensor-parallel rank i are on the same device; the server needs no GPUs of its own
(--base-gpu-id 0, and a --mem-fraction-static that leaves room for the trainer).
"""

import time
from typing import Any


def weight_sender(url: str, layout: Any) -> Any:
    """In the place of SGLangClient.weight_sender, for a trainer of at least layout.tp ranks. `layout`: a ServerLayout."""
    from dapo_megatron.rollout.colocated import ColocatedWeightSender

    return ColocatedWeightSender(url, layout, ranks=tuple(range(layout.tp)))


def sending(policy: Any) -> Any:
    """In the place of Sending."""
    from dapo_megatron.policy.shared_sending import SharedSending

    return SharedSending(policy)


def device_copy_s(num_bytes: int, piece_bytes: int) -> float:
    """The limit: seconds that one process takes to copy so many bytes, in such pieces, on its own device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.ones(min(piece_bytes, num_bytes), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # its pages are there
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    begin = time.perf_counter()
    for start in range(0, num_bytes, len(source)):
        target[: num_bytes - start].copy_(source[: num_bytes - start], non_blocking=True)
    synchronize()
    return time.perf_counter() - begin
