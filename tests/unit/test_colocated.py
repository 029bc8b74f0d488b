"""Handing weights over on the trainer's own device, to a server that copies late: order, lifetime, what SGLang can read."""

import ast
import base64
import importlib.util
import io
import json
import pickle
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch.multiprocessing import reductions

from dapo_megatron.rollout.colocated import ColocatedWeightSender
from dapo_megatron.rollout.sglang_weights import ServerLayout
from dapo_megatron.weights.buckets import buckets
from dapo_megatron.weights.devices import HostMemory, IpcHandle

SRT = Path(sysconfig.get_path("purelib")) / "sglang" / "srt"
LAYOUT = ServerLayout(tp=2, dtype="bfloat16", device="cpu", num_kv_heads=2)
TENSORS = [(f"model.layers.{i}.mlp.down_proj.weight", torch.arange(6.0).reshape(2, 3) + 10 * i) for i in range(7)]


class SharedMemory(HostMemory):
    """As on a GPU, what is shared stays where it is: a number goes through the pickle, by which the server finds it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.shared = calls, list[torch.Tensor]()

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def share(self, flat: torch.Tensor) -> Any:
        self.calls.append("share")
        self.shared.append(flat)
        return len(self.shared) - 1

    def give_back(self) -> None:
        self.calls.append("give back")


class LateServer:
    """Its copies of a bucket are done no sooner than it must: when it answers the call after."""

    def __init__(self, calls: list[str], memory: SharedMemory, during: Callable[[], None] = lambda: None) -> None:
        self.calls, self.memory, self.during = calls, memory, during
        self.loaded: dict[str, torch.Tensor] = {}
        self.names = [name for name, _ in TENSORS]
        self.copying: list[dict[str, Any]] = []
        self.refuses = False

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/weights_checker":
            return httpx.Response(200, json={"ranks": [{"checksums": dict.fromkeys(self.names, "")}]})
        body = json.loads(request.content)
        assert body["flush_cache"] is False and body["weight_version"] == "3"
        payloads = [pickle.loads(base64.b64decode(text)) for text in body["serialized_named_tensors"]]
        assert len(payloads) == LAYOUT.tp and payloads[0] == payloads[1]
        self.calls.append("update" if payloads[0] else "fence")
        self.during()
        for bucket in self.copying:
            self._copy(bucket)
        self.copying = [payloads[0]] if payloads[0] else []
        if self.refuses:
            return httpx.Response(400, text="out of memory")
        return httpx.Response(200, json={"success": True})

    def _copy(self, bucket: dict[str, Any]) -> None:
        flat = self.memory.shared[bucket["flattened_tensor"]]
        for place in bucket["metadata"]:
            part = flat[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
            self.loaded[place.name] = part.clone()


def make(during: Callable[[], None] = lambda: None) -> tuple[ColocatedWeightSender, LateServer, list[str]]:
    calls: list[str] = []
    memory = SharedMemory(calls)
    server = LateServer(calls, memory, during)
    sender = ColocatedWeightSender("http://s", LAYOUT, memory=memory)
    connect = httpx.Client

    def client(**kwargs: Any) -> httpx.Client:
        return connect(transport=httpx.MockTransport(server.answer), **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx, "Client", client)
        sender.open(0, 1)
    return sender, server, calls


def test_two_alternating_buckets_reach_a_server_that_copies_late() -> None:
    sender, server, calls = make()
    places = set()
    for bucket in buckets(iter(TENSORS), 24, "cpu", "bfloat16"):  # two tensors each
        places.add(bucket.flat.data_ptr())
        sender.send(bucket, 3)
    assert len(places) == 2 and calls == ["synchronize", "share", "update", "fence"] * 4
    assert server.loaded.keys() == dict(TENSORS).keys()
    assert all(torch.equal(server.loaded[name], tensor.bfloat16()) for name, tensor in TENSORS)
    sender.close()
    sender.close()
    assert calls[-2:] == ["fence", "give back"]


def test_a_bucket_made_for_the_sending_alone_lives_until_it_is_copied() -> None:
    lives: list[bool] = []
    sender, server, _ = make(during=lambda: lives.append(not storage.expired()))
    share = server.memory.share
    storage: Any = None

    def share_weakly(flat: torch.Tensor) -> Any:
        nonlocal storage
        storage = reductions.StorageWeakRef(flat.untyped_storage())
        number = share(flat)
        server.memory.shared[number] = flat.clone()
        return number

    server.memory.share = share_weakly  # type: ignore[method-assign]
    sender.send(TENSORS[:3], 3)  # fp32: cast into a bucket of its own
    assert lives == [True, True] and storage.expired()


def test_a_refusal_and_an_unknown_name_are_errors() -> None:
    sender, server, calls = make()
    with pytest.raises(ValueError, match=r"no parameter for \['model.mlp.nonsense'\]"):
        sender.send([("model.mlp.nonsense", torch.ones(2))], 3)
    assert "update" not in calls
    server.refuses = True
    with pytest.raises(RuntimeError, match="refused /update_weights_from_tensor: out of memory"):
        sender.send(TENSORS, 3)
    assert calls[-1] == "update"


def test_ranks_are_one_for_each_gpu() -> None:
    with pytest.raises(ValueError, match=r"ranks: \(4, 4\) must be one trainer rank for each of the server's 2 GPUs"):
        ColocatedWeightSender("http://s", LAYOUT, ranks=(4, 4))


def of_source(file: str, name: str) -> Any:
    """The literal that is assigned to a name in a file of the installed SGLang, whose import would take twenty seconds."""
    for node in ast.walk(ast.parse((SRT / file).read_text())):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    raise AssertionError(f"no {name} in {file}")


def megatrons_load_from_bytes(data: bytes) -> Any:
    """Once Megatron is imported, this is what torch's own tensors pickle with."""
    return torch.load(io.BytesIO(data), weights_only=True)


class SGLangsUnpickler(pickle.Unpickler):
    """Finds what SGLang's SafeUnpickler does."""

    allowed = of_source("utils/common.py", "ALLOWED_GLOBALS")

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in self.allowed or (module, name) == ("torch.storage", "_load_from_bytes"), (module, name)
        return super().find_class(module, name)


def read_by_sglang(text: str) -> Any:
    return SGLangsUnpickler(io.BytesIO(base64.b64decode(text))).load()


def test_sglang_reads_our_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.storage, "_load_from_bytes", megatrons_load_from_bytes)
    spec = importlib.util.spec_from_file_location("tensor_bucket", SRT / "weight_sync/tensor_bucket.py")
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    sender = ColocatedWeightSender("http://s", LAYOUT, memory=HostMemory())
    (bucket,) = buckets(iter(TENSORS), 1 << 20, "cpu", "bfloat16")
    read = read_by_sglang(sender._serialized(bucket))
    assert read["flattened_tensor"].untyped_storage().nbytes() == bucket.flat.nbytes  # not the whole of the buffer
    fields = theirs.FlattenedTensorMetadata.__dataclass_fields__
    metadata = [theirs.FlattenedTensorMetadata(**{key: getattr(place, key) for key in fields}) for place in read["metadata"]]
    found = theirs.FlattenedTensorBucket(flattened_tensor=read["flattened_tensor"], metadata=metadata).reconstruct_tensors()
    assert [name for name, _ in found] == [name for name, _ in TENSORS]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, bucket, strict=True))
    assert read_by_sglang(sender.fence_body(3)["serialized_named_tensors"][1]) == []


def test_a_handle_names_the_device_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of it is what torch says, which SGLang's unpickler lets through."""
    assert of_source("utils/patch_torch.py", "_REDUCE_TENSOR_ARG_DEVICE_INDEX") == IpcHandle.DEVICE
    storage = torch.zeros(8, dtype=torch.uint8)._typed_storage()
    arguments = (
        torch.Tensor,
        torch.Size([8]),
        (1,),
        0,
        type(storage),
        torch.uint8,
        5,
        b"handle",
        8,
        512,
        False,
        b"c",
        1,
        b"e",
        True,
    )
    rebuild = reductions.rebuild_cuda_tensor
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (rebuild, arguments))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"GPU-{number}"))
    text = base64.b64encode(pickle.dumps(IpcHandle(torch.zeros(8)))).decode()
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *given: given)  # as SGLang does, too
    assert read_by_sglang(text) == (*arguments[:6], "GPU-5", *arguments[7:])
