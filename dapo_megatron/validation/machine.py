"""What this machine must offer: a writable run folder, free ports."""

import os
import re
from pathlib import Path

from dapo_megatron.machine import why_not_listenable, why_not_writable
from dapo_megatron.validation.report import Report


def check_run_folder(report: Report) -> None:
    run = report.config.run
    if not re.fullmatch(r"\w[\w.+-]*", run.name):
        report.add("run.name", "names a folder: letters, digits and . _ + - only")
        return
    reason = why_not_writable((Path(run.dir) / run.name).expanduser().absolute())
    if reason:
        report.add("run.dir", f"{reason}; choose another folder", "machine")


def check_ports(report: Report) -> None:
    rollout = report.config.rollout
    if rollout.engine == "local" or rollout.base_port <= 0 or os.environ.get("RAY_ADDRESS"):
        return  # on a cluster the servers' nodes are others
    ports = range(rollout.base_port, rollout.base_port + rollout.num_servers)
    if ports.stop > 65536:
        report.add("rollout.base_port", f"with {rollout.num_servers} servers the ports go over 65535; choose a lower one")
        return
    reason = why_not_listenable(ports)
    if reason:
        report.add("rollout.base_port", f"{reason}; choose another, or 0 for any", "machine")
