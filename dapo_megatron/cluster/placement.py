"""Where a run's processes stand: what Ray is asked for, and what became of it.

Neighbouring trainer ranks (tensor parallel) share a node, and so do a server's GPUs. In a Slurm job all stand where layout.py
says, by Slurm's numbers of the nodes. Elsewhere Ray chooses nodes, which are then taken in the order of their names, so that
pipeline and data-parallel neighbours are network neighbours there too.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from dapo_megatron.cluster.session import is_own_session
from dapo_megatron.config import Config
from dapo_megatron.layout import num_started_servers, ranks_under_servers, server_places, spans

GPU_WAIT_S = 600.0
NODE_LABEL = "slurm-nodeid"  # Ray's label of a node that cluster.slurm_node started


@dataclass(frozen=True)
class Place:
    """Where a process has turned out to be. `gpus`: their numbers or UUIDs among all of the node's; none on CPU."""

    node_id: str  # Ray's
    host: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spot:
    """Where a process shall be: Ray's options of its actor. `gpus`: CUDA_VISIBLE_DEVICES; "": those that Ray gives it."""

    options: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0, "num_gpus": 0})
    gpus: str = ""


def uses_gpus(cfg: Config) -> bool:
    return cfg.cluster.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0


def here() -> Place:
    """In an actor."""
    context = ray.get_runtime_context()
    node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    return Place(node["NodeID"], node["NodeManagerHostname"], tuple(context.get_accelerator_ids().get("GPU", ())))


def place_ranks(cfg: Config) -> list[Spot]:
    """cluster.gpus_per_node trainer ranks to a node."""
    per_node = cfg.cluster.gpus_per_node
    sizes = [min(per_node, cfg.world_size - first) for first in range(0, cfg.world_size, per_node)]
    if uses_gpus(cfg):
        _check_gpus(cfg.world_size)
        nodes = _reserve("GPU", sizes, "STRICT_SPREAD" if len(sizes) > 1 else "PACK", range(len(sizes)))
        return [Spot(_options(1, nodes[rank // per_node])) for rank in range(cfg.world_size)]
    if is_own_session():
        return [Spot()] * cfg.world_size  # all on this machine's cores
    nodes = _reserve("CPU", [_A_CORES_SHARE] * len(sizes), "SPREAD", range(len(sizes)))
    return [Spot(_options(0, nodes[rank // per_node])) for rank in range(cfg.world_size)]


def place_servers(cfg: Config, ranks: Sequence[Place] = (), num_taken: int = 0) -> list[Spot]:
    """`ranks`: where the trainer's are, for servers that share their GPUs. `num_taken`: GPUs that it has, for the others."""
    number, tp = num_started_servers(cfg), cfg.rollout.tp
    if number == 0:
        return []
    if uses_gpus(cfg):
        if cfg.cluster.colocate:
            return [_on_gpus_of(under, ranks) for under in ranks_under_servers(cfg)]
        _check_gpus(num_taken + number * tp)
        numbers = [place.node for place in server_places(cfg)] if num_taken else []  # else there is no trainer before them
        return [Spot(_options(tp, bundle)) for bundle in _reserve("GPU", [tp] * number, "PACK", numbers)]
    if is_own_session():
        return [Spot()] * number
    return [Spot(_options(0, bundle)) for bundle in _reserve("CPU", [_A_CORES_SHARE] * number, "SPREAD")]


def place_texts(ranks: Sequence[Place], servers: Sequence[Place]) -> dict[str, object]:
    """Who is where, by node, for people: {"node1": "ranks 0-7 on GPUs 0-7", ...}."""
    texts: dict[str, list[str]] = {}
    for host in dict.fromkeys(place.host for place in (*ranks, *servers)):
        there = [rank for rank, place in enumerate(ranks) if place.host == host]
        gpus = [gpu for rank in there for gpu in ranks[rank].gpus]
        texts[host] = [f"rank{'s' * (len(there) > 1)} {spans(there)}{_on(gpus)}"] if there else []
        texts[host] += [f"server {i}{_on(place.gpus)}" for i, place in enumerate(servers) if place.host == host]
    return {host: ", ".join(parts) for host, parts in texts.items()}


def _on(gpus: Sequence[str]) -> str:
    if not gpus:
        return ""
    numbers = spans([int(gpu) for gpu in gpus]) if all(gpu.isdigit() for gpu in gpus) else ", ".join(gpus)
    return f" on GPU{'s' * (len(gpus) > 1)} {numbers}"


# Enough to be somewhere, for processes that share a machine's cores with others anyway.
_A_CORES_SHARE = 0.001


def _on_gpus_of(ranks: Sequence[int], places: Sequence[Place]) -> Spot:
    """On the GPUs of these trainer ranks: the server's tensor-parallel rank i on that of ranks[i]. Ray has given them away
    already, so the server is told which they are. RuntimeError if there is no such spot."""
    gpus = [places[rank].gpus[0] for rank in ranks]
    for (host, gpu), number in Counter((place.host, place.gpus[0]) for place in places).items():
        if number > 1:
            raise RuntimeError(f"{number} trainer ranks are on GPU {gpu} of node {host}; each needs one of its own")
    nodes = {places[rank].node_id for rank in ranks}
    if len(nodes) > 1:
        hosts = ", ".join(sorted({places[rank].host for rank in ranks}))
        raise RuntimeError(
            f"trainer ranks {', '.join(map(str, ranks))}, whose GPUs one rollout server shares, are on nodes {hosts}; "
            "rollout.tp must divide the number of ranks on a node (cluster.gpus_per_node)"
        )
    strategy = NodeAffinitySchedulingStrategy(nodes.pop(), soft=False)
    return Spot({"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy}, ",".join(gpus))


def _options(gpus: int, bundle: tuple[PlacementGroup, int]) -> dict[str, Any]:
    group, index = bundle
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": strategy}


def _reserve(
    resource: str, amounts: Sequence[float], strategy: str, numbers: Sequence[int] = ()
) -> list[tuple[PlacementGroup, int]]:
    """A bundle of so much for each amount, in the order of their nodes; amounts on several nodes have to be equal. `numbers`:
    on which nodes of a Slurm job."""
    is_job = all(NODE_LABEL in node["Labels"] for node in ray.nodes())
    labels = [{NODE_LABEL: str(number)} for number in numbers] if is_job else None
    group = placement_group([{resource: amount} for amount in amounts], strategy=strategy, bundle_label_selector=labels or None)
    if not group.wait(GPU_WAIT_S):
        raise RuntimeError(
            f"within {GPU_WAIT_S:.0f} s the cluster did not have {len(amounts)} times {amounts[0]:g} free {resource}s, each on "
            "one node; is another run holding them? Lower parallel.*, rollout.num_servers or rollout.tp, or add nodes"
        )
    node_ids = placement_group_table(group)["bundles_to_node_id"]
    order = {node["NodeID"]: node_order(node) for node in ray.nodes()}
    return [(group, index) for index in sorted(node_ids, key=lambda index: (order[node_ids[index]], index))]


def node_order(node: dict[str, Any]) -> tuple[Any, ...]:
    """Of one of ray.nodes(): to sort by. Numbers in names count as numbers."""
    label = node["Labels"].get(NODE_LABEL, "")
    name = [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", node["NodeManagerHostname"])]
    return (int(label) if label.isdigit() else -1, name, node["NodeID"])


def _check_gpus(needed: float) -> None:
    """What can never be had is said at once."""
    offered = ray.cluster_resources()["GPU"]
    if needed > offered:
        raise RuntimeError(
            f"trainer ranks and rollout servers need {needed:g} GPUs and the cluster offers {offered:g}; lower parallel.*, "
            "rollout.num_servers or rollout.tp, add nodes, or set cluster.device=cpu"
        )
