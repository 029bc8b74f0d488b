"""All processes of a run: trainer ranks, rollout engines, reward workers; where they stand, and that none is left behind."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo_megatron.cluster.engines import Engines
from dapo_megatron.cluster.rewards import RewardPool
from dapo_megatron.cluster.session import get_all, ray_session
from dapo_megatron.cluster.trainer import PolicyGroup, TrainerRank
from dapo_megatron.config import Config
from dapo_megatron.rollout.engine import RolloutEngine
from dapo_megatron.weights.turns import Turns

GPU_WAIT_S = 600.0


@dataclass
class Cluster:
    policy: PolicyGroup
    engine: RolloutEngine
    rewards: RewardPool
    turns: Turns = field(default_factory=Turns)  # of trainer and servers that share devices


@contextlib.contextmanager
def start_cluster(
    cfg: Config, model_dir: Path, eos_ids: tuple[int, ...], run_dir: Path, note: Callable[[str], None]
) -> Iterator[Cluster]:
    """Start everything, trainer ranks and servers at the same time; on leaving, whatever the reason, end it all. `note` is
    told when a server is lost or comes back."""
    logs = str(run_dir.absolute() / "logs")
    on_cpu = cfg.cluster.device == "cpu"
    with ray_session(hide_gpus=on_cpu):
        use_gpus = not on_cpu and ray.cluster_resources().get("GPU", 0) > 0
        placement = _place_on_gpus(cfg) if use_gpus else _place_on_cpu(cfg)
        policy = _make_trainer(cfg, model_dir, logs, placement.ranks)
        engines = Engines(cfg, str(model_dir), eos_ids, logs, "cuda" if use_gpus else "cpu", placement.servers, note)
        rewards = RewardPool(cfg, str(model_dir), logs)
        try:
            servers_starting, ranks_starting = engines.begin_start(), policy.begin_start()
            started = get_all([*servers_starting, *ranks_starting])  # whoever fails first is heard first
            engines.end_start(started[: len(servers_starting)])
            policy.end_start(started[len(servers_starting) :])
            yield Cluster(policy, engines.engine, rewards, engines.turns(policy))
        finally:
            engines.kill()


@contextlib.contextmanager
def start_trainer(cfg: Config, model_dir: Path, run_dir: Path) -> Iterator[PolicyGroup]:
    """The trainer ranks alone, without engines; on leaving, whatever the reason, they are ended."""
    logs = str(run_dir.absolute() / "logs")
    on_cpu = cfg.cluster.device == "cpu"
    with ray_session(hide_gpus=on_cpu):
        use_gpus = not on_cpu and ray.cluster_resources().get("GPU", 0) > 0
        policy = _make_trainer(cfg, model_dir, logs, _rank_options_on_gpus(cfg) if use_gpus else _place_on_cpu(cfg).ranks)
        policy.end_start(get_all(policy.begin_start()))
        yield policy


def _make_trainer(cfg: Config, model_dir: Path, logs: str, options: list[dict[str, Any]]) -> PolicyGroup:
    ranks = [
        TrainerRank.options(**of_rank).remote(f"{logs}/trainer_{rank}.log")  # type: ignore[attr-defined]
        for rank, of_rank in enumerate(options)
    ]
    return PolicyGroup(ranks, cfg, str(model_dir))


@dataclass
class _Placement:
    """Ray's options for each trainer rank and each server."""

    ranks: list[dict[str, Any]]
    servers: list[dict[str, Any]]


def _place_on_cpu(cfg: Config) -> _Placement:
    nothing = {"num_cpus": 0, "num_gpus": 0}
    return _Placement([nothing] * cfg.world_size, [nothing] * cfg.rollout.num_servers)


def _place_on_gpus(cfg: Config) -> _Placement:
    """Neighbouring ranks (tensor parallel) share a node, and so do a server's GPUs: one bundle for each node of ranks and
    one for each server. When colocated, a rank and a server have half of the one GPU each."""
    share = 0.5 if cfg.cluster.colocate else 1
    num_servers = 0 if cfg.rollout.engine == "local" or cfg.rollout.servers else cfg.rollout.num_servers
    _check_gpus(share * (cfg.world_size + num_servers * cfg.rollout.tp))
    ranks = _rank_options_on_gpus(cfg, share)
    if num_servers == 0:  # the local engine computes on the CPU
        return _Placement(ranks, [])
    servers = _reserve([cfg.rollout.tp * share] * num_servers, "PACK")
    return _Placement(ranks, [_options(cfg.rollout.tp * share, servers, i) for i in range(num_servers)])


def _rank_options_on_gpus(cfg: Config, share: float = 1) -> list[dict[str, Any]]:
    per_node = cfg.cluster.gpus_per_node
    sizes = [min(per_node, cfg.world_size - first) for first in range(0, cfg.world_size, per_node)]
    _check_gpus(share * cfg.world_size)
    nodes = _reserve([size * share for size in sizes], "STRICT_SPREAD" if len(sizes) > 1 else "PACK")
    return [_options(share, nodes, rank // per_node) for rank in range(cfg.world_size)]


def _options(gpus: float, group: PlacementGroup, bundle: int) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": strategy}


def _reserve(bundles: list[float], strategy: str) -> PlacementGroup:
    """One bundle of so many GPUs each."""
    group = placement_group([{"GPU": gpus} for gpus in bundles], strategy=strategy)
    if not group.wait(GPU_WAIT_S):
        raise RuntimeError(
            f"within {GPU_WAIT_S:.0f} s the cluster did not have {len(bundles)} times {bundles[0]:g} free GPUs, each on one "
            "node; is another run holding them? Lower parallel.*, rollout.num_servers or rollout.tp, or add nodes"
        )
    return group


def _check_gpus(needed: float) -> None:
    """What can never be had is said at once."""
    offered = ray.cluster_resources()["GPU"]
    if needed > offered:
        raise RuntimeError(
            f"trainer ranks and rollout servers need {needed:g} GPUs and the cluster offers {offered:g}; lower parallel.*, "
            "rollout.num_servers or rollout.tp, add nodes, or set cluster.device=cpu"
        )
