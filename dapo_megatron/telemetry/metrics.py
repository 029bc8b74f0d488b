"""Every metric of a run: name, unit, meaning; and the file they are appended to, one JSON object a step."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Metric:
    unit: str
    meaning: str


# By the policy before the step nothing is computed then but the first update.
_FIRST = "; with algorithm.old_logprobs=engine of the step's first mini-batch only"

# G is the number of samples per prompt. "Kept" groups are those the step trains on. old, new: the policy that sampled,
# the policy being updated. policy/* means are over all valid tokens of the step's mini-batches, unless said otherwise.
METRICS: dict[str, Metric] = {
    # Rewards of the kept groups' responses; accuracy over all resolved groups, since filtering changes the mix.
    "reward/mean": Metric("reward", "mean shaped reward (raw + overlong penalty) of the kept responses"),
    "reward/raw_mean": Metric("reward", "mean reward of the kept responses before length shaping"),
    "reward/accuracy": Metric("share", "correct among the responses of all resolved groups, filtered ones included"),
    "reward/kept_accuracy": Metric("share", "correct among the responses of the kept groups"),
    "reward/overlong_mean": Metric("reward", "mean overlong penalty of the kept responses, in [-factor, 0]"),
    "reward/overlong_min": Metric("reward", "the lowest overlong penalty among the kept responses"),
    "reward/unparsed": Metric("responses", "kept responses in which the verifier found no answer"),
    "reward/verifier_errors": Metric(
        "responses", "in all resolved groups, verdicts that failed or took over reward.timeout_s: incorrect"
    ),
    # Dynamic sampling: sampled + carried_in = resolved + cut + carried_out (groups)
    "sampling/groups_sampled": Metric("groups", "groups taken from the prompt stream and started in the step"),
    "sampling/groups_resolved": Metric("groups", "groups finished, scored and judged: kept or filtered"),
    "sampling/groups_kept": Metric("groups", "groups that the step trains on; with dynamic sampling 0 < number correct < G"),
    "sampling/groups_all_correct": Metric("groups", "resolved groups with all G responses correct"),
    "sampling/groups_all_wrong": Metric("groups", "resolved groups with none of the G responses correct"),
    "sampling/groups_cut": Metric("groups", "groups started, then not needed: their prompts went back to the stream"),
    "sampling/groups_carried_in": Metric("groups", "left over by the step before"),
    "sampling/groups_carried_out": Metric("groups", "left over for the next step, finished or not"),
    "sampling/acceptance_rate": Metric("share", "estimated share of groups that are kept, older steps fading out"),
    "sampling/budget_used_up": Metric("0 or 1", "1: the batch isn't full because no further group was allowed"),
    # Tokens by fate: generated + carried_in = kept + filtered_correct + filtered_wrong + aborted + carried_out
    "tokens/generated": Metric("tokens", "response tokens sampled for the step"),
    "tokens/kept": Metric("tokens", "in kept groups"),
    "tokens/filtered_correct": Metric("tokens", "in filtered groups with every response correct"),
    "tokens/filtered_wrong": Metric("tokens", "in all other filtered groups"),
    "tokens/aborted": Metric(
        "tokens", "thrown away: in cut groups, finished or partial, or of a response that a publish interrupted (publish.pause)"
    ),
    "tokens/carried_in": Metric("tokens", "sampled in earlier steps, brought into this one"),
    "tokens/carried_out": Metric("tokens", "left over for the next step"),
    "tokens/cut": Metric("tokens", "those of `kept` that are in responses cut at the length limit"),
    "tokens/trained": Metric("tokens", "those of `kept` that the mask lets into the loss"),
    "tokens/packed": Metric(
        "tokens", "of the kept responses, each with its prompt; fewer are computed with parallel.share_prompts"
    ),
    # Responses of all resolved groups
    "response/length_mean": Metric("tokens", "mean response length, EOS included"),
    "response/length_max": Metric("tokens", "longest response"),
    "response/cut_share": Metric("share", "responses cut at the length limit"),
    # Policy and objective
    "policy/entropy": Metric("nats", "mean entropy of the next-token distribution at the sampling temperature"),
    "policy/prob_mean": Metric("probability", "mean probability of the sampled tokens, under the policy being updated"),
    "policy/clip_high_share": Metric("share", "tokens with A > 0 and ratio > 1 + clip_high: their gradient is cut off"),
    "policy/clip_low_share": Metric("share", "tokens with A < 0 and ratio < 1 - clip_low: their gradient is cut off"),
    "policy/dual_clip_share": Metric("share", "tokens with A < 0 whose ratio is above the dual clip"),
    "policy/ratio_max": Metric("ratio", "largest new/old probability ratio of a token"),
    "policy/first_ratio_error_max": Metric(
        "ratio",
        "first mini-batch of the step, tokens of the step's weights: largest |ratio - 1|; rounding only, but with "
        "algorithm.old_logprobs=engine what the server differs by",
    ),
    "policy/k1": Metric("nats", "mean(logp_old - logp_new), KL(old, new) by the estimator k1"),
    "policy/k3": Metric("nats", "mean(exp(d) - 1 - d), d = logp_new - logp_old: KL(old, new) by k3, never negative"),
    "policy/loss": Metric("loss", "the minimised objective, mean over the step's mini-batches"),
    # Optimizer
    "optimizer/grad_norm": Metric("norm", "global gradient norm before clipping, mean over the step's updates"),
    "optimizer/lr": Metric("1", "learning rate of the step"),
    "optimizer/updates": Metric("updates", "optimizer steps done in this rollout step"),
    "optimizer/updates_skipped": Metric("updates", "mini-batches without an update, since the mask let no token into the loss"),
    "optimizer/updates_nonfinite": Metric("updates", "mini-batches without an update: loss or gradient was nan or infinite"),
    "optimizer/nonfinite_in_a_row": Metric("updates", "how many of the last updates were such, without one between them"),
    # Trainer, by its policy before the step, against rollout server
    "sync/logprob_diff_mean": Metric("nats", f"mean |trainer's log-prob - server's|, tokens of the step's weights{_FIRST}"),
    "sync/logprob_diff_max": Metric("nats", "the largest of these"),
    "sync/stale_logprob_diff_mean": Metric(
        "nats", f"the same for tokens of older weights: also what updates since then have changed{_FIRST}"
    ),
    "sync/effective_sample_size": Metric(
        "share", f"(sum w)^2 / (N sum w^2), w = exp(trainer's log-prob - server's), N tokens; 1: on policy{_FIRST}"
    ),
    "sync/truncated_share": Metric("share", "tokens whose w is above algorithm.importance_cap"),
    # Of the trained tokens; they add up to 1
    "sync/staleness_0": Metric("share", "sampled by the step's weights"),
    "sync/staleness_1": Metric("share", "sampled by weights one version older"),
    "sync/staleness_2_or_more": Metric("share", "sampled by weights older still"),
    "sync/publish_gb_per_s": Metric(
        "GB/s", "of the publish: bytes that each server got / seconds, pausing and connecting included"
    ),
    "sync/publish_buckets": Metric("buckets", "in which the weights were sent"),
    "sync/version": Metric("version", "version of the weights the servers hold after the step's publish"),
    "engine/servers": Metric("servers", "that hold these weights now; the others are being started anew, or were given up"),
    "engine/restarts": Metric("restarts", "of servers that were lost, since the run was started"),
    "engine/retries": Metric("requests", "sent once more, as a server did not answer, since the run was started"),
    # Seconds of wall time on the controller
    "time/startup_s": Metric("s", "from the start of the job or the command to its first step; in that step's row only"),
    "time/rollout_s": Metric("s", "waiting for the batch; all of time/collect_s, but for rollout.max_staleness=1"),
    "time/collect_s": Metric("s", "from the first request of the step's batch until it was full; rewards are scored meanwhile"),
    "time/reward_s": Metric("s", "spent in reward workers on the resolved groups, summed over workers"),
    "time/old_logprobs_s": Metric("s", "the trainer's log-probs of the batch by the weights before the step"),
    "time/update_s": Metric("s", "all mini-batch updates"),
    "time/publish_s": Metric("s", "sending the new weights to the servers"),
    "time/checkpoint_s": Metric("s", "writing a checkpoint"),
    "time/eval_s": Metric("s", "evaluation"),
    "time/step_s": Metric("s", "the whole step, evaluation and checkpoint included"),
    "throughput/generated_tokens_per_s": Metric("tokens/s", "tokens/generated / time/collect_s"),
    "throughput/trained_tokens_per_s": Metric("tokens/s", "tokens/packed / time/update_s"),
    "memory/peak_gb": Metric("GB", "peak memory so far of the largest trainer rank: device memory on GPUs, else resident"),
    # Prompt stream
    "data/epoch": Metric("epochs", "epoch of the prompt after the step's, from 0"),
    "data/position": Metric("prompts", "prompts of the stream consumed up to the step's batch, never falling"),
    "data/skipped_too_long": Metric("prompts", "prompts of the data set left out for their length"),
    # Evaluation on held-out prompts, by the weights after the step
    "eval/avg_at_k": Metric("share", "mean accuracy over prompts and k samples each"),
    "eval/pass_at_k": Metric("share", "prompts with at least one of the k samples correct"),
    "eval/majority_at_k": Metric(
        "share",
        "prompts whose most frequent answer, as the verifier spells answers, is correct; of a tie the share that is correct",
    ),
    "eval/greedy": Metric("share", "accuracy at temperature 0"),
    "eval/k": Metric("samples", "k of avg@k, pass@k and majority@k"),
    "eval/prompts": Metric("prompts", "held-out prompts"),
    "eval/length_mean": Metric("tokens", "mean response length of the k samples"),
    "eval/cut_share": Metric("share", "of the k samples, cut at the length limit"),
    "eval/verifier_errors": Metric("responses", "verdicts that failed or took over reward.timeout_s: incorrect"),
}


class MetricsWriter:
    """Appends to `run_dir/metrics.jsonl`. A line is on disk when `write` returns.

    A run that starts or resumes at `next_step` first drops the lines of that step and later ones: they will come again.
    """

    def __init__(self, run_dir: str | Path, next_step: int = 0):
        self.path = Path(run_dir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(self.path) if row["step"] < next_step]
        self.last_row: dict[str, Any] = kept[-1] if kept else {"step": -1}
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(_line(row) for row in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Append one step. JSON has no NaN or infinity: they are written as null and named in the row's `nonfinite`.

        Raises ValueError for a name that METRICS doesn't document, a value that is no number, or a step out of order.
        """
        if step <= self.last_step:
            raise ValueError(f"step {step} is written already (last: {self.last_step}); one object a step, in order")
        row = make_row(step, values)
        self._file.write(_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.last_row = row

    @property
    def last_step(self) -> int:
        """-1: nothing is written yet."""
        return int(self.last_row["step"])

    def close(self) -> None:
        self._file.close()


def make_row(step: int, values: Mapping[str, float | int]) -> dict[str, Any]:
    """The JSON object of a step: METRICS' order, plain numbers, non-finite ones apart."""
    unknown = sorted(set(values) - set(METRICS))
    if unknown:
        raise ValueError(f"undocumented metrics {', '.join(unknown)}: add them to telemetry.metrics.METRICS")
    row: dict[str, Any] = {"step": step}
    nonfinite = {}
    for name in METRICS:
        if name not in values:
            continue
        value = values[name]
        value = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"metric {name} = {value!r} is no number")
        if math.isfinite(value):
            row[name] = value
        else:
            row[name], nonfinite[name] = None, str(value)
    if nonfinite:
        row["nonfinite"] = nonfinite
    return row


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, [] if there is none. A torn last line (the writer was killed) is left out.

    Raises ValueError if any other line is damaged.
    """
    path = Path(path)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: is no JSON; repair or move the file") from None
    return rows


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
