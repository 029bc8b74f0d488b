"""What the ratio is against, truncated importance weights, and the distance between trainer and engine."""

import math

import numpy as np
import pytest
import torch

from dapo_megatron.algo.objective import dapo_objective, merge_stats
from dapo_megatron.algo.off_policy import drift_stats, effective_sample_size, old_policy
from dapo_megatron.algo.samples import build_samples
from dapo_megatron.rollout.sampler import SampledBatch
from dapo_megatron.rollout.sampling_stats import SamplingStats
from dapo_megatron.telemetry.measure import measure_step
from dapo_megatron.telemetry.metrics import METRICS
from tests.unit.test_train import REPLICA, make_group

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
TRAINER = torch.tensor([-1.0, -2.0, -0.5, -3.0])
ENGINE = torch.tensor([-1.5, -2.0, -0.1, -9.0])
STALE = torch.tensor([False, True, True, False])


def test_stale_tokens_have_the_engines_log_probs() -> None:
    old, importance = old_policy(TRAINER, ENGINE, STALE)
    assert importance is None
    assert old.tolist() == torch.tensor([-1.0, -2.0, -0.1, -3.0]).tolist()


def test_with_a_cap_all_have_the_trainers_and_a_weight() -> None:
    old, importance = old_policy(TRAINER, ENGINE, STALE, importance_cap=2.0)
    assert old.tolist() == TRAINER.tolist() and importance is not None
    assert importance.tolist() == pytest.approx([math.exp(0.5), 1.0, math.exp(-0.4), 2.0])
    _, importance = old_policy(torch.zeros(1), torch.tensor([-500.0]), STALE[:1], importance_cap=3.0)
    assert importance is not None and importance.tolist() == [3.0]  # exp overflows


def objective(importance, log_ratio=0.1, advantage=1.3, **kwargs):
    """Loss and gradient of one token of weight 0.5."""
    new = torch.tensor([log_ratio - 2.0], dtype=torch.float32, requires_grad=True)
    weight = None if importance is None else torch.tensor([importance])
    arguments = torch.tensor([-2.0]), torch.tensor([advantage]), torch.tensor([0.5]), torch.tensor([True])
    loss, _ = dapo_objective(new, *arguments, importance=weight, **CLIPS, **kwargs)
    loss.backward()
    return loss.item(), new.grad.item()


@pytest.mark.parametrize("log_ratio", [-1.0, -0.1, 0.0, 0.2, 1.0, 2.5])
@pytest.mark.parametrize("advantage", [1.3, -0.7])
def test_loss_and_gradient_are_weighted(log_ratio: float, advantage: float) -> None:
    for importance in (0.25, 1.0, 1.75):
        loss, gradient = objective(importance, log_ratio, advantage, dual_clip=3.0)
        plain_loss, plain_gradient = objective(None, log_ratio, advantage, dual_clip=3.0)
        assert loss == pytest.approx(importance * plain_loss, rel=1e-6)
        assert gradient == pytest.approx(importance * plain_gradient, rel=1e-6)
        step = 1e-3  # with the weight a constant
        up, down = (objective(importance, log_ratio + s, advantage, dual_clip=3.0)[0] for s in (step, -step))
        assert gradient == pytest.approx((up - down) / (2 * step), abs=2e-3)


def test_no_gradient_goes_into_the_weight() -> None:
    """Though it is made of the very log-probs that are trained."""
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    engine, ones, mask = torch.tensor([-1.5, -1.5]), torch.ones(2), torch.ones(2, dtype=torch.bool)
    old, importance = old_policy(new, engine, ~mask, importance_cap=10.0)
    loss, _ = dapo_objective(new, old.detach(), ones, ones, mask, importance=importance, **CLIPS)
    loss.backward()
    assert new.grad is not None and importance is not None
    assert new.grad.tolist() == pytest.approx((-importance).tolist())  # at ratio 1 and A = 1


def test_the_entropy_bonus_isnt_weighted() -> None:
    entropy = torch.tensor([2.0], requires_grad=True)
    one, mask = torch.ones(1), torch.ones(1, dtype=torch.bool)
    weight = torch.tensor([0.25])
    loss, _ = dapo_objective(one, one, one, one, mask, entropy=entropy, entropy_coef=0.1, importance=weight, **CLIPS)
    loss.backward()
    assert loss.item() == pytest.approx(-(0.25 + 0.1 * 2.0)) and entropy.grad is not None
    assert entropy.grad.item() == pytest.approx(-0.1)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
def test_garbage_at_masked_places_has_no_influence(garbage: float) -> None:
    mask = torch.tensor([True, True, False])
    found = []
    for last in (1.0, garbage):
        new = torch.tensor([-1.0, -2.0, last], requires_grad=True)
        old, rest = torch.tensor([-1.1, -1.9, last]), torch.tensor([1.0, 1.0, last])
        loss, stats = dapo_objective(new, old, rest, rest, mask, importance=torch.tensor([0.5, 1.5, last]), **CLIPS)
        loss.backward()
        found.append((loss.item(), new.grad.tolist(), {name: value.item() for name, value in stats.items()}))
    assert found[0] == found[1] and all(map(math.isfinite, found[1][1]))


def drift(trainer, engine, stale=None, cap=0.0):
    trainer, engine = torch.as_tensor(trainer), torch.as_tensor(engine)
    return drift_stats(trainer, engine, torch.zeros(len(trainer), dtype=torch.bool) if stale is None else stale, cap)


def test_drift_by_hand() -> None:
    stats = {name: value.item() for name, value in drift(TRAINER, ENGINE, STALE, cap=1.5).items()}
    weights = [math.exp(0.5), 1.0, math.exp(-0.4), math.exp(6.0)]
    assert stats == pytest.approx(
        {
            "fresh_tokens": 2,
            "stale_tokens": 2,
            "diff_sum": 6.5,
            "stale_diff_sum": 0.4,
            "diff_max": 6.0,
            "weight_sum": sum(weights),
            "weight_square_sum": sum(w * w for w in weights),
            "truncated": 2,
        },
        rel=1e-6,
    )
    assert "truncated" not in drift(TRAINER, ENGINE)


def test_effective_sample_size() -> None:
    assert effective_sample_size(drift(TRAINER, TRAINER)) == 1.0
    assert effective_sample_size(drift(TRAINER + 3, TRAINER)) == pytest.approx(1.0)  # all weigh the same
    assert effective_sample_size(drift([0.0, 0.0, 0.0, math.log(3)], [0.0] * 4)) == pytest.approx(36 / (4 * 12))


@pytest.mark.parametrize("far", [90.0, 400.0, 1e5])
def test_effective_sample_size_doesnt_overflow(far: float) -> None:
    """exp(90) is infinite in fp32, the square of exp(400) in fp64."""
    assert effective_sample_size(drift([0.0] * 10, [-far] + [0.0] * 9)) == pytest.approx(0.1)
    assert effective_sample_size(drift([-far] * 10, [0.0] * 10)) == pytest.approx(1.0)


def test_parts_of_a_batch_add_up() -> None:
    torch.manual_seed(1)
    trainer, engine, stale = torch.randn(50) - 3, torch.randn(50) - 3, torch.rand(50) < 0.4
    cuts = [slice(0, 0), slice(0, 7), slice(7, 30), slice(30, 50)]
    whole = drift_stats(trainer, engine, stale, 1.2)
    merged = merge_stats(drift_stats(trainer[c], engine[c], stale[c], 1.2) for c in cuts)
    assert {name: v.item() for name, v in merged.items()} == pytest.approx({name: v.item() for name, v in whole.items()})
    weights = np.exp(trainer.double().numpy() - engine.double().numpy())
    assert effective_sample_size(merged) == pytest.approx(weights.sum() ** 2 / (50 * (weights**2).sum()))


def measured(drift: list, updates: list) -> dict[str, float]:
    groups = [make_group(i, (True, False), (3, 5)) for i in range(2)]  # by weights 3
    groups[0].completions[0].versions[:] = [1, 1, 2]
    groups[0].completions[1].versions[:2] = 2
    samples = build_samples(groups, version=3)
    samples[3].mask[:] = False
    sampled = SampledBatch(groups, [], SamplingStats())
    metrics = measure_step(sampled, samples, drift, updates, num_minibatches=len(updates))
    assert metrics.keys() <= METRICS.keys()
    return {name.removeprefix("sync/"): value for name, value in metrics.items() if name.startswith("sync/")}


STALENESS = {"staleness_0": 6 / 11, "staleness_1": 3 / 11, "staleness_2_or_more": 2 / 11}


def plain(stats) -> dict[str, float]:
    return {name: float(value) for name, value in stats.items()}


def test_metrics_of_two_replicas() -> None:
    parts = [plain(drift(TRAINER[c], ENGINE[c], STALE[c], cap=1.5)) for c in (slice(0, 3), slice(3, 4))]
    weights = np.exp((TRAINER - ENGINE).double().numpy())
    expected = {
        "logprob_diff_mean": 3.25,
        "logprob_diff_max": 6.0,
        "stale_logprob_diff_mean": 0.2,
        "effective_sample_size": weights.sum() ** 2 / (4 * (weights**2).sum()),
        "truncated_share": 0.5,
        **STALENESS,
    }
    assert measured(parts, [[REPLICA]]) == pytest.approx(expected)


def test_without_recomputation_the_first_update_that_was_done_tells_the_drift() -> None:
    first, later = ({**REPLICA, **plain(drift(TRAINER, engine))} for engine in (TRAINER - 0.5, ENGINE))
    skipped = {**later, "grad_norm_max": math.nan}
    found = measured([], [[skipped], [first], [later]])
    expected = {"logprob_diff_mean": 0.5, "logprob_diff_max": 0.5, "effective_sample_size": 1.0}
    assert found == pytest.approx(expected | STALENESS, abs=1e-6)
    assert measured([], [[skipped]]) == pytest.approx(STALENESS)
