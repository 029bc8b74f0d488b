"""The trainer's weights in a real SGLang server: the same log-probs after a publish, and visibly not without one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.algo.samples import build_samples, split_minibatches
from dapo_megatron.cluster.cluster import Cluster, start_cluster
from dapo_megatron.config import Config
from dapo_megatron.config_io import load_config
from dapo_megatron.setup import make_sampler, prepare
from dapo_megatron.train import pack
from dapo_megatron.weights.publish import Publisher

ROOT = Path(__file__).resolve().parents[2]


class Trial:
    """Cluster of the tiny configuration, driven by hand."""

    def __init__(self, cfg: Config, cluster: Cluster, prepared: Any) -> None:
        self.cfg, self.cluster = cfg, cluster
        self.sampler = make_sampler(cfg, prepared, cluster)
        self.publisher = Publisher(cluster.policy, cluster.engine, check=True)
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
    with start_cluster(cfg, prepared.model_dir, prepared.eos_ids, tmp_path_factory.mktemp("run")) as cluster:
        yield Trial(cfg, cluster, prepared)


def test_server_equals_trainer_after_a_publish_and_only_then(trial: Trial, tmp_path: Path) -> None:
    async def scenario() -> None:
        await trial.publisher.connect()
        await trial.publish()
        assert await trial.drift(update=True) <= 1e-4
        await trial.publish()
        assert await trial.drift(update=True) <= 1e-4
        # The publish left out: the same measurement sees it, and so does the comparison of checksums.
        assert await trial.drift(update=False) > 1e-2
        with pytest.raises(RuntimeError, match=r"publish\.check: engine 0 does not hold version"):
            await trial.publisher.compare()
        await trial.publish()
        assert await trial.drift(update=False) <= 1e-4
        await trial.cluster.policy.export_hf(str(out))

    out = tmp_path / "hf"
    asyncio.run(scenario())
    assert exported_difference(out, trial) <= 1e-4


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
