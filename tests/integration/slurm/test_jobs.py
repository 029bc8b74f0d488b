"""slurm/*.sbatch as real jobs, on a Slurm of two nodes: real Ray over both, real ranks, gloo between them."""

import contextlib
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from dapo_megatron.telemetry.metrics import read_metrics
from tests.conftest import ROOT
from tests.integration.cli_run import assert_same_run, command_lines, marked
from tests.integration.slurm.local_slurm import LocalSlurm, wait_until

pytestmark = pytest.mark.slow
TINY = str(ROOT / "configs/tiny_cpu.yaml")
FILES = sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch"))
# One rank a node. Groups in flight are carried into the next step, so that a stop has something to lose.
LOCAL = (
    "rollout.engine=local",
    "parallel.tp=1",
    "parallel.sequence_parallel=false",
    "sampling.prompts_per_step=4",
    "sampling.samples_per_prompt=2",
    "sampling.surplus=carry",
    "rollout.max_inflight_groups=4",
    "optimizer.prompts_per_minibatch=2",
)
# After 30 steps of the configuration's learning rate no group is informative any more.
TWO_NODES = (*LOCAL, "parallel.dp=2", "cluster.gpus_per_node=1", "optimizer.lr=1e-4")


class Jobs:
    """Submits from a folder of its own. All processes of its jobs carry a mark in their environment."""

    def __init__(self, slurm: LocalSlurm, folder: Path) -> None:
        self.slurm, self.folder, self.mark = slurm, folder, uuid.uuid4().hex
        self.environment = {"DAPO_DIR": str(ROOT), "DAPO_PYTHON": sys.executable, "DAPO_TEST_MARK": self.mark}

    def sbatch(self, file: str, *words: str) -> str:
        options = [word for word in words if word.startswith("--")]
        arguments = [word for word in words if not word.startswith("--")]
        script = str(ROOT / "slurm" / file)
        return self._number(["sbatch", "--cpus-per-task=2", *options, script, *arguments])

    def dapo_submit(self, *words: str) -> str:
        return self._number([sys.executable, "-m", "dapo_megatron.cli", "submit", *words])

    def _number(self, command: list[str]) -> str:
        said = self.slurm.run(*command, cwd=self.folder, **self.environment)
        found = re.search(r"[Jj]ob (\d+)", said)
        assert found, said
        return found[1]

    def output(self, job: str) -> str:
        return "".join(path.read_text(errors="replace") for path in self.folder.glob(f"slurm*-{job}*.out"))

    def finished(self, job: str, state: str = "COMPLETED", code: str = "0:0") -> str:
        """The output, when the job has ended this way. None of its processes and of Ray's files is left then."""
        ended = self.slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        assert (ended["JobState"], ended["ExitCode"]) == (state, code), self.everything(job)
        wait_until(lambda: not self.processes(job), f"{command_lines(self.mark)} to end")
        assert not list(Path("/tmp").glob(f"dapo-ray-{job}-*"))
        return self.output(job)

    def everything(self, job: str) -> str:
        logs = [*self.folder.glob(f"slurm-logs/{job}/*.log"), *self.folder.glob("runs/*/logs/*.log")]
        return self.output(job) + "".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}\n" for path in logs)

    def processes(self, job: str, node: int | None = None, command: str = "") -> list[psutil.Process]:
        """Of a job, on one of its nodes or all, whose command line has `command` in it."""
        found = []
        for process in marked(self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                environment, words = process.environ(), " ".join(process.cmdline())
                there = node in (None, int(environment.get("SLURM_NODEID", -1)))
                if environment.get("SLURM_JOB_ID") == job and there and command in words:
                    found.append(process)
        return found

    def kill(self, job: str, node: int) -> None:
        """SIGKILL for all that the job has on a node: ranks, engines, Ray."""
        found = self.processes(job, node)
        assert any("TrainerRank" in " ".join(process.cmdline()) for process in found), command_lines(self.mark)
        for process in found:
            process.kill()

    def wait_for_step(self, job: str, name: str, step: int) -> None:
        metrics = self.folder / "runs" / name / "metrics.jsonl"

        def there() -> bool:
            assert self.slurm.state(job)["JobState"] in ("PENDING", "RUNNING", "COMPLETING"), self.everything(job)
            return any(row["step"] >= step for row in read_metrics(metrics))

        wait_until(there, f"step {step} of {name}", timeout_s=300)

    def wait_for_restart(self, job: str, number: int) -> None:
        wait_until(lambda: int(self.slurm.state(job)["Restarts"]) >= number, f"job {job} to be queued again", timeout_s=200)


@pytest.fixture
def jobs(slurm: LocalSlurm, tmp_path: Path) -> Jobs:
    return Jobs(slurm, tmp_path)


@pytest.mark.parametrize("file", FILES)
def test_the_file_is_sound(slurm: LocalSlurm, file: str) -> None:
    path = str(ROOT / "slurm" / file)
    slurm.run("bash", "-n", path)
    slurm.run("shellcheck", "--external-sources", path, cwd=ROOT / "slurm")
    few = ("--nodes=1", "--gpus-per-node=1", "--mem=1G", "--cpus-per-task=1")  # what this cluster has
    slurm.run("sbatch", "--test-only", *few, path, TINY)


def test_trains_over_two_nodes(jobs: Jobs) -> None:
    """2 x 2 ranks and an SGLang server; two of four GPUs of each node."""
    settings = ("parallel.dp=2", "cluster.gpus_per_node=2", "run.steps=2")
    job = jobs.dapo_submit(TINY, "--nodes", "2", "--sbatch", "--gres=gpu:2 --cpus-per-task=2", *settings)
    output = jobs.finished(job)
    assert "Ray is up: node1 (2 GPUs), node2 (2 GPUs)" in output
    where = dict(re.findall(r"^(node\d) +(\S.*)$", output, re.MULTILINE))
    assert where["node1"].startswith("ranks 0-1") and where["node2"].startswith("ranks 2-3"), output
    assert sorted(text.count("server 0") for text in where.values()) == [0, 1]
    rows = read_metrics(jobs.folder / "runs/tiny_cpu/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert [row.get("time/startup_s", 0) > 1 for row in rows] == [True, False]
    assert rows[0]["sync/logprob_diff_max"] < 1e-4


JOIN = """
import os, sys, ray
ray.init(address=sys.argv[1], _node_ip_address="127.0.0.11", log_to_driver=False)
print("joined", file=sys.stderr, flush=True)
os._exit(0)
"""


def can_join(address: str, token: str) -> bool:
    """A Ray with this token. One that refuses would be asked again for 20 seconds."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    process = subprocess.Popen([sys.executable, "-c", JOIN, address], env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = next(line for line in process.stderr if line.strip() == "joined" or "InvalidAuthToken" in line)
    process.kill()
    process.communicate()
    return said.strip() == "joined"


def test_two_jobs_at_once_are_stopped_and_lose_nodes_and_nothing_else(jobs: Jobs) -> None:
    """On the same nodes, neither in reach of the other's Ray. Stopped and killed at different moments they end alike, bit for
    bit."""
    settings = (*TWO_NODES, "run.steps=60", "checkpoint.export_hf=true")
    one = jobs.sbatch("train.sbatch", "--nodes=2", TINY, *settings, "run.name=one", "checkpoint.every=0")
    other = jobs.sbatch("train.sbatch", "--nodes=2", TINY, *settings, "run.name=other", "checkpoint.every=1")
    jobs.wait_for_step(one, "one", 3)
    tokens = [jobs.processes(job, 0, "slurm_node join")[0].environ()["RAY_AUTH_TOKEN"] for job in (one, other)]
    jobs.slurm.run("scancel", "--signal=USR1", "--batch", one)
    jobs.wait_for_step(other, "other", 3)
    address = ":".join((jobs.folder / "slurm-logs" / other / "ray-0" / "address").read_text().split())
    assert [can_join(address, token) for token in tokens] == [False, True]
    jobs.kill(other, 1)
    jobs.wait_for_restart(one, 1)
    jobs.wait_for_restart(other, 1)
    stopped_at = len(read_metrics(jobs.folder / "runs/one/metrics.jsonl"))
    assert [path.name for path in jobs.folder.glob("runs/one/checkpoints/*")] == [f"step_{stopped_at:06d}"]

    assert f"stopped after step {stopped_at} as asked to" in jobs.finished(one)
    said = jobs.finished(other)
    assert "Ray has ended on a node" in said and "dapo: trainer rank(s)" in said and "started again the run goes on" in said
    rows = read_metrics(jobs.folder / "runs/one/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert_same_run(jobs.folder / "runs/one", jobs.folder / "runs/other")


def test_a_cancelled_job_leaves_nothing(jobs: Jobs) -> None:
    job = jobs.sbatch("train.sbatch", "--nodes=2", TINY, *TWO_NODES)
    wait_until(lambda: jobs.processes(job, 1, "raylet"), "Ray on the second node", timeout_s=200)
    jobs.slurm.run("scancel", job)
    jobs.finished(job, "CANCELLED", "0:15")


def test_a_job_whose_nodes_never_come_is_not_queued_for_ever(jobs: Jobs) -> None:
    jobs.environment |= {"DAPO_START_TIMEOUT_S": "0.1", "DAPO_MAX_LOST": "1"}
    job = jobs.sbatch("train.sbatch", "--nodes=2", TINY, *TWO_NODES)
    output = jobs.finished(job, "FAILED", "1:0")
    assert jobs.slurm.state(job)["Restarts"] == "1" and output.count("back into the queue") == 1
    assert "Ray on the job's first node (node1) doesn't answer after 0 s (DAPO_START_TIMEOUT_S)" in output
    assert "lost 2 times without getting further (DAPO_MAX_LOST=1): not queued again" in output


def test_a_users_mistake_is_not_queued_again(jobs: Jobs) -> None:
    job = jobs.sbatch("train.sbatch", "--nodes=1", TINY, "parallel.tp=3")
    output = jobs.finished(job, "FAILED", "2:0")
    assert "parallel.tp" in output and "nothing was started" in output and "back into the queue" not in output
    assert jobs.slurm.state(job)["Restarts"] == "0"


def test_a_sweep_its_table_and_what_comes_after_it(jobs: Jobs) -> None:
    (jobs.folder / "lr.txt").write_text("low: optimizer.lr=1e-4\nhigh: optimizer.lr=3e-3  # as it is\n")
    few_prompts = ("eval.prompts=4", "eval.samples=2")
    settings = (*LOCAL, *few_prompts, "cluster.gpus_per_node=2", "run.steps=2", "eval.every=0")
    job = jobs.dapo_submit(TINY, "--sweep", "lr.txt", "--sbatch", "--cpus-per-task=2", *settings)
    for task in (1, 2):
        jobs.finished(f"{job}_{task}")
    table = (jobs.folder / "runs/tiny_cpu_sweep.md").read_text()
    assert re.search(r"\| tiny_cpu_low +\| +2 of 2 ", table) and re.search(r"\| tiny_cpu_high +\| +2 of 2 ", table), table

    few = ("--mem=2G", "--nodes=1")
    job = jobs.sbatch("convert.sbatch", *few, "megatron-to-hf", "runs/tiny_cpu_low", "model")
    jobs.finished(job)
    job = jobs.sbatch(
        "eval.sbatch", *few, "--gpus-per-node=1", TINY, *LOCAL, *few_prompts, "model.path=model", "model.random_model={}"
    )
    assert re.search(r"^eval/avg_at_k +0\.", jobs.finished(job), re.MULTILINE)


def test_a_script_that_is_no_job_says_so() -> None:
    done = subprocess.run(["bash", str(ROOT / "slurm/train.sbatch"), TINY], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "start it by sbatch, or use dapo submit" in done.stderr
