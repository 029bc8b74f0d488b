"""Killed at any moment and started again, a run equals one that went through, bit for bit (local engine)."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.checkpoint_files import damage
from dapo_megatron.telemetry.metrics import read_metrics
from tests.conftest import ROOT
from tests.forking import CONTEXT
from tests.integration.cli_run import CliRun, assert_same_run, kill_marked
from tests.integration.moments import at, half_a_row
from tests.integration.solo import SoloRun
from tests.small_disk import small_disk as disk_of

# Small groups, so that many are filtered and each step takes another number of prompts; four groups at a time and what is over
# at the end of a step is carried into the next; epochs of 10 prompts.
SETTINGS = (
    "run.steps=4",
    "sampling.prompts_per_step=4",
    "sampling.samples_per_prompt=2",
    "sampling.surplus=carry",
    "rollout.max_inflight_groups=4",
    "optimizer.prompts_per_minibatch=2",
    "data.train.limit=10",
    "checkpoint.every=1",
    "checkpoint.export_hf=true",
)
NUM_TENSORS = 21  # of the model: 3, and 9 in each of 2 layers
LOCAL = "rollout.local_engine:LocalEngine"
MEGATRON_FILES = "megatron.core.dist_checkpointing.strategies.filesystem_async"


# What happens, how to die there, and the last checkpoint afterwards.
CHAIN: list[tuple[str, Callable[[], None], int]] = [
    ("within sampling", partial(at, "rollout.local_engine:LocalEngine.generate", "after", 5), 0),
    ("between two updates", partial(at, "policy.policy:Policy.update", "after"), 0),
    ("between updates and publish", partial(at, "weights.publish:Publisher.publish", "before", 2), 0),
    (
        "within the publish, a part is loaded",
        partial(at, "rollout.local_engine:LocalEngine.load_bucket", "after", NUM_TENSORS + 5),
        0,
    ),
    ("loaded, not committed", partial(at, "rollout.local_engine:LocalEngine.end_update", "before", 2), 0),
    ("between publish and checkpoint", partial(at, "train:write_samples", "after"), 0),
    ("before the checkpoint", partial(at, "run_folder:RunFolder.save_checkpoint", "before"), 0),
    ("within the checkpoint's tensors", partial(at, f"{MEGATRON_FILES}:_write_item", "before", 20), 0),
    ("between policy and state", partial(at, "policy.policy:Policy.save", "after"), 0),
    ("between state and manifest", partial(at, "run_folder:seal", "before"), 0),
    ("whole, not named", partial(at, "run_folder:seal", "after"), 0),
    ("between checkpoint and metrics", partial(at, "run_folder:RunFolder.save_checkpoint", "after"), 1),
    ("within the metrics that the one before didn't write", half_a_row, 1),
    ("within the metrics", partial(half_a_row, 2), 2),
    ("named, older ones not removed", partial(at, "run_folder:sync", "after", 2), 3),
    ("while resuming, policy loaded", partial(at, "policy.policy:Policy.load", "after"), 3),
    (
        "while resuming, within the publish",
        partial(at, "rollout.local_engine:LocalEngine.load_bucket", "after", 5),
        3,
    ),
    ("within the export", partial(at, "policy.worker:finish_folder", "before"), 4),
]


def last_checkpoint(run: SoloRun | CliRun) -> int:
    return max((int(p.name.removeprefix("step_")) for p in run.folder.glob("checkpoints/step_*")), default=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody disturbed."""
    run = SoloRun(ROOT, tmp_path_factory.mktemp("whole"), *SETTINGS, "checkpoint.keep=9")
    run.finish()
    return run.folder


def test_the_run_has_what_makes_resuming_hard(whole: Path) -> None:
    """Checkpoints with carried groups, finished ones among them; a varying number of prompts; several epochs."""
    rows = read_metrics(whole / "metrics.jsonl")
    assert len({row["sampling/groups_sampled"] for row in rows}) > 1 and rows[-1]["data/epoch"] >= 2
    assert sum(row["sampling/groups_all_correct"] + row["sampling/groups_all_wrong"] for row in rows) > 0
    carried = [json.loads((path / "state.json").read_text())["sampler"]["carried"] for path in whole.glob("checkpoints/*")]
    assert len(carried) == 4 and all(carried) and any(entry["group"] for entries in carried for entry in entries)
    assert sum(row["tokens/carried_in"] for row in rows) > 0


def test_killed_at_every_phase_boundary(whole: Path, tmp_path: Path) -> None:
    """One run that dies at each of them in turn."""
    for name, kill, expected in CHAIN:
        run = SoloRun(ROOT, tmp_path, *SETTINGS, hook=kill)
        run.finish(-9)
        assert last_checkpoint(run) == expected, name
    run = SoloRun(ROOT, tmp_path, *SETTINGS)
    assert "resuming after step 4" in run.finish()
    assert_same_run(whole, run.folder)
    assert "all 4 steps are done" in SoloRun(ROOT, tmp_path, *SETTINGS).finish()


AHEAD: list[tuple[str, Callable[[], None], int]] = [
    ("the second step's batch is complete, the first isn't published", partial(at, f"{LOCAL}.end_update", "before", 2), 0),
    ("within the third step's batch", partial(at, f"{LOCAL}.generate", "after", 45), 1),
    ("whole, not named", partial(at, "run_folder:seal", "after", 2), 2),
]


def test_killed_with_a_batch_collected_ahead(tmp_path: Path) -> None:
    """It is trained on after all, and not sampled again."""
    settings = (*SETTINGS, "rollout.max_staleness=1")
    one = SoloRun(ROOT, tmp_path / "whole", *settings)
    one.finish()
    rows = read_metrics(one.folder / "metrics.jsonl")
    assert [row["sync/staleness_0"] for row in rows] == [1, 0, 0, 0] and rows[1]["sync/staleness_1"] == 1
    for name, kill, expected in AHEAD:
        run = SoloRun(ROOT, tmp_path / "killed", *settings, hook=kill)
        run.finish(-9)
        assert last_checkpoint(run) == expected, name
    run = SoloRun(ROOT, tmp_path / "killed", *settings)
    assert "resuming after step 2" in run.finish()
    assert_same_run(one.folder, run.folder)


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


# What happens, when SIGUSR1 comes, and the step that it stops after.
STOPS: list[tuple[str, Callable[[], None], int]] = [
    ("while it starts", partial(at, "train:prepare", "after", action=ask_to_stop), 0),
    ("within the first step's sampling", partial(at, f"{LOCAL}.generate", "after", 5, ask_to_stop), 0),
    ("within an update", partial(at, "policy.policy:Policy.update", "after", action=ask_to_stop), 1),
    ("within sampling again", partial(at, f"{LOCAL}.generate", "after", 20, ask_to_stop), 2),
    ("within a publish", partial(at, f"{LOCAL}.load_bucket", "after", NUM_TENSORS + 5, ask_to_stop), 3),
]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_asked_to_stop_at_any_moment(tmp_path: Path, max_staleness: int) -> None:
    """It saves what is finished, whatever checkpoint.every says, and says so; of a step that only samples nothing is kept,
    unless its batch is collected ahead."""
    settings = (*SETTINGS, "run.steps=6", "checkpoint.every=0", f"rollout.max_staleness={max_staleness}")
    one = SoloRun(ROOT, tmp_path / "whole", *settings)
    one.finish()
    for name, stop, expected in STOPS:
        run = SoloRun(ROOT, tmp_path / "stopped", *settings, hook=stop)
        said = run.finish(75).splitlines()[-1]
        last = last_checkpoint(run)
        assert said == f"dapo: stopped after step {last} as asked to; started again the run goes on there", name
        assert last == expected or max_staleness, name
    run = SoloRun(ROOT, tmp_path / "stopped", *settings)
    assert f"resuming after step {last}" in run.finish()
    assert_same_run(one.folder, run.folder)


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Six times, in one run or several."""
    settings = (*SETTINGS, "run.steps=8")
    begin = time.monotonic()
    one = SoloRun(ROOT, tmp_path / "whole", *settings)
    one.finish()
    duration_s = time.monotonic() - begin
    rng = random.Random(5)
    num_killed, number = 0, 0
    while num_killed < 6:
        run = SoloRun(ROOT, tmp_path / f"killed{number}", *settings)
        run.process.join(timeout=rng.uniform(0, 0.4 * duration_s))
        run.process.kill()
        run.process.join()
        if run.process.exitcode == -9:
            num_killed += 1
        else:  # it was faster than its end
            run.finish()
            assert_same_run(one.folder, run.folder)
            number += 1
    run = SoloRun(ROOT, tmp_path / f"killed{number}", *settings)
    run.finish()
    assert_same_run(one.folder, run.folder)


@pytest.mark.slow
def test_a_whole_job_killed_at_a_random_moment(tmp_path: Path) -> None:
    """Controller, Ray, two ranks, engine and reward worker, all at once, somewhere in the first half of the steps."""
    settings = ("rollout.engine=local", *SETTINGS, "run.steps=12")
    one = CliRun(ROOT, tmp_path / "whole", *settings)
    begin = time.monotonic()
    one.wait_for_step(1)
    start_s = time.monotonic() - begin
    one.finish()
    rest_s = time.monotonic() - begin - start_s
    run = CliRun(ROOT, tmp_path / "killed", *settings)
    time.sleep(start_s + random.Random(6).uniform(0, 0.5 * rest_s))
    run.kill()
    assert run.survivors() == []
    run = CliRun(ROOT, tmp_path / "killed", *settings)
    run.finish()
    assert_same_run(one.folder, run.folder)


@pytest.mark.slow
def test_resumed_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """8 prompts, 4 a step: after step 2 the first epoch is over to the last prompt."""
    settings = (*SETTINGS, "sampling.dynamic=false", "data.train.limit=8")
    one = SoloRun(ROOT, tmp_path / "whole", *settings)
    one.finish()
    kill = partial(at, "run_folder:RunFolder.save_checkpoint", "after", 2)
    killed = SoloRun(ROOT, tmp_path / "killed", *settings, hook=kill)
    killed.finish(-9)
    state = json.loads((killed.folder / "checkpoints/step_000002/state.json").read_text())
    assert state["stream"]["position"] == state["stream"]["num_prompts"] == 8
    SoloRun(ROOT, tmp_path / "killed", *settings).finish()
    assert_same_run(one.folder, killed.folder)


def tell_and_die(path: str, at_step: int) -> None:
    """Before a step samples: write down what weights, optimizer, engine, sampler and stream hold; then end the whole job."""
    from dapo_megatron import run_folder, train

    original = train.dapo_step

    async def telling(run: Any, step: int) -> Any:
        if step == at_step:
            policy = Path(path) / "policy"
            policy.mkdir(parents=True)
            await run.cluster.policy.save(str(policy))
            servers = list(await run.cluster.engine.weight_senders())
            state = {
                "trainer": await run.cluster.policy.checksums(servers),
                "engine": await run.cluster.engine.checksums(servers),
                "version": run.publisher.version,
                "sampler": run_folder._encode(run.batches.state_dict()),
                "stream": run.prepared.stream.state_dict(),
            }
            (Path(path) / "state.json").write_text(json.dumps(state))
            kill_marked(os.environ["DAPO_TEST_MARK"])
        return await original(run, step)

    train.dapo_step = telling


@pytest.mark.slow
def test_with_sglang_all_is_equal_up_to_the_first_sampling(tmp_path: Path) -> None:
    """Its own sampling doesn't repeat. Groups in flight are carried over."""
    settings = ("run.steps=3", "checkpoint.every=1", "sampling.surplus=carry", "sampling.samples_per_prompt=2")
    told = [tmp_path / name for name in ("went_on", "resumed")]
    for path in told:
        hook = f"from tests.integration.test_kill import tell_and_die\ntell_and_die({str(path)!r}, 2)\n"
        run = CliRun(ROOT, tmp_path / "run", *settings, before=hook)
        run.finish(-9)
        assert run.survivors() == []
    one, other = (json.loads((path / "state.json").read_text()) for path in told)
    assert one == other and one["version"] == 1 and one["trainer"] == one["engine"] and one["sampler"]["carried"]
    tensors = [sorted((path / "policy").glob("*.distcp")) for path in told]
    assert len(tensors[0]) == 2  # ranks
    for a, b in zip(*tensors, strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run" / "tiny_cpu")
    run = tmp_path / "run" / "tiny_cpu"
    tensors = next((run / "checkpoints/step_000004/policy").glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:-100])
    output = SoloRun(ROOT, tmp_path / "run", *SETTINGS).finish()
    assert "resuming after step 3" in output
    (line,) = [line for line in output.splitlines() if line.startswith("damaged ")]
    assert f"step_000004: policy/{tensors.name} has {tensors_size(whole, tensors) - 100} bytes instead of" in line
    assert_same_run(whole, run)
    for path in run.glob("checkpoints/step_*"):
        flipped = next((path / "policy").glob("*.distcp"))
        content = bytearray(flipped.read_bytes())
        content[-1000] ^= 4
        flipped.write_bytes(content)
    output = SoloRun(ROOT, tmp_path / "run", *SETTINGS, "run.steps=5").finish(1)
    assert output.splitlines()[-1].startswith(
        f"dapo: all checkpoints of {run} are damaged (step_000004: the content of policy/"
    )


def tensors_size(whole: Path, tensors: Path) -> int:
    return (whole / "checkpoints/step_000004/policy" / tensors.name).stat().st_size


def wait_within(reached: Any, go_on: Any) -> None:
    """Stand still before the first update until told to go on."""

    def wait() -> None:
        reached.set()
        go_on.wait()

    at("policy.policy:Policy.update", "before", action=wait)


def test_two_jobs_on_one_folder(whole: Path, tmp_path: Path) -> None:
    """The second is refused, whatever it wants, and doesn't disturb the first."""
    reached, go_on = CONTEXT.Event(), CONTEXT.Event()
    first = SoloRun(ROOT, tmp_path / "runs", *SETTINGS, hook=partial(wait_within, reached, go_on))
    assert reached.wait(timeout=120)
    for resume in ("auto", "never"):
        second = SoloRun(ROOT, tmp_path / "runs", *SETTINGS, resume=resume)
        last = second.finish(1).splitlines()[-1]
        assert last.startswith(f"dapo: run.name: {first.folder} is in use by another process; wait for it or choose another")
    go_on.set()
    first.finish()
    assert_same_run(whole, first.folder)


# --- a full disk ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "disk", 32 * 1024) as folder:
        yield folder


def fill(disk: Path) -> None:
    """No byte is left."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


SAVE, NO_CHECKPOINT = "policy.policy:Policy.save", "the checkpoint after step 2 can't be written: "
FULL = [  # what is being written, when the disk has become full, the last good checkpoint, what is said
    pytest.param((SAVE, "before", 2), 1, NO_CHECKPOINT, id="policy"),
    pytest.param((SAVE, "after", 2), 1, NO_CHECKPOINT, id="state", marks=pytest.mark.slow),
    pytest.param(("train:write_samples", "before", 2), 1, "writing failed: ", id="samples", marks=pytest.mark.slow),
    pytest.param(("telemetry.metrics:MetricsWriter.write", "before", 2), 2, "writing failed: ", id="metrics"),
    pytest.param(("policy.worker:write_shards", "before", 1), 4, "writing failed: ", id="export", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("place", "good", "message"), FULL)
def test_a_full_disk_is_said_and_loses_nothing(
    whole: Path, small_disk: Path, place: tuple[str, str, int], good: int, message: str
) -> None:
    run = SoloRun(ROOT, small_disk, *SETTINGS, hook=partial(at, *place, partial(fill, small_disk)))
    output = run.finish(1)
    said = [line for line in output.splitlines() if line.startswith("dapo: ")]
    assert len(said) == 1 and message in said[0] and "No space left on device" in said[0] and "Traceback" not in output
    assert f"step_{good:06d} is complete: the run goes on from there when it is started again" in said[0]
    assert last_checkpoint(run) == good and damage(run.folder / "checkpoints" / f"step_{good:06d}") == ""
    (small_disk / "filler").unlink()
    SoloRun(ROOT, small_disk, *SETTINGS).finish()
    assert_same_run(whole, run.folder)
