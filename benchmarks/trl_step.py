"""The steps of TRL's GRPOTrainer that benchmarks/step.py compares with. It runs in an environment of its own, which has TRL
(benchmarks/step.py says how it is made) and of this project only the reward's pure Python.

    PYTHON benchmarks/trl_step.py JOB.json RESULT.json

JOB is what step.py's `trl_job` makes; RESULT gets the seconds and tokens of every step and the peak memory.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dapo_megatron.reward.overlong import soft_overlong_penalty
from dapo_megatron.reward.scoring import Scorer


class Clock(TrainerCallback):
    """Seconds of each rollout's parts: `step`, of it `prepare` (everything before the updates), of that `old_logprobs`."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0:
            self.steps.append({})
        self._begin = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.add("step", time.monotonic() - self._begin)

    def add(self, name: str, value: float) -> None:
        self.steps[-1][name] = self.steps[-1].get(name, 0.0) + value

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.add(name, time.monotonic() - begin)

    def phases(self, prompt_tokens: list[int]) -> list[dict[str, float]]:
        """Seconds and tokens of every rollout by step.py's names, given the prompts' tokens of each."""
        return [
            {
                "rollout": step["prepare"] - step.get("old_logprobs", 0.0),
                "old_logprobs": step.get("old_logprobs", 0.0),
                "update": step["step"] - step["prepare"],
                "step": step["step"],
                "reply_tokens": step["reply_tokens"],
                "generated_tokens": step["reply_tokens"],
                "sequence_tokens": step["reply_tokens"] + in_prompts,
                "accuracy": step["accuracy"],
            }
            for step, in_prompts in zip(self.steps, prompt_tokens, strict=True)
        ]


class TimedTrainer(GRPOTrainer):
    clock: Clock
    _preparing = False

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.clock("prepare"):  # sampling, rewards, advantages, with several updates old log-probs
            self._preparing = True
            try:
                return super()._generate_and_score_completions(inputs)
            finally:
                self._preparing = False

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if not self._preparing:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.clock("old_logprobs"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def reward_function(job: dict[str, Any], clock: Clock) -> Any:
    """This project's verdict and overlong punishment; counts tokens and correct responses as well."""
    reward = job["reward"]
    scorer = Scorer(reward["verifier"], reward["verifier_args"], max_response_tokens=job["max_response_tokens"])

    def score(completions: list[str], completion_ids: list[list[int]], gold: list[str], **_: Any) -> list[float]:
        correct = np.array([scorer.verify(text, answer).correct for text, answer in zip(completions, gold, strict=True)])
        lengths = [len(ids) for ids in completion_ids]
        overlong = reward["overlong"]
        penalty = soft_overlong_penalty(
            lengths, job["max_response_tokens"], overlong["cache_tokens"], overlong["penalty_factor"]
        )
        clock.add("reply_tokens", sum(lengths))
        clock.add("accuracy", float(correct.mean()))
        return (np.where(correct, reward["correct"], reward["incorrect"]) + penalty).tolist()

    return score


def config(job: dict[str, Any], folder: str) -> GRPOConfig:
    algorithm, optimizer = job["algorithm"], job["optimizer"]
    accumulation = job["prompts"] * job["samples"] // job["updates"] // job["microbatch"]
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=job["dtype"] != job["weights"],  # autocast; weights that are bf16 don't need it
        max_steps=job["steps"] * job["updates"],
        per_device_train_batch_size=job["microbatch"],
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * job["updates"],
        gradient_checkpointing=False,
        num_generations=job["samples"],
        max_completion_length=job["max_response_tokens"],
        temperature=job["temperature"],
        shuffle_dataset=False,
        loss_type="dapo",
        num_iterations=1,
        beta=0.0,
        epsilon=algorithm["clip_low"],
        epsilon_high=algorithm["clip_high"],
        learning_rate=optimizer["lr"],
        lr_scheduler_type="constant",
        weight_decay=optimizer["weight_decay"],
        adam_beta1=optimizer["beta1"],
        adam_beta2=optimizer["beta2"],
        adam_epsilon=optimizer["eps"],
        max_grad_norm=optimizer["clip_grad"],
        seed=job["seed"],
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model_dir"], padding_side="left")
    texts = [tokenizer.decode(ids) for ids in job["prompt_ids"]]
    assert tokenizer(texts)["input_ids"] == job["prompt_ids"], "TRL tokenises the prompts' text to other tokens"
    model = AutoModelForCausalLM.from_pretrained(job["model_dir"], dtype=job["weights"])
    model.generation_config.eos_token_id = job["eos_ids"]
    clock = Clock(job["updates"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=model,
            reward_funcs=reward_function(job, clock),
            args=config(job, folder),
            train_dataset=Dataset.from_dict({"prompt": texts, "gold": job["golds"]}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.clock = clock
        trainer.train()
    status = Path("/proc/self/status").read_text()
    peak_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    per_step = range(0, len(job["prompt_ids"]), job["prompts"])
    prompt_tokens = [job["samples"] * sum(map(len, job["prompt_ids"][i : i + job["prompts"]])) for i in per_step]
    Path(sys.argv[2]).write_text(json.dumps({"steps": clock.phases(prompt_tokens), "peak_gb": peak_kb * 1024 / 1e9}))


if __name__ == "__main__":
    main()
