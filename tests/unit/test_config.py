"""Reading and judging configurations: every kind of wrong use has one test that names the field."""

import json
import socket
import struct
from pathlib import Path

import pytest

from dapo_megatron.config import Config, ModelConfig
from dapo_megatron.config_io import ConfigError, Problem, config_hash, load_config, read_config, resolved_yaml
from dapo_megatron.layout import sharing_text, sizes_text
from dapo_megatron.model_sizes import FAMILIES, read_sizes
from dapo_megatron.validation import AT_LEAST, BETWEEN, load_valid_config, validate

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny_cpu.yaml"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def tiny(tmp_path: Path, *overrides: str) -> Config:
    return load_config(TINY, [f"run.dir={tmp_path}", *overrides])


def faults(tmp_path: Path, *overrides: str) -> dict[str, Problem]:
    """Errors of the tiny configuration with these overrides, by field."""
    problems = validate(tiny(tmp_path, *overrides))
    return {p.field: p for p in problems if p.severity != "warning"}


# Reading ------------------------------------------------------------------------------------------------------------


def test_bases_compose_and_the_command_line_comes_last(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.yaml",
        "run: {steps: 1, name: a, seed: 5}\nmodel: {random_model: {model_type: llama, hidden_size: 8}}\n",
    )
    write(tmp_path, "deep/b.yaml", "base: ../a.yaml\nrun: {steps: 2, name: b}\n")
    top = write(tmp_path, "c.yaml", "base: [deep/b.yaml]\nrun: {steps: 3}\nmodel: {random_model: {hidden_size: 16}}\n")
    config = load_config(top, ["run.steps=4", "optimizer.lr=1e-5", "data.train.args.max=9", "run.name=x=y"])
    assert (config.run.seed, config.run.name, config.run.steps) == (5, "x=y", 4)
    assert config.model.random_model == {"hidden_size": 16}  # free-form: replaced, not merged
    assert config.optimizer.lr == 1e-5 and config.data.train.args == {"max": 9}


def test_free_form_mappings_are_replaced_whole_unless_one_entry_is_set(tmp_path: Path) -> None:
    a = "data: {train: {path: a, args: {x: 1, deep: {y: 1, z: 2}}}}\nreward: {verifier_args: {strict: false}}\n"
    write(tmp_path, "a.yaml", a)
    b = write(tmp_path, "b.yaml", "base: a.yaml\ndata: {train: {args: {w: 3}}}\nreward: {verifier_args: {}}\n")
    config = load_config(b)
    assert (config.data.train.args, config.data.train.path, config.reward.verifier_args) == ({"w": 3}, "a", {})
    assert load_config(tmp_path / "a.yaml", ["data.train.args={w: 3}"]).data.train.args == {"w": 3}
    assert load_config(tmp_path / "a.yaml", ["data.train={args: {w: 3}}"]).data.train.args == {"w": 3}
    one = load_config(tmp_path / "a.yaml", ["data.train.args.deep.z=5", "data.train.args.w=3"])
    assert one.data.train.args == {"x": 1, "deep": {"y": 1, "z": 5}, "w": 3}


def test_two_bases_the_later_wins(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "run: {steps: 1}\n")
    write(tmp_path, "b.yaml", "run: {steps: 2}\n")
    assert load_config(write(tmp_path, "c.yaml", "base: [a.yaml, b.yaml]\n")).run.steps == 2
    assert load_config(write(tmp_path, "d.yaml", "base: [b.yaml, a.yaml]\n")).run.steps == 1


def test_every_fault_of_the_structure_is_reported_at_once(tmp_path: Path) -> None:
    text = "run: {step: 3, steps: many}\nalgorithm: {aggregation: tokn}\nreward: 5\nparalel: {tp: 2}\n"
    overrides = ["optimizer.clip_high=0.3", "checkpoint.export_hf=1", "run.seed", "rollout.tp=[1]", "model.path=null"]
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "a.yaml", text), overrides)
    messages = {p.field: str(p) for p in caught.value.problems}
    assert set(messages) == {
        *("run.step", "run.steps", "algorithm.aggregation", "reward", "paralel"),
        *("optimizer.clip_high", "checkpoint.export_hf", "command line", "rollout.tp", "model.path"),
    }
    assert "did you mean run.steps?" in messages["run.step"]
    assert "whole number" in messages["run.steps"]
    assert "did you mean token?" in messages["algorithm.aggregation"]
    assert "did you mean parallel?" in messages["paralel"]
    assert "did you mean algorithm.clip_high?" in messages["optimizer.clip_high"]
    assert "true or false" in messages["checkpoint.export_hf"]


def test_a_faulty_key_does_not_hide_the_others(tmp_path: Path) -> None:
    config, problems = read_config(write(tmp_path, "a.yaml", "run: {steps: x, seed: 4}\n"))
    assert config.run.seed == 4 and config.run.steps == Config().run.steps and len(problems) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: missing.yaml\n", "no such file"),
        ("base: a.yaml\n", "circle"),
        ("base: {a: 1}\n", "list of file names"),
        ("run: [\n", "cannot be read as YAML"),
        ("- run\n", "mappings"),
        ("run: {steps: 1}\nrun: {steps: 2}\n", "duplicate"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, "a.yaml", text))


def test_missing_configuration_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "quickstart.yaml", "")
    with pytest.raises(ConfigError, match=r"did you mean .*quickstart\.yaml"):
        load_config(tmp_path / "quickstrat.yaml")
    with pytest.raises(ConfigError) as caught:  # what the file would have set is not called missing
        load_valid_config(tmp_path / "quickstrat.yaml", ["run.stepz=1"])
    assert [p.field for p in caught.value.problems] == ["configuration file", "run.stepz"]


def test_resolved_yaml_reads_back_and_the_hash_follows_every_field(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    assert load_config(write(tmp_path, "r.yaml", resolved_yaml(config))) == config
    assert config_hash(config) == config_hash(tiny(tmp_path)) != config_hash(tiny(tmp_path, "run.seed=2"))


# Values and combinations --------------------------------------------------------------------------------------------


def test_the_tiny_configuration_has_no_problem(tmp_path: Path) -> None:
    assert validate(tiny(tmp_path)) == []


@pytest.mark.parametrize("field", sorted({*AT_LEAST, *BETWEEN}))
def test_ranges(tmp_path: Path, field: str) -> None:
    assert set(faults(tmp_path, f"{field}={-2 if field in AT_LEAST else 0}")) >= {field}


MOE = [
    f"model.random_model.{name}"
    for name in ("model_type=qwen3_moe", "num_experts=4", "moe_intermediate_size=16", "num_experts_per_tok=2")
]
WRONG = [
    # group of one
    (["sampling.samples_per_prompt=1"], "sampling.samples_per_prompt", "group of one"),
    # response limit under the overlong cache
    (["reward.overlong.cache_tokens=8"], "rollout.max_response_tokens", "overlong"),
    (["reward.overlong.cache_tokens=0"], "reward.overlong.cache_tokens", "penalty_factor=0"),
    # world size that doesn't factor
    (["parallel.dp=5", "cluster.gpus_per_node=4"], "parallel.dp", "factor"),
    (["cluster.gpus_per_node=1"], "parallel.tp", "within a node"),
    # heads or query groups not divisible by TP
    (["model.random_model.num_attention_heads=3"], "parallel.tp", "3 attention heads"),
    (["model.random_model.num_key_value_heads=1"], "parallel.tp", "1 query groups"),
    (["model.random_model.num_hidden_layers=3", "parallel.pp=2"], "parallel.pp", "3 layers"),
    # experts
    (["parallel.ep=2"], "parallel.ep", "no experts"),
    ([*MOE, "parallel.ep=2", "model.random_model.num_experts=3"], "parallel.ep", "3 experts"),
    ([*MOE, "model.random_model.num_experts=3", "parallel.ep=3"], "parallel.ep", "must divide tp x cp x dp = 2"),
    (
        [*MOE, "model.random_model.num_experts=3", "parallel.dp=3", "parallel.ep=3"],
        "parallel.ep",
        "multiple or a divisor of tp (2)",
    ),
    ([*MOE, "rollout.engine=vllm"], "rollout.engine", "use sglang"),
    ([*MOE, "parallel.sequence_parallel=false"], "parallel.sequence_parallel", "route their own tokens"),
    # unknown model family
    (["model.random_model.model_type=mamba"], "model.path", "unknown model family 'mamba'"),
    (["model.path="], "model.path", "is required"),
    (["model.path=package:no_such_package"], "model.path", "no such package"),
    (["model.path=./no/such/folder", "model.random_model.model_type=llama"], "model.path", "no such file or folder"),
    # missing data file, and sources nobody knows
    (["data.train.path=nowhere/train.jsonl"], "data.train.path", "no such file"),
    (["data.train.path=./train.csv"], "data.train.path", "must end with"),
    (["data.train.path=generator:arithmetik"], "data.train.path", "known: arithmetic"),
    (["data.train.split=validation"], "data.train.split", "train or test"),
    (["data.train.path=gsm8k"], "data.train.path", "hub id (owner/name)"),
    (["data.train.path=data/train.jsonl", "data.train.args.num_rows=3"], "data.train.args", "of generators"),
    (["data.train.path=openai/gsm8k", "data.train.args.num_rows=3"], "data.train.args", "of generators"),
    (["data.train.path=train.parquet", "data.train.split=validation"], "data.train.split", "no splits"),
    (["data.train.path=train.parquet", "data.train.subset=main"], "data.train.subset", "remove it"),
    (["data.train.subset=main"], "data.train.subset", "remove it"),
    (["data.train.prompt_key=question"], "data.train.prompt_key", "files and hub data sets"),
    (["data.train.id_key=uid"], "data.train.id_key", "files and hub data sets"),
    (["eval.every=0", "data.eval.args.seed=1"], "data.eval.args", "seed is 1 here and 0 in data.train.args"),
    (["algorithm.entropy_coef=-0.1"], "algorithm.entropy_coef", "at least 0"),
    (["data.train.args.num_rovs=9"], "data.train.path", "num_rows"),
    (["data.train.path=generator:arithmetic", "data.train.args.test_fraction=1"], "data.train.path", "no problem"),
    (["reward.verifier=exact_answer"], "data.train.path", "needs an integer"),
    (["data.train.path="], "data.train.path", "is required"),
    (["eval.every=5", "data.eval.path="], "data.eval.path", "eval.every=-1"),
    (["data.train.answer_pattern=(x"], "data.train.answer_pattern", "regular expression"),
    (["data.train.answer_pattern=abc"], "data.train.answer_pattern", "group"),
    (["data.template=hello"], "data.template", "{prompt}"),
    (["data.few_shot=[[a,b,c]]"], "data.few_shot", "pair"),
    # what the recipe rules out
    (["rollout.top_p=0.9"], "rollout.top_p", "another distribution"),
    (["rollout.top_k=50"], "rollout.top_k", "another distribution"),
    (["rollout.temperature=0"], "rollout.temperature", "above 0"),
    (["algorithm.dual_clip=0.5"], "algorithm.dual_clip", "above 1"),
    (["algorithm.clip_low=1"], "algorithm.clip_low", "between 0 and 1"),
    (["reward.correct=.nan"], "reward.correct", "finite"),
    (["reward.correct=1e39"], "reward.correct", "within +-1e+09"),
    (["reward.incorrect=-1e39"], "reward.incorrect", "within +-1e+09"),
    (["reward.overlong.penalty_factor=1e39"], "reward.overlong.penalty_factor", "within +-1e+09"),
    (["optimizer.eps=1e-50"], "optimizer.eps", "above 1e-37"),
    (["optimizer.prompts_per_minibatch=17"], "optimizer.prompts_per_minibatch", "at most"),
    (["reward.correct=-1"], "reward.correct", "reward.incorrect"),
    (["reward.verifier=choise"], "reward.verifier", "choice"),
    (["reward.verifier_args={strict: 1}"], "reward.verifier", "strict"),
    (["reward.verifier=math_dapo", "reward.verifier_args={strict: .nan}"], "reward.verifier", "must be of type bool"),
    (["parallel.tp=1"], "parallel.sequence_parallel", "tp > 1"),
    (["rollout.max_response_tokens=250"], "rollout.max_response_tokens", "context is 256"),
    (["rollout.engine=local", "rollout.num_servers=2"], "rollout.num_servers", "local engine"),
    (["rollout.engine=local", "rollout.servers=['http://a:1']"], "rollout.servers", "no server"),
    (["rollout.servers=['host:1']"], "rollout.servers", "http://host:port"),
    (["rollout.servers=['http://a:1', 'http://a:1']"], "rollout.servers", "twice"),
    (["rollout.servers=['http://a:1', 'http://b:1']", "rollout.num_servers=3"], "rollout.num_servers", "leave num_servers out"),
    (["rollout.servers=['http://a:1']", "rollout.base_port=4000"], "rollout.base_port", "that this run starts"),
    (["rollout.python=/no/such/python"], "rollout.python", "no such program"),
    (["rollout.max_staleness=2"], "rollout.max_staleness", "0 (on policy) or 1"),
    (["rollout.engine=local", "publish.pause=in_place"], "publish.pause", "use drain"),
    (["publish.check=-1"], "publish.check", "at least 0"),
    (["publish.timeout_s=0"], "publish.timeout_s", "above 0"),
    (["algorithm.importance_cap=2", "algorithm.old_logprobs=engine"], "algorithm.importance_cap", "old_logprobs=trainer"),
    (["cluster.colocate=true", "rollout.num_servers=3"], "rollout.num_servers", "share"),
    (["eval.top_p=0"], "eval.top_p", "above 0"),
    (["run.name=a/b"], "run.name", "letters"),
]


@pytest.mark.parametrize(("overrides", "field", "message"), WRONG, ids=[" ".join(o) for o, _, _ in WRONG])
def test_wrong_values_name_the_field_and_the_remedy(tmp_path: Path, overrides: list[str], field: str, message: str) -> None:
    found = faults(tmp_path, *overrides)
    assert field in found
    assert message in str(found[field])


def test_values_and_structure_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_valid_config(TINY, [f"run.dir={tmp_path}", "run.stepz=1", "sampling.samples_per_prompt=1", "rollout.top_p=0.5"])
    assert {p.field for p in caught.value.problems} == {"run.stepz", "sampling.samples_per_prompt", "rollout.top_p"}


def test_warnings_do_not_stop_a_run(tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}", "optimizer.prompts_per_minibatch=16", "parallel.max_tokens_per_microbatch=8"]
    _, warnings = load_valid_config(TINY, overrides)
    assert {p.field for p in warnings} == {"optimizer.prompts_per_minibatch", "parallel.max_tokens_per_microbatch"}


def test_sharing_prompts_that_do_not_fit_is_warned_of(tmp_path: Path) -> None:
    budget = "parallel.max_tokens_per_microbatch="  # prompts of 32 tokens, responses of 8
    for tokens, expected in ((48, set()), (47, {"parallel.share_prompts"}), (39, {"parallel.max_tokens_per_microbatch"})):
        _, warnings = load_valid_config(TINY, [f"run.dir={tmp_path}", f"{budget}{tokens}"])
        assert {p.field for p in warnings} == expected


def test_what_sharing_prompts_saves_is_told() -> None:
    cfg = Config()
    cfg.rollout.max_response_tokens, cfg.sampling.samples_per_prompt, cfg.parallel.max_tokens_per_microbatch = 24, 8, 1024
    cfg.parallel.share_prompts = True
    # 8 x (55 + 5) = 480 and 55 + 8 x 5 = 95; 8 x (55 + 23) = 624 and 55 + 8 x 23 = 239
    saved = "55 tokens of a prompt are packed once for up to 8 responses: 80% fewer tokens with responses of 6, 62% with 24"
    assert sharing_text(cfg, 55.2) == saved and "prompts shared" in sizes_text(cfg.parallel)
    cfg.parallel.max_tokens_per_microbatch = 110  # two responses of 24 fit beside a prompt: 4 prompts, 4 x 55 + 8 x 23 = 404
    assert "62%" not in sharing_text(cfg, 55) and "35% with 24" in sharing_text(cfg, 55)
    cfg.parallel.share_prompts = False
    assert sharing_text(cfg, 55).startswith("off; with parallel.share_prompts=true 55 tokens of a prompt are packed once")
    cfg.rollout.max_response_tokens = 20480
    assert sharing_text(cfg, 55) == ""


def test_the_model_is_judged_whatever_else_is_wrong(tmp_path: Path) -> None:
    warned = ("parallel.max_tokens_per_microbatch=8", "model.random_model.num_attention_heads=9", "rollout.tp=2")
    messages = " ".join(map(str, validate(tiny(tmp_path, *warned))))
    assert "9 attention heads" in messages and "below the longest sequence" in messages
    messages = " ".join(map(str, validate(tiny(tmp_path, *warned, "parallel.logprob_chunk_tokens=-1", "eval.every=-9"))))
    assert "9 attention heads" in messages and "must be at least 0" in messages and "below the longest sequence" in messages
    for divisor in ("parallel.tp", "parallel.pp", "rollout.tp", "cluster.gpus_per_node", "optimizer.prompts_per_minibatch"):
        assert divisor in faults(tmp_path, f"{divisor}=0")
    assert "rollout.num_servers" in faults(tmp_path, "rollout.num_servers=0", "rollout.base_port=7000")


def test_quickstart_on_two_tensor_parallel_ranks_is_refused(tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}", "parallel.tp=2", "parallel.pp=1", "parallel.max_tokens_per_microbatch=100"]
    with pytest.raises(ConfigError, match="doesn't divide the model's 9 attention heads"):
        load_valid_config(ROOT / "configs" / "quickstart.yaml", overrides, dry_run=True)


def test_evaluation_reads_the_test_split(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "a.yaml", "data: {train: {path: generator:choice}, eval: {path: generator:choice}}\n"))
    assert (config.data.train.split, config.data.eval.split) == ("train", "test")
    assert Config().data.eval.split == "test"


def test_two_sides_of_a_generator_must_be_cut_alike(tmp_path: Path) -> None:
    base = ("data.train.path=generator:arithmetic", "data.eval.path=generator:arithmetic", "reward.verifier=exact_answer")
    assert faults(tmp_path, *base, "eval.every=0", "data.eval.args.test_fraction=0.25") == {}
    found = faults(tmp_path, *base, "eval.every=0", "data.train.args.test_fraction=0.5")
    assert "test_fraction is 0.25 here and 0.5" in str(found["data.eval.args"])
    assert faults(tmp_path, *base, "eval.every=-1", "data.train.args.test_fraction=0.5") == {}


def test_what_is_taken_for_a_hub_id_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("data.train.path=owner/train.csv", "model.path=owner/model", "model.random_model={}")
    problems = validate(tiny(tmp_path, *overrides))
    assert [(p.field, p.severity) for p in problems] == [("model.path", "warning"), ("data.train.path", "warning")]
    assert all("taken for a hub id" in p.message for p in problems)
    write(tmp_path, "owner/train.csv", "")
    monkeypatch.chdir(tmp_path)
    assert "unknown kind of file" in str(faults(tmp_path, *overrides)["data.train.path"])


def test_cache_of_a_cpu_server_must_hold_a_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "rollout.max_total_tokens" in faults(tmp_path, "rollout.max_total_tokens=39")
    assert faults(tmp_path, "rollout.max_total_tokens=40") == {}


def test_unwritable_run_folder(tmp_path: Path) -> None:
    file = write(tmp_path, "file", "")
    assert "is a file" in str(faults(tmp_path, f"run.dir={file}/runs")["run.dir"])
    # even root, who passes every check of permissions, can write nothing there
    assert "nothing can be written in /proc" in str(faults(tmp_path, "run.dir=/proc/runs")["run.dir"])


def test_busy_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = faults(tmp_path, f"rollout.base_port={port - 1}", "rollout.num_servers=2")
        assert f"port {port}" in str(found["rollout.base_port"])
    assert "65535" in str(faults(tmp_path, "rollout.base_port=65535", "rollout.num_servers=2")["rollout.base_port"])


def test_missing_files_are_warnings_in_a_dry_run(tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}", "data.train.path=nowhere/train.jsonl", "data.train.prompt_key=question"]
    _, problems = load_valid_config(TINY, overrides, dry_run=True)
    assert [(p.field, p.severity) for p in problems] == [("data.train.path", "machine")]
    with pytest.raises(ConfigError, match="no such file"):
        load_valid_config(TINY, overrides)


# Models -------------------------------------------------------------------------------------------------------------


def test_validation_knows_the_families_that_the_weight_mapping_knows() -> None:
    from dapo_megatron.weights import mapping  # loads torch, so validation can't

    assert mapping.FAMILIES == FAMILIES


def test_sizes_of_an_hf_folder_and_its_limits(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 30}
    write(tmp_path, "m/config.json", json.dumps({"model_type": "qwen2", "max_position_embeddings": 64, **sizes}))
    found = read_sizes(ModelConfig(path=str(tmp_path / "m")))
    assert found is not None and (found.family, found.num_query_groups, found.max_positions) == ("qwen2", 3, 64)
    problems = validate(tiny(tmp_path, f"model.path={tmp_path}/m", "rollout.max_response_tokens=40"))
    messages = " ".join(map(str, problems))
    assert "3 query groups" in messages and "context is 64" in messages and "model.random_model" in messages
    write(tmp_path, "m/config.json", json.dumps({"model_type": "qwen2"}))
    assert "lacks num_hidden_layers" in str(faults(tmp_path, f"model.path={tmp_path}/m")["model.path"])


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def test_sizes_of_a_gguf_file_is_read_from_its_header(tmp_path: Path) -> None:
    numbers = {"block_count": 4, "attention.head_count": 9, "attention.head_count_kv": 3, "feed_forward_length": 12}
    entries = gguf_text("general.architecture") + struct.pack("<I", 8) + gguf_text("llama")
    entries += gguf_text("general.tags") + struct.pack("<IIQ", 9, 8, 2) + gguf_text("a") + gguf_text("b")
    for key, number in numbers.items():
        entries += gguf_text(f"llama.{key}") + struct.pack("<II", 4, number)
    entries += gguf_text("tokenizer.ggml.model")  # the reader stops here, so that what follows may be missing
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(numbers) + 3) + entries)
    found = read_sizes(ModelConfig(path=str(file)))
    assert found is not None and (found.num_layers, found.num_heads, found.num_query_groups) == (4, 9, 3)
    assert "9 attention heads" in " ".join(map(str, validate(tiny(tmp_path, f"model.path={file}"))))
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(ValueError, match="damaged"):
        read_sizes(ModelConfig(path=str(file)))
