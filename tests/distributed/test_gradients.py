"""The Megatron policy's loss and gradients against plain transformers + autograd in fp64, on several layouts. fp32: 1e-5."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.harness import RankPool, make_config, make_samples, pack, reference

LAYOUTS = {
    "one rank": {},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
}


def policy_gradients(rank: int, model_dir: str, cfg: Any, shares: list[Any]) -> dict[str, Any]:
    from dapo_megatron.policy.policy import Policy

    policy = Policy(cfg, model_dir)
    policy.load_batch([shares[policy.dp_rank]])
    policy.old_logprobs()
    old = [batch.old_logprobs.numpy() for batch in policy.minibatches[0]] if policy._reports() else []
    stats = policy.update(0, lr=0.0)
    grads = {name: t.clone() for bucket in policy.stream_gradients(10**6) for name, t in bucket}
    return {"grads": grads, "stats": {k: float(v) for k, v in stats.items()}, "old": old}


def check(ranks: RankPool, model_dir: Path, cfg: Any, stale: bool = False) -> list[dict[str, Any]]:
    """`stale`: all tokens are carried over from older weights, whose log-probs differ, so that every kind of clip acts."""
    samples = make_samples()
    expected = reference(model_dir, samples, cfg)
    if stale:
        rng = np.random.default_rng(4)
        for sample, logprobs in zip(samples, expected["logprobs"], strict=True):
            sample.rollout_logprobs = (logprobs - rng.normal(0, 1.0, len(logprobs))).astype(np.float32)
            sample.stale[:] = True
        expected = reference(model_dir, samples, cfg, old=[sample.rollout_logprobs for sample in samples])
    world = cfg.world_size
    results = ranks.run(policy_gradients, world, str(model_dir), cfg, pack(samples, cfg))
    grads: dict[str, torch.Tensor] = {}
    for result in results:
        grads.update(result["grads"])
    assert grads.keys() == expected["grads"].keys()
    for name, want in expected["grads"].items():
        error = (grads[name].double() - want).norm() / want.norm()
        assert error <= 1e-5, f"{name}: relative error {error:.2e}"
    stats = [r["stats"] for r in results if r["stats"]]
    num_valid = sum(s.num_valid for s in samples)
    assert sum(s["num_tokens"] for s in stats) == num_valid
    loss = sum(s["loss_sum"] for s in stats) / num_valid
    assert loss == pytest.approx(expected["loss"], abs=1e-6)
    norm = torch.stack([g.norm() for g in expected["grads"].values()]).norm()
    assert all(s["grad_norm_max"] == pytest.approx(float(norm), rel=1e-5) for s in stats)
    assert max(s["fresh_ratio_error_max"] for s in stats) == 0.0  # same batches, same weights: not even rounding differs
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama_untied", "llama_tied"])
def test_gradients_equal_transformers(ranks: RankPool, models: dict[str, Path], model: str, layout: str) -> None:
    check(ranks, models[model], make_config(**LAYOUTS[layout], parallel__max_tokens_per_microbatch=40))


@pytest.mark.parametrize(("model", "layout"), [("qwen2_tied", "tp2 sp"), ("qwen3_untied", "tp2"), ("qwen3_untied", "tp2 sp")])
def test_gradients_of_other_families(ranks: RankPool, models: dict[str, Path], model: str, layout: str) -> None:
    check(ranks, models[model], make_config(**LAYOUTS[layout]))


@pytest.mark.parametrize("layout", ["one rank", "tp2 sp", "pp2", "dp2"])
def test_gradients_when_the_clips_act(ranks: RankPool, models: dict[str, Path], layout: str) -> None:
    settings = LAYOUTS[layout] | {"algorithm__dual_clip": 3.0, "parallel__max_tokens_per_microbatch": 40}
    results = check(ranks, models["llama_tied"], make_config(**settings), stale=True)
    for name in ("clipped_high", "clipped_low", "dual_clipped"):
        assert sum(result["stats"].get(name, 0) for result in results) > 0, name


@pytest.mark.parametrize("aggregation", ["group_token", "sequence", "constant"])
def test_gradients_of_other_aggregations(ranks: RankPool, models: dict[str, Path], aggregation: str) -> None:
    cfg = make_config(dp=2, parallel__max_tokens_per_microbatch=40, algorithm__aggregation=aggregation)
    check(ranks, models["llama_tied"], cfg)


def test_gradients_with_entropy_bonus_and_recomputation(ranks: RankPool, models: dict[str, Path]) -> None:
    check(ranks, models["llama_untied"], make_config(tp=2, algorithm__entropy_coef=0.05, parallel__recompute=True))


def test_old_logprobs_equal_transformers(ranks: RankPool, models: dict[str, Path]) -> None:
    cfg = make_config(parallel__max_tokens_per_microbatch=10**6)
    samples = make_samples()
    expected = reference(models["llama_tied"], samples, cfg)
    (result,) = ranks.run(policy_gradients, 1, str(models["llama_tied"]), cfg, pack(samples, cfg))
    np.testing.assert_allclose(np.concatenate(result["old"]), np.concatenate(expected["logprobs"]), atol=1e-5)
