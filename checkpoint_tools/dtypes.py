"""Which dtypes are converted, and how."""

import torch
from torch import Tensor


def cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """To `dtype`, rounding to nearest (even); as it is for None. ValueError if a finite number would become infinite."""
    if dtype is None or tensor.dtype == dtype:
        return tensor
    out = tensor.to(dtype)
    narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    # aminmax needs no memory of the tensor's size, and is ten times as fast
    if narrower and out.numel() and not all(value.isfinite() for value in out.aminmax()):
        lost = ~out.isfinite() & tensor.isfinite()
        if lost.any():
            value = float(tensor[lost][0])
            raise ValueError(f"tensor {name}: {value:g} is too large for {name_of(dtype)}; use a wider --dtype or none")
    return out


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
