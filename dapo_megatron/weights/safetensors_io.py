"""safetensors files in streams: one tensor in memory at a time, where the library maps or holds the whole file."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in FLOATS.items()}
_OTHERS = {
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class Entry(NamedTuple):
    """A tensor within a file: dtype as safetensors calls it (BF16 ...), and the bytes from `start` to `end` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name. ValueError, naming the file, if it is damaged or cut off."""
    try:
        with safe_open(path, framework="pt"):  # checks that the header fits itself and the file's size
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except Exception as error:  # safetensors raises its own type
        raise ValueError(f"{path}: unreadable safetensors file ({error})") from error
    header.pop("__metadata__", None)
    first = 8 + length
    return {
        name: Entry(entry["dtype"], tuple(entry["shape"]), *(first + offset for offset in entry["data_offsets"]))
        for name, entry in header.items()
    }


def read_tensor(path: Path, name: str, entry: Entry) -> Tensor:
    """A tensor of its own memory. (One that the library gives is mapped to the file, and all that was ever read of a file stays
    in the process's memory until the file is closed.)"""
    dtype = FLOATS.get(entry.dtype) or _OTHERS.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"{path}: tensor {name} is {entry.dtype}, which is not read here: dequantise the model first")
    tensor = torch.empty(entry.shape, dtype=dtype)
    left = memoryview(tensor.view(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")
    with path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        while left and (count := file.readinto(left)):
            left = left[count:]
    if left:
        raise ValueError(f"{path}: ends within tensor {name}: the file has changed")
    return tensor


class StreamedFile:
    """A safetensors file of known tensors, each written straight to its place, in any order. On leaving it without an error the
    file is whole and on the disk; OSError if the disk is full. `tensors`: name -> (dtype, shape)."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.path = path
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._expected = dict(tensors)
        self._start: dict[str, int] = {}
        end = 0
        for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):  # so that all of them are aligned
            dtype, shape = tensors[name]
            size = dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            self._start[name], end = end, end + size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._first = 8 + len(text)
        self._file = path.open("wb", buffering=0)
        try:
            self._write(memoryview(len(text).to_bytes(8, "little") + text), 0)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Each tensor once."""
        assert self._expected.pop(name) == (tensor.dtype, tuple(tensor.shape)), name
        if tensor.numel():
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            self._write(memoryview(data), self._first + self._start[name])

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count

    def __enter__(self) -> "StreamedFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file:
            if error is None:
                assert not self._expected, f"not written: {sorted(self._expected)}"
                os.fsync(self._file.fileno())
