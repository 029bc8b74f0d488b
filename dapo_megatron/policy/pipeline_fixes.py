"""A fault of Megatron-Core 0.19.2's pipeline communication, mended in this one place."""

from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication

ORIGINAL = p2p_communication.P2PCommunicator._communicate_shapes  # for the test that shows that it is still needed


def install() -> None:
    """With two pipeline stages and virtual stages the previous and the next rank are the same one, and messages between two
    ranks are matched in the order in which they are posted. Tensors go out in an order that fits (batch_p2p_comm off); the
    shapes that precede them (variable_seq_lengths) don't: both ranks post "to the previous" first, and each takes the other's
    message for another one. The run then hangs, or goes on with wrong shapes. So shapes take the tensors' way. Idempotent."""
    p2p_communication.P2PCommunicator._communicate_shapes = _communicate_shapes


def _communicate_shapes(
    self: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
) -> tuple[list[int], list[int]]:
    """(shape that comes from the previous rank, shape that comes from the next), zeros where nothing comes."""
    device = torch.cuda.current_device()

    def sent(tensor: Any) -> torch.Tensor | None:
        return None if tensor is None else torch.tensor(tensor.shape, dtype=torch.int64, device=device)

    def received(wanted: bool) -> torch.Tensor | None:
        return torch.zeros(3, dtype=torch.int64, device=device) if wanted else None

    from_prev, from_next = received(recv_prev), received(recv_next)
    requests = p2p_communication._p2p_ops(
        tensor_send_prev=sent(tensor_send_prev),
        tensor_recv_prev=from_prev,
        tensor_send_next=sent(tensor_send_next),
        tensor_recv_next=from_next,
        group=self.pp_group,
        prev_pipeline_rank=self.prev_rank,
        next_pipeline_rank=self.next_rank,
    )
    for request in requests.values():
        request.wait()
    return tuple([0, 0, 0] if shape is None else shape.tolist() for shape in (from_prev, from_next))  # type: ignore[return-value]
