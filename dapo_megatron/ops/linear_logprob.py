"""Log-probs and entropies of given tokens, and any loss of them, from hidden states and the output weight: the logits of a
vocabulary never exist but for one tile of tokens.

Logits are vocabulary-major, [rows, c]: rows of the (vocabulary-parallel) output weight, c tokens. Two forms:

- `linear_logprob`: the log-probs themselves. Without gradient one matmul. With gradient four, as the backward computes the
  logits again: this form is for losses that are not known yet in the forward.
- `linear_loss`: the loss is given as a function of log-probs and entropies. Its derivative is known as soon as a tile's
  log-sum-exp is, so that every tile's gradients are computed from the very logits that gave its loss: three matmuls.

Both work a tile off in the same blocks, so that the same weights give the same log-probs, bit for bit.

What becomes of the weight's gradient: see ops.main_grad.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.ops import torch_kernels
from dapo_megatron.ops.main_grad import MainGrad
from dapo_megatron.ops.parts import NO_ROWS, Softmax, merge_parts, whole_softmax
from dapo_megatron.ops.reference import plain_logprob

# (rows of the tokens [lo, hi), log-probs [c], entropies [c]) -> (loss, anything: it comes back in linear_loss's list)
TileLoss = Callable[[slice, Tensor, Tensor], tuple[Tensor, Any]]

# Of the element-wise work. auto: Triton on GPUs (not for fp64), else torch. reference: all plain, see ops.reference.
Implementation = Literal["auto", "torch", "triton", "reference"]

# What a tile may take: its logits, and of each hidden value its gradient, as it is added up and as it is given. CPU: some 700
# tokens in bf16 and 350 in fp32 at 152K words, where the matmuls reach their full speed. The weight's gradient in fp32 is
# read and written once a tile, and must not outweigh the tile's own matmuls: so as few tiles as that allows, of equal size.
CPU_TILE_BYTES, GPU_TILE_BYTES, HIDDEN_BYTES = 215 * 2**20, 2 * 2**30, 16
CPU_BLOCK_LOGITS = 2**19  # 2 MB in fp32


@dataclass
class _Head:
    """One call's fixed inputs. `weight` has this rank's rows without padding."""

    hidden: Tensor  # [R, hidden]
    weight: Tensor  # [rows, hidden]
    index: Tensor  # int64 [R]: the target's row in `weight`, outside of it if another rank has it
    inverse_temperature: float
    group: dist.ProcessGroup | None
    tile_tokens: int
    kernels: Any  # torch_kernels or triton_kernels

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def logit_dtype(self) -> torch.dtype:
        """What the matmul gives: cuBLAS can keep the accumulator's fp32, a CPU's BLAS gives the inputs' dtype."""
        return self.compute_dtype if self.hidden.is_cuda else self.hidden.dtype

    def tiles(self) -> Iterator[slice]:
        """At least one, if empty: every tensor-parallel rank takes part in every tile's all-gather."""
        for lo in range(0, max(len(self.hidden), 1), self.tile_tokens):
            yield slice(lo, min(lo + self.tile_tokens, len(self.hidden)))

    def buffer(self, num_logits: int) -> Tensor:
        return torch.empty(num_logits, dtype=self.logit_dtype, device=self.hidden.device)

    def places(self, tile: slice, buffer: Tensor | None = None) -> list["_Block"]:
        """Rows of the weight that are worked on at a time (on CPU what stays in a core's cache, on GPUs all), and where their
        logits go: beside each other in `buffer`, or else all to the same place, which the next block then takes.
        """
        rows, num_tokens = len(self.weight), tile.stop - tile.start
        step = max(rows if self.hidden.is_cuda else CPU_BLOCK_LOGITS // max(num_tokens, 1), 1)
        into = buffer if buffer is not None else self.buffer(min(step, rows) * num_tokens)
        found = []
        for lo in range(0, rows, step):
            size, begin = min(step, rows - lo), 0 if buffer is None else lo * num_tokens
            found.append((slice(lo, lo + size), into[begin : begin + size * num_tokens].view(size, num_tokens)))
        return found

    def multiply(self, tile: slice, places: list["_Block"]) -> Iterator["_Block"]:
        """The logits before the temperature, block by block."""
        tokens, options = self.hidden[tile].t(), {}
        if self.logit_dtype is not self.hidden.dtype:
            options["out_dtype"] = self.logit_dtype
        for block, out in places:
            yield block, torch.mm(self.weight[block], tokens, out=out, **options)

    def shard_stats(self, tile: slice, places: list["_Block"]) -> Tensor:
        """[4, c] of this rank's rows; the logits are then in `places`."""
        # one tensor for the blocks' statistics: small ones that stay, between large ones that go, tear holes into the heap
        shape = (max(len(places), 1), 4, tile.stop - tile.start)
        parts = torch.zeros(shape, dtype=self.compute_dtype, device=self.hidden.device)
        parts[:, 0] = NO_ROWS  # this rank may have but padding
        for number, (block, logits) in enumerate(self.multiply(tile, places)):
            parts[number] = self.kernels.block_stats(logits, self.index[tile] - block.start, self.inverse_temperature)
        return merge_parts(parts)


# a tile's tokens, their softmax, the loss's derivatives by their log-probs and (None: it doesn't depend on them) entropies
_Derivative = tuple[slice, Softmax, Tensor, Tensor | None]
_Block = tuple[slice, Tensor]  # rows, their logits [rows, c] before the temperature


class _Gradients:
    """Of hidden, this rank's part [R, hidden], and of the weight, [rows, hidden] (None: not wanted); added up tile by tile."""

    def __init__(self, head: _Head, weight: Tensor | None) -> None:
        self._head, self.hidden, self.weight = head, torch.zeros_like(head.hidden), weight

    def add(self, derivative: _Derivative, blocks: Iterable[_Block], scale: float = 1.0) -> None:
        """`scale` times what a tile contributes."""
        head = self._head
        tile, softmax, d_logprob, d_entropy = derivative
        d_logprob, d_entropy = d_logprob * scale, None if d_entropy is None else d_entropy * scale
        d_tokens = torch.zeros(head.hidden[tile].shape, dtype=head.compute_dtype, device=head.hidden.device)
        for block, logits in blocks:
            index = head.index[tile] - block.start
            d_logits = head.kernels.block_gradient(
                logits, softmax, index, d_logprob, d_entropy, head.inverse_temperature, head.hidden.dtype
            )
            _addmm(d_tokens, d_logits.t(), head.weight[block])
            if self.weight is not None:
                _addmm(self.weight[block], d_logits, head.hidden[tile])
        self.hidden[tile] = d_tokens

    def add_again(self, derivative: _Derivative, scale: float = 1.0) -> None:
        """The same from the log-sum-exp alone: logits are computed again, a block at a time."""
        head, tile = self._head, derivative[0]
        self.add(derivative, head.multiply(tile, head.places(tile)), scale)


def _addmm(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b; `into` may be of a wider dtype."""
    if into.dtype is a.dtype:
        into.addmm_(a, b)
    elif a.is_cuda and into.dtype is torch.float32:
        torch.addmm(into, a, b, out_dtype=torch.float32, out=into)
    else:
        into.add_(a @ b)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: _Head, main_grad: MainGrad) -> tuple[Tensor, Tensor]:
        shard = []
        for tile in head.tiles():
            shard.append(head.shard_stats(tile, head.places(tile)))
        softmax = whole_softmax(torch.cat(shard, dim=1), head.group)
        ctx.head, ctx.main_grad, ctx.softmax = head, main_grad, softmax
        ctx.save_for_backward(hidden, weight)  # autograd then complains if they are changed before the backward
        ctx.set_materialize_grads(False)
        return softmax.logprob, softmax.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        d_logprob, d_entropy = grads
        if d_logprob is None:
            d_logprob = torch.zeros_like(ctx.softmax.logprob)
        gradients = _Gradients(ctx.head, ctx.main_grad.rows())
        for tile in ctx.head.tiles():
            softmax = Softmax(*(value[tile] for value in ctx.softmax))
            gradients.add_again((tile, softmax, d_logprob[tile], None if d_entropy is None else d_entropy[tile]))
        return gradients.hidden, ctx.main_grad.for_autograd(gradients.weight), None, None


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        head: _Head,
        main_grad: MainGrad,
        grad_scale: float,
        loss_fn: TileLoss,
        outputs: list[Any],
    ) -> Tensor:
        wanted = main_grad.wanted or ctx.needs_input_grad[0]
        gradients = _Gradients(head, main_grad.rows())
        total = torch.zeros((), dtype=head.compute_dtype, device=hidden.device)
        buffer = head.buffer(len(head.weight) * min(head.tile_tokens, len(hidden)))
        derivatives: list[_Derivative] = []
        for tile in head.tiles():
            places = head.places(tile, buffer)
            softmax = whole_softmax(head.shard_stats(tile, places), head.group)
            loss, d_logprob, d_entropy, output = _differentiate(loss_fn, tile, softmax)
            total += loss
            outputs.append(output)
            if wanted:
                derivatives.append((tile, softmax, d_logprob, d_entropy))
                gradients.add(derivatives[-1], places, grad_scale)
        ctx.head, ctx.main_grad, ctx.gradients, ctx.derivatives = head, main_grad, gradients, derivatives
        ctx.grad_scale, ctx.num_backwards = grad_scale, 0
        ctx.save_for_backward(hidden, weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        main_grad: MainGrad = ctx.main_grad
        upstream = float(grads[0])
        # what main_grad lacks if another gradient comes than was announced, or another backward follows
        missing = upstream - (ctx.grad_scale if ctx.num_backwards == 0 else 0.0)
        ctx.num_backwards += 1
        if missing and main_grad.in_place:
            again = _Gradients(ctx.head, main_grad.rows())
            for derivative in ctx.derivatives:
                again.add_again(derivative, missing)
        factor = upstream / ctx.grad_scale
        d_hidden = ctx.gradients.hidden if factor == 1.0 else ctx.gradients.hidden * factor
        return d_hidden, main_grad.for_autograd(ctx.gradients.weight, factor), *[None] * 5


def _differentiate(loss_fn: TileLoss, tile: slice, softmax: Softmax) -> tuple[Tensor, Tensor, Tensor | None, Any]:
    """(loss, its derivatives by the tile's log-probs and, if it depends on them, entropies [c], loss_fn's other output)."""
    with torch.enable_grad():
        logprob, entropy = softmax.logprob.detach().requires_grad_(), softmax.entropy.detach().requires_grad_()
        loss, output = loss_fn(tile, logprob, entropy)
        if not loss.requires_grad:
            return loss.detach(), torch.zeros_like(logprob), None, output
        d_logprob, d_entropy = torch.autograd.grad(loss, (logprob, entropy), allow_unused=True)
    return loss.detach(), torch.zeros_like(logprob) if d_logprob is None else d_logprob, d_entropy, output


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    tile_tokens: int = 0,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[targets] and that distribution's entropy in nats.

    hidden [R, hidden], weight [vocab/tp, hidden] (this rank's rows), targets int64 [R] (ids of the whole vocabulary).
    Returns (logprob, entropy), fp32 [R] (fp64 for fp64). Both can be differentiated; an entropy nobody differentiates costs
    nothing in the backward. `vocab_size` excludes padding rows. With a tp_group, hidden's gradient is this rank's part: the
    caller reduces it. `tile_tokens` at a time have logits; 0: as many as fit CPU_TILE_BYTES or GPU_TILE_BYTES.
    """
    if implementation == "reference":
        _check_reference(tp_group)
        return plain_logprob(hidden, weight, targets, temperature, vocab_size)
    head = _head(hidden, weight, targets, temperature, vocab_size, tp_group, tile_tokens, implementation)
    return _LinearLogprob.apply(hidden, weight, head, MainGrad(weight, len(head.weight), head.compute_dtype))


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: TileLoss,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    tile_tokens: int = 0,
    grad_scale: float = 1.0,
    implementation: Implementation = "auto",
) -> tuple[Tensor, list[Any]]:
    """The sum over tiles of loss_fn(tokens, logprob, entropy)'s first output, differentiable by hidden and weight, and the list
    of its second outputs. Arguments as in linear_logprob.

    loss_fn gets a slice of the R tokens with their log-probs and entropies [c], fp32, and must be a sum over tokens: it is
    called for each tile, for an empty one if there are no tokens. `grad_scale` is the gradient that the caller will send back
    into the loss (Megatron's loss scale): gradients are computed with it in the forward, so that fp16 doesn't lose small ones.
    Another one is right as well, but takes a recomputation where the weight's gradient goes straight into main_grad.
    """
    if implementation == "reference":
        _check_reference(tp_group)
        loss, output = loss_fn(slice(0, len(hidden)), *plain_logprob(hidden, weight, targets, temperature, vocab_size))
        return loss, [output]
    head = _head(hidden, weight, targets, temperature, vocab_size, tp_group, tile_tokens, implementation)
    outputs: list[Any] = []
    if not torch.is_grad_enabled():  # autograd.Function doesn't see that, and would add to main_grad
        hidden, weight = hidden.detach(), weight.detach()
    main_grad = MainGrad(weight, len(head.weight), head.compute_dtype)
    loss = _LinearLoss.apply(hidden, weight, head, main_grad, grad_scale, loss_fn, outputs)
    return loss, outputs


def _check_reference(group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        raise ValueError(f"implementation: reference has no sharded vocabulary, and the group has {group.size()} ranks")


def _head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int | None,
    group: dist.ProcessGroup | None,
    tile_tokens: int,
    implementation: Implementation,
) -> _Head:
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    shard = weight.shape[0]
    total = vocab_size if vocab_size is not None else shard * size
    num_rows = max(0, min(shard, total - rank * shard))
    head = _Head(
        hidden=hidden.detach(),
        weight=weight.detach()[:num_rows],
        index=targets - rank * shard,
        inverse_temperature=1.0 / temperature,
        group=group,
        tile_tokens=tile_tokens,
        kernels=_kernels(implementation, hidden),
    )
    if not tile_tokens:
        budget = GPU_TILE_BYTES if hidden.is_cuda else CPU_TILE_BYTES
        # by the shard with its padding: the same on all ranks
        most = budget // (shard * head.logit_dtype.itemsize + HIDDEN_BYTES * hidden.shape[1])
        count = -(-len(hidden) // max(most, 64))
        head.tile_tokens = max(-(-len(hidden) // max(count, 1) // 16) * 16, 64)
    return head


def _kernels(implementation: Implementation, hidden: Tensor) -> Any:
    if implementation == "triton" or (implementation == "auto" and hidden.is_cuda and hidden.dtype is not torch.float64):
        from dapo_megatron.ops import triton_kernels  # comes with torch's CUDA builds; on CPU nobody has to wait for its import

        return triton_kernels
    return torch_kernels
