"""The resumable stream of prompts."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dapo_megatron.config import DataConfig
from dapo_megatron.data.prompts import PromptRenderer
from dapo_megatron.data.rows import Row, Rows
from dapo_megatron.records import Prompt

log = logging.getLogger(__name__)
BATCH_ROWS = 1024


class _Encoded:
    """Rows that fit, with their token ids (int32 arrays: a fifth of the memory of lists)."""

    def __init__(self, rows: Sequence[Row], tokenizer: Any, data: DataConfig) -> None:
        renderer = PromptRenderer(tokenizer, data)
        self.rows: list[Row] = []
        self.token_ids: list[np.ndarray] = []
        for begin in range(0, len(rows), BATCH_ROWS):
            batch = list(rows[begin : begin + BATCH_ROWS])
            for row, ids in zip(batch, renderer.encode(batch), strict=True):
                if 0 < len(ids) <= data.max_prompt_tokens:
                    self.rows.append(row)
                    self.token_ids.append(np.array(ids, dtype=np.int32))
        self.num_skipped_too_long = len(rows) - len(self.rows)
        if self.num_skipped_too_long:
            log.warning(
                "%d of %d prompts are longer than data.max_prompt_tokens (%d) and skipped",
                *(self.num_skipped_too_long, len(rows), data.max_prompt_tokens),
            )
        if not self.rows:
            raise ValueError(f"data.max_prompt_tokens: {data.max_prompt_tokens} leaves none of {len(rows)} prompts; raise it")

    def prompt(self, number: int, index: int) -> Prompt:
        row = self.rows[number]
        return Prompt(index, row.uid, tuple(self.token_ids[number].tolist()), row.gold, row.data_source)

    def fingerprint(self) -> str:
        """16 hex digits that change with any prompt, gold answer, template, tokenizer or order."""
        digest = hashlib.sha256()
        for row, ids in zip(self.rows, self.token_ids, strict=True):
            digest.update(f"{row.uid}\0{len(row.gold)}\0{row.gold}\0{len(ids)}\0".encode())
            digest.update(ids.tobytes())
        return digest.hexdigest()[:16]


class PromptStream:
    """Prompts without end, epoch after epoch: what stands at a position depends on data, seed and position alone.

    Setting `position` rewinds or skips. All rows are tokenised at the start, so that an epoch has a known length and a
    prompt that is too long leaves no hole (half a second for a thousand rows).
    """

    def __init__(self, rows: Sequence[Row], tokenizer: Any, data_cfg: DataConfig, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"run.seed: {seed} must not be negative")
        self._encoded = _Encoded(rows, tokenizer, data_cfg)
        read = rows.summary() if isinstance(rows, Rows) else f"{len(rows)} problems"
        # what became of all rows, in one line
        self.summary = f"{read}, {self.num_skipped_too_long} longer than {data_cfg.max_prompt_tokens} tokens"
        self._seed = seed
        self._shuffle = data_cfg.shuffle
        self._continue_on_change = data_cfg.on_change == "continue"
        self._fingerprint = self._encoded.fingerprint()
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, order) last used
        self._position = 0

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._encoded.rows)

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            yield self.next()

    @property
    def num_skipped_too_long(self) -> int:
        """Rows left out for data.max_prompt_tokens."""
        return self._encoded.num_skipped_too_long

    @property
    def mean_prompt_tokens(self) -> float:
        """Of an epoch's prompts."""
        return sum(map(len, self._encoded.token_ids)) / len(self)

    @property
    def position(self) -> int:
        """Index of the prompt that `next` gives."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        if value < 0:
            raise ValueError(f"stream position: {value} must not be negative")
        self._position = value

    @property
    def epoch(self) -> int:
        """Epochs begun before this one, from 0."""
        return self._position // len(self)

    def next(self) -> Prompt:
        prompt = self.at(self._position)
        self._position += 1
        return prompt

    def at(self, position: int) -> Prompt:
        """The prompt at a position; moves nothing."""
        epoch, slot = divmod(position, len(self))
        return self._encoded.prompt(int(self._epoch_order(epoch)[slot]), position)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            order = np.arange(len(self))
            if self._shuffle:
                # a generator of its own: the global random state is neither read nor moved
                np.random.Generator(np.random.PCG64([self._seed, epoch])).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_prompts": len(self),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a saved position. If data, rendering or shuffling aren't those that were saved: ValueError, unless
        data.on_change is continue; the summary says it then. Another seed is always a ValueError."""
        now = self.state_dict()
        changed = [key for key in now if key != "position" and state[key] != now[key]]
        changes = ", ".join(f"{key} was {state[key]!r} and is {now[key]!r} now" for key in changed)
        if "seed" in changed:
            raise ValueError(f"the prompt stream can't be resumed: its {changes}; restore run.seed, or start a new run")
        if changed and not self._continue_on_change:
            raise ValueError(
                f"the training prompts aren't those that the run was started with: their {changes}. Restore data, tokenizer "
                "and data.*, start a new run, or set data.on_change=continue to go on at the saved position in the new prompts"
            )
        self.position = int(state["position"])
        if changed:
            self.summary += (
                f"; changed since the checkpoint ({changes}): going on at prompt {self._position}, epoch {self.epoch} "
                "(data.on_change=continue)"
            )


def eval_prompts(rows: Sequence[Row], tokenizer: Any, data_cfg: DataConfig, limit: int = 0) -> list[Prompt]:
    """The first `limit` (0: all) held-out prompts in order, with indices -1, -2, ... so that none is taken for one of
    the stream's. Prompts that are too long are skipped with a warning; ValueError if all are."""
    encoded = _Encoded(rows, tokenizer, data_cfg)
    count = min(limit or len(encoded.rows), len(encoded.rows))
    return [encoded.prompt(number, -1 - number) for number in range(count)]
