"""Where the output weight's gradient goes, and what autograd is told of it.

A parameter in a Megatron gradient buffer has `main_grad`, in fp32, which collects the gradients of all micro-batches. Adding to
it directly saves a second matrix of the weight's size, [vocab/tp, hidden], for each micro-batch in flight. The contract with
Megatron-Core 0.19's schedules and DistributedDataParallel:

- DDP's hook, which runs when autograd has the parameter's gradient, adds that gradient to main_grad unless
  `grad_added_to_main_grad` is set, drops it and, with overlapped reduction, counts the parameter as ready. So autograd must be
  given a gradient in every backward: one that nobody looks at.
- `zero_out_wgrad` marks a weight that another layer uses too (tied embeddings on one stage). Autograd adds up what both give
  before the hook sees it, and the hook then adds the sum: here what nobody looks at must be zeros.
- Forward and backward of several micro-batches interleave (pipelining, virtual stages); the buffer is zeroed before the first
  forward, and reduced after the last backward. Adding in the forward is therefore as good as in the backward, if a backward
  follows: under no_grad nothing is added.
- The schedule multiplies the loss by the loss scale after the forward, so that the gradient sent back into the loss is that
  scale: it has to be known before (linear_loss's grad_scale). A gradient that differs from it is made up for in the backward.
"""

import torch
from torch import Tensor


class MainGrad:
    """The gradient of a weight's first `num_rows` rows; the others are padding and get none."""

    def __init__(self, weight: Tensor, num_rows: int, dtype: torch.dtype) -> None:
        self._weight, self._num_rows, self._dtype = weight, num_rows, dtype
        self.wanted = weight.requires_grad
        self.in_place = self.wanted and getattr(weight, "main_grad", None) is not None

    def rows(self) -> Tensor | None:
        """[num_rows, hidden] to add the gradient to: main_grad's, else new zeros of `dtype`. None: no gradient is wanted."""
        if self.in_place:
            return self._weight.main_grad[: self._num_rows]  # type: ignore[attr-defined]
        shape = (self._num_rows, self._weight.shape[1])
        return torch.zeros(shape, dtype=self._dtype, device=self._weight.device) if self.wanted else None

    def for_autograd(self, rows: Tensor | None, factor: float = 1.0) -> Tensor | None:
        """What a backward returns for the weight: `factor` times `rows`, or a stand-in if those are main_grad's."""
        if rows is None:
            return None
        weight = self._weight
        if self.in_place:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
        gradient = torch.zeros_like(weight)
        torch.mul(rows, factor, out=gradient[: self._num_rows])
        return gradient
