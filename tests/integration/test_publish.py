"""The trainer's weights in a real SGLang server: the same log-probs after a publish, and visibly not without one."""

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dapo_megatron.algo.samples import build_samples, split_minibatches
from dapo_megatron.cluster.cluster import Cluster, start_cluster
from dapo_megatron.config import Config
from dapo_megatron.config_io import load_config
from dapo_megatron.policy.sending import Sending
from dapo_megatron.rollout.server_client import ServerHttp
from dapo_megatron.rollout.sglang_client import SGLangClient
from dapo_megatron.rollout.sglang_server import SGLangServer
from dapo_megatron.rollout.sglang_weights import ServerLayout
from dapo_megatron.setup import make_sampler, prepare
from dapo_megatron.train import pack
from dapo_megatron.weights.publish import Publisher
from tests.distributed.harness import RankPool, make_config, make_model
from tests.distributed.test_publishing import TEXTS, merged, worker_on
from tests.small_models import change_tensors

ROOT = Path(__file__).resolve().parents[2]


class Trial:
    """Cluster of the tiny configuration, driven by hand."""

    def __init__(self, cfg: Config, cluster: Cluster, prepared: Any) -> None:
        self.cfg, self.cluster = cfg, cluster
        self.sampler = make_sampler(cfg, prepared, cluster)
        self.publisher = Publisher(cluster.policy, cluster.engine, check_every=1)
        self.version = 0

    async def publish(self) -> None:
        self.version += 1
        await self.publisher.publish(self.version)

    async def drift(self, update: bool) -> float:
        """Largest |trainer's - server's| log-prob of freshly sampled tokens; then, if wanted, an update of the trainer."""
        self.sampler.stream.position = 0  # the same prompts every time: a stale prefix would be hit
        sampled = await self.sampler.collect(self.version)
        self.groups = sampled.groups
        minibatches = split_minibatches(build_samples(sampled.groups, version=self.version), 8)
        await self.cluster.policy.load_batch(pack(self.cfg, minibatches))
        (stats,) = await self.cluster.policy.old_logprobs()
        if update:
            await self.cluster.policy.update(0, lr=1e-2)
        return stats["diff_max"]


# At temperature 1 every step of test_training's run shows the same.
@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    overrides = ["rollout.temperature=0.6", "sampling.prompts_per_step=8", "sampling.dynamic=false"]
    cfg = load_config(ROOT / "configs/tiny_cpu.yaml", overrides)
    prepared = prepare(cfg)
    with start_cluster(cfg, prepared.model_dir, prepared.eos_ids, tmp_path_factory.mktemp("run"), print) as cluster:
        yield Trial(cfg, cluster, prepared)


def test_server_equals_trainer_after_a_publish_and_only_then(trial: Trial, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with trial.publisher:
            await steps()

    async def steps() -> None:
        await trial.publish()
        assert await trial.drift(update=True) <= 1e-4
        await trial.publish()
        assert await trial.drift(update=True) <= 1e-4
        # The publish left out: the same measurement sees it, and so does the comparison of checksums.
        assert await trial.drift(update=False) > 1e-2
        with pytest.raises(RuntimeError, match=r"publish\.check: server 0 does not hold version"):
            await trial.publisher.compare()
        await trial.publish()
        assert await trial.drift(update=False) <= 1e-4
        await trial.cluster.policy.export_hf(str(out))

    out = tmp_path / "hf"
    asyncio.run(scenario())
    assert exported_difference(out, trial) <= 1e-4


def trained_weights(rank: int, cfg: Config, folder: Path, sender: Any, version: int, bucket_bytes: int) -> tuple[Any, ...]:
    """From a trainer rank: publishes, as PolicyWorker does, and tells what the server must have and say."""
    worker = worker_on(rank, cfg, folder)
    sending = Sending(worker.policy)
    sending.open({"server": sender})
    sent = sending.send(version, ["server"], bucket_bytes)
    expected = sending.checksums(["server"]).get("server", {})
    sending.close()
    return sent, expected, worker.score(TEXTS)


@pytest.mark.slow
def test_from_tensor_pipeline_and_expert_parallel_ranks_into_a_server_with_tensor_parallelism(tmp_path: Path) -> None:
    started_with, trained = make_model("qwen3_moe", tmp_path / "started_with"), tmp_path / "trained"
    shutil.copytree(started_with, trained)
    change_tensors(trained, lambda tensors: [tensor.mul_(1.5) for tensor in tensors.values()])
    cfg = make_config(tp=2, pp=2, ep=2, sequence_parallel=True)
    ranks = RankPool()
    options = {"dtype": "float32", "tp": 2, "max_total_tokens": 1024}
    server = SGLangServer(started_with, **options, log_path=tmp_path / "log")

    async def publish(folder: Path, version: int, bucket_bytes: int) -> int:
        """Number of buckets."""
        layout = ServerLayout.of(folder, tp=2, dtype="float32", device="cpu")
        client = SGLangClient(ServerHttp(server.url), folder, layout, backend="gloo", sender_timeout_s=60)
        await client.begin_update("drain", 60)
        arguments = cfg, folder, client.weight_sender(), version, bucket_bytes
        sent, expected, scores = zip(*await asyncio.to_thread(ranks.run, trained_weights, 4, *arguments), strict=True)
        await client.end_update(version, 60)
        assert await client.checksums(60) == {name: value for part in expected for name, value in part.items()}
        for number, ours in enumerate(await merged(list(scores), TEXTS)):
            theirs = await client.prompt_logprobs(TEXTS[number], f"text {number}", version, 60)
            np.testing.assert_allclose(theirs, ours, atol=1e-4)
        return sum(part.get("buckets", 0) for part in sent)

    async def scenario() -> None:
        assert await publish(trained, 1, bucket_bytes=1) == len(load_file(trained / "model.safetensors"))
        assert await publish(started_with, 2, bucket_bytes=30_000) < 40

    with contextlib.closing(ranks), ThreadPoolExecutor(1) as beside:
        imported = beside.submit(ranks.run, str, 4)  # takes as long as the server's start
        with server:
            imported.result()
            asyncio.run(scenario())


def exported_difference(folder: Path, trial: Trial) -> float:
    """Largest |transformers' log-prob by the exported folder - server's| of the last sampled tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worst = 0.0
    for group in trial.groups:
        for completion in group.completions:
            ids = torch.tensor([*group.prompt.token_ids, *completion.token_ids.tolist()])[None]
            with torch.no_grad():
                logits = model(ids).logits[0, len(group.prompt.token_ids) - 1 : -1] / trial.cfg.rollout.temperature
            ours = logits.log_softmax(-1).gather(1, ids[0, -len(completion) :, None])[:, 0]
            worst = max(worst, float((ours - torch.tensor(completion.logprobs)).abs().max()))
    return worst
