"""Sampling, objective and lengths: what goes together in the recipe."""

from dapo_megatron.machine import has_gpu
from dapo_megatron.validation.report import Report


def check_sampling(report: Report) -> None:
    c = report.config
    if c.sampling.samples_per_prompt < 2:
        report.add(
            "sampling.samples_per_prompt",
            "a group of one has no advantage (its reward is its mean) and is never informative; use 2 or more",
        )
    for name, off in (("rollout.top_p", 1.0), ("rollout.top_k", -1)):
        if report.value(name) != off:
            report.add(
                name,
                f"training needs {off:g}: truncation renormalises, so the trainer's log-probs would belong to another "
                "distribution than the one that was sampled and the ratio would be wrong (eval.top_p is free)",
            )
    if c.optimizer.prompts_per_minibatch > c.sampling.prompts_per_step:
        report.add(
            "optimizer.prompts_per_minibatch",
            f"must be at most sampling.prompts_per_step ({c.sampling.prompts_per_step}): there is no more to train on",
        )
    elif c.sampling.prompts_per_step % c.optimizer.prompts_per_minibatch:
        rest = c.sampling.prompts_per_step % c.optimizer.prompts_per_minibatch
        report.add(
            "optimizer.prompts_per_minibatch",
            f"doesn't divide sampling.prompts_per_step ({c.sampling.prompts_per_step}): the last update of a step sees "
            f"{rest} prompts only",
            "warning",
        )
    elif c.sampling.prompts_per_step == c.optimizer.prompts_per_minibatch:
        report.add(
            "optimizer.prompts_per_minibatch",
            "one update a rollout: the ratio is always 1, so neither clip ever acts",
            "warning",
        )


def check_objective(report: Report) -> None:
    a = report.config.algorithm
    if a.dual_clip != 0 and a.dual_clip <= 1:
        report.add("algorithm.dual_clip", "must be above 1 (10 in the published recipe), or 0 to switch it off")
    if a.clip_high < a.clip_low:
        report.add("algorithm.clip_high", f"below algorithm.clip_low ({a.clip_low:g}): the opposite of clip-higher", "warning")
    if a.aggregation == "constant" and a.advantage == "group_norm":
        report.add("algorithm.aggregation", "Dr. GRPO's constant normalisation goes with advantage=mean_only", "warning")
    r = report.config.reward
    if r.correct <= r.incorrect:
        report.add("reward.correct", f"must be above reward.incorrect ({r.incorrect:g})")


def check_lengths(report: Report) -> None:
    c = report.config
    longest = c.data.max_prompt_tokens + c.rollout.max_response_tokens
    overlong = c.reward.overlong
    if overlong.penalty_factor > 0 and overlong.cache_tokens >= c.rollout.max_response_tokens:
        report.add(
            "rollout.max_response_tokens",
            f"not above reward.overlong.cache_tokens ({overlong.cache_tokens}), so every response would be punished; "
            "raise the limit, shrink the cache, or set reward.overlong.penalty_factor=0",
        )
    if overlong.penalty_factor > 0 and overlong.cache_tokens == 0:
        report.add("reward.overlong.cache_tokens", "must be above 0, or set reward.overlong.penalty_factor=0")
    if c.parallel.max_tokens_per_microbatch < longest:
        report.add(
            "parallel.max_tokens_per_microbatch",
            f"below the longest sequence ({longest} = data.max_prompt_tokens + rollout.max_response_tokens): a longer "
            "sample gets a micro-batch of its own, and memory must suffice for it",
            "warning",
        )
    elif c.parallel.share_prompts and c.parallel.max_tokens_per_microbatch < longest + c.rollout.max_response_tokens:
        report.add(
            "parallel.share_prompts",
            f"a micro-batch of {c.parallel.max_tokens_per_microbatch} tokens (parallel.max_tokens_per_microbatch) doesn't hold "
            f"the longest prompt with two of the longest responses ({longest + c.rollout.max_response_tokens}): such prompts "
            "are packed once for each response",
            "warning",
        )
    ours = c.rollout.engine != "local" and not c.rollout.servers
    if ours and c.rollout.max_total_tokens < longest and not has_gpu():
        report.add(
            "rollout.max_total_tokens",
            f"the server's cache on CPU must hold one whole sequence: at least {longest} (data.max_prompt_tokens + "
            "rollout.max_response_tokens)",
            "machine",
        )
