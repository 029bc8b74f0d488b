"""Weights and optimizer state in and out: HF round trips bit for bit, checkpoints that resume exactly or on another layout."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.harness import LAYOUTS, MODELS, RankPool, make_config, make_samples, pack

SMALL = ("one rank", "TP2+SP", "PP2", "PP2 VPP2", "CP2", "DP2")
EXPERTS = [pytest.param(layout, "qwen3_moe", marks=pytest.mark.slow) for layout in ("EP2", "TP2xEP2", "TP2xEP4")]


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def worker_for(rank: int, cfg: Any, model_dir: str) -> Any:
    """A PolicyWorker on the pool's process, which is a rank already."""
    from dapo_megatron.policy.policy import Policy
    from dapo_megatron.policy.worker import PolicyWorker

    worker = PolicyWorker.__new__(PolicyWorker)
    worker.cfg, worker.model_dir, worker.rank, worker._senders = cfg, model_dir, rank, []
    worker.policy = Policy(cfg, model_dir)
    return worker


def export(rank: int, model_dir: str, cfg: Any, out: str) -> None:
    worker_for(rank, cfg, model_dir).export_hf(out)


@pytest.mark.parametrize(("layout", "model"), [(layout, model) for layout in SMALL for model in MODELS] + EXPERTS)
def test_hf_round_trip_is_exact(ranks: RankPool, models: dict[str, Path], tmp_path: Path, model: str, layout: str) -> None:
    cfg = make_config(**LAYOUTS[layout], publish__bucket_mb=0)  # every tensor is a bucket
    ranks.run(export, cfg.world_size, str(models[model]), cfg, str(tmp_path / "out"))
    before, after = all_tensors(models[model]), all_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)


def steps(rank: int, model_dir: str, cfg: Any, shares: list[Any], todo: int, load: str, save: str, out: str) -> None:
    worker = worker_for(rank, cfg, model_dir)
    if load:
        worker.load(load)
    worker.load_batch([shares[worker.policy.dp_rank]])
    for _ in range(todo):
        worker.old_logprobs()
        worker.update(0, lr=1e-3)
    if save:
        worker.save(save)
    worker.export_hf(out)


def run_steps(ranks: RankPool, model_dir: Path, cfg: Any, todo: int, tmp: Path, load: str = "", save: str = "") -> Any:
    out = tmp / f"out-{len(list(tmp.iterdir()))}"
    if save:
        Path(save).mkdir()
    ranks.run(steps, cfg.world_size, str(model_dir), cfg, pack(make_samples(), cfg), todo, load, save, str(out))
    return all_tensors(out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layout", "name"), [*((layout, "llama_tied") for layout in SMALL), *EXPERTS[:2]])
def test_resume_is_bit_for_bit(
    ranks: RankPool, models: dict[str, Path], tmp_path: Path, layout: str, name: str, dtype: str
) -> None:
    cfg, model = make_config(**LAYOUTS[layout], model__dtype=dtype, optimizer__clip_grad=0.5), models[name]
    whole = run_steps(ranks, model, cfg, 3, tmp_path)
    half = run_steps(ranks, model, cfg, 2, tmp_path, save=str(tmp_path / "checkpoint"))
    resumed = run_steps(ranks, model, cfg, 1, tmp_path, load=str(tmp_path / "checkpoint"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(not torch.equal(whole[name], half[name]) for name in whole)


CHANGES = [("TP2+SP", "PP2"), ("TP2+SP", "PP2 VPP2"), ("PP2 VPP2", "CP2"), ("CP2", "DP2")]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_resume_on_another_layout(ranks: RankPool, models: dict[str, Path], tmp_path: Path, before: str, after: str) -> None:
    """fp32: equal up to rounding; one Adam step moves a weight by at most about lr."""
    model, lr = models["llama_tied"], 1e-3
    from_cfg, to_cfg = (make_config(**LAYOUTS[layout]) for layout in (before, after))
    whole = run_steps(ranks, model, from_cfg, 3, tmp_path)
    run_steps(ranks, model, from_cfg, 2, tmp_path, save=str(tmp_path / "checkpoint"))
    resumed = run_steps(ranks, model, to_cfg, 1, tmp_path, load=str(tmp_path / "checkpoint"))
    for name in whole:
        error = (whole[name] - resumed[name]).norm() / whole[name].norm()
        assert error <= 0.02 * lr, f"{name}: {error:.1e}"


def decay_only(rank: int, model_dir: str, cfg: Any, shares: list[Any], out: str) -> None:
    """One update without any gradient: advantages are 0."""
    worker = worker_for(rank, cfg, model_dir)
    worker.load_batch([shares[worker.policy.dp_rank]])
    worker.old_logprobs()
    worker.update(0, lr=0.1)
    worker.export_hf(out)


def test_weight_decay_spares_norms_and_biases(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    cfg = make_config(optimizer__weight_decay=0.5)
    samples = make_samples()
    for sample in samples:
        sample.advantages[:] = 0.0
    ranks.run(decay_only, 1, str(models["qwen2_tied"]), cfg, pack(samples, cfg), str(tmp_path / "out"))
    before, after = all_tensors(models["qwen2_tied"]), all_tensors(tmp_path / "out")
    for name in before:
        factor = 1.0 if before[name].ndim == 1 else 1.0 - 0.1 * 0.5
        torch.testing.assert_close(after[name], factor * before[name], rtol=1e-6, atol=1e-7, msg=name)


def state_bytes(policy: Any) -> list[bytes]:
    """This rank's weights, master weights, moments and step counters."""
    from dapo_megatron.policy.optimizer_fixes import distributed_optimizers

    tensors = [param for chunk in policy.gpt for param in chunk.parameters()]
    counters = []
    for part in distributed_optimizers(policy.optimizer):
        tensors += [param for group in part.optimizer.param_groups for param in group["params"]]
        counters += [str(group.get("step")).encode() for group in part.optimizer.param_groups]
        for state in part.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    copies = [t.detach().cpu().clone() for t in tensors]  # what numpy has seen can't be resized any more
    return counters + [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in copies]


def good_bad_good(rank: int, model_dir: str, cfg: Any, good: list[Any], bad: list[Any], spoil: bool) -> tuple[list[Any], ...]:
    """Statistics and state after each of three updates; `spoil`: before the second one a weight of rank 0 becomes nan."""
    worker = worker_for(rank, cfg, model_dir)
    dp_rank = worker.policy.dp_rank
    worker.load_batch([good[dp_rank], bad[dp_rank], good[dp_rank]])
    worker.old_logprobs()
    stats, states = [], []
    for index in range(3):
        if spoil and index == 1 and rank == 0:
            next(worker.policy.gpt[0].parameters()).data.view(-1)[0] = torch.nan
        before = state_bytes(worker.policy)
        stats.append(worker.update(index, lr=1e-3))
        states.append(state_bytes(worker.policy) == before)
    return stats, states


FAULTS = {
    "nan advantage": ("advantages", float("nan")),
    "inf advantage": ("advantages", float("inf")),
    "nan old log-prob": ("rollout_logprobs", float("nan")),
    # a ratio of 0 or without bound, which the clips would hide
    "inf old log-prob": ("rollout_logprobs", float("inf")),
    "-inf old log-prob": ("rollout_logprobs", float("-inf")),
    "-inf log-prob, weight capped": ("rollout_logprobs", float("-inf")),
    "nan weight": ("", 0.0),
}


@pytest.mark.parametrize(
    ("layout", "dtype", "fault"),
    [("DP2", "float32", fault) for fault in FAULTS]
    + [(layout, "float32", "inf old log-prob") for layout in SMALL if layout != "DP2"]
    + [("DP2", "bfloat16", "nan advantage"), ("TP2+SP", "float32", "nan weight"), ("PP2", "float32", "nan weight")],
)
def test_an_update_that_is_not_finite_is_skipped_on_all_ranks(
    ranks: RankPool, models: dict[str, Path], layout: str, dtype: str, fault: str
) -> None:
    """Though only one token of one rank is at fault; weights, moments and step counters bit for bit."""
    cap = 2.0 if "capped" in fault else 0.0
    cfg = make_config(**LAYOUTS[layout], model__dtype=dtype, optimizer__clip_grad=0.5, algorithm__importance_cap=cap)
    good, bad = make_samples(), make_samples()
    field, value = FAULTS[fault]
    if field:
        getattr(bad[0], field)[0], bad[0].staleness[0] = value, 1
    spoil = fault == "nan weight"
    model = str(models["llama_untied"])
    results = ranks.run(good_bad_good, cfg.world_size, model, cfg, pack(good, cfg), pack(bad, cfg), spoil)
    for stats, unchanged in results:
        assert unchanged == [False, True, spoil], (fault, unchanged)
        assert [math.isfinite(s["grad_norm_max"]) for s in stats if s] == ([True, False, not spoil] if stats[0] else [])
    assert any(stats[0] for stats, _ in results)
