"""Which engine goes with which settings, and what of the old policy."""

import os
import re
from pathlib import Path

from dapo_megatron.validation.report import Report


def check_rollout(report: Report) -> None:
    c, r = report.config, report.config.rollout
    if r.max_staleness not in (0, 1):
        report.add("rollout.max_staleness", "must be 0 (on policy) or 1 (the next batch is sampled while this one trains)")
    if r.engine == "local":
        _local(report)
    elif r.servers:
        _others_servers(report)
    if r.python and r.engine != "local" and not os.access(Path(r.python).expanduser(), os.X_OK):
        report.add("rollout.python", "there is no such program; give an interpreter's path, or nothing for this one", "machine")
    if c.cluster.colocate and r.engine == "vllm":
        report.add("cluster.colocate", "works with SGLang's servers only; give vLLM's servers GPUs of their own: false")
    if c.cluster.colocate and r.max_staleness:
        report.add(
            "rollout.max_staleness", "must be 0 with cluster.colocate: nothing is sampled while the trainer has the memory"
        )
    if c.publish.pause != "drain" and r.engine == "local":
        report.add("publish.pause", "the local engine's requests always finish before a publish; use drain")
    elif c.publish.pause != "drain" and r.max_staleness == 0:
        report.add("publish.pause", "never acts: with rollout.max_staleness=0 nothing is in flight at a publish", "warning")
    a = c.algorithm
    if a.importance_cap and a.old_logprobs == "engine":
        report.add(
            "algorithm.importance_cap",
            "needs algorithm.old_logprobs=trainer: the weights compare the trainer's log-probs with the engine's",
        )


def _local(report: Report) -> None:
    r = report.config.rollout
    if r.num_servers > 1 or r.tp > 1:
        report.add("rollout.num_servers", "the local engine is one process: num_servers and rollout.tp must be 1")
    for name, value in (("server_args", r.server_args), ("servers", r.servers), ("python", r.python)):
        if value:
            report.add(f"rollout.{name}", "the local engine has no server; remove it")


def _others_servers(report: Report) -> None:
    r = report.config.rollout
    for url in r.servers:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            report.add("rollout.servers", f"{url!r} is no address; write http://host:port")
    if len(set(r.servers)) < len(r.servers):
        report.add("rollout.servers", "names a server twice; every one has weights of its own")
    if r.num_servers not in (1, len(r.servers)):
        report.add("rollout.num_servers", f"rollout.servers names {len(r.servers)} servers; leave num_servers out")
    for name, value in (("server_args", r.server_args), ("python", r.python), ("base_port", r.base_port)):
        if value:
            report.add(f"rollout.{name}", "is for servers that this run starts, and rollout.servers names others; remove it")
    if report.config.cluster.colocate:
        report.add("cluster.colocate", "servers that others started can't share the trainer's GPUs; use false")
