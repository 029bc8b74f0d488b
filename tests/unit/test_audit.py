"""What an audit compares, what it says, and its batch."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo_megatron.audit.batch import audit_batch, old_logprobs, with_old_logprobs
from dapo_megatron.audit.compare import TOLERANCES, compare, table
from dapo_megatron.audit.record import Record, RecordedTrainer
from dapo_megatron.audit.reference import ReferencePolicy, ReferenceStep, clip_scale
from dapo_megatron.audit.shorten import shortened
from dapo_megatron.config import AlgorithmConfig, Config, OptimizerConfig
from dapo_megatron.samples_file import load_samples, save_samples
from tests.distributed.harness import ReferenceTrainer, make_model, make_samples

SETTINGS = OptimizerConfig(weight_decay=0.1, clip_grad=0.5, eps=1e-8)
LR = 1e-2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3_untied", tmp_path_factory.mktemp("audit") / "model")


def write(folder: Path, source: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file({name: t.float().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


@pytest.fixture
def recorded(model_dir: Path, tmp_path: Path) -> tuple[Path, ReferenceStep]:
    """A record without a fault: made of the reference's own values, in fp32."""
    samples = make_samples()
    for sample in samples:
        sample.weights = sample.mask / sum(s.num_valid for s in samples)
    policy = ReferenceTrainer(model_dir, AlgorithmConfig(), 1.0)
    step = policy.step(samples, policy.logprobs(samples))
    folder = tmp_path / "step_000001"
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}
    policy.update(step, LR, SETTINGS)
    scale = clip_scale(step.grad_norm, SETTINGS.clip_grad)
    write(folder / "before", model_dir, before)
    write(folder / "after", model_dir, policy.weights())
    write(folder / "gradients", model_dir, {name: g * scale for name, g in step.gradients.items()})
    save_samples(folder / "samples.npz", samples)
    np.save(folder / "logprobs.npy", np.concatenate(step.logprobs).astype(np.float32))
    facts = {"step": 1, "lr": LR, "layout": "tp 1", "loss": step.loss, "grad_norm": step.grad_norm}
    (folder / "record.json").write_text(json.dumps(facts))
    return folder, step


def comparison(folder: Path, step: ReferenceStep) -> Any:
    return compare("here", Record.read(folder), step, SETTINGS, "float32")


def change(folder: Path, name: str, function: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = function(tensors[name])
    save_file(tensors, folder / "model.safetensors")


def off(result: Any) -> list[tuple[str, str]]:
    return [(d.what, d.name) for d in result.differences if not d.ok]


def test_equal_values_pass(recorded: tuple[Path, ReferenceStep]) -> None:
    result = comparison(*recorded)
    assert result.ok and result.first_token is None and off(result) == []
    assert {d.what for d in result.differences} == set(TOLERANCES["float32"])
    assert "equal within the tolerances" in table(result, str)
    json.dumps(result.as_dict())


KEY = "model.layers.2.self_attn.k_proj.weight"


def test_a_layout_is_judged_by_the_single_rank(recorded: tuple[Path, ReferenceStep]) -> None:
    """bf16: a third of a gradient missing is over its limit, though elsewhere rounding may be as much."""
    folder, step = recorded
    change(folder / "gradients", "model.norm.weight", lambda g: 0.7 * g)
    rounded = compare("single", Record.read(folder), step, SETTINGS, "bfloat16")
    assert rounded.ok
    assert compare("layout", Record.read(folder), step, SETTINGS, "bfloat16", rounded).ok
    change(folder / "gradients", KEY, lambda g: 0.7 * g)
    result = compare("layout", Record.read(folder), step, SETTINGS, "bfloat16", rounded)
    assert off(result) == [("gradient", KEY)]


@pytest.mark.parametrize("factor", [0.999, 2.0, float("nan")])
def test_a_gradient_that_is_off_is_named(recorded: tuple[Path, ReferenceStep], factor: float) -> None:
    folder, step = recorded
    change(folder / "gradients", KEY, lambda g: g * factor)
    result = comparison(folder, step)
    assert not result.ok and ("gradient", KEY) in off(result)
    lines = table(result, str).splitlines()
    assert any("OFF" in line and KEY in line for line in lines) and lines[-1].endswith("DIFFERENT")
    gradients = next(line for line in lines if line.strip().startswith("gradient"))
    assert KEY in gradients  # the largest one comes first, nan too


def test_an_update_that_is_off_is_named(recorded: tuple[Path, ReferenceStep]) -> None:
    """Weight decay on a norm, as when a parameter is in the wrong group."""
    folder, step = recorded
    change(folder / "after", "model.norm.weight", lambda w: w - LR * SETTINGS.weight_decay * w)
    assert off(comparison(folder, step)) == [("update", "model.norm.weight")]


def test_rounding_the_weights_to_bf16_is_no_difference(recorded: tuple[Path, ReferenceStep]) -> None:
    folder, step = recorded
    name = "model.norm.weight"  # around 1, where steps of bf16 are about as large as the update
    change(folder / "before", name, lambda w: w.bfloat16())
    master = torch.nn.Parameter(load_file(folder / "before" / "model.safetensors")[name].float())
    master.grad = load_file(folder / "gradients" / "model.safetensors")[name]
    torch.optim.AdamW([master], lr=LR, eps=SETTINGS.eps, weight_decay=0.0).step()
    change(folder / "after", name, lambda _: master.detach().bfloat16())
    assert off(comparison(folder, step)) == []
    change(folder / "after", name, lambda w: w - LR)
    assert off(comparison(folder, step)) == [("update", name)]


@pytest.mark.parametrize(("fact", "what"), [("loss", "loss"), ("grad_norm", "grad norm")])
def test_a_figure_that_is_off_is_named(recorded: tuple[Path, ReferenceStep], fact: str, what: str) -> None:
    folder, step = recorded
    facts = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps({**facts, fact: facts[fact] * 1.01}))
    assert off(comparison(folder, step)) == [(what, "")]


@pytest.mark.parametrize("value", [0.3, float("nan")])
def test_the_first_token_that_is_off_is_found(recorded: tuple[Path, ReferenceStep], value: float) -> None:
    folder, step = recorded
    lengths = [len(values) for values in step.logprobs]
    logprobs = np.load(folder / "logprobs.npy")
    place = sum(lengths[:3]) + 4
    logprobs[place:] += value
    np.save(folder / "logprobs.npy", logprobs)
    result = comparison(folder, step)
    token = result.first_token
    assert (token.sample, token.place) == (3, 4) and off(result) == [("logprob", "")]
    assert token.token_id == make_samples()[3].token_ids[make_samples()[3].prompt_len + 4]
    assert "place 4 of response 3" in table(result, str)


def test_a_parameter_on_one_side_only_is_named(recorded: tuple[Path, ReferenceStep]) -> None:
    folder, step = recorded
    gradients = {name: g for name, g in step.gradients.items() if name != KEY}
    with pytest.raises(ValueError, match=rf"1 parameters are on one side only: {KEY}"):
        comparison(folder, replace(step, gradients=gradients))


def test_no_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing was recorded there; set audit\.save_every"):
        Record.read(tmp_path / "step_000001")


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("record.json", lambda data: data[:20], ""),
        ("record.json", lambda _: b'{"step": 1, "lr": 1, "layout": "", "loss": 0}', r"record\.json has no grad_norm"),
        ("samples.npz", lambda data: data[:-30], r"samples\.npz: not a file of samples"),
        ("logprobs.npy", lambda data: data[:-4], ""),
        ("logprobs.npy", lambda data: data[:0], ""),
        ("before/model.safetensors", lambda data: data[:-4], "unreadable safetensors file"),
        ("gradients/model.safetensors", None, r"gradients: no \*\.safetensors"),
    ],
)
def test_a_damaged_record_is_refused(recorded: tuple[Path, ReferenceStep], file: str, damage: Any, message: str) -> None:
    folder, _ = recorded
    data = (folder / file).read_bytes()
    (folder / file).unlink()
    if damage:
        (folder / file).write_bytes(damage(data))
    with pytest.raises(ValueError, match=rf"step_000001: the record is damaged .*{message}"):
        Record.read(folder)


def test_missing_logprobs_are_damage(recorded: tuple[Path, ReferenceStep]) -> None:
    folder, _ = recorded
    logprobs = np.load(folder / "logprobs.npy")
    np.save(folder / "logprobs.npy", logprobs[:-1])
    with pytest.raises(ValueError, match=rf"{len(logprobs) - 1} log-probs for {len(logprobs)} response tokens"):
        Record.read(folder)


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.01, 1)])
def test_the_report_says_all_and_only_a_difference_leaves_its_tensors(
    recorded: tuple[Path, ReferenceStep], tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float, code: int
) -> None:
    from dapo_megatron.audit.run import _judge

    folder, step = recorded
    change(folder / "gradients", KEY, lambda g: g * factor)
    record, cfg = Record.read(folder), Config(optimizer=SETTINGS)
    cfg.model.dtype = "float32"
    reference: Any = SimpleNamespace(logprobs=lambda _: step.logprobs, step=lambda *_: step)
    work, report = tmp_path / "work", tmp_path / "report.json"
    work.mkdir()
    assert _judge(cfg, reference, record, record, "here", report, str, work) == code
    out, found = capsys.readouterr().out, json.loads(report.read_text())
    assert work.exists() == (code == 1) == (str(work) in out) == (not found["ok"])
    assert str(report) in out and found["config_hash"] and len(found["comparisons"][0]["differences"]) > len(step.gradients)


class Stream:
    """Prompts of growing length, the first ones shorter than the responses that are wanted."""

    def at(self, index: int) -> Any:
        return type("Prompt", (), {"token_ids": tuple(range(100 * index, 100 * index + 1 + index))})


def test_audit_batch_is_uneven_and_repeats() -> None:
    cfg = Config()
    cfg.audit.sequences, cfg.audit.max_tokens = 12, 40
    first, second = (audit_batch(cfg, Stream()) for _ in range(2))  # type: ignore[arg-type]
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, second, strict=True))
    lengths = [len(sample.mask) for sample in first]
    assert len(first) == 12 and min(lengths) == 1 and max(lengths) == 20 and max(len(s.token_ids) for s in first) <= 40
    assert first[3].token_ids[:2].tolist() == [300, 301]
    for sample in first:  # a group has one prompt, so that sharing it is audited as well
        assert np.array_equal(sample.token_ids[: sample.prompt_len], first[3 * sample.group].token_ids[: sample.prompt_len])
    assert all(len(s.token_ids) == s.prompt_len + n and s.prompt_len > 0 for s, n in zip(first, lengths, strict=True))
    assert sum(s.num_valid == 0 for s in first) == 1
    own = [np.full(n, -2.0) for n in lengths]
    filled = with_old_logprobs(first, own)
    for sample, noise in zip(filled, first, strict=True):
        np.testing.assert_allclose(sample.rollout_logprobs, noise.rollout_logprobs - 2, rtol=1e-6)
    modes = {"trainer": AlgorithmConfig(), "engine": AlgorithmConfig(old_logprobs="engine")}
    modes["capped"] = AlgorithmConfig(importance_cap=2.0)
    old = {mode: old_logprobs(filled, own, algorithm) for mode, algorithm in modes.items()}
    assert any(sample.stale.any() for sample in filled)
    for i, sample in enumerate(filled):
        assert np.array_equal(old["trainer"][i] == -2.0, ~sample.stale)
        assert np.array_equal(old["engine"][i], sample.rollout_logprobs) and (old["capped"][i] == -2.0).all()


def test_shortened_model_is_the_first_layers(model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = shortened(model_dir, 2, tmp_path / "short")
    short, whole = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (out, model_dir))
    weights = dict(whole.named_parameters())
    assert len(short.model.layers) == 2 and all(torch.equal(p, weights[n]) for n, p in short.named_parameters())
    with pytest.raises(ValueError, match=r"audit\.num_layers: 9 is more than the model's 4"):
        shortened(model_dir, 9, tmp_path / "long")


def test_reference_gives_every_token_a_gradient(model_dir: Path, tmp_path: Path) -> None:
    """Also the pad token, which transformers leaves out of the embedding's gradient."""
    padded = tmp_path / "padded"
    shutil.copytree(model_dir, padded)
    samples = make_samples()[:1]
    samples[0].weights[:] = 1.0
    token = int(samples[0].token_ids[0])
    config = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps({**config, "pad_token_id": token}))
    steps = []
    for folder in (model_dir, padded):
        policy = ReferencePolicy(folder, AlgorithmConfig(), 1.0)
        steps.append(policy.step(samples, policy.logprobs(samples)).gradients["model.embed_tokens.weight"])
    assert torch.equal(*steps) and steps[0][token].abs().max() > 0


def test_reference_begins_with_the_policys_rounded_weights(model_dir: Path) -> None:
    exact, rounded = (ReferenceTrainer(model_dir, AlgorithmConfig(), 1.0, dtype) for dtype in (torch.float32, torch.bfloat16))
    for name, weight in exact.weights().items():
        assert torch.equal(rounded.weights()[name], weight.bfloat16().double()) and weight.dtype == torch.float64, name
    assert any(not torch.equal(w, rounded.weights()[name]) for name, w in exact.weights().items())


class Trainer:
    """Writes what it is asked for, and nothing into it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.passes: list[int | None] = []  # through the model, by the number of the mini-batch, None: of all

    async def load_batch(self, shares: list[Any]) -> None: ...

    async def old_logprobs(self) -> list[dict[str, float]]:
        self.passes.append(None)
        return []

    async def token_logprobs(self, index: int) -> dict[int, float]:
        self.asked.append(index)
        assert self.passes[-1] in (None, index), "nothing has found them yet, or weights other than the first ones have"
        return {2: -1.5}

    async def update(self, index: int, lr: float) -> list[dict[str, float]]:
        self.passes.append(index)
        return [{"loss_sum": 2.0 * index, "num_tokens": 2.0, "grad_norm_max": 1.0}]

    async def export_hf(self, out: str) -> None:
        Path(out).mkdir()

    write_gradients = export_hf


@pytest.mark.parametrize("mode", ["trainer", "engine"])
@pytest.mark.parametrize("masked", [(), (0,), (0, 1)])
def test_the_first_minibatch_with_an_update_is_recorded(tmp_path: Path, masked: tuple[int, ...], mode: Any) -> None:
    minibatches = [make_samples(seed=i) for i in range(2)]
    for number in masked:
        for sample in minibatches[number]:
            sample.mask[:] = False
    trainer, folder = Trainer(), tmp_path / "step_000004"
    cfg = Config(algorithm=AlgorithmConfig(old_logprobs=mode))
    recorded = RecordedTrainer(trainer, cfg, 4, folder, minibatches, after=False)

    async def step() -> None:
        await recorded.load_batch([])
        if mode == "trainer":
            await recorded.old_logprobs()
        for index in range(2):
            if index not in masked:
                await recorded.update(index, 1e-3)

    asyncio.run(step())
    if len(masked) == 2:
        assert list(tmp_path.iterdir()) == [] and trainer.asked == []
    else:
        assert [path.name for path in tmp_path.iterdir()] == ["step_000004"] and trainer.asked == [len(masked)]
        assert json.loads((folder / "record.json").read_text())["loss"] == len(masked)
        assert np.array_equal(load_samples(folder / "samples.npz")[0].token_ids, minibatches[len(masked)][0].token_ids)
        mask = np.concatenate([sample.mask for sample in minibatches[len(masked)]])
        logprobs = np.load(folder / "logprobs.npy")
        assert logprobs[2] == -1.5 and np.isnan(logprobs[mask][3:]).all() and (logprobs[~mask] == 0).all()
