"""One batch from a file, one model from an HF folder: every layout and every split into micro-batches gives the loss, the
gradients and, after three optimizer steps, the weights of plain transformers + autograd in fp64.

The default run takes a sample of layouts and variants, `-m ""` takes all; the differences are printed.
"""

from collections import defaultdict
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo_megatron.algo.objective import merge_stats
from dapo_megatron.algo.off_policy import effective_sample_size
from dapo_megatron.algo.samples import set_weights
from dapo_megatron.audit.batch import old_logprobs as old_logprobs_of
from dapo_megatron.audit.batch import with_old_logprobs
from dapo_megatron.audit.reference import ReferencePolicy, ReferenceStep, clip_scale
from dapo_megatron.config import Config
from dapo_megatron.records import Sample
from dapo_megatron.samples_file import load_samples
from tests.distributed.harness import LAYOUTS, MODELS, RankPool, ReferenceTrainer, make_config, pack, pack_by_number
from tests.distributed.make_batch import BATCH

BUDGET = {"parallel__max_tokens_per_microbatch": 40}
# whole groups in a micro-batch; of two data-parallel ranks one then has the long response alone
SHARED = {"parallel__max_tokens_per_microbatch": 120, "parallel__share_prompts": True}
RECOMPUTE_PARTS = {"parallel__recompute": "selective", "parallel__recompute_modules": ["core_attn", "mlp"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "token budget": BUDGET,
    "micro-batches of 1": {"samples_per_microbatch": 1},
    "micro-batches of 2": {"samples_per_microbatch": 2},
    "one micro-batch": {"parallel__max_tokens_per_microbatch": 10**6},
    "padded": {"samples_per_microbatch": 3, "pad_sequences_to": 128},
    "selective recomputation": BUDGET | RECOMPUTE_PARTS,
    "full recomputation": BUDGET | {"parallel__recompute": "full"},
    "group_token": BUDGET | {"algorithm__aggregation": "group_token"},
    "sequence": BUDGET | {"algorithm__aggregation": "sequence"},
    "constant": BUDGET | {"algorithm__aggregation": "constant"},
    "entropy bonus": BUDGET | {"algorithm__entropy_coef": 0.05},
    "shared prompts": SHARED,
    "shared prompts, recomputed": SHARED | RECOMPUTE_PARTS,
}
# Old policies beside the trainer's, which the variants above have. The cap is amid the weights.
OLD_POLICIES: dict[str, dict[str, Any]] = {
    "importance weights": SHARED | {"algorithm__importance_cap": 1.2},
    "engine's log-probs": BUDGET | {"algorithm__old_logprobs": "engine"},
}
# Gradients are clipped at every step. Adam's eps is of the size of a gradient's elements: with a tiny one the update would
# hardly depend on the gradient's scale, and a wrong norm would go unnoticed.
COMMON = {"optimizer__clip_grad": 0.02, "optimizer__eps": 1e-3, "algorithm__dual_clip": 3.0}
LR, UPDATES = 5e-3, 3
FP32 = {"loss": 1e-6, "grads": 1e-5, "gradient norm": 1e-5, "weights": 1e-5}

EXPERTS = "qwen3_moe"
TURNS = [model for model in MODELS if model != EXPERTS]
DENSE = [layout for layout in LAYOUTS if "EP" not in layout]
FIRST = [*zip(DENSE, cycle(VARIANTS), cycle(TURNS), strict=False), ("EP2", "token budget", EXPERTS)]
FIRST += [
    ("one rank", "shared prompts", "qwen3_untied"),
    ("PP2 VPP2", "shared prompts, recomputed", "qwen3_untied"),
    ("DP2", "shared prompts", "qwen3_untied"),
    ("TP2xCP2", "shared prompts", "qwen3_untied"),
    ("TP2xCP2", "importance weights", "llama_tied"),
    ("DP2", "importance weights", "qwen2_tied"),
    ("PP2", "engine's log-probs", "qwen3_untied"),
]
# Models take turns, so that every layout and every variant meets each of them.
ALL = [(layout, variant, TURNS[(i + j) % 4]) for i, layout in enumerate(DENSE) for j, variant in enumerate(VARIANTS)]
ALL += [
    *((layout, "token budget", EXPERTS) for layout in ("one rank", "EP2", "TP2xEP2", "PP2xEP2", "CP2xEP2", "TP2xEP4")),
    *(
        ("EP2", variant, EXPERTS)
        for variant in ("micro-batches of 1", "padded", "full recomputation", "sequence", "shared prompts")
    ),
    ("PP2 VPP2", "importance weights", "llama_untied"),
    ("PP2xCP2", "engine's log-probs", "llama_tied"),
]
BIG = "TP2xPP2xDP2"  # eight processes on two cores: three variants will do
ALL = [case for case in ALL if case[0] != BIG or case[1] in ("token budget", "full recomputation", "sequence")]
CASES = [
    *(case for case in FIRST if case[0] != BIG),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FIRST or case[0] == BIG),
]

Worst = dict[str, float]  # largest difference, by what was compared
worst: dict[str, Worst] = defaultdict(lambda: defaultdict(float))  # printed by conftest.py


def run_policy(rank: int, model_dir: str, cfg: Config, shares: list[Any]) -> dict[str, Any]:
    from dapo_megatron.policy.policy import Policy

    policy = Policy(cfg, model_dir)
    policy.load_batch([shares[policy.dp_rank]])
    drift = policy.old_logprobs() if cfg.algorithm.old_logprobs == "trainer" else None
    stats, grads = [], {}
    for number in range(UPDATES):
        stats.append(policy.update(0, lr=LR))
        if number == 0:
            grads = {name: t.clone() for name, t in policy.stream_gradients()}
    weights = {name: t.clone() for name, t in policy.stream_weights()}
    return {"drift": stats[0] if drift is None else drift, "grads": grads, "stats": stats, "weights": weights}


@cache
def expected(model_dir: Path, algorithm: tuple[tuple[str, Any], ...]) -> tuple[list[Sample], list[ReferenceStep], Any]:
    """The batch with the model's log-probs filled in, the reference's three steps, its weights after them."""
    cfg = make_config(**COMMON, **dict(algorithm))
    samples = load_samples(BATCH)
    set_weights(samples, cfg.algorithm.aggregation, cfg.rollout.max_response_tokens)
    policy = ReferenceTrainer(model_dir, cfg.algorithm, cfg.rollout.temperature)
    own = policy.logprobs(samples)
    samples = with_old_logprobs(samples, own)
    old = old_logprobs_of(samples, own, cfg.algorithm)
    steps = []
    for _ in range(UPDATES):
        steps.append(policy.step(samples, old))
        assert steps[-1].grad_norm > 2 * cfg.optimizer.clip_grad, "the gradient is clipped at every step"
        policy.update(steps[-1], LR, cfg.optimizer)
    return samples, steps, policy.weights()


def run_case(
    ranks: RankPool, model_dir: Path, layout: str, variant: str, limits: dict[str, float], dtype: str = "float32"
) -> Worst:
    """The largest differences: loss (absolute), gradients and weights (relative norm per tensor), gradient norm (relative);
    none is over its limit."""
    options = dict({**VARIANTS, **OLD_POLICIES}[variant])
    per_microbatch, pad = options.pop("samples_per_microbatch", 0), options.pop("pad_sequences_to", 1)
    cfg = make_config(**LAYOUTS[layout], **COMMON, **options, model__dtype=dtype)
    algorithm = tuple((name, value) for name, value in options.items() if name.startswith("algorithm__"))
    samples, steps, weights = expected(model_dir, algorithm)
    shares = pack_by_number(samples, cfg, per_microbatch, pad) if per_microbatch else pack(samples, cfg)
    results = ranks.run(run_policy, cfg.world_size, str(model_dir), cfg, shares)
    num_valid = sum(sample.num_valid for sample in samples)
    found: Worst = defaultdict(float)
    for number, step in enumerate(steps):
        stats = [result["stats"][number] for result in results if result["stats"][number]]
        assert sum(s["num_tokens"] for s in stats) == num_valid
        if number == 0:
            check_old_policy(cfg, stats)
        found["loss"] = max(found["loss"], abs(sum(s["loss_sum"] for s in stats) / num_valid - step.loss))
        norms = [abs(s["grad_norm_max"] / step.grad_norm - 1) for s in stats]
        found["gradient norm"] = max(found["gradient norm"], *norms)
    check_drift(cfg, samples, steps[0], [result["drift"] for result in results if result["drift"]], 100 * limits["loss"])
    scale = clip_scale(steps[0].grad_norm, cfg.optimizer.clip_grad)
    for what, want in (("grads", {n: g * scale for n, g in steps[0].gradients.items()}), ("weights", weights)):
        have = {name: tensor for result in results for name, tensor in result[what].items()}
        assert have.keys() == want.keys()
        errors = {n: float((have[n].double() - want[n]).norm() / want[n].norm()) for n in want}
        off = {n: error for n, error in errors.items() if not error <= limits[what]}
        assert not off, ", ".join(f"{n}: relative error {error:.2e}" for n, error in off.items())
        found[what] = max(errors.values())
    for what in ("loss", "gradient norm"):
        assert found[what] <= limits[what], what
    return found


def check_old_policy(cfg: Config, stats: list[dict[str, float]]) -> None:
    """The first update's ratios: against the trainer's own log-probs with the same weights in the same micro-batches not even
    rounding differs; against the engine's they are all over the place."""
    largest = max(s["ratio_max"] for s in stats)
    clipped = [sum(s[name] for s in stats) for name in ("clipped_high", "clipped_low", "dual_clipped")]
    if cfg.algorithm.importance_cap:
        assert largest == 1.0 and clipped == [0, 0, 0]
    else:
        assert min(clipped) > 0
    if cfg.algorithm.old_logprobs == "trainer":
        assert max(s["fresh_ratio_error_max"] for s in stats) == 0.0
    else:
        assert max(s["fresh_ratio_error_max"] for s in stats) > 1.0


def check_drift(
    cfg: Config, samples: list[Sample], step: ReferenceStep, parts: list[dict[str, float]], tolerance: float
) -> None:
    """Trainer against engine before the first update, over all ranks, by hand."""
    found = merge_stats(parts)
    mask, stale, engine = (
        np.concatenate([getattr(s, name) for s in samples]) for name in ("mask", "stale", "rollout_logprobs")
    )
    difference = (np.concatenate(step.logprobs) - engine)[mask]
    weight, fresh = np.exp(difference), ~stale[mask]
    assert effective_sample_size(found) == pytest.approx(weight.sum() ** 2 / (len(weight) * (weight**2).sum()), rel=tolerance)
    assert (found["fresh_tokens"], found["stale_tokens"]) == (fresh.sum(), len(fresh) - fresh.sum())
    assert found["diff_sum"] == pytest.approx(np.abs(difference[fresh]).sum(), rel=tolerance)
    assert found["stale_diff_sum"] == pytest.approx(np.abs(difference[~fresh]).sum(), rel=tolerance)
    cap = cfg.algorithm.importance_cap
    assert found.get("truncated") == ((weight > cap).sum() if cap else None)


@pytest.mark.parametrize(("layout", "variant", "model"), CASES)
def test_every_layout_gives_the_same(ranks: RankPool, models: dict[str, Path], layout: str, variant: str, model: str) -> None:
    for name, value in run_case(ranks, models[model], layout, variant, FP32).items():
        worst[layout][name] = max(worst[layout][name], value)


def times_computed(rank: int, model_dir: str, cfg: Config, shares: list[Any]) -> tuple[float, float]:
    """How often an update computes each layer's attention and MLP for each micro-batch."""
    from megatron.core.transformer.mlp import MLP

    from dapo_megatron.policy.attention import PackedAttention
    from dapo_megatron.policy.policy import Policy

    policy = Policy(cfg, model_dir)
    policy.load_batch([shares[0]])
    policy.old_logprobs()
    calls = {PackedAttention: 0, MLP: 0}

    def count(module: Any, *_: Any) -> None:
        for kind in calls:
            calls[kind] += isinstance(module, kind)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    policy.update(0, lr=LR)
    hook.remove()
    return tuple(number / (policy.shape.num_layers * len(shares[0])) for number in calls.values())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("recompute", "modules", "expected_times"),
    [
        ("none", ["core_attn"], (1, 1)),
        ("selective", ["core_attn"], (2, 1)),
        ("selective", ["mlp"], (1, 2)),
        ("full", ["core_attn"], (2, 2)),
    ],
)
def test_recomputation_computes_again(
    ranks: RankPool, models: dict[str, Path], recompute: str, modules: list[str], expected_times: tuple[int, int]
) -> None:
    cfg = make_config(**BUDGET, parallel__recompute=recompute, parallel__recompute_modules=modules)
    shares = pack(load_samples(BATCH), cfg)
    assert ranks.run(times_computed, 1, str(models["llama_tied"]), cfg, shares) == [expected_times]


# bf16 with fp32 gradients and master weights; measured at a fifth to a third of this. The clips decide by the ratio, which bf16
# moves: a token that is clipped here and not there changes the gradient by all it gives.
BF16 = {"loss": 1e-2, "grads": 0.1, "gradient norm": 0.05, "weights": 5e-3}


@pytest.mark.parametrize("layout", ["one rank", "TP2+SP", "PP2 VPP2", "DP2", "CP2", "PP2xCP2"])
def test_bf16(ranks: RankPool, models: dict[str, Path], layout: str) -> None:
    run_case(ranks, bf16_copy(models["llama_tied"]), layout, "token budget", BF16, "bfloat16")


@cache
def bf16_copy(model_dir: Path) -> Path:
    """The reference starts from the same rounded weights."""
    from transformers import AutoModelForCausalLM

    out = model_dir.with_name(f"{model_dir.name}_bf16")
    AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).save_pretrained(out)
    return out


def old_logprobs(rank: int, model_dir: str, cfg: Config, shares: list[Any]) -> dict[int, float]:
    from dapo_megatron.policy.policy import Policy

    policy = Policy(cfg, model_dir)
    policy.load_batch([shares[policy.dp_rank]])
    policy.old_logprobs()
    return policy.token_logprobs(0)


@pytest.mark.parametrize("layout", ["one rank", "PP2xCP2"])
def test_old_logprobs_equal_transformers(ranks: RankPool, models: dict[str, Path], layout: str) -> None:
    """Token by token, also where ranks have pieces of a sequence."""
    cfg = make_config(**LAYOUTS[layout], **BUDGET)
    samples = load_samples(BATCH)
    want = ReferencePolicy(models["llama_tied"], cfg.algorithm, cfg.rollout.temperature).logprobs(samples)
    results = ranks.run(old_logprobs, cfg.world_size, str(models["llama_tied"]), cfg, pack(samples, cfg))
    found = {number: value for result in results for number, value in result.items()}
    trained = np.flatnonzero(np.concatenate([sample.mask for sample in samples]))
    assert sorted(found) == trained.tolist()
    np.testing.assert_allclose([found[i] for i in trained], np.concatenate(want)[trained], atol=1e-5)


def test_the_batch_is_as_uneven_as_it_should_be() -> None:
    samples = load_samples(BATCH)
    lengths = [len(sample.mask) for sample in samples]
    assert min(lengths) == 1 and max(lengths) > sum(lengths) - max(lengths)
    shares = pack(samples, make_config(dp=4))
    assert 0 in [sum(micro.num_valid for micro in share) for share in shares]  # a data-parallel rank without a valid token
