"""Log-probs, entropies and fused losses over a sharded vocabulary equal those over the whole one (fp32); all ranks have the
same, bit for bit."""

from typing import Any

import pytest
import torch

from dapo_megatron.ops import linear_logprob as module
from dapo_megatron.ops.linear_logprob import linear_logprob, linear_loss
from tests.distributed.harness import RankPool

ROWS, WIDTH, VOCAB = 11, 6, 21  # the last of 4 ranks has 3 of its 6 rows


def inputs(tp: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    hidden = 3 * torch.randn(ROWS, WIDTH, generator=generator)
    padding = -VOCAB % tp
    return hidden, torch.nn.functional.pad(weight, (0, 0, 0, padding)), torch.arange(ROWS) * 2


def term(rows: slice, logprob: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Not linear, so that a rank that doesn't see the whole log-prob is found out."""
    return (logprob.exp() * torch.arange(1.0, ROWS + 1)[rows] + entropy**2).sum(), None


def sharded(rank: int, tp: int, fused: bool, padding: int) -> dict[str, Any]:
    hidden, weight, targets = inputs(tp)
    weight = torch.nn.functional.pad(weight, (0, 0, 0, padding))
    hidden.requires_grad_()
    local = weight.chunk(tp)[rank].clone().requires_grad_()
    group = torch.distributed.group.WORLD
    module.CPU_BLOCK_LOGITS = 8  # two of a shard's rows at a time
    if fused:
        loss, _ = linear_loss(hidden, local, targets, term, 0.6, VOCAB, group, tile_tokens=4)
    else:
        loss, _ = term(slice(None), *linear_logprob(hidden, local, targets, 0.6, VOCAB, group, tile_tokens=4))
    loss.backward()
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": local.grad}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("tp", "padding"), [(2, 0), (4, 0), (4, 16)])  # the last of the ranks has but padding
def test_sharded_vocabulary(ranks: RankPool, tp: int, padding: int, fused: bool) -> None:
    results = ranks.run(sharded, tp, tp, fused, padding)
    hidden, weight, targets = (t.double() if t.is_floating_point() else t for t in inputs(1))
    hidden.requires_grad_(), weight.requires_grad_()
    loss, _ = term(slice(None), *linear_logprob(hidden, weight, targets, 0.6, implementation="reference"))
    loss.backward()
    for result in results:
        torch.testing.assert_close(result["loss"].double(), loss.detach(), atol=1e-6, rtol=1e-6)
        assert torch.equal(result["loss"], results[0]["loss"])
    total = sum(r["hidden"] for r in results)  # each rank has its part; the caller adds them up
    torch.testing.assert_close(total.double(), hidden.grad, atol=1e-5, rtol=1e-5)
    whole = torch.cat([r["weight"] for r in results])[:VOCAB]
    torch.testing.assert_close(whole.double(), weight.grad, atol=1e-5, rtol=1e-5)
