"""Where processes shall be, as far as it can be said without a cluster."""

from typing import Any

import pytest

from dapo_megatron.cluster import placement
from dapo_megatron.cluster.placement import Place, node_order, place_servers, place_texts
from dapo_megatron.config import Config

ID = {"a": "0a" * 28, "b": "0b" * 28, "n1": "", "n2": ""}  # as Ray's are


def node(host: str, nodeid: int | None = None) -> dict[str, Any]:
    labels = {} if nodeid is None else {placement.NODE_LABEL: str(nodeid)}
    return {"NodeID": host.encode().hex(), "NodeManagerHostname": host, "Labels": labels}


def test_nodes_are_in_slurms_order_and_else_in_that_of_their_numbers() -> None:
    by_label = [node("n1", 2), node("n10", 0), node("n9", 1), node("n11", 10)]
    assert [n["NodeManagerHostname"] for n in sorted(by_label, key=node_order)] == ["n10", "n9", "n1", "n11"]
    names = ["rack2-n1", "rack10-n1", "rack2-n10", "rack2-n9", "10", "node", "9"]
    assert [n["NodeManagerHostname"] for n in sorted(map(node, names), key=node_order)] == [
        "9", "10", "node", "rack2-n1", "rack2-n9", "rack2-n10", "rack10-n1",
    ]  # fmt: skip


def places(host: str, gpus: str) -> list[Place]:
    return [Place(ID[host], host, (gpu,)) for gpu in gpus]


def shared(monkeypatch: pytest.MonkeyPatch, tp: int, number: int, ranks: list[Place]) -> list[tuple[str, str]]:
    """(node, CUDA_VISIBLE_DEVICES) of each server."""
    monkeypatch.setattr(placement, "uses_gpus", lambda cfg: True)
    cfg = Config()
    cfg.parallel.dp, cfg.cluster.gpus_per_node, cfg.cluster.colocate = len(ranks), 4, True
    cfg.rollout.tp, cfg.rollout.num_servers = tp, number
    spots = place_servers(cfg, ranks)
    assert all(spot.options["num_gpus"] == 0 for spot in spots)  # Ray has none left: they are the ranks'
    return [(spot.options["scheduling_strategy"].node_id, spot.gpus) for spot in spots]


def test_a_colocated_server_sees_its_ranks_gpus_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = places("a", "5104") + places("b", "0123")
    assert shared(monkeypatch, 2, 3, ranks) == [(ID["a"], "5,1"), (ID["a"], "0,4"), (ID["b"], "0,1")]
    assert shared(monkeypatch, 4, 2, ranks) == [(ID["a"], "5,1,0,4"), (ID["b"], "0,1,2,3")]
    assert shared(monkeypatch, 1, 1, places("a", "7")) == [(ID["a"], "7")]


def test_no_colocated_server_stands_on_two_nodes_or_on_half_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"trainer ranks 2, 3, .* are on nodes a, b; rollout\.tp must divide"):
        shared(monkeypatch, 2, 2, places("a", "012") + places("b", "0"))
    with pytest.raises(RuntimeError, match="2 trainer ranks are on GPU 0 of node a"):
        shared(monkeypatch, 1, 1, places("a", "00"))


def test_who_is_where_in_words() -> None:
    ranks = places("n1", "01234567") + places("n2", "0134")
    servers = [Place("", "n2", ("5", "6")), Place("", "n3", ("GPU-7f", "GPU-80"))]
    assert place_texts(ranks, servers) == {
        "n1": "ranks 0-7 on GPUs 0-7",
        "n2": "ranks 8-11 on GPUs 0-1,3-4, server 0 on GPUs 5-6",
        "n3": "server 1 on GPUs GPU-7f, GPU-80",
    }
    assert place_texts([Place("", "here")], [Place("", "here")]) == {"here": "rank 0, server 0"}
