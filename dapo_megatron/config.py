"""The whole configuration as typed dataclasses. Reading lives in `config_io.py`, validation in `validation/`; none
of them imports torch, ray or megatron.

Every field is documented where it stands. Lengths are in tokens, times in seconds.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class RunConfig:
    name: str = "dapo"
    dir: str = "runs"  # the run's folder is dir/name
    seed: int = 1
    steps: int = 100  # rollout steps


@dataclass
class ModelConfig:
    # An HF folder, a folder with one GGUF file, a .gguf file, a hub id, `package:NAME` (an installed Python package
    # that carries weights), or `random` (see random_model).
    path: str = ""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of forward and backward; bfloat16 has fp32 master weights
    # With path: random. Keys of transformers' config class of model_type: {model_type: llama, hidden_size: 64, ...}.
    # The vocabulary is that of the built-in character tokenizer.
    random_model: dict[str, Any] = field(default_factory=dict)


@dataclass
class SourceConfig:
    # jsonl/jsonl.gz/parquet path, a hub data set id, or `generator:NAME` (generator:arithmetic, generator:choice,
    # generator:reasoning_gym)
    path: str = ""
    subset: str = ""  # of a hub data set with several configurations, which one, e.g. `main` of GSM8K; empty: its default
    # Of generators (train or test) and hub data sets; a file has none. data.eval's default is test.
    split: str = "train"
    args: dict[str, Any] = field(default_factory=dict)  # the generator's arguments; those of a later file replace all of them
    # Columns. The defaults read verl's rows; set prompt/answer for flat rows ({question, answer} ...).
    prompt_key: str = "prompt"
    answer_key: str = "reward_model.ground_truth"
    answer_pattern: str = ""  # regular expression whose first group is the gold answer, e.g. GSM8K's `#### (.*)`
    # Column of the problem's own id, if there is such a column: one id on two different problems of a data_source is
    # refused. Empty: ids are not looked at.
    id_key: str = "id"
    limit: int = 0  # use at most this many rows; 0 is all


@dataclass
class DataConfig:
    train: SourceConfig = field(default_factory=SourceConfig)
    eval: SourceConfig = field(default_factory=lambda: SourceConfig(split="test"))
    format: Literal["chat", "plain"] = "chat"  # chat: the tokenizer's chat template; plain: the text itself
    system: str = ""  # system turn; empty: none is added by us
    few_shot: list[list[str]] = field(default_factory=list)  # [[question, reply], ...] as earlier turns
    template: str = "{prompt}"  # put around every problem's text (the last user turn)
    shuffle: bool = True
    max_prompt_tokens: int = 2048  # rows whose prompt is longer are skipped (and counted), never truncated
    # When a run is resumed and its training prompts are others than before (rows, rendering, tokenizer or shuffling):
    # refuse, or continue at the saved position in the new ones.
    on_change: Literal["refuse", "continue"] = "refuse"


@dataclass
class RolloutConfig:
    # local: transformers in a process of ours, repeats bit for bit, for debugging
    engine: Literal["sglang", "vllm", "local"] = "sglang"
    num_servers: int = 1
    # Addresses (http://host:port) of servers that someone else started, with the run's model; none is started then.
    servers: list[str] = field(default_factory=list)
    python: str = ""  # interpreter of the environment that the servers run in; empty: this one
    tp: int = 1  # tensor parallel size of each server
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: the model's dtype
    max_response_tokens: int = 20480
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_total_tokens: int = 8192  # KV cache of a server on CPU; on GPUs SGLang sizes it itself from mem_fraction
    mem_fraction: float = 0.6
    base_port: int = 0  # 0: any free port; otherwise server i listens on base_port + i
    max_inflight_groups: int = 64  # groups being generated at a time, over all servers together
    request_timeout_s: float = 600.0
    startup_timeout_s: float = 600.0
    health_interval_s: float = 10.0  # between two looks at whether a server is alive
    health_timeout_s: float = 120.0  # a server that gives no sign of life for so long is ended and started anew
    # 0: a step trains on what its own weights sampled. 1: the next batch is sampled while this one trains, by weights that are
    # one step older than those it will train.
    max_staleness: int = 0
    server_args: list[str] = field(default_factory=list)  # appended to SGLang's command line


@dataclass
class SamplingConfig:
    """Dynamic sampling."""

    dynamic: bool = True  # False: every group is kept
    prompts_per_step: int = 512  # groups a step trains on
    samples_per_prompt: int = 16
    surplus: Literal["rewind", "carry"] = "rewind"  # what becomes of groups sampled past the last accepted one
    max_groups_factor: float = 10.0  # budget: at most this many times prompts_per_step groups are sampled in a step
    # Over budget: train on what there is, or end the run with an error.
    on_budget: Literal["smaller_batch", "stop"] = "smaller_batch"


@dataclass
class OverlongConfig:
    cache_tokens: int = 4096  # the last cache_tokens of max_response_tokens are punished linearly
    penalty_factor: float = 1.0  # 0 switches the punishment off
    filter: bool = False  # responses cut at the limit get mask 0


@dataclass
class RewardConfig:
    verifier: str = "math_dapo"
    verifier_args: dict[str, Any] = field(default_factory=dict)
    correct: float = 1.0
    incorrect: float = -1.0
    num_workers: int = 1
    timeout_s: float = 30.0  # of one response's verdict; over it the response is incorrect and counted as an error
    overlong: OverlongConfig = field(default_factory=OverlongConfig)


@dataclass
class AlgorithmConfig:
    # group_norm: (R - mean) / (std + eps); mean_only: R - mean
    advantage: Literal["group_norm", "mean_only"] = "group_norm"
    std_eps: float = 1e-6
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0  # c of the dual clip, > 1; 0: off
    aggregation: Literal["token", "group_token", "sequence", "constant"] = "token"
    entropy_coef: float = 0.0  # of the bonus for the policy's entropy; 0: off
    # Whose log-probs the ratio is against. trainer: the trainer's own, computed again before the updates (of tokens that older
    # weights sampled: the engine's, as the trainer hasn't got those weights any more). engine: the engine's, nothing is
    # computed again.
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    # C of truncated importance weights: each token's term times min(exp(trainer's - engine's log-prob), C), both of the old
    # policy, which then is the trainer's for all tokens. 0: off.
    importance_cap: float = 0.0


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    warmup_steps: int = 20  # linear, in rollout steps
    weight_decay: float = 0.1  # not on norms and biases
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 1.0  # largest global norm of the gradient; 0: no clipping
    prompts_per_minibatch: int = 32  # groups in one optimizer step
    # Updates whose loss or gradient is nan or infinite are skipped; more than this many in a row end the run (0: the first).
    max_skipped_updates: int = 3


RECOMPUTE_MODULES = ("core_attn", "mlp")


@dataclass
class ParallelConfig:
    tp: int = 1
    pp: int = 1
    vpp: int = 1  # model chunks of each pipeline rank (interleaved schedule); 1: plain 1F1B
    cp: int = 1  # every sequence is split over this many ranks
    dp: int = 1
    ep: int = 1  # an MoE layer's experts are spread over this many of the tp x cp x dp ranks, each whole on its rank
    sequence_parallel: bool = False
    max_tokens_per_microbatch: int = 8192  # of all context-parallel ranks together
    # Pack a prompt once for all its responses in a micro-batch instead of once for each: same loss and gradients, fewer tokens.
    # On GPUs FlexAttention then takes the place of Transformer Engine's attention.
    share_prompts: bool = False
    # Response tokens whose logits exist at a time. 0: as many as fit 190 MB on CPU and 2 GB on GPUs.
    logprob_chunk_tokens: int = 0
    # Activations computed again in the backward. full: of every layer; selective: of recompute_modules only.
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"])  # of RECOMPUTE_MODULES

    @property
    def sequence_multiple(self) -> int:
        """A packed sequence's length is a multiple of this: context parallelism cuts it into 2 x cp equal pieces."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def microbatch_multiple(self) -> int:
        """A micro-batch's length is a multiple of this: sequence parallelism shares a rank's part over the tp ranks."""
        return math.lcm(self.sequence_multiple, self.cp * self.tp if self.sequence_parallel else 1)

    @property
    def num_microbatches_multiple(self) -> int:
        """The interleaved schedule works micro-batches off in rounds of pp."""
        return self.pp if self.vpp > 1 else 1


@dataclass
class ClusterConfig:
    device: Literal["auto", "cpu"] = "auto"  # auto: GPUs where there are any; cpu: leave them alone
    gpus_per_node: int = 8
    colocate: bool = False  # trainer and servers share GPUs


@dataclass
class PublishConfig:
    bucket_mb: int = 256
    timeout_s: float = 300.0  # for one bucket to reach one server
    # What becomes of requests in flight. drain: they finish first. retract: they go on under the new weights, which compute
    # their keys and values again. in_place: they go on with the old ones. abort: they are dropped and sampled anew.
    pause: Literal["drain", "retract", "in_place", "abort"] = "drain"
    check: int = 0  # after every so many publishes compare all tensors' checksums and some log-probs; 0: never


@dataclass
class CheckpointConfig:
    every: int = 10  # rollout steps; 0: only at the end
    keep: int = 2
    export_hf: bool = True  # the final policy as an HF folder


@dataclass
class EvalConfig:
    every: int = 0  # rollout steps; 0: only before and after; -1: never
    prompts: int = 0  # 0: all
    samples: int = 8  # for avg@k
    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = True  # measure greedy accuracy as well


@dataclass
class AuditConfig:
    """`dapo audit`: loss and gradients on this layout against a single rank and plain transformers."""

    # Every so many rollout steps the first mini-batch that is updated with is recorded for `dapo audit RUN --step N`: the
    # weights before it and its gradients in fp32, which nothing removes later. 0: never.
    save_every: int = 0
    num_layers: int = 0  # `dapo audit CONFIG` takes the model's first layers only, so that one rank can hold it; 0: all
    sequences: int = 12
    max_tokens: int = 128  # of a sequence, prompt and response


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)

    @property
    def world_size(self) -> int:
        return self.parallel.tp * self.parallel.cp * self.parallel.pp * self.parallel.dp
