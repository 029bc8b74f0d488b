"""All processes of a run: trainer ranks, rollout engines, reward workers; and that none is left behind."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from dapo_megatron.cluster.engines import Engines
from dapo_megatron.cluster.placement import place_ranks, place_servers, place_texts, uses_gpus
from dapo_megatron.cluster.rewards import RewardPool
from dapo_megatron.cluster.session import get_all, ray_session
from dapo_megatron.cluster.trainer import PolicyGroup, make_ranks
from dapo_megatron.config import Config
from dapo_megatron.rollout.engine import RolloutEngine
from dapo_megatron.stopping import ProcessLost
from dapo_megatron.weights.turns import Turns


@dataclass
class Cluster:
    policy: PolicyGroup
    engine: RolloutEngine
    rewards: RewardPool
    turns: Turns = field(default_factory=Turns)  # of trainer and servers that share devices
    places: dict[str, object] = field(default_factory=dict)  # who is on which node, for people


@contextlib.contextmanager
def start_cluster(
    cfg: Config, model_dir: Path, eos_ids: tuple[int, ...], run_dir: Path, note: Callable[[str], None]
) -> Iterator[Cluster]:
    """Start everything, trainer ranks and servers at the same time; on leaving, whatever the reason, end it all. `note` is
    told when a server is lost or comes back. Whatever fails because trainer ranks have died is raised as ProcessLost."""
    logs = str(run_dir.absolute() / "logs")
    with ray_session(hide_gpus=cfg.cluster.device == "cpu"):
        device = "cuda" if uses_gpus(cfg) else "cpu"
        policy = PolicyGroup(make_ranks(place_ranks(cfg), logs), cfg, str(model_dir))
        shared = cfg.cluster.colocate and device == "cuda"
        if shared:  # the servers need to know on which GPUs the ranks are, and take of their memory what is free by then
            policy.end_start(get_all(policy.begin_start()))
            asyncio.run(policy.offload())
        servers = place_servers(cfg, policy.places, num_taken=cfg.world_size)
        engines = Engines(cfg, str(model_dir), eos_ids, logs, device, servers, note)
        rewards = RewardPool(cfg, str(model_dir), logs)
        try:
            servers_starting, ranks_starting = engines.begin_start(), [] if shared else policy.begin_start()
            started = get_all([*servers_starting, *ranks_starting])  # whoever fails first is heard first
            engines.end_start(started[: len(servers_starting)])
            if not shared:
                policy.end_start(started[len(servers_starting) :])
            texts = place_texts(policy.places, engines.places)
            yield Cluster(policy, engines.engine, rewards, engines.turns(policy), texts)
        except RuntimeError as error:
            if lost := policy.lost():
                raise ProcessLost(f"{lost}, and the others then failed: {error}") from error
            raise
        finally:
            engines.kill()


@contextlib.contextmanager
def start_trainer(cfg: Config, model_dir: Path, run_dir: Path) -> Iterator[PolicyGroup]:
    """The trainer ranks alone, without engines; on leaving, whatever the reason, they are ended."""
    logs = str(run_dir.absolute() / "logs")
    with ray_session(hide_gpus=cfg.cluster.device == "cpu"):
        policy = PolicyGroup(make_ranks(place_ranks(cfg), logs), cfg, str(model_dir))
        policy.end_start(get_all(policy.begin_start()))
        yield policy


@contextlib.contextmanager
def start_engines(
    cfg: Config, model_dir: Path, eos_ids: tuple[int, ...], run_dir: Path, note: Callable[[str], None]
) -> Iterator[tuple[RolloutEngine, RewardPool]]:
    """Engines and reward workers alone; on leaving, whatever the reason, they are ended. `note`: see start_cluster. Servers
    have loaded the weights of `model_dir`, and wait for others."""
    cfg = replace(cfg, cluster=replace(cfg.cluster, colocate=False))  # there is no trainer to share GPUs with
    logs = str(run_dir.absolute() / "logs")
    with ray_session(hide_gpus=cfg.cluster.device == "cpu"):
        device = "cuda" if uses_gpus(cfg) else "cpu"
        engines = Engines(cfg, str(model_dir), eos_ids, logs, device, place_servers(cfg), note)
        rewards = RewardPool(cfg, str(model_dir), logs)
        try:
            engines.end_start(get_all(engines.begin_start()))
            yield engines.engine, rewards
        finally:
            engines.kill()
