"""The zig-zag split of packed sequences over context-parallel ranks."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from dapo_megatron.algo.packing import context_share, pack_minibatch_for, zigzag_indices
from dapo_megatron.config import ParallelConfig
from dapo_megatron.samples_file import load_samples
from tests.distributed.harness import make_samples
from tests.distributed.make_batch import BATCH


def test_zigzag_by_hand() -> None:
    cu_seqlens = np.array([0, 8, 12])
    assert zigzag_indices(cu_seqlens, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_indices(cu_seqlens, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert zigzag_indices(cu_seqlens, 1, 0).tolist() == list(range(12))
    with pytest.raises(AssertionError, match="6 tokens can't be cut into 4 equal pieces"):
        zigzag_indices(np.array([0, 6]), 2, 0)


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("share", [False, True])
def test_every_token_and_every_response_token_is_with_one_rank(cp: int, share: bool) -> None:
    parallel = ParallelConfig(cp=cp, tp=2, sequence_parallel=True, max_tokens_per_microbatch=64, share_prompts=share)
    for whole in pack_minibatch_for(parallel, load_samples(BATCH))[0]:
        shares = [context_share(whole, cp, rank) for rank in range(cp)]
        assert len({len(share.token_ids) for share in shares}) == 1 and len(shares[0].token_ids) % parallel.tp == 0
        held = np.concatenate([zigzag_indices(whole.cu_seqlens, cp, rank) for rank in range(cp)])
        assert sorted(held.tolist()) == list(range(len(whole.token_ids)))
        for name in ("token_ids", "position_ids", "branch"):
            assert np.array_equal(np.concatenate([getattr(share, name) for share in shares]), getattr(whole, name)[held])
        length = len(shares[0].token_ids)
        # a response token goes with the token that predicts it
        places = np.concatenate([held[rank * length + share.positions] for rank, share in enumerate(shares)])
        order, want = np.argsort(np.concatenate([share.number for share in shares])), np.argsort(whole.number)
        assert np.array_equal(places[order], whole.positions[want])
        for field in fields(whole):
            if field.name not in ("token_ids", "position_ids", "branch", "cu_seqlens", "positions"):
                together = np.concatenate([getattr(share, field.name) for share in shares])[order]
                assert np.array_equal(together, getattr(whole, field.name)[want]), field.name


def test_layouts_ask_for_the_lengths_that_they_need() -> None:
    def multiples(**settings: Any) -> tuple[int, int, int]:
        p = ParallelConfig(**settings)
        return p.sequence_multiple, p.microbatch_multiple, p.num_microbatches_multiple

    assert multiples(tp=4) == (1, 1, 1)
    assert multiples(tp=4, sequence_parallel=True, pp=2) == (1, 4, 1)
    assert multiples(cp=2, pp=2, vpp=2) == (4, 4, 2)
    assert multiples(tp=4, cp=2, sequence_parallel=True) == (4, 8, 1)
    for rank in pack_minibatch_for(ParallelConfig(pp=4, vpp=2, dp=2), make_samples()):
        assert len(rank) == 4 and sum(micro.num_valid > 0 for micro in rank) >= 1
