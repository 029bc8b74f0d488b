"""Two pipeline ranks that are each other's previous and next one, as with virtual stages, tell each other their shapes."""

from types import SimpleNamespace
from typing import Any

from tests.distributed.harness import RankPool


def exchange(rank: int, mended: bool) -> tuple[list[int], list[int]]:
    """(from the previous rank, from the next): rank r sends [1 + 10 r, 2, 3] to its next, [4 + 10 r, 5, 6] to its previous."""
    import torch

    from dapo_megatron.policy import pipeline_fixes

    method: Any = pipeline_fixes._communicate_shapes if mended else pipeline_fixes.ORIGINAL
    config = SimpleNamespace(use_ring_exchange_p2p=False)
    communicator = SimpleNamespace(
        config=config, pp_group=torch.distributed.group.WORLD, prev_rank=1 - rank, next_rank=1 - rank
    )
    to_next, to_prev = torch.empty(1 + 10 * rank, 2, 3), torch.empty(4 + 10 * rank, 5, 6)
    from_prev, from_next = method(communicator, to_next, to_prev, True, True)
    return list(from_prev), list(from_next)


RIGHT = [([11, 2, 3], [14, 5, 6]), ([1, 2, 3], [4, 5, 6])]


def test_shapes_arrive_from_where_they_were_sent(ranks: RankPool) -> None:
    assert ranks.run(exchange, 2, True) == RIGHT


def test_megatron_still_mixes_them_up(ranks: RankPool) -> None:
    """When this fails, Megatron has been mended and policy/pipeline_fixes.py can go."""
    assert ranks.run(exchange, 2, False) != RIGHT
