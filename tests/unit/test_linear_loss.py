"""The loss fused into the log-probs: values and gradients against autograd through plain logits, and the contract with
Megatron's schedules and gradient buffers (ops.main_grad)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dapo_megatron.algo.objective import dapo_objective, merge_stats
from dapo_megatron.ops import linear_logprob as module
from dapo_megatron.ops.linear_logprob import linear_logprob, linear_loss
from tests.unit.test_linear_logprob import Largest, inputs

R, VOCAB = 13, 29


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_BLOCK_LOGITS", 40)


def objective(entropy_coef: float = 0.0, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    """DAPO's, with tokens on both sides of the clips."""
    generator = torch.Generator().manual_seed(2)
    old = -3.5 + torch.randn(R, generator=generator)
    advantages, weights = torch.randn(R, generator=generator), torch.rand(R, generator=generator)
    mask = torch.ones(R, dtype=torch.bool)

    def loss_fn(rows: slice, logprob: torch.Tensor, entropy: torch.Tensor) -> Any:
        settings = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "entropy_coef": entropy_coef}
        parts = (values[rows] for values in (old, advantages, weights, mask))
        return dapo_objective(logprob, *parts, entropy=entropy, **settings)

    return loss_fn


def run(hidden: Any, weight: Any, targets: Any, loss_fn: Any, upstream: float = 1.0, **options: Any) -> Any:
    """(loss, statistics, gradient of hidden, of weight as Megatron's hook would have it)."""
    hidden, weight = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    if options.pop("buffer", False):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        weight.grad_added_to_main_grad = False
    loss, stats = linear_loss(hidden, weight, targets, loss_fn, 0.6, **options)
    loss.backward(torch.tensor(upstream, dtype=loss.dtype))
    if hasattr(weight, "main_grad"):
        assert weight.grad is not None and weight.grad_added_to_main_grad  # the hook asks for both
        return loss.detach(), merge_stats(stats), hidden.grad, weight.main_grad
    return loss.detach(), merge_stats(stats), hidden.grad, weight.grad


@pytest.mark.parametrize("tile", [1, 5, 13, 0])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("buffer", [False, True])
def test_values_and_gradients_fp32(tile: int, entropy_coef: float, buffer: bool) -> None:
    batch = inputs()
    ours = run(*batch, objective(entropy_coef), tile_tokens=tile, buffer=buffer)
    ref = run(*batch, objective(entropy_coef), implementation="reference")
    assert ref[1]["clipped_high"] > 0 and ref[1]["clipped_low"] > 0
    torch.testing.assert_close(ours[0], ref[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours[1], ref[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[2:], ref[2:], atol=3e-6, rtol=1e-5)


def test_gradcheck_fp64() -> None:
    hidden, weight, targets = inputs(5, 3, 11, torch.float64)

    def loss_fn(rows: slice, logprob: torch.Tensor, entropy: torch.Tensor) -> Any:
        return (logprob.exp() * torch.arange(5.0)[rows] + entropy**2).sum(), None

    assert torch.autograd.gradcheck(
        lambda h, w: linear_loss(h, w, targets, loss_fn, 0.7, 9, tile_tokens=2)[0], (hidden, weight)
    )


@pytest.mark.parametrize("upstream", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("announced", [1.0, 3.0])
def test_any_upstream_gradient(upstream: float, buffer: bool, announced: float) -> None:
    """Whatever the schedule multiplies the loss by, announced or not. In main_grad what was too much is subtracted again."""
    batch = inputs()
    ours = run(*batch, objective(), upstream, buffer=buffer, grad_scale=announced, tile_tokens=4)
    ref = run(*batch, objective(), upstream, implementation="reference")
    torch.testing.assert_close(ours[2:], ref[2:], atol=1e-5, rtol=1e-5)


def test_a_second_backward_adds_the_gradient_again() -> None:
    hidden, weight, targets = inputs()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    loss, _ = linear_loss(hidden, weight, targets, objective())
    loss.backward(retain_graph=True)
    once = weight.main_grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.main_grad, 2 * once, atol=1e-6, rtol=1e-5)


def test_fp16_keeps_small_gradients_by_the_announced_scale() -> None:
    """A term of 1e-7 x p is below fp16's smallest number; with the loss scale in the forward it isn't."""
    hidden, weight, targets = inputs(dtype=torch.float16)

    def loss_fn(rows: slice, logprob: torch.Tensor, entropy: torch.Tensor) -> Any:
        return 1e-7 * logprob.sum(), {}

    scale = 2.0**16
    scaled = run(hidden, weight, targets, lambda *a: (loss_fn(*a)[0], {"x": 0}), scale, buffer=True, grad_scale=scale)
    exact = run(
        hidden.double(), weight.double(), targets, lambda *a: (loss_fn(*a)[0], {"x": 0}), scale, implementation="reference"
    )
    for have, want in zip(scaled[2:], exact[2:], strict=True):
        assert want.abs().max() > 0 and (have.double() - want).norm() < 1e-2 * want.norm()


def test_two_forwards_before_their_backwards() -> None:
    """As pipelining does it."""
    hidden, weight, targets = inputs()
    others = inputs(scale=2.0)[0]
    single = [run(h, weight, targets, objective(), buffer=True) for h in (hidden, others)]
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    losses = [linear_loss(h, weight, targets, objective(), 0.6)[0] for h in (hidden, others)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(weight.main_grad, single[0][3] + single[1][3], atol=1e-6, rtol=1e-6)
    assert torch.equal(hidden.grad, single[0][2]) and torch.equal(others.grad, single[1][2])


def test_nothing_is_added_without_grad() -> None:
    hidden, weight, targets = inputs()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    with torch.no_grad():
        loss, _ = linear_loss(hidden, weight, targets, objective())
    assert not loss.requires_grad and (weight.main_grad == 0).all() and not weight.grad_added_to_main_grad


def test_activation_recomputation_adds_once() -> None:
    """torch's checkpointing runs the forward twice, the first time without grad."""
    batch = inputs()
    plain = run(*batch, objective(), buffer=True)
    hidden, weight, targets = batch
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    loss = torch.utils.checkpoint.checkpoint(
        lambda h: linear_loss(h, weight, targets, objective(), 0.6)[0], hidden, use_reentrant=True
    )
    loss.backward()
    assert torch.equal(weight.main_grad, plain[3]) and torch.equal(hidden.grad, plain[2])


def test_a_weight_of_two_layers_gets_zeros_from_here() -> None:
    """Tied embeddings on one stage: DDP's hook adds what autograd has collected from both layers."""
    hidden, weight, targets = inputs()
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros_like(weight), False, True
    loss, _ = linear_loss(hidden, weight, targets, objective())
    (loss + weight[3].sum()).backward()
    assert (weight.grad[3] == 1).all() and weight.grad.abs().sum() == weight.shape[1]
    assert (weight.main_grad != 0).any()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    hidden, weight, targets = inputs()
    want = run(hidden, weight, targets, objective())
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    linear_loss(hidden, weight, targets, objective(), 0.6)[0].backward()
    if frozen == "hidden":
        assert hidden.grad is None and torch.equal(weight.grad, want[3])
    else:
        assert weight.grad is None and torch.equal(hidden.grad, want[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_form_sees_the_same_logprobs(dtype: torch.dtype) -> None:
    """Bit for bit: the ratio of a rollout's first mini-batch is exactly 1."""
    hidden, weight, targets = inputs(dtype=dtype)
    _, seen = linear_loss(hidden, weight, targets, lambda _, logprob, __: (logprob.sum(), logprob.detach()), tile_tokens=4)
    assert torch.equal(torch.cat(seen), linear_logprob(hidden, weight, targets, tile_tokens=4)[0])


def test_no_token_is_a_loss_of_zero() -> None:
    hidden, weight, _ = inputs(rows=4)
    none = torch.zeros(0, dtype=torch.long)
    calls = []

    def loss_fn(rows: slice, logprob: torch.Tensor, entropy: torch.Tensor) -> Any:
        calls.append(rows)
        return logprob.sum(), None

    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    loss, _ = linear_loss(hidden[none], weight, none, loss_fn)
    loss.backward()
    assert loss == 0 and calls == [slice(0, 0)] and (hidden.grad == 0).all() and (weight.main_grad == 0).all()


def test_no_more_than_a_tile_of_logits_exists() -> None:
    hidden, weight, targets = inputs(rows=64, width=3, vocab=500)
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    with Largest() as largest:
        linear_loss(hidden, weight, targets, lambda _, logprob, __: (logprob.sum(), None), tile_tokens=4)[0].backward()
    assert largest.numel == 4 * 500


def test_bf16_gradients() -> None:
    """Relative 2^-7 by norm: the logits' rounding, then that of their gradients."""
    hidden, weight, targets = inputs(rows=60, width=48, vocab=400, dtype=torch.bfloat16, scale=0.1)

    def loss_fn(rows: slice, logprob: torch.Tensor, entropy: torch.Tensor) -> Any:
        return (logprob * torch.linspace(-1, 1, 60)[rows]).sum() + 0.1 * entropy.sum(), {"x": 0}

    ours = run(hidden, weight, targets, loss_fn, buffer=True)
    want = run(hidden.double(), weight.double(), targets, loss_fn, implementation="reference")
    for a, b in zip(ours[2:], want[2:], strict=True):
        assert (a.double() - b).norm() < 2**-7 * b.norm()
