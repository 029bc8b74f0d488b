"""Log-probs and entropy over a sharded vocabulary equal those over the whole one (fp32)."""

from typing import Any

import pytest
import torch

from dapo_megatron.ops.linear_logprob import linear_logprob
from tests.distributed.harness import RankPool

ROWS, WIDTH, VOCAB = 11, 6, 21  # the last of 4 ranks has 3 of its 6 rows


def inputs(tp: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    hidden = 3 * torch.randn(ROWS, WIDTH, generator=generator)
    padding = -VOCAB % tp
    return hidden, torch.nn.functional.pad(weight, (0, 0, 0, padding)), torch.arange(ROWS) * 2


def sharded(rank: int, tp: int) -> dict[str, Any]:
    hidden, weight, targets = inputs(tp)
    hidden.requires_grad_()
    local = weight.chunk(tp)[rank].clone().requires_grad_()
    group = torch.distributed.group.WORLD
    logprob, entropy = linear_logprob(hidden, local, targets, 0.6, VOCAB, group, chunk_tokens=4)
    (logprob * torch.arange(ROWS) + entropy).sum().backward()
    return {"logprob": logprob.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": local.grad}


@pytest.mark.parametrize("tp", [2, 4])
def test_sharded_vocabulary(ranks: RankPool, tp: int) -> None:
    results = ranks.run(sharded, tp, tp)
    hidden, weight, targets = (t.double() if t.is_floating_point() else t for t in inputs(1))
    hidden.requires_grad_(), weight.requires_grad_()
    logp = (hidden @ weight.t() / 0.6).log_softmax(-1)
    logprob, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    (logprob * torch.arange(ROWS) + entropy).sum().backward()
    for result in results:
        torch.testing.assert_close(result["logprob"].double(), logprob.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result["entropy"].double(), entropy.detach(), atol=1e-5, rtol=1e-5)
    total = sum(r["hidden"] for r in results)  # each rank has its part; the caller adds them up
    torch.testing.assert_close(total.double(), hidden.grad, atol=1e-4, rtol=1e-5)
    whole = torch.cat([r["weight"] for r in results])[:VOCAB]
    torch.testing.assert_close(whole.double(), weight.grad, atol=1e-4, rtol=1e-5)
