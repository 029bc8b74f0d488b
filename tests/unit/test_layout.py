"""Which rank and which server is where, and what is said of it at start."""

from pathlib import Path

import pytest

from dapo_megatron.config import Config
from dapo_megatron.layout import layout_text, rank_places, ranks_under_servers, server_places
from tests.unit.test_config import tiny


def test_rank_order_is_megatrons(tmp_path: Path) -> None:
    config = tiny(tmp_path, "parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "cluster.gpus_per_node=4")
    places = [(r.tp, r.pp, r.dp, r.node, r.gpu) for r in rank_places(config)]
    assert places[:5] == [(0, 0, 0, 0, 0), (1, 0, 0, 0, 1), (0, 0, 1, 0, 2), (1, 0, 1, 0, 3), (0, 1, 0, 1, 0)]
    assert len(set(places)) == 8


def test_servers_stay_within_a_node(tmp_path: Path) -> None:
    overrides = ("parallel.tp=2", "rollout.num_servers=2", "rollout.tp=4", "cluster.gpus_per_node=4")
    apart = server_places(tiny(tmp_path, *overrides, "rollout.base_port=7000"))
    assert [(s.node, s.gpus, s.port) for s in apart] == [(1, (0, 1, 2, 3), 7000), (2, (0, 1, 2, 3), 7001)]
    colocated = server_places(tiny(tmp_path, *overrides, "parallel.dp=4", "cluster.colocate=true"))
    assert [s.node for s in colocated] == [0, 1]


def test_layout_text_counts_updates(tmp_path: Path) -> None:
    text = layout_text(tiny(tmp_path, "optimizer.prompts_per_minibatch=5", "run.steps=3"))
    assert "4 update(s) of 40 responses" in text and "12 updates" in text
    assert "= 128 responses" in text and "at most 160 groups" in text


def shared(server_tp: int, num_servers: int, gpus_per_node: int = 4, **parallel: int) -> Config:
    cfg = Config()
    for name, value in parallel.items():
        setattr(cfg.parallel, name, value)
    cfg.rollout.tp, cfg.rollout.num_servers = server_tp, num_servers
    cfg.cluster.colocate, cfg.cluster.gpus_per_node = True, gpus_per_node
    return cfg


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (shared(1, 1), [(0,)]),
        (shared(2, 2, tp=2, pp=2), [(0, 1), (2, 3)]),
        (shared(4, 2, tp=2, pp=2, dp=2), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (shared(2, 3, dp=8), [(0, 1), (2, 3), (4, 5)]),  # the last two ranks are under none
        (shared(1, 4, tp=2, dp=2), [(0,), (1,), (2,), (3,)]),
    ],
)
def test_the_ranks_under_each_server(cfg: Config, expected: list[tuple[int, ...]]) -> None:
    assert ranks_under_servers(cfg) == expected
