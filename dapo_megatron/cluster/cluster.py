"""All processes of a run: trainer ranks, rollout engines, reward workers; where they stand, and that none is left behind."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo_megatron.cluster.engines import Engines
from dapo_megatron.cluster.rewards import RewardPool
from dapo_megatron.cluster.session import ray_session
from dapo_megatron.cluster.trainer import PolicyGroup, TrainerRank
from dapo_megatron.config import Config
from dapo_megatron.rollout.engine import RolloutEngine

GPU_WAIT_S = 600.0


@dataclass
class Cluster:
    policy: PolicyGroup
    engine: RolloutEngine
    rewards: RewardPool


@contextlib.contextmanager
def start_cluster(cfg: Config, model_dir: Path, eos_ids: tuple[int, ...], run_dir: Path) -> Iterator[Cluster]:
    """Start everything, trainer ranks and servers at the same time; on leaving, whatever the reason, end it all."""
    logs = str(run_dir.absolute() / "logs")
    with ray_session():
        use_gpus = ray.cluster_resources().get("GPU", 0) > 0
        share = 0.5 if cfg.cluster.colocate else 1.0
        if use_gpus:
            _check_gpus(cfg, share)
        ranks = _trainer_ranks(cfg, logs, share if use_gpus else 0.0)
        engines = Engines(cfg, str(model_dir), eos_ids, logs, share * cfg.rollout.tp if use_gpus else 0.0)
        policy = PolicyGroup(ranks, cfg, str(model_dir))
        rewards = RewardPool(cfg, str(model_dir), logs)
        try:
            servers_started, ranks_started = engines.begin_start(), policy.begin_start()
            engines.end_start(servers_started)
            policy.end_start(ranks_started)
            yield Cluster(policy, engines.engine, rewards)
        finally:
            with contextlib.suppress(RuntimeError):  # an owner that died took its server with it
                engines.stop()


def _check_gpus(cfg: Config, share: float) -> None:
    """Without enough GPUs actors would wait for ever."""
    servers = cfg.rollout.num_servers * cfg.rollout.tp if cfg.rollout.engine == "sglang" else 0
    needed, offered = share * (cfg.world_size + servers), ray.cluster_resources()["GPU"]
    if needed > offered:
        raise RuntimeError(
            f"the run needs {needed:g} GPUs ({cfg.world_size} trainer ranks, {servers} for rollout servers) and the cluster "
            f"offers {offered:g}; lower parallel.*, rollout.num_servers or rollout.tp, or add nodes"
        )


def _trainer_ranks(cfg: Config, logs: str, gpus: float) -> list[Any]:
    """On GPUs neighbouring ranks (tensor parallel) share a node: one bundle of a placement group for each node."""
    group = _node_bundles(cfg, gpus) if gpus else None
    actors = []
    for rank in range(cfg.world_size):
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": gpus}
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank // cfg.cluster.gpus_per_node
            )
        actors.append(TrainerRank.options(**options).remote(f"{logs}/trainer_{rank}.log"))  # type: ignore[attr-defined]
    return actors


def _node_bundles(cfg: Config, gpus: float) -> PlacementGroup:
    per_node = cfg.cluster.gpus_per_node
    sizes = [min(per_node, cfg.world_size - first) for first in range(0, cfg.world_size, per_node)]
    group = placement_group([{"GPU": size * gpus} for size in sizes], strategy="STRICT_SPREAD" if len(sizes) > 1 else "PACK")
    if not group.wait(GPU_WAIT_S):
        raise RuntimeError(
            f"the cluster has no {len(sizes)} node(s) with {per_node} free GPUs for parallel.tp x pp x dp = {cfg.world_size} "
            f"ranks: it offers {ray.cluster_resources().get('GPU', 0):g} GPUs in all; lower parallel.* or add nodes"
        )
    return group
