"""Publishing to servers that share the trainer's devices: every rank has every bucket, and each server's rank reads that of the
trainer rank on its own device."""

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dapo_megatron.rollout.colocated import ColocatedWeightSender
from dapo_megatron.rollout.sglang_weights import ServerLayout, engine_name
from dapo_megatron.weights.devices import HostMemory
from tests.distributed.harness import LAYOUTS, RankPool, make_config


class SignedMemory(HostMemory):
    """Says whose a bucket is."""

    def share(self, flat: torch.Tensor) -> Any:
        return dist.get_rank(), flat.clone()


class Server:
    """Loads what it is told; `capacity`: number of buckets after which it refuses."""

    def __init__(self, names: list[str], ranks: tuple[int, ...], capacity: int) -> None:
        self.names, self.ranks, self.capacity = names, ranks, capacity
        self.loaded: dict[str, torch.Tensor] = {}

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/weights_checker":
            return httpx.Response(200, json={"ranks": [{"checksums": dict.fromkeys(self.names, "")}]})
        payloads = [pickle.loads(base64.b64decode(text)) for text in json.loads(request.content)["serialized_named_tensors"]]
        if payloads[0]:
            if self.capacity == 0:
                return httpx.Response(400, text="out of memory")
            self.capacity -= 1
            assert tuple(payload["flattened_tensor"][0] for payload in payloads) == self.ranks
            for place in payloads[0]["metadata"]:
                first, *others = (p["flattened_tensor"][1][place.start_idx : place.end_idx] for p in payloads)
                assert all(torch.equal(first, other) for other in others)
                self.loaded[place.name] = first.view(place.dtype).reshape(place.shape)
        return httpx.Response(200, json={"success": True})


def publish(
    rank: int, model_dir: str, cfg: Any, senders: dict[str, ColocatedWeightSender], capacity: dict[str, int]
) -> tuple[dict[str, dict[str, Any]], dict[str, int], str]:
    """Server -> what it has loaded, on the rank that talks to it; what was sent; the error."""
    from dapo_megatron.policy.policy import Policy
    from dapo_megatron.policy.shared_sending import SharedSending

    names = [engine_name(name)[0] for name in load_file(f"{model_dir}/model.safetensors")]
    servers = {name: Server(names, sender.ranks, capacity.get(name, 10**6)) for name, sender in senders.items()}
    connect = httpx.Client

    def client(*, base_url: str, **kwargs: Any) -> httpx.Client:
        transport = httpx.MockTransport(servers[httpx.URL(base_url).host].answer)
        return connect(base_url=base_url, transport=transport, **kwargs)

    sending = SharedSending(Policy(cfg, model_dir))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx, "Client", client)
        sending.open(senders)
        sent, error = {}, ""
        try:
            sent = sending.send(1, list(senders), bucket_bytes=40_000)
        except RuntimeError as e:
            error = str(e)
    sending.close()
    return {name: server.loaded for name, server in servers.items() if server.loaded}, sent, error


def make_senders(*ranks: tuple[int, ...], timeout_s: float = 30.0) -> dict[str, ColocatedWeightSender]:
    senders = {}
    for number, of_server in enumerate(ranks):
        layout = ServerLayout(tp=len(of_server), dtype="bfloat16", device="cpu", num_kv_heads=2)
        memory = SignedMemory()
        senders[f"s{number}"] = ColocatedWeightSender(
            f"http://s{number}", layout, ranks=of_server, timeout_s=timeout_s, memory=memory
        )
    return senders


@pytest.mark.parametrize(
    ("layout", "name", "of_servers"),
    [
        ("TP2xPP2", "llama_untied", [(0, 1), (3, 2)]),
        ("DP2", "llama_tied", [(0,), (1,)]),
        ("PP2", "qwen2_tied", [(1,)]),  # a rank without a server takes part in what the others need
        pytest.param("PP2xEP2", "qwen3_moe", [(0, 2), (1, 3)], marks=pytest.mark.slow),
    ],
)
def test_every_server_gets_the_whole_model(
    ranks: RankPool, models: dict[str, Path], layout: str, name: str, of_servers: list[tuple[int, ...]]
) -> None:
    cfg = make_config(**LAYOUTS[layout])
    senders = make_senders(*of_servers)
    results = ranks.run(publish, cfg.world_size, str(models[name]), cfg, senders, {})
    expected = {key: tensor.bfloat16() for key, tensor in load_file(models[name] / "model.safetensors").items()}
    for server, sender in senders.items():
        (loaded,) = [found[server] for found, _, _ in results if server in found]
        assert results[sender.ranks[0]][0][server] is loaded
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    assert sum(sent.get("bytes", 0) for _, sent, _ in results) == sum(tensor.nbytes for tensor in expected.values())
    assert sum(sent.get("buckets", 0) for _, sent, _ in results) > 2 * cfg.parallel.pp
    assert not any(error for _, _, error in results)


def test_a_server_that_refuses_is_named_on_every_rank_and_the_others_get_theirs(
    ranks: RankPool, models: dict[str, Path]
) -> None:
    cfg = make_config(**LAYOUTS["TP2xPP2"])
    senders = make_senders((0, 1), (2, 3))
    results = ranks.run(publish, 4, str(models["llama_untied"]), cfg, senders, {"s1": 1})
    assert all("did not reach s1: " in error and "refused" in error for _, _, error in results)
    (whole,) = [found["s0"] for found, _, _ in results if "s0" in found]
    assert whole.keys() == load_file(models["llama_untied"] / "model.safetensors").keys()


def come_late(rank: int, sender: ColocatedWeightSender) -> str:
    if rank == 0:
        return ""
    with pytest.raises(RuntimeError) as error:
        sender.open(0, 1)
    return str(error.value)


def test_a_rank_that_does_not_come_is_an_error(ranks: RankPool) -> None:
    """On the others, when their patience is over."""
    (sender,) = make_senders((1, 0), timeout_s=0.5).values()
    assert "imeout" in ranks.run(come_late, 2, sender)[1]
