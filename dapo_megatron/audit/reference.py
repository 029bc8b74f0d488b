"""The same mini-batch by plain transformers and autograd in fp64: no Megatron, no packing, no objective of ours, one sequence
at a time. What a layout is judged by."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_megatron.config import AlgorithmConfig
from dapo_megatron.records import Sample
from dapo_megatron.weights.hub_names import hub_tensors


@dataclass
class ReferenceStep:
    """Of one mini-batch: loss, gradients by parameter name (not clipped) and their norm, log-probs [L] of each response."""

    loss: float
    gradients: dict[str, Tensor]
    grad_norm: float
    logprobs: list[np.ndarray]


class ReferencePolicy:
    """An HF folder's model with transformers' eager attention, its weights rounded to `dtype` as a policy's are. Raises
    whatever transformers raises."""

    def __init__(
        self, model_dir: str | Path, algorithm: AlgorithmConfig, temperature: float, dtype: torch.dtype = torch.float32
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        with torch.no_grad():
            for param in self.model.parameters():
                param.copy_(param.to(dtype))
        # transformers gives the pad token's embedding no gradient, though for chat models it is one that prompts are full of
        self.model.get_input_embeddings().padding_idx = None  # type: ignore[assignment]
        self.algorithm, self.temperature = algorithm, temperature

    def _logits(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """log softmax [L, vocab] over the response's places, and its tokens [L]."""
        ids = torch.tensor(np.asarray(sample.token_ids)[None], dtype=torch.long)
        logits = self.model(ids).logits[0, sample.prompt_len - 1 : -1] / self.temperature
        return logits.log_softmax(-1), ids[0, sample.prompt_len :]

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Of every response's tokens, float64 [L] each, at the sampling temperature."""
        with torch.no_grad():
            found = [self._logits(sample) for sample in samples]
            return [logp.gather(1, tokens[:, None])[:, 0].numpy() for logp, tokens in found]

    def step(self, samples: Sequence[Sample], old: Sequence[np.ndarray]) -> ReferenceStep:
        """Loss and gradients of a mini-batch whose weights are set, against old log-probs [L] of each response.

        Equations 8 and 10 of arXiv 2503.14476: sum over valid tokens of w * -(min(rho A, clip(rho) A) + c * entropy), with
        the dual clip where it is on. With an importance cap C the minimum is multiplied by min(exp(old - engine's), C).
        """
        a = self.algorithm
        self.model.zero_grad(set_to_none=True)
        loss, logprobs = 0.0, []
        for sample, before in zip(samples, old, strict=True):
            logp_all, tokens = self._logits(sample)
            logp = logp_all.gather(1, tokens[:, None])[:, 0]
            ratio = (logp - torch.tensor(np.asarray(before), dtype=torch.float64)).exp()
            advantage = torch.tensor(np.asarray(sample.advantages), dtype=torch.float64)
            term = torch.minimum(ratio * advantage, ratio.clamp(1 - a.clip_low, 1 + a.clip_high) * advantage)
            if a.dual_clip:
                term = torch.where(advantage < 0, torch.maximum(term, a.dual_clip * advantage), term)
            if a.importance_cap:
                log_weight = np.asarray(before, np.float64) - sample.rollout_logprobs
                term = term * torch.tensor(np.exp(np.minimum(log_weight, np.log(a.importance_cap))))
            entropy = -(logp_all.exp() * logp_all).sum(-1)
            weights = torch.tensor(sample.weights * sample.mask, dtype=torch.float64)
            part = -(weights * (term + a.entropy_coef * entropy)).sum()
            part.backward()
            loss += part.item()
            logprobs.append(logp.detach().numpy())
        gradients = {
            hub_name: grad.clone()
            for name, param in self.model.named_parameters()
            for hub_name, grad in hub_tensors(name, param.grad)
        }
        norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
        return ReferenceStep(loss, gradients, norm, logprobs)


def clip_scale(norm: float, limit: float) -> float:
    """What gradients are multiplied with so that their global norm is at most `limit` (0: no limit)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
