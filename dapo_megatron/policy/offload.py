"""The optimizer's state and the gradients off the device while rollout servers use it, and back.

Only storages move: they are copied to the host and resized to nothing, later resized again and filled. All tensors that are
views of them (param.main_grad, the optimizer's shards) stay the objects that they are, and see the same values afterwards.
(Megatron's own optimizer.offload_to_cpu gives parameters new tensors; with fp32 weights the optimizer then no longer updates
the model.)
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from dapo_megatron.policy.optimizer_fixes import distributed_optimizers
from dapo_megatron.policy.policy import Policy
from dapo_megatron.weights.devices import CudaMemory, DeviceMemory


class Offload:
    """`memory`: of the device whose storages move. On a machine without such a device nothing does."""

    def __init__(self, policy: Policy, memory: DeviceMemory | None = None) -> None:
        self._policy, self._memory = policy, memory or CudaMemory()
        self._on_device = next(policy.gpt[0].parameters()).device.type == self._memory.type
        self._host: list[Tensor] = []  # buffers, kept from one time to the next
        self._moved: list[UntypedStorage] = []
        self.away = False

    def offload(self) -> None:
        """Weights stay. Does nothing if it was done already."""
        if self.away or not self._on_device:
            return
        self.away = True
        self._moved = list(self._state())
        for number, storage in enumerate(self._moved):
            self._host_buffer(number, storage.nbytes()).copy_(_bytes_of(storage), non_blocking=True)
        self._memory.synchronize()
        for storage in self._moved:
            storage.resize_(0)
        for chunk in self._policy.model:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        self._memory.give_back()

    def onload(self) -> None:
        """The state as it was; gradients are zero. Does nothing if nothing is away."""
        if not self.away:
            return
        for chunk in self._policy.model:
            chunk.restore_grad_buffers(synchronize=False)
        for number, storage in enumerate(self._moved):
            storage.resize_(self._host[number].nbytes)
            _bytes_of(storage).copy_(self._host[number], non_blocking=True)
        self._memory.synchronize()
        self._moved = []
        self.away = False

    def _state(self) -> Iterator[UntypedStorage]:
        """Of master weights and moments; none that the model's weights or gradients lie in too."""
        params = [param for chunk in self._policy.gpt for param in chunk.parameters()]
        seen = {_identity(tensor) for param in params for tensor in (param, param.main_grad)}
        for tensor in _optimizer_tensors(self._policy.optimizer):
            if tensor.device.type == self._memory.type and _identity(tensor) not in seen:
                seen.add(_identity(tensor))
                yield tensor.untyped_storage()

    def _host_buffer(self, number: int, num_bytes: int) -> Tensor:
        if number == len(self._host):
            self._host.append(self._memory.host_buffer(num_bytes))
        elif self._host[number].nbytes != num_bytes:
            self._host[number] = self._memory.host_buffer(num_bytes)
        return self._host[number]


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    for part in distributed_optimizers(optimizer):
        if part.optimizer is None:  # this rank has no parameters of the kind
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _identity(tensor: Tensor) -> int:
    """Of its storage, which may have no address."""
    return tensor.untyped_storage()._cdata


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
