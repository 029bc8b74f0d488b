"""The two things that `verify` compares: wherever their weights lie, one parameter at a time, as HF tensors."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoint_tools import UsageError
from checkpoint_tools.hf_to_megatron import checked_shape
from checkpoint_tools.locate import Place, locate
from checkpoint_tools.parameters import Parameter
from checkpoint_tools.sources import checkpoint, hf_folder, settings_of
from dapo_megatron.weights.hf_folder import HFFolder
from dapo_megatron.weights.mapping import ModelShape, to_hf

Texts = Sequence[Sequence[int]]  # token ids


class Side(ABC):
    """`folder` has the model's config.json, and its tokenizer if there is one; None if nothing tells what model it is."""

    title: str
    folder: Path | None
    is_megatron = False

    @cached_property
    def config(self) -> dict[str, Any]:
        assert self.folder is not None
        return HFFolder.read_config(self.folder)

    @cached_property
    def shape(self) -> ModelShape:
        """ValueError for a model that the mapping doesn't know."""
        return ModelShape.from_hf(self.config)

    @property
    def tokenizer(self) -> Path | None:
        """The folder, if it has a tokenizer."""
        files = ("tokenizer.json", "tokenizer.model", "vocab.json")
        return self.folder if self.folder and any((self.folder / file).is_file() for file in files) else None

    @abstractmethod
    def check(self) -> None:
        """ValueError that names what is missing, unknown or of a wrong shape."""

    @abstractmethod
    def nbytes(self, parameter: Parameter) -> int: ...

    @abstractmethod
    def tensors(self, parameter: Parameter) -> list[Tensor]:
        """The parameter's HF tensors, in its rule's order. ValueError if they can't be read."""

    def key(self, parameter: Parameter) -> str:
        """Under which key Megatron stores it; "" on the HF side."""
        return ""

    @abstractmethod
    def logprobs(self, texts: Texts, dtype: torch.dtype | None) -> list[np.ndarray]:
        """float32 [length - 1] of each text: of every token but the first, at temperature 1. In fp32 whatever the weights are,
        which are rounded to `dtype` before. The model is in memory meanwhile."""


class HFSide(Side):
    def __init__(self, folder: Path) -> None:
        self._model = HFFolder(folder)
        self.title, self.folder = f"HF folder {folder}", folder

    def check(self) -> None:
        checked_shape(self._model)

    def nbytes(self, parameter: Parameter) -> int:
        return sum(self._model.entries[name].nbytes for name in parameter.hf_names)

    def tensors(self, parameter: Parameter) -> list[Tensor]:
        return [self._model.tensor(name) for name in parameter.hf_names]

    def logprobs(self, texts: Texts, dtype: torch.dtype | None) -> list[np.ndarray]:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(
            self._model.path, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
        )
        model.to(device)
        found = []
        with torch.no_grad():
            _round(model.parameters(), dtype)
            for text in texts:
                ids = torch.tensor([text], device=device)
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
                found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy())
        del model
        gc.collect()  # before the other side's is made
        return found


class MegatronSide(Side):
    is_megatron = True

    def __init__(self, place: Place) -> None:
        from dapo_megatron.policy.torch_dist import CheckpointReader

        self._weights, self._reader = place.weights, CheckpointReader(place.weights)
        self.title, self.folder = place.title, None
        with suppress(UsageError):  # the other side may know
            self.folder = settings_of(place, "")

    def check(self) -> None:
        self._reader.check(self.shape)

    def nbytes(self, parameter: Parameter) -> int:
        numel = sum(int(np.prod(size)) for size in parameter.rule.hf_shapes(self.shape))
        return numel * self._reader.dtype(parameter.rule, parameter.index, self.shape).itemsize

    def tensors(self, parameter: Parameter) -> list[Tensor]:
        rule, index = parameter.rule, parameter.index
        return to_hf(rule, [self._reader.parameter(rule, index, self.shape)], self.shape)

    def key(self, parameter: Parameter) -> str:
        return self._reader.key(parameter.rule, parameter.index, self.shape)

    def logprobs(self, texts: Texts, dtype: torch.dtype | None) -> list[np.ndarray]:
        """By Megatron's own loading into its own model, not by the reader that `tensors` uses."""
        from dapo_megatron.policy.scorer import Scorer, single_rank

        with single_rank():
            scorer = Scorer(self._weights, self.config)
            with torch.no_grad():
                _round(scorer.parameters(), dtype)
            found = scorer.logprobs(texts)
            del scorer
            gc.collect()
        return found


def side_of(name: str) -> Side:
    """UsageError if `name` is no model, ValueError if it is damaged."""
    place = locate(name)
    return MegatronSide(checkpoint(name)) if place and place.is_megatron else HFSide(hf_folder(name))


def _round(parameters: Iterable[Tensor], dtype: torch.dtype | None) -> None:
    for parameter in parameters if dtype else ():
        parameter.copy_(parameter.to(dtype))
