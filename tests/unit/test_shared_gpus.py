"""Servers on the trainer's GPUs: which trainer ranks are under which server, and what each server may see."""

import pytest

from dapo_megatron.cluster.shared_gpus import GpuPlace, server_gpus
from dapo_megatron.config import Config
from dapo_megatron.layout import ranks_under_servers


def make(server_tp: int, num_servers: int, gpus_per_node: int = 4, **parallel: int) -> Config:
    cfg = Config()
    for name, value in parallel.items():
        setattr(cfg.parallel, name, value)
    cfg.rollout.tp, cfg.rollout.num_servers = server_tp, num_servers
    cfg.cluster.colocate, cfg.cluster.gpus_per_node = True, gpus_per_node
    return cfg


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (make(1, 1), [(0,)]),
        (make(2, 2, tp=2, pp=2), [(0, 1), (2, 3)]),
        (make(4, 2, tp=2, pp=2, dp=2), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (make(2, 3, dp=8), [(0, 1), (2, 3), (4, 5)]),  # the last two ranks are under none
        (make(1, 4, tp=2, dp=2), [(0,), (1,), (2,), (3,)]),
    ],
)
def test_the_ranks_under_each_server(cfg: Config, expected: list[tuple[int, ...]]) -> None:
    assert ranks_under_servers(cfg) == expected


def test_a_server_sees_its_ranks_gpus_in_their_order() -> None:
    places = [GpuPlace("a", gpu) for gpu in "5104"] + [GpuPlace("b", gpu) for gpu in "0123"]
    assert server_gpus((0, 1), places) == ("a", "5,1")
    assert server_gpus((3, 2), places) == ("a", "4,0")
    assert server_gpus((4, 5, 6, 7), places) == ("b", "0,1,2,3")


def test_no_server_stands_on_two_nodes_or_on_half_a_gpu() -> None:
    with pytest.raises(RuntimeError, match=r"trainer ranks 1, 2, .* are on nodes a, b; rollout\.tp must divide"):
        server_gpus((1, 2), [GpuPlace("a", "0"), GpuPlace("a", "1"), GpuPlace("b", "0")])
    with pytest.raises(RuntimeError, match="several trainer ranks are on GPU 0 of node a"):
        server_gpus((0,), [GpuPlace("a", "0"), GpuPlace("a", "0")])
