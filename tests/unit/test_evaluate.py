"""`dapo eval` and what is measured on held-out prompts: numbers, wrong use, the file, servers that nobody publishes to.
(Evaluation beside a run's sampling: test_ahead.py. Whole evaluations: tests/integration/test_eval.py.)"""

import asyncio
import fcntl
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo_megatron import evaluate
from dapo_megatron.cli import main
from dapo_megatron.config import Config
from dapo_megatron.evaluate import Evaluator, answer_by_own_weights, majority, measure, pass_at, pass_curve, table
from dapo_megatron.records import Completion, Group, Prompt
from dapo_megatron.telemetry.metrics import METRICS
from tests.sglang_engines import Source
from tests.unit.scripted_engine import EOS, Engine
from tests.unit.test_fleet import World, refuse

TINY = str(Path(__file__).resolve().parents[2] / "configs" / "tiny_cpu.yaml")


def make_group(correct: str, extracted: str = "", cut: int = 0) -> Group:
    """One response for each character: `correct` has 1 or 0, `extracted` the answer, - for none. `cut` of them are cut."""
    completions = [
        Completion(np.zeros(i + 1, np.int32), np.zeros(i + 1, np.float32), np.zeros(i + 1, np.int32), reason)
        for i, reason in enumerate(["length"] * cut + ["stop"] * (len(correct) - cut))
    ]
    right = np.array([c == "1" for c in correct])
    answers = [None if answer == "-" else answer for answer in extracted]
    reward = right.astype(np.float32)
    return Group(Prompt(-1, "p", (1,), "g"), completions, [""] * len(correct), right, reward, 0 * reward, answers)


@pytest.mark.parametrize("num_samples", [1, 4, 6])
def test_pass_at_k_is_what_all_choices_of_k_samples_give(num_samples: int) -> None:
    for k, num_correct in itertools.product(range(1, num_samples + 1), range(num_samples + 1)):
        group = make_group("1" * num_correct + "0" * (num_samples - num_correct))
        choices = [any(chosen) for chosen in itertools.combinations(group.correct.tolist(), k)]
        assert pass_at(k, [group]) == pytest.approx(sum(choices) / len(choices), abs=1e-15), (k, num_correct)


def test_pass_at_k_is_the_mean_over_prompts_and_its_ends_are_known_metrics() -> None:
    groups = [make_group("100000"), make_group("000000"), make_group("111100")]
    values, passes = measure(groups, []), pass_curve(groups)
    assert list(passes) == [1, 2, 4, 6]
    assert passes[1] == pytest.approx(values["eval/avg_at_k"]) and passes[6] == values["eval/pass_at_k"] == 2 / 3
    assert passes[2] == pytest.approx((1 / 3 + 0 + 14 / 15) / 3)
    assert list(pass_curve([make_group("10")])) == [1, 2] and pass_curve([make_group("1")]) == {1: 1.0}
    assert pass_at(512, [make_group("1" + "0" * 1023)]) == 0.5  # large binomials


@pytest.mark.parametrize(
    ("correct", "extracted", "expected"),
    [
        ("1100", "aabc", 1.0),
        ("1000", "abbc", 0.0),
        ("1100", "aabb", 1 / 2),  # a tie
        ("1000", "abcd", 1 / 4),
        ("1100", "abcd", 1 / 2),  # several right answers
        ("1000", "a---", 1.0),  # no answer is no vote
        ("0000", "----", 0.0),
        ("0000", "aab-", 0.0),
    ],
)
def test_majority(correct: str, extracted: str, expected: float) -> None:
    assert majority(make_group(correct, extracted)) == expected


def test_measure_by_hand() -> None:
    sampled = [make_group("1100", "aabc", cut=2), make_group("1000", "abbc", cut=1)]
    greedy = [make_group("1"), make_group("0"), make_group("0"), make_group("0")]
    sampled[1].num_errors, greedy[2].num_errors = 2, 1
    assert measure(sampled, greedy) == {
        "eval/avg_at_k": 3 / 8,
        "eval/pass_at_k": 1.0,
        "eval/majority_at_k": 1 / 2,
        "eval/greedy": 1 / 4,
        "eval/k": 4,
        "eval/prompts": 2,
        "eval/length_mean": 2.5,
        "eval/cut_share": 3 / 8,
        "eval/verifier_errors": 3,
    }


def test_without_answers_there_is_no_majority_and_the_table_says_so() -> None:
    sampled = [make_group("1100", "aabc"), make_group("1000")]
    values = measure(sampled, [])
    assert "eval/majority_at_k" not in values and "eval/greedy" not in values
    assert "majority@k is left out: the verifier doesn't tell" in table(values, pass_curve(sampled))
    whole = [make_group("1100", "aabc")]
    text = table(measure(whole, []), pass_curve(whole))
    assert "left out" not in text and text.splitlines()[-1].split() == ["pass@", "1:", "0.5", "2:", "0.8333", "4:", "1"]
    assert text.splitlines()[0].endswith(METRICS["eval/avg_at_k"].meaning)


async def score(prompt: Prompt, completions: list[Completion]) -> Group:
    correct = np.array([i == 0 for i in range(len(completions))])
    reward = correct.astype(np.float32)
    answers = [str(i) for i in range(len(completions))]
    return Group(prompt, completions, [""] * len(completions), correct, reward, 0 * reward, list(answers))


def test_a_server_that_is_lost_comes_back_with_the_weights_that_it_was_started_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2, "architectures": ["Tiny"]})
    )
    world = World(tmp_path, 1, version=None)
    world.engine.fleet._sources[0] = Source(alive=False, restart=lambda: "http://s1")
    world.fault["s0"] = refuse
    cfg = Config()
    cfg.eval.samples = 2
    prompts = [Prompt(-1 - i, f"p{i}", (1, 2), "g") for i in range(3)]
    evaluator = Evaluator(cfg, world.engine, score, prompts, (2,))
    sampled, greedy = asyncio.run(asyncio.wait_for(answer_by_own_weights(evaluator, world.engine), 20))
    assert [len(g.completions) for g in sampled] == [2, 2, 2] and [len(g.completions) for g in greedy] == [1, 1, 1]
    assert world.hosts() == {"s0", "s1"} and world.notes[-1] == "server 0 is up again"


class Answers(Engine):
    """Answers at once, by weights of its version. Prompts go by number."""

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    async def joined(self) -> None:
        await asyncio.Event().wait()

    async def generate(self, request: Any) -> Completion:
        ids = np.array([5, EOS], np.int32)
        return Completion(ids, np.zeros(2, np.float32), np.full(2, self.version, np.int32), "stop")


@pytest.fixture
def dapo_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`dapo eval` on the tiny configuration, answered by a scripted engine; its exit code. `engines` are those it started."""

    @contextmanager
    def start(cfg: Config, model_dir: Path, eos_ids: object, run_dir: Path, note: object) -> Iterator[Any]:
        engine = Answers()
        run.engines.append(engine)  # type: ignore[attr-defined]
        engine.version = run.version  # type: ignore[attr-defined]
        yield engine, type("Rewards", (), {"score": staticmethod(score)})

    def run(*arguments: str) -> int:
        return main(["eval", TINY, f"run.dir={tmp_path}/runs", *arguments])

    monkeypatch.setattr(evaluate, "start_engines", start)
    run.engines, run.version = [], 0  # type: ignore[attr-defined]
    return run


def test_the_result_is_printed_and_written_whole(
    dapo_eval: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a run that goes on in the folder (the lock), though the configuration never evaluates (eval.every=-1)."""
    folder = tmp_path / "runs" / "tiny_cpu"
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert dapo_eval("eval.samples=4", "eval.prompts=3") == 0
    out, err = capsys.readouterr()
    (path,) = (folder / "eval").iterdir()
    assert out.endswith(f"written to {path}\n") and "held out  3 prompts\n" in out and err.count("error") == 0
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "eval"] and path.suffix == ".json"
    found = json.loads(path.read_text())
    assert found["metrics"]["eval/avg_at_k"] == 0.25 and found["metrics"]["eval/majority_at_k"] == 0.25
    assert found["pass_at"] == {"1": 0.25, "2": 0.5, "4": 1.0} and found["model"] == "random"
    assert "samples: 4" in found["config"] and set(found["metrics"]) <= set(METRICS)


def test_a_result_that_cannot_be_written_is_printed_all_the_same(
    dapo_eval: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate, "sync", full)
    assert dapo_eval("eval.prompts=3") == 1
    out, err = capsys.readouterr()
    assert "eval/avg_at_k" in out and "written to" not in out
    assert err == f"dapo: [Errno 28] No space left on device (details: {tmp_path}/runs/tiny_cpu/eval/error.log)\n"
    assert not list((tmp_path / "runs/tiny_cpu/eval").glob("*.json"))


def test_answers_by_other_weights_are_refused(
    dapo_eval: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dapo_eval.version = 3  # type: ignore[attr-defined]
    assert dapo_eval("eval.prompts=3") == 1
    err = capsys.readouterr().err
    assert "the engine answered by weight versions [3]" in err and str(tmp_path / "runs/tiny_cpu/eval/error.log") in err
    assert [p.name for p in (tmp_path / "runs/tiny_cpu").iterdir()] == ["eval"]  # a run's own error.log stays as it is


@pytest.mark.parametrize("kind", [".metadata", "state.json", "checkpoints/step_000003/state.json"])
def test_a_megatron_checkpoint_and_all_else_that_is_wrong(
    kind: str, dapo_eval: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    (model / kind).parent.mkdir(parents=True)
    (model / kind).touch()
    assert dapo_eval(f"model.path={model}", "model.random_model={}", "eval.samples=0", "data.eval.path=") == 2
    err = capsys.readouterr().err
    assert "3 error(s), nothing was started" in err and "eval.samples = 0: must be at least 1" in err
    assert f"model.path = '{model}': holds a Megatron checkpoint, which no engine loads; give OUT after " in err
    assert f"python -m checkpoint_tools megatron-to-hf {model} OUT\n" in err
    assert ", or generator:NAME\n" in err  # and no advice not to evaluate
    (model / "hf").mkdir()
    (model / "hf" / "model.safetensors").touch()
    assert dapo_eval(f"model.path={model}", "model.random_model={}") == 2
    assert f"no engine loads; give {model}/hf, or OUT after" in capsys.readouterr().err
    assert dapo_eval.engines == []  # type: ignore[attr-defined]


def test_what_is_no_model_at_all_is_told_as_ever(
    dapo_eval: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nothing").mkdir()
    for path, message in ((tmp_path / "nothing", "expected a config.json"), (tmp_path / "absent", "no such file or folder")):
        assert dapo_eval(f"model.path={path}", "model.random_model={}") == 2
        err = capsys.readouterr().err
        assert message in err and "Megatron" not in err


def test_servers_of_others_are_refused(dapo_eval: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert dapo_eval("rollout.servers=[http://127.0.0.1:1]") == 2
    assert "rollout.servers = ['http://127.0.0.1:1']: servers of others hold who knows which weights" in capsys.readouterr().err
    assert dapo_eval.engines == []  # type: ignore[attr-defined]
