"""Ray on the nodes of a Slurm job (slurm/train.sbatch), with ports and files of the job's own.

    python -m dapo_megatron.cluster.slurm_node join FOLDER              on every node: Ray, until the job ends it
    python -m dapo_megatron.cluster.slurm_node run FOLDER COMMAND ...   on the first: COMMAND, once all nodes are there

FOLDER, which all nodes see, is this start of the job's alone: the first node writes its address there. The environment has,
besides Slurm's variables, DAPO_NODES (all names), DAPO_NODE_TMP, DAPO_START_TIMEOUT_S and Ray's token.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from dapo_megatron.addresses import address_towards, free_port, url_host
from dapo_megatron.cluster.placement import NODE_LABEL
from dapo_megatron.cluster.session import NODE_ADDRESS

OBJECT_STORE_BYTES = 8 * 10**9  # batches of token ids and log-probs; Ray's default takes 30% of a node's memory
LOST = 69  # EX_UNAVAILABLE of sysexits.h, as in train.sbatch: a node, or Ray on it, was lost or never came
WEAK = ("127.0.0.1", "127.0.1.1", "::1")  # what many nodes call themselves by, and no other node can reach


def main(argv: Sequence[str]) -> int:
    """The exit code, of `run` only if COMMAND could not be started: LOST, so that the job is queued again."""
    what, folder, *command = argv
    try:
        return join(Path(folder)) if what == "join" else run(Path(folder), command)
    except (RuntimeError, OSError) as error:
        print(f"dapo: {error}", file=sys.stderr)
        return LOST


def join(folder: Path) -> int:
    """Ray's exit code. Its files are gone then."""
    number, name = int(os.environ["SLURM_NODEID"]), os.environ["SLURMD_NODENAME"]
    nodes = os.environ["DAPO_NODES"].split()
    own = own_address(nodes[1 if number == 0 else 0])
    files = Path(os.environ["DAPO_NODE_TMP"]) / f"dapo-ray-{os.environ['SLURM_JOB_ID']}-{number}"
    shutil.rmtree(files, ignore_errors=True)
    if number == 0:
        port = free_port(own)
        where = ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
        where += [f"--ray-client-server-port={free_port(own)}"]  # else the same for all jobs of a node
        new = folder / "address.tmp"
        new.write_text(f"{own} {port}", encoding="utf-8")
        new.rename(folder / "address")
    else:
        head, port = wait_for_head(folder)
        where = [f"--address={url_host(head)}:{port}"]
    memory = min(OBJECT_STORE_BYTES, psutil.virtual_memory().total // 10)
    options = [f"--node-ip-address={own}", f"--node-name={name}", f"--temp-dir={files}", f"--labels={NODE_LABEL}={number}"]
    options += [f"--num-cpus={os.environ['SLURM_CPUS_ON_NODE']}", f"--object-store-memory={memory}", "--disable-usage-stats"]
    options += [f"--dashboard-agent-listen-port={free_port(own)}", "--include-log-monitor=false"]
    options += ["--min-worker-port=0", "--max-worker-port=0"]  # any free ones; by default all jobs' are of the same range
    options += [f"--num-gpus={gpus}"] if (gpus := os.environ.get("SLURM_GPUS_ON_NODE")) else []
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where, *options]
    ended = []
    process = subprocess.Popen(command)

    def end(*_: object) -> None:
        ended.append(True)
        process.kill()  # and the kernel all of Ray with it. Asked to end, it would wait half a minute for work that is over

    signal.signal(signal.SIGTERM, end)  # of a job that is cancelled
    signal.signal(signal.SIGUSR1, end)  # of one that is done: at SIGTERM srun would kill this process too
    try:
        code = process.wait()
    finally:
        shutil.rmtree(files, ignore_errors=True)
    return 0 if ended else code or 1  # it isn't supposed to end by itself


def own_address(other: str) -> str:
    """Of this node, for others: what its name stands for, or, where that is loopback, the address it reaches `other` from."""
    addresses = [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    useful = [str(address) for address in addresses if address not in WEAK]
    if useful:
        return min(useful, key=lambda address: ":" in address)  # IPv4 first
    return address_towards(other)


def wait_for_head(folder: Path) -> tuple[str, int]:
    """Address and port of the first node's Ray, which listens there. RuntimeError if it takes too long."""
    file = folder / "address"

    def listens() -> tuple[str, int] | None:
        if not file.exists():
            return None
        host, port = file.read_text(encoding="utf-8").split()
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError:
            return None
        return host, int(port)

    return wait_for(listens, lambda: f"Ray on the job's first node ({os.environ['DAPO_NODES'].split()[0]}) doesn't answer")


def wait_for(there: Callable[[], Any], problem: Callable[[], str]) -> Any:
    """What `there` gives as soon as it isn't None. RuntimeError with `problem` after DAPO_START_TIMEOUT_S."""
    limit_s = float(os.environ["DAPO_START_TIMEOUT_S"])
    deadline = time.monotonic() + limit_s
    while (found := there()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{problem()} after {limit_s:.0f} s (DAPO_START_TIMEOUT_S)")
        time.sleep(0.5)
    return found


def run(folder: Path, command: list[str]) -> int:
    """Becomes COMMAND. RuntimeError names the nodes that didn't come."""
    host, port = wait_for_head(folder)
    os.environ["RAY_ADDRESS"], os.environ[NODE_ADDRESS] = f"{url_host(host)}:{port}", host
    wait_for_nodes(os.environ["DAPO_NODES"].split(), int(os.environ.get("SLURM_GPUS_ON_NODE") or 0))
    sys.stdout.flush()
    os.execvp(command[0], command)


def wait_for_nodes(names: Sequence[str], gpus_per_node: int) -> None:
    """Until all these nodes are in Ray with all their GPUs."""
    import ray

    from dapo_megatron.cluster.session import ray_session

    def gpus() -> dict[str, float]:
        return {node["NodeName"]: node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]}

    def missing() -> str:
        there = gpus()
        return ", ".join(
            f"{name} ({there[name]:g} of {gpus_per_node} GPUs)" if name in there else name
            for name in names
            if there.get(name, -1) < gpus_per_node
        )

    with ray_session(hide_gpus=False):
        wait_for(
            lambda: None if missing() else True,
            lambda: f"Ray has not come up on {missing()}; see ray-NODE.log in the job's logs and the node's state: not there",
        )
        print("Ray is up:", ", ".join(f"{name} ({number:g} GPUs)" for name, number in gpus().items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
