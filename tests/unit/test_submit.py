"""`dapo submit` up to the call of sbatch, in whose place a program stands that records its arguments."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dapo_megatron.cli import main
from dapo_megatron.config_io import ConfigError, load_config
from dapo_megatron.submit import Allocation, allocation, placement_text, slurm_home
from tests.unit.test_config import ROOT, TINY, tiny, write

TRAIN, SWEEP = str(ROOT / "slurm" / "train.sbatch"), str(ROOT / "slurm" / "sweep.sbatch")
SBATCH = """#!/bin/sh
printf '%s\\0' "DAPO_DIR=$DAPO_DIR" "DAPO_PYTHON=$DAPO_PYTHON" sbatch "$@" > "$0.call"
cat "$0.out"; cat "$0.err" >&2; exit $(cat "$0.code")
"""
SCONTROL = """#!/bin/sh
case $* in
"show job 4711") printf 'JobId=4711\\n   StdErr=/else where/err\\n   StdOut=/else where/slurm-4711.out\\n' ;;
"show job 4720") printf 'JobId=4720 ArrayJobId=4720\\n   StdOut=/slurm-4720_4294967294.out\\n' ;;
*) exit 1 ;;
esac
"""
# 8 ranks, and 2 servers on the third
THREE_NODES = ("cluster.device=auto", "parallel.dp=4", "rollout.num_servers=2", "cluster.gpus_per_node=4")


@dataclass
class FakeSlurm:
    """sbatch and scontrol in the one folder of PATH."""

    folder: Path

    def answers(self, out: str = "Submitted batch job 4711\n", err: str = "", code: int = 0) -> None:
        for kind, content in (("out", out), ("err", err), ("code", str(code))):
            (self.folder / f"sbatch.{kind}").write_text(content)

    def call(self) -> list[str]:
        """Variables, program and arguments of the one call since the last look; [] if there was none."""
        record = self.folder / "sbatch.call"
        if not record.exists():
            return []
        words = record.read_text().split("\0")[:-1]
        record.unlink()
        return words


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "bin"
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
        write(folder, name, text).chmod(0o755)
    (folder / "cat").symlink_to("/bin/cat")
    monkeypatch.setenv("PATH", str(folder))
    for name in ("DAPO_PYTHON", "DAPO_CONTAINER_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "executable", "/envs/my env/bin/python3")
    fake = FakeSlurm(folder)
    fake.answers()
    return fake


def submit(tmp_path: Path, *words: str, config: Path = TINY) -> int:
    return main(["submit", str(config), f"run.dir={tmp_path}/runs", *words])


def printed(out: str) -> str:
    """The one line with the command."""
    [line] = [line for line in out.splitlines() if line.startswith("DAPO_DIR=")]
    return line


def test_the_printed_line_does_what_submit_does(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with names and values that a shell would take apart."""
    write(tmp_path, "odd dir/it's $HOME.yaml", f"base: {TINY}\n")
    monkeypatch.chdir(tmp_path)
    template = "data.template=$(echo \"a\\b\") *{prompt}; 'c'"
    options = "--comment='two words' -p gpu"
    assert submit(tmp_path, template, "--sbatch", options, config=Path("odd dir/it's $HOME.yaml")) == 0
    called = slurm.call()
    assert called == [
        f"DAPO_DIR={ROOT}",
        "DAPO_PYTHON=/envs/my env/bin/python3",
        "sbatch",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--job-name=tiny_cpu",
        "--comment=two words",
        "-p",
        "gpu",
        TRAIN,
        "odd dir/it's $HOME.yaml",
        f"run.dir={tmp_path}/runs",
        template,
    ]
    line = printed(capsys.readouterr().out)
    subprocess.run(["/bin/bash", "-c", line], check=True, stdout=subprocess.DEVNULL)
    assert slurm.call() == called


def test_the_jobs_interpreter_is_this_one_unless_another_is_named(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("DAPO_PYTHON", "python3"), ("DAPO_CONTAINER_IMAGE", "dapo.sqsh")):
        monkeypatch.setenv(name, value)
        assert submit(tmp_path) == 0
        assert " DAPO_PYTHON=" not in capsys.readouterr().out
        assert slurm.call()[1] == f"DAPO_PYTHON={os.environ.get('DAPO_PYTHON', '')}"
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv" / "bin" / "python"))  # train.sbatch takes that by itself
    assert submit(tmp_path) == 0
    assert " DAPO_PYTHON=" not in capsys.readouterr().out


def test_on_gpus_they_are_asked_for(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "qwen2.5_32b_dapo_math.yaml")
    command = ["sbatch", "--nodes=16", "--ntasks-per-node=1", "--gpus-per-node=8", "--job-name=qwen2.5_32b_dapo_math"]
    assert main(["submit", config, "--nodes", "16", "run.steps=5", "--sbatch", "--time=1-0", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert shlex.split(printed(out))[2:] == [*command, "--time=1-0", TRAIN, config, "run.steps=5"]
    assert out.startswith(
        "Placement on 16 nodes of 8 GPUs:\n"
        "  trainer  nodes 0-7: 64 ranks, tp 8 x pp 2 x dp 4, sequence parallel\n"
        "  rollout  nodes 8-15: 16 sglang server(s), tp 4, on GPUs of their own\nDAPO_DIR="
    )
    assert slurm.call() == []


def test_fewer_gpus_than_the_configuration_says(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(tmp_path, "cluster.device=auto", "--gpus-per-node", "2", "run.steps=5") == 0
    called = slurm.call()
    assert called[3:6] == ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2"]
    assert called[-2:] == ["run.steps=5", "cluster.gpus_per_node=2"]
    assert "  idle     1 GPU\n" in capsys.readouterr().out
    assert submit(tmp_path, "--gpus-per-node", "0") == 2
    assert "cluster.gpus_per_node = 0: must be at least 1" in capsys.readouterr().err and slurm.call() == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), Allocation(1, 8, False)),
        (("cluster.device=auto",), Allocation(1, 8, True)),
        (THREE_NODES, Allocation(3, 4, True)),
        ((*THREE_NODES, "cluster.device=cpu"), Allocation(2, 4, False)),
        ((*THREE_NODES, "cluster.colocate=true"), Allocation(2, 4, True)),
        ((*THREE_NODES, "rollout.engine=local"), Allocation(2, 4, True)),
        ((*THREE_NODES, "rollout.servers=['http://a:1','http://b:1']"), Allocation(2, 4, True)),
        ((*THREE_NODES, "rollout.tp=4"), Allocation(4, 4, True)),
    ],
)
def test_what_a_layout_needs(tmp_path: Path, overrides: tuple[str, ...], expected: Allocation) -> None:
    assert allocation(tiny(tmp_path, *overrides)) == expected


def test_the_placement_names_who_else_samples(tmp_path: Path) -> None:
    urls = "rollout.servers=['http://a:1','http://b:1']"
    assert "  rollout  2 sglang server(s) that others started" in placement_text(tiny(tmp_path, urls))
    assert "  rollout  the local engine, on CPU" in placement_text(tiny(tmp_path, "rollout.engine=local"))
    on_cpu = placement_text(tiny(tmp_path, *THREE_NODES, "cluster.device=cpu"))
    assert on_cpu == (
        "Placement on 2 nodes of up to 4 ranks:\n  trainer  nodes 0-1: 8 ranks, tp 2 x pp 1 x dp 4, sequence parallel, "
        "prompts shared\n  rollout  2 sglang server(s), tp 1, on the same cores"
    )
    one = load_config(ROOT / "configs" / "qwen2.5_1.5b_gsm8k.yaml")
    assert placement_text(one) == (
        "Placement on 1 node of 1 GPU:\n  trainer  node 0: 1 rank, tp 1 x pp 1 x dp 1\n"
        "  rollout  node 0: 1 sglang server(s), tp 1, on the trainer's GPUs"
    )


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            1,
            "--nodes = 1: too few: 8 trainer ranks and 2 servers of tp 1 take 3 nodes of 4 GPUs (cluster.gpus_per_node); ",
        ),
        (0, "--nodes = 0: too few: "),
        (5, "--nodes = 5: 2 would stand idle: 8 trainer ranks and 2 servers of tp 1 take 3 nodes of 4 GPUs"),
    ],
)
def test_the_wrong_number_of_nodes_is_refused(
    nodes: int, message: str, slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(tmp_path, *THREE_NODES, "--nodes", str(nodes)) == 2
    err = capsys.readouterr().err
    assert message in err and "use --nodes 3, or " in err and slurm.call() == []
    assert submit(tmp_path, *THREE_NODES, "--nodes", "3") == 0
    assert slurm.call()[3] == "--nodes=3"


def test_what_only_this_machine_lacks_is_a_warning(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(tmp_path, "model.path=/there/only", "model.random_model={}") == 0
    assert "warning: this machine: model.path = '/there/only'" in capsys.readouterr().err and slurm.call()
    assert submit(tmp_path, "run.stepz=1", "rollout.top_p=0.9") == 2
    assert "2 error(s), nothing was started" in capsys.readouterr().err
    assert submit(tmp_path, config=tmp_path / "missing.yaml") == 2
    assert "there is no such file" in capsys.readouterr().err and slurm.call() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--comment='two", "No closing quotation; quote it as for a shell"),
        ("gpu -t 5", "must be options, such as"),
        ("-p gpu -N2", "--sbatch = '-N': use --nodes of dapo submit"),
        ("--gpus-per-node=3", "--sbatch = '--gpus-per-node': use --gpus-per-node of dapo submit"),
        ("--export=NONE --ntasks-per-node 2", "2 error(s), nothing was started"),
    ],
)
def test_options_that_sbatch_must_not_get(
    options: str, message: str, slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(tmp_path, "--sbatch", options) == 2
    assert message in capsys.readouterr().err and slurm.call() == []


def test_without_sbatch_only_a_dry_run_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit(tmp_path) == 2
    out, err = capsys.readouterr()
    assert "sbatch: there is no such program on this machine" in err and "--dry-run" in err and out == ""
    assert submit(tmp_path, "--dry-run") == 0
    assert printed(capsys.readouterr().out)


def test_what_sbatch_says(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(tmp_path) == 0
    assert capsys.readouterr().out.endswith(
        f"Job 4711 is queued. Its output: /else where/slurm-4711.out; metrics and logs: {tmp_path}/runs/tiny_cpu\n"
    )
    slurm.answers(out="4712;other\n", err="sbatch: warning: account is new\n")  # another cluster's, which scontrol doesn't know
    assert submit(tmp_path) == 0
    out, err = capsys.readouterr()
    assert "Job 4712 is queued. Its output: see `scontrol show job 4712`; metrics" in out
    assert err == "sbatch: warning: account is new\n"
    (slurm.folder / "scontrol").unlink()
    assert submit(tmp_path, "--sbatch", "-M other") == 0
    assert "see `scontrol show job 4712`; metrics" in capsys.readouterr().out
    slurm.answers(out="", err="sbatch: Job 4713 to start at noon\n")
    assert submit(tmp_path, "--sbatch", "--test-only") == 0
    out, err = capsys.readouterr()
    assert "queued" not in out and err == "sbatch: Job 4713 to start at noon\n"


def test_sbatchs_failure_is_passed_on(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.answers(out="", err="sbatch: error: invalid partition specified: gpu\n", code=4)
    assert submit(tmp_path, "--sbatch", "-p gpu") == 1
    out, err = capsys.readouterr()
    assert (
        err == ("sbatch: error: invalid partition specified: gpu\ndapo: sbatch refused the job (its exit code: 4)\n")
        and "queued" not in out
    )
    assert not (tmp_path / "runs").exists()


RATES = "# learning rates\nlow: optimizer.lr=1e-4\nhigh: optimizer.lr=1e-2 parallel.dp=2\n\nmid: optimizer.lr=1e-3\n"


def test_a_sweep_is_a_job_array(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = str(write(tmp_path, "rates.txt", RATES.replace("mid:", "mid: optimizer.prompts_per_minibatch=5")))
    slurm.answers("Submitted batch job 4720\n")
    assert submit(tmp_path, "--sweep", sweep, "algorithm.clip_high=0.1", "--sbatch", "--array=1-3%2") == 0
    called = slurm.call()
    assert called[3:7] == ["--nodes=1", "--ntasks-per-node=1", "--job-name=tiny_cpu", "--array=1-3"]
    assert called[7:11] == ["--array=1-3%2", SWEEP, str(TINY), sweep]
    assert called[11:] == [f"run.dir={tmp_path}/runs", "algorithm.clip_high=0.1"]
    out, err = capsys.readouterr()
    assert f"Job 4720 is queued. Its output: /slurm-4720_*.out; metrics and logs: {tmp_path}/runs/tiny_cpu_*\n" in out
    everywhere, one_line = err.splitlines()
    assert everywhere.startswith("warning: algorithm.clip_high = 0.1: below")
    assert one_line.startswith(f"warning: {sweep}, line 5: optimizer.prompts_per_minibatch = 5: doesn't divide")


def test_a_sweep_whose_lines_cannot_all_run(slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = str(write(tmp_path, "rates.txt", RATES))
    for words, message in (
        (
            ("cluster.gpus_per_node=2",),
            "the lines need 1 node of up to 2 ranks for low, mid; 2 nodes of up to 2 ranks for high;",
        ),
        (("--nodes", "2"), "--nodes = 2: 1 would stand idle: 2 trainer ranks take 1 node of up to 8 ranks"),
        (("--sweep", f"{sweep}x"), f"{sweep}x"),
    ):
        assert submit(tmp_path, "--sweep", sweep, *words) == 2
        assert message in capsys.readouterr().err
    write(tmp_path, "rates.txt", RATES.replace("mid: optimizer.lr", "mid: optimizer.lrr"))
    assert submit(tmp_path, "--sweep", sweep) == 2
    assert "line 5: optimizer.lrr" in capsys.readouterr().err and slurm.call() == []


def test_where_the_sbatch_files_are(tmp_path: Path) -> None:
    package = tmp_path / "dapo_megatron"
    with pytest.raises(ConfigError, match=r"slurm/train\.sbatch.*install dapo_megatron again"):
        slurm_home(package)
    write(tmp_path, "slurm/train.sbatch", "")
    assert slurm_home(package) == tmp_path
    write(package, "slurm/train.sbatch", "")
    assert slurm_home(package) == package
