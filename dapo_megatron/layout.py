"""Which process does what and where: computed from the configuration alone, printed by --dry-run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dapo_megatron.config import Config, ParallelConfig


@dataclass(frozen=True)
class RankPlace:
    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    node: int
    gpu: int  # within the node


@dataclass(frozen=True)
class ServerPlace:
    server: int
    node: int
    gpus: tuple[int, ...]
    port: int  # 0: any free one


def rank_places(config: Config) -> list[RankPlace]:
    """All Megatron ranks. Megatron counts tensor-parallel ranks fastest, then context-, then data-parallel, then stages."""
    p, per_node = config.parallel, config.cluster.gpus_per_node
    return [
        RankPlace(
            rank=rank,
            tp=rank % p.tp,
            cp=rank // p.tp % p.cp,
            dp=rank // (p.tp * p.cp) % p.dp,
            pp=rank // (p.tp * p.cp * p.dp),
            node=rank // per_node,
            gpu=rank % per_node,
        )
        for rank in range(config.world_size)
    ]


def num_started_servers(config: Config) -> int:
    """Servers that the run starts: none for the local engine, nor where others' are used."""
    r = config.rollout
    return 0 if r.engine == "local" or r.servers else r.num_servers


def server_places(config: Config) -> list[ServerPlace]:
    """All rollout servers that the run starts: on the trainer's GPUs if colocated, else on those after them; none is split over
    nodes."""
    r, per_node = config.rollout, config.cluster.gpus_per_node
    places = []
    slot = 0 if config.cluster.colocate else config.world_size
    for server in range(num_started_servers(config)):
        if r.tp <= per_node and slot % per_node + r.tp > per_node:
            slot = math.ceil(slot / per_node) * per_node
        gpus = tuple((slot + i) % per_node for i in range(r.tp))
        places.append(ServerPlace(server, slot // per_node, gpus, r.base_port + server if r.base_port else 0))
        slot += r.tp
    return places


def ranks_under_servers(config: Config) -> list[tuple[int, ...]]:
    """With colocated servers: for each, the trainer rank on the GPU of each of its tensor-parallel ranks, in their order."""
    on = {(place.node, place.gpu): place.rank for place in rank_places(config)}
    return [tuple(on[place.node, gpu] for gpu in place.gpus) for place in server_places(config)]


def sizes_text(parallel: ParallelConfig) -> str:
    """For example "tp 2 x pp 2 x dp 1, sequence parallel": what is not in use is left out, but for tp, pp and dp."""
    p = parallel
    sizes = [f"tp {p.tp}", f"pp {p.pp}", *([f"cp {p.cp}"] if p.cp > 1 else []), f"dp {p.dp}"]
    extras = [f"experts over {p.ep} ranks"] * (p.ep > 1) + [f"{p.vpp} model chunks a stage"] * (p.vpp > 1)
    extras += ["sequence parallel"] * p.sequence_parallel + ["prompts shared"] * p.share_prompts
    return ", ".join([" x ".join(sizes), *extras])


def sharing_text(config: Config, mean_prompt_tokens: float) -> str:
    """What parallel.share_prompts saves on such prompts, for responses of the longest and of a quarter of that length; "" where
    it is off and would save less than a tenth of the tokens even of short responses."""
    longest = config.rollout.max_response_tokens
    quarter = max(1, longest // 4)
    short, long = (_shared_part(config, mean_prompt_tokens, length) for length in (quarter, longest))
    if not config.parallel.share_prompts and short < 0.1:
        return ""
    off = "" if config.parallel.share_prompts else "off; with parallel.share_prompts=true "
    return (
        f"{off}{mean_prompt_tokens:.0f} tokens of a prompt are packed once for up to {config.sampling.samples_per_prompt} "
        f"responses: {short:.0%} fewer tokens with responses of {quarter}, {long:.0%} with {longest}"
    )


def _shared_part(config: Config, prompt: float, response: int) -> float:
    """Of a group's packed tokens, the part that sharing its prompt saves. A response's last token isn't packed."""
    samples, budget = config.sampling.samples_per_prompt, config.parallel.max_tokens_per_microbatch
    fitting = max(1, int((budget - prompt) // max(response - 1, 1)))  # responses beside their prompt in a micro-batch
    num_prompts = math.ceil(samples / fitting)
    return (samples - num_prompts) * prompt / (samples * (prompt + response - 1))


def layout_text(config: Config) -> str:
    """The process layout for people. Node and GPU numbers hold on GPUs; on CPU all processes share one machine."""
    c, p, s = config, config.parallel, config.sampling
    ranks, servers = rank_places(c), server_places(c)
    nodes = 1 + max([r.node for r in ranks] + [s.node for s in servers])
    lines = [f"Trainer: {len(ranks)} Megatron ranks = {sizes_text(p)}"]
    lines += [f"  {'rank':>5} {'tp':>3} {'pp':>3} {'cp':>3} {'dp':>3} {'node':>5} {'gpu':>4}"]
    lines += [f"  {r.rank:>5} {r.tp:>3} {r.pp:>3} {r.cp:>3} {r.dp:>3} {r.node:>5} {r.gpu:>4}" for r in ranks]
    lines += [f"Rollout: {rollout_text(c)}"]
    lines += [f"  {'server':>6} {'node':>5} {'gpus':>8} {'port':>6}"] if servers else []
    lines += [f"  {x.server:>6} {x.node:>5} {spans(x.gpus):>8} {x.port or 'any':>6}" for x in servers]
    lines += [f"Reward: {c.reward.num_workers} worker(s), verifier {c.reward.verifier}"]
    lines += [f"Nodes: {nodes} with {c.cluster.gpus_per_node} GPUs each; without GPUs all run on one machine's cores"]
    responses = s.prompts_per_step * s.samples_per_prompt
    updates = math.ceil(s.prompts_per_step / c.optimizer.prompts_per_minibatch)
    per_update = c.optimizer.prompts_per_minibatch * s.samples_per_prompt
    lines += [f"A step: {s.prompts_per_step} prompts x {s.samples_per_prompt} samples = {responses} responses to train on"]
    if s.dynamic:
        budget = int(s.max_groups_factor * s.prompts_per_step)
        lines += [f"  dynamic sampling: until the batch is full, at most {budget} groups"]
    lines += [f"  {updates} update(s) of {per_update} responses, {per_update / p.dp:g} for each data-parallel rank"]
    lines += [f"The run: {c.run.steps} steps, {c.run.steps * updates} updates"]
    return "\n".join(lines)


def rollout_text(config: Config) -> str:
    """Which engines, and on what."""
    r = config.rollout
    if r.engine == "local":
        return "the local engine, on CPU"
    if r.servers:
        return f"{len(r.servers)} {r.engine} server(s) that others started"
    if config.cluster.device == "cpu":
        where = "on the same cores"
    else:
        where = "on the trainer's GPUs" if config.cluster.colocate else "on GPUs of their own"
    return f"{r.num_servers} {r.engine} server(s), tp {r.tp}, {where}"


def spans(numbers: Sequence[int]) -> str:
    """In their order, neighbours as ranges: "0-3,7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
