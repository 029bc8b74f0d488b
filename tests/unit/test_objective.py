import math

import pytest
import torch

from dapo_megatron.algo.objective import dapo_objective, merge_stats

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def objective(ratios, advantages, weights=None, mask=None, **kwargs):
    """The objective at given probability ratios; returns loss, gradient for the new log-probs, statistics."""
    ratios = torch.tensor(ratios, dtype=torch.float32)
    old = torch.full_like(ratios, -1.0)
    new = (old + ratios.log()).requires_grad_()
    weights = torch.ones_like(ratios) if weights is None else torch.tensor(weights)
    mask = torch.ones_like(ratios, dtype=torch.bool) if mask is None else torch.tensor(mask)
    loss, stats = dapo_objective(new, old, torch.tensor(advantages), weights, mask, **{**CLIPS, **kwargs})
    loss.backward()
    return loss.item(), new.grad, {name: value.item() for name, value in stats.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, ""),
        (1.2, 2.0, -2.4, -2.4, ""),  # above 1 + eps_low: the upper bound is the higher one
        (1.5, 2.0, -2.56, 0.0, "clipped_high"),
        (0.5, 2.0, -1.0, -1.0, ""),  # pessimistic: no lower clip for A > 0
        (1.5, -2.0, 3.0, 3.0, ""),  # no upper clip for A < 0
        (0.9, -2.0, 1.8, 1.8, ""),
        (0.5, -2.0, 1.6, 0.0, "clipped_low"),
        (1.5, 0.0, 0.0, 0.0, ""),
    ],
)
def test_clips_by_hand(ratio, advantage, loss, gradient, clipped):
    value, grad, stats = objective([ratio], [advantage])
    assert value == pytest.approx(loss, rel=1e-6)
    assert grad.item() == pytest.approx(gradient, rel=1e-6)  # d(rho A) / d(log-prob) = rho A
    assert [name for name in ("clipped_high", "clipped_low", "dual_clipped") if stats[name]] == [clipped] * bool(clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "dual_clipped"),
    [(20.0, -0.5, 5.0, 0.0, 1), (9.0, -0.5, 4.5, 4.5, 0), (20.0, 0.5, -0.64, 0.0, 0), (0.1, -0.5, 0.4, 0.0, 0)],
)
def test_dual_clip_by_hand(ratio, advantage, loss, gradient, dual_clipped):
    value, grad, stats = objective([ratio], [advantage], dual_clip=10.0)
    assert value == pytest.approx(loss, rel=1e-5)
    assert grad.item() == pytest.approx(gradient, rel=1e-5)
    assert stats["dual_clipped"] == dual_clipped
    assert objective([20.0], [-0.5])[0] == pytest.approx(10.0, rel=1e-5)  # off by default


def test_statistics_by_hand():
    ratios = [2.0, 0.5, 1.0]
    loss, _, stats = objective(ratios, [1.0, -1.0, 1.0], weights=[0.5, 0.25, 0.25])
    assert stats["num_tokens"] == 3
    assert stats["ratio_max"] == pytest.approx(2.0)
    assert stats["k1_sum"] == pytest.approx(-math.log(2) + math.log(2), abs=1e-6)
    assert stats["k3_sum"] == pytest.approx((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2)), rel=1e-5)
    assert stats["prob_sum"] == pytest.approx(3.5 * math.exp(-1), rel=1e-6)
    assert loss == pytest.approx(-(0.5 * 1.28 - 0.25 * 0.8 + 0.25 * 1.0), rel=1e-6)
    assert stats["loss_sum"] == pytest.approx(loss)


def test_same_policy_clips_nothing():
    _, _, stats = objective([1.0] * 5, [1.0, -1.0, 2.0, -2.0, 0.0], dual_clip=10.0)
    assert stats["ratio_max"] == 1 and stats["k3_sum"] == 0
    assert stats["clipped_high"] == stats["clipped_low"] == stats["dual_clipped"] == 0


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_garbage_at_masked_places_has_no_influence(garbage):
    clean = objective([1.5, 0.9], [1.0, -1.0])
    new = torch.tensor([math.log(1.5) - 1, math.log(0.9) - 1, garbage], requires_grad=True)
    dirty = torch.tensor([-1.0, -1.0, garbage])
    loss, stats = dapo_objective(
        new,
        dirty,
        torch.tensor([1.0, -1.0, garbage]),
        torch.tensor([1.0, 1.0, garbage]),
        torch.tensor([True, True, False]),
        entropy=torch.tensor([0.0, 0.0, garbage]),
        entropy_coef=0.1,
        **CLIPS,
    )
    loss.backward()
    assert loss.item() == clean[0]
    assert new.grad.tolist() == [*clean[1].tolist(), 0.0]
    assert {name: value.item() for name, value in stats.items()} == clean[2]


def test_extreme_ratios_stay_finite():
    new = torch.tensor([500.0, 500.0, -500.0, -500.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    ones, mask = torch.ones(4), torch.ones(4, dtype=torch.bool)
    loss, stats = dapo_objective(new, torch.zeros(4), advantages, ones, mask, **CLIPS)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(new.grad).all()
    assert all(math.isfinite(value) for name, value in stats.items() if name != "prob_sum")
    assert stats["clipped_high"] == 1 and stats["clipped_low"] == 1


@pytest.mark.parametrize("length", [0, 3])
def test_nothing_valid_gives_zero_loss_and_gradient(length):
    new = torch.full((length,), -1.0, requires_grad=True)
    rest = torch.ones(length)
    loss, stats = dapo_objective(new, rest, rest, rest, torch.zeros(length, dtype=torch.bool), **CLIPS)
    loss.backward()  # an empty micro-batch still takes part in the backward pass
    assert loss.item() == 0 and new.grad.tolist() == [0.0] * length
    assert all(value == 0 for value in stats.values())


def test_entropy_bonus():
    entropy = torch.tensor([0.5, 2.0], requires_grad=True)
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    arguments = (new, new.detach(), torch.ones(2), torch.tensor([0.25, 0.75]), torch.ones(2, dtype=torch.bool))
    plain, stats = dapo_objective(*arguments, entropy=entropy, **CLIPS)
    assert stats["entropy_sum"] == 2.5
    plain.backward()
    assert entropy.grad is None  # coefficient 0: no backward through the entropy at all
    with_bonus, _ = dapo_objective(*arguments, entropy=entropy, entropy_coef=0.1, **CLIPS)
    assert with_bonus.item() == pytest.approx(plain.item() - 0.1 * (0.25 * 0.5 + 0.75 * 2.0))
    with_bonus.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.025, -0.075])


def test_bfloat16_log_probs_are_computed_in_float32():
    new = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    old = torch.tensor([-1.001])
    loss, stats = dapo_objective(new, old, torch.ones(1), torch.ones(1), torch.ones(1, dtype=torch.bool), **CLIPS)
    assert loss.dtype == torch.float32
    assert stats["ratio_max"].item() == pytest.approx(math.exp(0.001), rel=1e-6)


def test_gradient_matches_finite_differences():
    step = 1e-3
    for ratio in (0.3, 0.79, 0.81, 1.0, 1.27, 1.29, 1.49, 1.51, 4.0):  # on both sides of every corner
        for advantage in (-1.7, 0.6):
            _, gradient, _ = objective([ratio], [advantage], dual_clip=1.5)
            up, down = (objective([ratio * math.exp(s)], [advantage], dual_clip=1.5)[0] for s in (step, -step))
            assert gradient.item() == pytest.approx((up - down) / (2 * step), abs=2e-3), (ratio, advantage)


def test_splitting_changes_nothing():
    torch.manual_seed(1)
    old, advantages, weights = torch.randn(60) - 3, torch.randn(60), torch.rand(60)
    new, mask = old + 0.3 * torch.randn(60), torch.rand(60) < 0.7
    whole_loss, whole = dapo_objective(new, old, advantages, weights, mask, dual_clip=1.3, **CLIPS)
    cuts = [slice(0, 7), slice(7, 7), slice(7, 40), slice(40, 60)]
    parts = [dapo_objective(new[c], old[c], advantages[c], weights[c], mask[c], dual_clip=1.3, **CLIPS) for c in cuts]
    merged = merge_stats(stats for _, stats in parts)
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole_loss.item(), rel=1e-5)
    assert whole["clipped_high"] > 0 and whole["clipped_low"] > 0 and whole["dual_clipped"] > 0
    for name, value in whole.items():
        assert merged[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6), name


def test_merge_stats():
    parts = [{"a": 1.0, "b_max": 3.0}, {"a": 2.0, "b_max": 1.0}]
    assert merge_stats(parts) == {"a": 3.0, "b_max": 3.0}
    assert parts[0] == {"a": 1.0, "b_max": 3.0}
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_stats([])
    with pytest.raises(ValueError, match=r"\['c'\]"):
        merge_stats([{"a": 1.0}, {"a": 1.0, "c": 2.0}])
