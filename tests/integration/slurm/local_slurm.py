"""A private Slurm cluster on this machine: a munged, a slurmctld and a slurmd for each "node", all below one folder.

Each slurmd has its own host name and its own /etc/hosts, so that jobs see what they would on real nodes: node1 has the address
127.0.0.11, node2 127.0.0.12. Nothing outside the folder is changed. Needs root and Debian's slurm-wlm and munge.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "sinfo", "unshare")
NUM_NODES, CPUS, GPUS, MEMORY_MB = 2, 4, 4, 8000  # claimed, not there

# munge's credentials are what authenticates; cred_expire also is the wait before a requeued job starts again.
# By default srun listens on any address. NoInAddrAny would bind it to its node's own, which the others don't call back to here.
_CONF = """
ClusterName=test
FirstJobId={first_job}
SlurmctldHost={here}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
PlugStackConfig={folder}/plugstack.conf
CommunicationParameters=NoCtldInAddrAny
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU={memory_per_cpu}
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
JobRequeue=1
ReturnToService=2
KillWait=5
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout=60
GresTypes=gpu
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why there can be none here; "" if there can."""
    if os.geteuid() != 0:
        return "needs root, to give the nodes host names of their own"
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    return f"needs Debian's slurm-wlm and munge ({', '.join(missing)} not found)" if missing else ""


class LocalSlurm:
    """As a context: up and running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Self:
        try:
            self._configure()
            self._start("munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key",
                        f"--seed-file={self.folder}/munge.seed", f"--socket={self.folder}/munge.socket",
                        f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log")  # fmt: skip
            wait_until((self.folder / "munge.socket").exists, "munged's socket")
            self._start("slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
            for name in self._names():
                # the inner shell's hosts file is seen by this node's processes alone
                script = f"hostname {name}; mount --bind {self.folder}/hosts /etc/hosts; exec slurmd -D -N {name}"
                self._start("unshare", "--mount", "--uts", "--propagation", "private", "sh", "-ec", script)
            wait_until(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * NUM_NODES, "the nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if len(self._daemons) == NUM_NODES + 2:
            self.run("scancel", "--user=root")
            wait_until(lambda: not self.run("squeue", "-h"), "the jobs to end")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *command: str, ok: bool = True, cwd: Path | None = None, **environment: str) -> str:
        """Its standard output; what it says on the other if it fails and shall not be `ok`."""
        done = subprocess.run(
            command, env={**self.environment, **environment}, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode == 0) == ok, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout if ok else done.stderr

    def state(self, job: str) -> dict[str, str]:
        """What scontrol tells of a job: JobState, Restarts, ExitCode ..."""
        words = self.run("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, *states: str, timeout_s: float = 400) -> dict[str, str]:
        wait_until(lambda: self.state(job)["JobState"] in states, f"job {job} in {states}", timeout_s)
        return self.state(job)

    def _configure(self) -> None:
        names = self._names()
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        (self.folder / "state").mkdir()
        (self.folder / "plugstack.conf").touch()
        here = socket.gethostname().split(".")[0]
        hosts = [f"127.0.0.1 localhost {here}", *(f"127.0.0.{11 + i} {name}" for i, name in enumerate(names))]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n", encoding="utf-8")
        for number in range(GPUS):  # slurmd wants device files
            os.mknod(self.folder / f"gpu{number}", 0o20666, os.makedev(1, 3))
        gpus = f"File={self.folder}/gpu[0-{GPUS - 1}]"
        (self.folder / "gres.conf").write_text(
            "".join(f"NodeName={name} Name=gpu {gpus}\n" for name in names), encoding="utf-8"
        )
        nodes = [
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.{11 + i} Port={_free_port()} CPUs={CPUS} Boards=1 "
            f"SocketsPerBoard=1 CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEMORY_MB} Gres=gpu:{GPUS} State=UNKNOWN"
            for i, name in enumerate(names)
        ]
        conf = _CONF.format(
            here=here,
            folder=self.folder,
            first_job=random.randrange(1, 10**6),
            port=_free_port(),
            memory_per_cpu=MEMORY_MB // CPUS,
            nodes="\n".join(nodes),
        )
        Path(self.environment["SLURM_CONF"]).write_text(conf, encoding="utf-8")

    def _names(self) -> list[str]:
        return [f"node{i + 1}" for i in range(NUM_NODES)]

    def _start(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))


def wait_until(there: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
