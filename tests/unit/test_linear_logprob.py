"""Log-probs and entropies, chunked, against plain log_softmax; gradients by gradcheck in fp64."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dapo_megatron.ops import linear_logprob as module
from dapo_megatron.ops.linear_logprob import linear_logprob


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 29 is one block otherwise."""
    monkeypatch.setattr(module, "CPU_BLOCK_LOGITS", 40)


def inputs(rows=13, width=7, vocab=29, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(5)
    hidden = (scale * torch.randn(rows, width, generator=generator)).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (rows,), generator=generator)


def exact(hidden, weight, targets, *args):
    """The reference in fp64."""
    return linear_logprob(hidden.double(), weight.double(), targets, *args, implementation="reference")


@pytest.mark.parametrize("tile", [1, 4, 13, 100, 0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_fp32(tile: int, temperature: float) -> None:
    hidden, weight, targets = inputs()
    ours = linear_logprob(hidden, weight, targets, temperature, tile_tokens=tile)
    ref = exact(hidden, weight, targets, temperature)
    upstream = torch.randn(2, 13, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((torch.stack(pair) * upstream).sum(), (hidden, weight)) for pair in (ours, ref)]
    torch.testing.assert_close(torch.stack(ours).double(), torch.stack(ref), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(grads[0], grads[1], atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(("rows", "vocab", "width"), [(1, 2, 1), (1, 31, 5), (3, 1, 4), (17, 41, 3)])
def test_odd_sizes(rows: int, vocab: int, width: int) -> None:
    hidden, weight, targets = inputs(rows, width, vocab)
    ours = linear_logprob(hidden, weight, targets, 0.6, tile_tokens=5)
    torch.testing.assert_close(
        torch.stack(ours).double(), torch.stack(exact(hidden, weight, targets, 0.6)), atol=1e-6, rtol=1e-6
    )


def test_gradcheck_fp64() -> None:
    hidden, weight, targets = inputs(5, 3, 11, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: linear_logprob(h, w, targets, 0.7, 9, tile_tokens=2), (hidden, weight))


def test_padding_rows_are_outside_the_vocabulary() -> None:
    hidden, weight, _ = inputs()
    targets = torch.arange(13)
    ours = linear_logprob(hidden, weight, targets, vocab_size=20, tile_tokens=5)
    torch.testing.assert_close(
        torch.stack(ours).double(), torch.stack(exact(hidden, weight[:20], targets)), atol=1e-6, rtol=1e-6
    )
    ours[0].sum().backward()
    assert weight.grad is not None and (weight.grad[20:] == 0).all() and (weight.grad[:20] != 0).any()


def test_large_logits_lose_nothing() -> None:
    """Logits of +-1e4: entropies and log-probs are as near to fp64's as the logits' own rounding (1e4 x 2^-24) lets them be."""
    hidden, weight, targets = inputs(scale=4e3)
    logprob, entropy = linear_logprob(hidden, weight, targets, tile_tokens=3)
    ref = exact(hidden, weight, targets)
    assert ref[0].min() < -1e4
    torch.testing.assert_close(logprob.double(), ref[0], rtol=1e-6, atol=4e-3)
    torch.testing.assert_close(entropy.double(), ref[1], rtol=1e-3, atol=1e-6)
    (logprob + entropy).sum().backward()
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()


def test_a_sure_token_keeps_its_digits() -> None:
    """1 - p is 1e-6 at the target: as a difference of bf16 numbers it would be 0 or 4e-3."""
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight = torch.ones(1, 1, dtype=dtype), torch.tensor([[14.0], [0.0]], dtype=dtype).requires_grad_()
        logprob, _ = linear_logprob(hidden, weight, torch.tensor([0]))
        logprob.sum().backward()
        assert weight.grad is not None
        expected = torch.tensor([[1.0], [-1.0]], dtype=torch.float64) * torch.sigmoid(torch.tensor(-14.0, dtype=torch.float64))
        torch.testing.assert_close(weight.grad.double(), expected, rtol=torch.finfo(dtype).eps, atol=2**-23)


def test_no_token_gives_zero_gradients() -> None:
    hidden, weight, _ = inputs(rows=4)
    none = torch.zeros(0, dtype=torch.long)
    logprob, entropy = linear_logprob(hidden[none], weight, none)
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()
    assert weight.grad is not None and (weight.grad == 0).all()


def test_bf16_is_close_to_fp32_arithmetic() -> None:
    """Logits are rounded to bf16 by the matmul (relative 2^-8), everything after is fp32; gradients are rounded twice more."""
    hidden, weight, targets = inputs(rows=60, width=48, vocab=400, dtype=torch.bfloat16, scale=0.1)
    ours, ref = linear_logprob(hidden, weight, targets), exact(hidden, weight, targets)
    assert ours[0].dtype == torch.float32
    logits = hidden.float() @ weight.float().t()
    assert (ours[0] - ref[0]).abs().max() < 2**-8 * logits.abs().max()
    grads = [torch.autograd.grad((a + 0.1 * b).sum(), (hidden, weight)) for a, b in (ours, ref)]
    for have, want in zip(*grads, strict=True):
        assert (have.double() - want.double()).norm() < 2**-7 * want.double().norm()


class Largest(TorchDispatchMode):
    """The most elements that any tensor had that an operator gave."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_more_than_a_block_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of 64 tokens x 500 words."""
    monkeypatch.setattr(module, "CPU_BLOCK_LOGITS", 1600)
    hidden, weight, targets = inputs(rows=64, width=3, vocab=500)
    with Largest() as largest:
        linear_logprob(hidden, weight, targets, tile_tokens=16)[0].sum().backward()
    assert largest.numel == 1600


def test_the_reference_refuses_a_sharded_vocabulary() -> None:
    class Group:
        def size(self) -> int:
            return 2

    group: Any = Group()
    with pytest.raises(ValueError, match="2 ranks"):
        linear_logprob(*inputs(), tp_group=group, implementation="reference")
