"""What a trainer rank asks of its device when it shares it with a rollout server: memory that another process may read, memory
that is given back. Everything that only CUDA can do stands here."""

import io
import pickle
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceMemory(Protocol):
    type: str  # torch's name of the kind of device

    def share(self, flat: Tensor) -> Any:
        """Something to be pickled, which another process on the same device unpickles as a tensor equal to `flat`. That may be
        this very memory: it has to stay, and unchanged, until the other process has let go of it."""
        ...

    def synchronize(self) -> None:
        """Returns when all that was queued is done."""
        ...

    def give_back(self) -> None:
        """What this process has freed, or another one has let go of, is there for every process again."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] in the host's memory, fast to copy to and from."""
        ...


class HostMemory:
    """On CPU a bucket goes through the pickle itself."""

    type = "cpu"

    def share(self, flat: Tensor) -> Any:
        return flat.clone()  # a part of a larger storage would take all of it along

    def synchronize(self) -> None: ...

    def give_back(self) -> None: ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class CudaMemory:
    """By CUDA IPC: a handle goes through the pickle, which the other process opens.

    Torch counts the readers of what was shared. What is freed too early therefore stays until the last one is gone; but
    nothing keeps it from being written to.
    """

    type = "cuda"

    def share(self, flat: Tensor) -> Any:
        return IpcHandle(flat)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def give_back(self) -> None:
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class IpcHandle:
    """Pickles as torch's multiprocessing pickles a CUDA tensor, but with the device's UUID in place of its number, which is
    another one in a process that sees other devices. SGLang's unpickler takes either."""

    DEVICE = 6  # place of the number among rebuild_cuda_tensor's arguments

    def __init__(self, tensor: Tensor) -> None:
        from torch.multiprocessing import reductions

        rebuild, arguments = reductions.reduce_tensor(tensor)
        uuid = str(torch.cuda.get_device_properties(arguments[self.DEVICE]).uuid)
        self._reduced = rebuild, (*arguments[: self.DEVICE], uuid, *arguments[self.DEVICE + 1 :])

    def __reduce__(self) -> Any:
        return self._reduced


_Pickler: Any = pickle._Pickler  # the one in Python, which can be told how to pickle a function


class _TorchsOwnNames(_Pickler):
    """Megatron puts a function of its own in the place of one of torch's, by whose name every tensor on CPU is pickled. Others
    don't know Megatron's, and SGLang's scheduler dies of what it doesn't know."""

    def save_function(self, function: Any) -> None:
        if function is torch.storage._load_from_bytes:
            self.save("torch.storage")
            self.save("_load_from_bytes")
            self.write(pickle.STACK_GLOBAL)
        else:
            self.save_global(function)

    dispatch = {**_Pickler.dispatch, FunctionType: save_function}  # noqa: RUF012


def pickled(shared: Any) -> bytes:
    """With tensors and what DeviceMemory.share gave, for a process of another program."""
    file = io.BytesIO()
    _TorchsOwnNames(file, protocol=4).dump(shared)
    return file.getvalue()


def memory_of(device: str) -> DeviceMemory:
    """For "cpu" or "cuda"."""
    return CudaMemory() if device == "cuda" else HostMemory()
