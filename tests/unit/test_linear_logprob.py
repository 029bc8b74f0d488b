"""Chunked log-prob and entropy against plain log_softmax; gradients by gradcheck in fp64."""

import pytest
import torch

from dapo_megatron.ops.linear_logprob import linear_logprob


def plain(hidden, weight, targets, temperature):
    logp = (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32)).div(temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def inputs(rows=13, width=7, vocab=29, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(5)
    hidden = (scale * torch.randn(rows, width, generator=generator)).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (rows,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_fp32(chunk: int, temperature: float) -> None:
    hidden, weight, targets = inputs()
    ours = linear_logprob(hidden, weight, targets, temperature, chunk_tokens=chunk)
    ref = plain(hidden, weight, targets, temperature)
    upstream = torch.randn(2, 13, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((torch.stack(pair) * upstream).sum(), (hidden, weight)) for pair in (ours, ref)]
    for a, b in (*zip(ours, ref, strict=True), *zip(*grads, strict=True)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradcheck_fp64() -> None:
    hidden, weight, targets = inputs(5, 3, 11, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: linear_logprob(h, w, targets, 0.7, 9, chunk_tokens=2), (hidden, weight))


def test_padding_rows_are_outside_the_vocabulary() -> None:
    hidden, weight, _ = inputs()
    targets = torch.arange(13)
    ours = linear_logprob(hidden, weight, targets, vocab_size=20, chunk_tokens=5)
    ref = plain(hidden, weight[:20], targets, 1.0)
    torch.testing.assert_close(torch.stack(ours), torch.stack(ref), atol=2e-6, rtol=1e-5)
    ours[0].sum().backward()
    assert weight.grad is not None and (weight.grad[20:] == 0).all() and (weight.grad[:20] != 0).any()


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = inputs(scale=1e4)
    logprob, entropy = linear_logprob(hidden, weight, targets, chunk_tokens=3)
    (logprob + entropy).sum().backward()
    assert torch.isfinite(logprob).all() and torch.isfinite(entropy).all()
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()
    torch.testing.assert_close(logprob, plain(hidden, weight, targets, 1.0)[0], rtol=1e-5, atol=1e-2)


def test_no_token_gives_zero_gradients() -> None:
    hidden, weight, _ = inputs(rows=4)
    none = torch.zeros(0, dtype=torch.long)
    logprob, entropy = linear_logprob(hidden[none], weight, none)
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()
    assert weight.grad is not None and (weight.grad == 0).all()


def test_bf16_is_close_to_fp32_arithmetic() -> None:
    """Logits are rounded to bf16 by the matmul (relative 2^-8), everything after is fp32."""
    hidden, weight, targets = inputs(dtype=torch.bfloat16)
    ours = linear_logprob(hidden, weight, targets)[0]
    exact = plain(hidden.float(), weight.float(), targets, 1.0)[0]
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() < 2**-7 * (hidden.float() @ weight.float().t()).abs().max()
