"""The order in which a run's processes are started, and what becomes of failures. With real processes: tests/integration."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.cluster import cluster, placement
from dapo_megatron.cluster.cluster import start_cluster
from dapo_megatron.cluster.placement import Place
from dapo_megatron.config import Config
from dapo_megatron.stopping import ProcessLost

NODE = "0a" * 28  # as Ray's ids are


class World:
    """Ray, trainer ranks and servers that write down what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.lost = ""
        world = self

        class Policy:
            places: tuple[Place, ...] = ()

            def __init__(self, *args: Any) -> None:
                pass

            def begin_start(self) -> list[str]:
                world.calls.append("ranks start")
                return ["rank"] * 4

            def end_start(self, facts: list[str]) -> None:
                assert facts == ["rank"] * 4
                self.places = tuple(Place(NODE, "n", (gpu,)) for gpu in "3201")

            async def offload(self) -> None:
                world.calls.append("offload")

            def lost(self) -> str:
                return world.lost

        class Engines:
            engine = "engine"

            def __init__(self, *args: Any) -> None:
                self._spots = args[5]
                self.places = [Place(NODE, "n", tuple(spot.gpus.split(","))) for spot in self._spots]
                world.calls.append(f"servers on {[spot.gpus for spot in self._spots]}")

            def begin_start(self) -> list[str]:
                world.calls.append("servers start")
                return ["server"] * len(self._spots)

            def end_start(self, started: list[str]) -> None:
                assert started == ["server"] * len(self._spots)

            def turns(self, policy: Policy) -> str:
                return "turns"

            def kill(self) -> None:
                world.calls.append("kill")

        monkeypatch.setattr(cluster, "ray_session", lambda hide_gpus: nullcontext())
        monkeypatch.setattr(cluster, "get_all", lambda refs: refs)
        monkeypatch.setattr(cluster, "make_ranks", lambda spots, logs: [])
        monkeypatch.setattr(cluster, "PolicyGroup", Policy)
        monkeypatch.setattr(cluster, "Engines", Engines)
        monkeypatch.setattr(cluster, "RewardPool", lambda *args: "rewards")
        for module in (cluster, placement):
            monkeypatch.setattr(module, "uses_gpus", lambda cfg: True)
        monkeypatch.setattr(placement, "_check_gpus", lambda needed: self.calls.append(f"{needed} GPUs"))
        monkeypatch.setattr(
            placement, "_reserve", lambda kind, sizes, strategy, numbers: [(None, i) for i in range(len(sizes))]
        )
        monkeypatch.setattr(placement, "_options", lambda gpus, bundle: {"num_gpus": gpus})

    @contextmanager
    def start(self, colocate: bool) -> Iterator[Any]:
        cfg = Config()
        cfg.parallel.tp, cfg.cluster.colocate, cfg.rollout.num_servers, cfg.rollout.tp = 4, colocate, 2, 2
        with start_cluster(cfg, Path("model"), (1,), Path("run"), print) as started:
            yield started


def test_colocated_servers_start_on_the_ranks_gpus_when_these_have_made_room(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    with world.start(colocate=True) as started:
        assert started.places == {"n": "ranks 0-3 on GPUs 3,2,0-1, server 0 on GPUs 3,2, server 1 on GPUs 0-1"}
        assert started.turns == "turns"
    assert world.calls == ["4 GPUs", "ranks start", "offload", "servers on ['3,2', '0,1']", "servers start", "kill"]


def test_apart_both_start_at_the_same_time_on_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    with world.start(colocate=False):
        pass
    on_any = "servers on ['', '']"  # Ray chooses
    assert world.calls == ["4 GPUs", "8 GPUs", on_any, "servers start", "ranks start", "kill"]


def test_a_failure_is_told_from_that_of_a_rank_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    with pytest.raises(RuntimeError, match=r"^wrong$") as caught, world.start(colocate=False):
        raise RuntimeError("wrong")
    assert not isinstance(caught.value, ProcessLost)
    world.lost = "trainer rank(s) 1 died"
    said = r"rank\(s\) 1 died, and the others then failed: peer gone"
    with pytest.raises(ProcessLost, match=said), world.start(colocate=False):
        raise RuntimeError("peer gone")
    assert world.calls.count("kill") == 2
