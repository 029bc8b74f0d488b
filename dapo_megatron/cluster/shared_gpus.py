"""Which GPUs a rollout server gets that stands on those of trainer ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuPlace:
    """Where a trainer rank has turned out to be. `gpu`: its number or UUID among all of the node's GPUs."""

    node: str
    gpu: str


def server_gpus(ranks: Sequence[int], places: Sequence[GpuPlace]) -> tuple[str, str]:
    """(node, CUDA_VISIBLE_DEVICES) of the server on the GPUs of these trainer ranks (layout.ranks_under_servers): its
    tensor-parallel rank i is on the GPU of ranks[i]. `places`: of all trainer ranks.

    RuntimeError if there is no such server: two trainer ranks on one GPU, or ranks of one server on two nodes.
    """
    twice = [place for place, number in Counter(places).items() if number > 1]
    if twice:
        raise RuntimeError(
            f"several trainer ranks are on GPU {twice[0].gpu} of node {twice[0].node}; each needs one of its own"
        )
    nodes = {places[rank].node for rank in ranks}
    if len(nodes) > 1:
        raise RuntimeError(
            f"trainer ranks {', '.join(map(str, ranks))}, whose GPUs one rollout server shares, are on nodes "
            f"{', '.join(sorted(nodes))}; rollout.tp must divide the number of ranks on a node (cluster.gpus_per_node)"
        )
    return nodes.pop(), ",".join(places[rank].gpu for rank in ranks)
