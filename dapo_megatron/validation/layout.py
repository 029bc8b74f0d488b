"""Ranks, servers and nodes, and whether the model can be split that way."""

from dapo_megatron.config import RECOMPUTE_MODULES
from dapo_megatron.model_sizes import FAMILIES, ModelSizes, find_weights, read_sizes
from dapo_megatron.validation.ranges import DIVISORS
from dapo_megatron.validation.report import Report


def check_layout(report: Report) -> None:
    c = report.config
    p, per_node = c.parallel, c.cluster.gpus_per_node
    if p.sequence_parallel and p.tp == 1:
        report.add("parallel.sequence_parallel", "needs parallel.tp > 1: it splits sequences over the tensor-parallel ranks")
    if p.vpp > 1 and p.pp == 1:
        report.add("parallel.vpp", "needs parallel.pp > 1: it cuts pipeline stages into chunks")
    if (p.tp * p.cp * p.dp) % p.ep or (p.ep % p.tp and p.tp % p.ep):
        report.add(
            "parallel.ep",
            f"must divide tp x cp x dp = {p.tp * p.cp * p.dp}, whose ranks the experts are spread over, and be a multiple or a "
            f"divisor of tp ({p.tp})",
        )
    odd = [module for module in p.recompute_modules if module not in RECOMPUTE_MODULES]
    if odd or not p.recompute_modules:
        report.add("parallel.recompute_modules", f"must name at least one of {', '.join(RECOMPUTE_MODULES)} and nothing else")
    if p.max_tokens_per_microbatch < p.microbatch_multiple:
        report.add(
            "parallel.max_tokens_per_microbatch",
            f"must be at least {p.microbatch_multiple}: with this tp and cp a micro-batch's length is a multiple of that",
        )
    for name, tp in (("parallel.tp", p.tp), ("rollout.tp", c.rollout.tp)):
        if tp > per_node or (c.world_size > per_node and per_node % tp):
            report.add(name, f"must divide cluster.gpus_per_node ({per_node}): a tensor-parallel group stays within a node")
    if c.world_size > per_node and c.world_size % per_node:
        report.add(
            "parallel.dp",
            f"the world size tp x pp x cp x dp = {p.tp} x {p.pp} x {p.cp} x {p.dp} = {c.world_size} doesn't factor into whole "
            f"nodes of {per_node} (cluster.gpus_per_node); use a multiple of {per_node}",
        )
    if c.sampling.samples_per_prompt * c.optimizer.prompts_per_minibatch < p.dp:
        report.add("parallel.dp", "more data-parallel ranks than responses in a mini-batch; some would have nothing to do")
    servers = c.rollout.num_servers * c.rollout.tp
    if c.cluster.colocate and servers > c.world_size:
        report.add(
            "rollout.num_servers",
            f"the servers need {servers} GPUs (num_servers x rollout.tp), but cluster.colocate shares the trainer's "
            f"{c.world_size}; use fewer servers",
        )


def check_model(report: Report) -> None:
    c = report.config
    if not c.model.path:
        report.add("model.path", "is required: an HF folder, a .gguf file, a hub id, package:NAME, or random")
        return
    if c.model.random_model and c.model.path != "random":
        report.add("model.random_model", "is only read with model.path=random; remove it")
    try:
        find_weights(c.model)
    except ValueError as error:
        report.add("model.path", str(error), "machine")
        return
    try:
        sizes = read_sizes(c.model)
    except (ValueError, OSError) as error:
        report.add("model.path", str(error))
        return
    if sizes is None:
        report.add("model.path", "taken for a hub id, as there is no such folder here; its sizes aren't checked", "warning")
        return
    if sizes.family not in FAMILIES:
        report.add("model.path", f"unknown model family {sizes.family!r}; the policy builds {', '.join(FAMILIES)}")
    elif all(report.value(name) >= 1 for name in DIVISORS):
        _model_fits(report, sizes)


def _model_fits(report: Report, sizes: ModelSizes) -> None:
    c = report.config
    splits = (
        ("parallel.tp", "attention heads", sizes.num_heads),
        ("parallel.tp", "query groups (key-value heads)", sizes.num_query_groups),
        ("parallel.tp", "feed-forward rows", 0 if sizes.num_experts else sizes.ffn_size),  # experts aren't split
        ("parallel.ep", "experts", sizes.num_experts),
        ("parallel.pp", "layers", sizes.num_layers),
        ("parallel.vpp", "layers of a pipeline stage", sizes.num_layers // c.parallel.pp),
        ("parallel.pp", "layers that audit.num_layers leaves", c.audit.num_layers),
        ("parallel.vpp", "layers of a pipeline stage that audit.num_layers leaves", c.audit.num_layers // c.parallel.pp),
        ("rollout.tp", "attention heads", sizes.num_heads),
    )
    for name, what, number in splits:
        if number % report.value(name):
            options = [str(n) for n in range(1, min(number, 64) + 1) if number % n == 0]
            report.add(name, f"doesn't divide the model's {number} {what}; possible: {', '.join(options)}")
    if c.parallel.ep > 1 and not sizes.num_experts:
        report.add("parallel.ep", "the model has no experts to spread; use 1")
    if sizes.num_experts and c.rollout.engine == "vllm":
        report.add("rollout.engine", "experts can't be published to vLLM's servers yet; use sglang for a model with experts")
    if sizes.num_experts and c.parallel.tp > 1 and not c.parallel.sequence_parallel:
        report.add(
            "parallel.sequence_parallel", "must be true: with experts, tensor-parallel ranks each route their own tokens"
        )
    if c.audit.num_layers > sizes.num_layers:
        report.add("audit.num_layers", f"the model has {sizes.num_layers} layers; use fewer, or 0 for all")
    if 0 < sizes.max_positions < c.audit.max_tokens:
        report.add("audit.max_tokens", f"is more than the model's context of {sizes.max_positions} tokens")
    longest = c.data.max_prompt_tokens + c.rollout.max_response_tokens
    if 0 < sizes.max_positions < longest:
        report.add(
            "rollout.max_response_tokens",
            f"with data.max_prompt_tokens ({c.data.max_prompt_tokens}) a sequence can have {longest} tokens, but the "
            f"model's context is {sizes.max_positions}",
        )
