"""What a run needs before any process starts: model folder, tokenizer, prompts. Errors here cost seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.config import Config
from dapo_megatron.data.rows import overlap
from dapo_megatron.data.sources import load_rows
from dapo_megatron.data.stream import PromptStream, eval_prompts
from dapo_megatron.layout import sharing_text, sizes_text
from dapo_megatron.records import Prompt
from dapo_megatron.reward.verifiers import validate_gold
from dapo_megatron.rollout.engine import SamplingParams
from dapo_megatron.rollout.sampler import DynamicSampler
from dapo_megatron.run_folder import RunFolder
from dapo_megatron.weights.source import eos_token_ids, resolve_model

if TYPE_CHECKING:
    from dapo_megatron.cluster.cluster import Cluster  # imports ray


@dataclass
class Prepared:
    cfg: Config
    model_dir: Path
    eos_ids: tuple[int, ...]
    tokenizer: Any
    stream: PromptStream
    eval_prompts: list[Prompt]
    num_overlap: int  # held-out problems that are trained on as well
    held_out_dropped: str  # what was read for them and dropped, empty if nothing was

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids))

    def facts(self, folder: RunFolder) -> dict[str, object]:
        """For the console's header."""
        start = f", resuming after step {folder.resumed_step} ({folder.checkpoint})" if folder.checkpoint else ""
        changed = {"changed": "; ".join(folder.changes)} if folder.changes else {}
        damaged = {"damaged": folder.damaged} if folder.damaged else {}
        sharing = sharing_text(self.cfg, self.stream.mean_prompt_tokens)
        evaluation = self.eval_facts()
        return {
            "run": f"{folder.path}{start}",
            **changed,
            **damaged,
            "model": evaluation["model"],
            "prompts": self.stream.summary,
            "held out": evaluation["held out"],
            "trainer": f"{self.cfg.world_size} rank(s): {sizes_text(self.cfg.parallel)}",
            **({"sharing": sharing} if sharing else {}),
            "rollout": evaluation["rollout"],
        }

    def eval_facts(self) -> dict[str, object]:
        """The same for an evaluation by itself."""
        rollout = self.cfg.rollout
        warning = f", {self.num_overlap} of the data set's problems are trained on as well!" if self.num_overlap else ""
        return {
            "model": f"{self.cfg.model.path} ({self.cfg.model.dtype})",
            "data": self.cfg.data.eval.path,
            "held out": f"{len(self.eval_prompts)} prompts{self.held_out_dropped}{warning}",
            "rollout": f"{rollout.engine}, {rollout.num_servers} server(s)" if rollout.engine != "local" else rollout.engine,
        }


def prepare(cfg: Config) -> Prepared:
    """Raises ValueError for a model, data set or gold answer that can't be used."""
    from transformers import AutoTokenizer

    model_dir = resolve_model(cfg.model)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    check_gold = partial(validate_gold, cfg.reward.verifier)
    rows = load_rows(cfg.data.train, check_gold=check_gold)
    held_out: list[Prompt] = []
    num_overlap, dropped = 0, ""
    if cfg.eval.every >= 0:
        eval_rows = load_rows(cfg.data.eval, check_gold=check_gold)
        num_overlap = overlap(rows, eval_rows)
        dropped = f" ({eval_rows.summary()})" if eval_rows.num_read > len(eval_rows) else ""
        held_out = eval_prompts(eval_rows, tokenizer, cfg.data, cfg.eval.prompts)
    stream = PromptStream(rows, tokenizer, cfg.data, cfg.run.seed)
    return Prepared(
        cfg=cfg,
        model_dir=model_dir,
        eos_ids=eos_token_ids(model_dir),
        tokenizer=tokenizer,
        stream=stream,
        eval_prompts=held_out,
        num_overlap=num_overlap,
        held_out_dropped=dropped,
    )


def make_sampler(cfg: Config, prepared: Prepared, cluster: "Cluster") -> DynamicSampler:
    params = SamplingParams(
        max_new_tokens=cfg.rollout.max_response_tokens,
        temperature=cfg.rollout.temperature,
        stop_token_ids=prepared.eos_ids,
    )
    return DynamicSampler(cfg.sampling, prepared.stream, cluster.engine, cluster.rewards.score, params, cfg.run.seed)
