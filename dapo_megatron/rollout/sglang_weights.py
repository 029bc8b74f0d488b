"""The trainer's end of a publish to one SGLang server: broadcasting buckets, and what the server's checksums must be.

Every sender (the leader of a pipeline stage) has its own process group with the server, in which it is rank 0 and the
server's tensor-parallel ranks follow. On CPU nothing here imports SGLang, which costs twenty seconds.
"""

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from dapo_megatron.addresses import address_towards
from dapo_megatron.rollout.server_client import KEEPALIVE_S

# SGLang fuses these projections; the order is that of the fused rows.
_FUSED = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
_FUSED_NAME = re.compile(r"(?<=\.)(" + "|".join(_FUSED) + r")(?=\.(?:weight|bias)$)")
# It stacks a layer's experts: [gate; up] of each, and down of each.
_EXPERT_NAME = re.compile(r"(?<=\.experts\.)(\d+)\.(gate|up|down)_proj\.weight$")
_VOCAB_NAMES = ("model.embed_tokens.weight", "lm_head.weight")
_VOCAB_PADDING = 64  # SGLang pads the vocabulary to a multiple of it, with zeros
_CPU_FFN_PADDING = 32  # and on CPU each rank's part of an MLP
CLOSE_TIMEOUT_S = 10.0  # a server that hangs has cost enough time by then


@dataclass(frozen=True)
class ServerLayout:
    """How a server holds its weights. `dtype` is torch's name ("float32", "bfloat16"), `device` "cpu" or "cuda",
    `num_experts` 0 for a dense model. Experts are split over the tensor-parallel ranks, not spread (SGLang's ep-size 1)."""

    tp: int
    dtype: str
    device: str
    num_kv_heads: int
    num_experts: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"rollout.dtype: {self.dtype!r} must be resolved to float32, bfloat16 or float16 by now")

    @classmethod
    def of(cls, model_dir: Path, *, tp: int, dtype: str, device: str) -> "ServerLayout":
        config = json.loads((model_dir / "config.json").read_text())
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        return cls(tp=tp, dtype=dtype, device=device, num_kv_heads=heads, num_experts=experts)


def engine_name(name: str, num_experts: int = 0) -> tuple[str, int, int]:
    """HF name -> (the server's parameter, which part of it this is, number of parts)."""
    if (match := _EXPERT_NAME.search(name)) is not None:
        expert, start = int(match[1]), name[: match.start()]
        if match[2] == "down":
            return f"{start}w2_weight", expert, num_experts
        return f"{start}w13_weight", 2 * expert + (match[2] == "up"), 2 * num_experts
    match = _FUSED_NAME.search(name)
    if match is None:
        return name, 0, 1
    fused, part, num_parts = _FUSED[match[1]]
    return name[: match.start()] + fused + name[match.end() :], part, num_parts


def sglang_checksums(tensors: Iterable[tuple[str, Any]], layout: ServerLayout) -> dict[str, str]:
    """What `SGLangEngine.checksums` must answer for these full HF tensors: "TP rank/parameter" -> checksum.

    SGLang hashes the bytes of each of its parameters, fused and sharded, in its dtype: the first 8 bytes of SHA-256 on
    CPU, a hash of its own on GPU. ValueError unless all parts of a fused parameter are among the tensors.
    """
    import torch

    dtype = getattr(torch, layout.dtype)
    parts: dict[str, dict[int, Any]] = {}
    sums: dict[str, str] = {}
    for hf_name, tensor in tensors:
        name, part, num_parts = engine_name(hf_name, layout.num_experts)
        parts.setdefault(name, {})[part] = tensor.detach().to(layout.device, dtype)
        if len(parts[name]) < num_parts:
            continue
        whole = parts.pop(name)
        for rank in range(layout.tp):
            shard = torch.cat([_shard(hf_name, whole[i], i, rank, layout) for i in range(num_parts)])
            sums[f"{rank}/{name}"] = _hash(shard.contiguous())
    if parts:
        raise ValueError(f"checksums: only some of the parts of {sorted(parts)} were given; give all tensors of a layer")
    return sums


def _shard(name: str, tensor: Any, part: int, rank: int, layout: ServerLayout) -> Any:
    """The share of one HF tensor that TP rank `rank` of the server holds."""
    import torch

    tp = layout.tp
    if name in _VOCAB_NAMES:
        padding = -len(tensor) % _VOCAB_PADDING
        return torch.nn.functional.pad(tensor, (0, 0, 0, padding)).chunk(tp)[rank]
    module = name.split(".")[-2]
    if module in ("k_proj", "v_proj") and tp > layout.num_kv_heads:
        return tensor.chunk(layout.num_kv_heads)[rank * layout.num_kv_heads // tp]  # heads are replicated
    if layout.device == "cpu" and module in ("gate_proj", "up_proj", "down_proj"):
        columns = module == "down_proj"
        padding = -tensor.shape[int(columns)] % (_CPU_FFN_PADDING * tp)
        tensor = torch.nn.functional.pad(tensor, (0, padding) if columns else (0,) * (2 * tensor.dim() - 1) + (padding,))
    if module in _FUSED:
        return tensor.chunk(tp)[rank]
    if module in ("o_proj", "down_proj") and tensor.dim() == 2:
        return tensor.chunk(tp, dim=1)[rank]
    return tensor


def _hash(tensor: Any) -> str:
    """As SGLang's weights_checker hashes a parameter."""
    import torch

    if tensor.is_cuda:
        from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

        return f"{gpu_tensor_hash(tensor):016x}"
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()[:16]


class SGLangSender:
    """What every way of handing weights to one SGLang server needs: its address, and which parameters it has."""

    kind = "SGLang"  # for messages

    def __init__(self, url: str, layout: ServerLayout, *, timeout_s: float):
        self.url, self.layout, self.timeout_s = url, layout, timeout_s
        self.dtype = layout.dtype
        self._http: httpx.Client | None = None
        self._engine_names: frozenset[str] = frozenset()

    def checksums(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, str]:
        """What the engine must hold after these full HF tensors were sent (see sglang_checksums)."""
        return sglang_checksums(tensors, self.layout)

    def _connect(self) -> None:
        assert self._http is None, "open is called once"
        limits = httpx.Limits(keepalive_expiry=KEEPALIVE_S)
        self._http = httpx.Client(base_url=self.url, timeout=self.timeout_s, limits=limits, trust_env=False)
        # SGLang logs and skips a name it does not know, so we ask which ones it does.
        self._engine_names = frozenset(self._parameter_names())

    def _parameter_names(self) -> Iterable[str]:
        return self._post("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]

    def _check_names(self, bucket: Iterable[tuple[str, Any]]) -> None:
        unknown = [name for name, _ in bucket if engine_name(name)[0] not in self._engine_names]
        if unknown:
            raise ValueError(f"the {self.kind} server on {self.url} has no parameter for {unknown}; send HF names it knows")

    def _post(self, path: str, body: dict[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        assert self._http is not None, "open comes first"
        try:
            response = self._http.post(path, json=body, timeout=timeout_s or self.timeout_s)
        except httpx.HTTPError as e:
            raise RuntimeError(f"the {self.kind} server on {self.url} did not answer {path}: {e or type(e).__name__}") from e
        if response.status_code != 200:
            raise RuntimeError(f"the {self.kind} server on {self.url} refused {path}: {response.text[:1000]}")
        return response.json()

    def _disconnect(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None


class SGLangWeightSender(SGLangSender):
    """Implements WeightSender for one server. Picklable until `open`; senders open one after the other.

    Works beside any default process group, or none.

    Args:
        backend: "nccl", or "gloo" on CPU or where trainer and server share a GPU.
        timeout_s: for one bucket, and for opening the group.
    """

    def __init__(self, url: str, layout: ServerLayout, *, backend: str, timeout_s: float = 300.0):
        super().__init__(url, layout, timeout_s=timeout_s)
        self.backend = backend
        self.device = "cuda" if backend == "nccl" else "cpu"  # gloo takes CPU tensors whatever the server's device is
        self._group: Any = None
        self._group_name = ""
        self._broken = False

    def open(self, sender: int, num_senders: int) -> None:
        """Join the server in a new group. RuntimeError if it does not answer."""
        import torch.distributed as dist

        self._connect()
        self._group_name = f"dapo-{sender}-of-{num_senders}-{uuid.uuid4().hex[:8]}"  # one left by a crash is in nobody's way
        address, timeout = address_towards(urlsplit(self.url).hostname or ""), timedelta(seconds=self.timeout_s)
        world_size = 1 + self.layout.tp
        store = dist.TCPStore(address, 0, world_size, is_master=True, wait_for_workers=False, timeout=timeout)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._post, "/init_weights_update_group", self.open_body(address, store.port))
            try:
                self._group = _process_group(self.backend, store, world_size, self._group_name, timeout)
            except Exception as e:
                raise RuntimeError(f"no update group with the {self.kind} server on {self.url}: {e}") from e
            answer.result()

    def open_body(self, address: str, port: int) -> dict[str, Any]:
        return {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self.layout.tp,
            "group_name": self._group_name,
            "backend": self.backend,
        }

    def send_body(self, bucket: list[tuple[str, Any]], version: int) -> dict[str, Any]:
        return {
            "names": [name for name, _ in bucket],
            "dtypes": [self.layout.dtype] * len(bucket),
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",  # one broadcast
            "weight_version": str(version),
            "flush_cache": False,  # begin_update flushed, and nothing has run since
        }

    def send(self, bucket: list[tuple[str, Any]], version: int) -> None:
        """Broadcast the bucket; returns when the server has loaded it and the bucket may be reused.

        Raises:
            ValueError: a name the server has no parameter for.
            RuntimeError: the server refused, died or took longer than timeout_s. The sender can then only be closed.
        """
        import torch

        from dapo_megatron.weights.buckets import packed

        self._check_names(bucket)
        flat = packed(bucket, self.device, self.dtype).flat
        self._broken = True
        work = self._group.broadcast(flat.view(torch.uint8), 0)  # goes on by itself while we wait for the answer
        # The server answers when it has loaded all, or at once when it refuses or dies, while a broadcast would wait for
        # its time-out: so the answer comes first.
        self._post("/update_weights_from_distributed", self.send_body(bucket, version))
        try:
            work.wait()
        except RuntimeError as e:
            raise RuntimeError(f"broadcasting weights of version {version} to {self.url} failed: {e}") from e
        if self.device == "cuda":
            torch.cuda.current_stream(flat.device).synchronize()  # waiting for NCCL's work only orders the stream
        self._broken = False

    def close(self) -> None:
        """Leave the group. Never raises: the server may be gone."""
        import torch.distributed as dist

        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._post("/destroy_weights_update_group", {"group_name": self._group_name}, CLOSE_TIMEOUT_S)
            # The end of a group waits for what runs in it, which after a failure may be for ever: such a group stays.
            if not self._broken:
                dist.destroy_process_group(self._group)
            self._group = None
        self._disconnect()


def _process_group(backend: str, store: Any, world_size: int, name: str, timeout: timedelta) -> Any:
    """A group of its own, as rank 0, made as SGLang's init_custom_process_group makes the server's end."""
    from torch.distributed import PrefixStore
    from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

    group, _ = _new_process_group_helper(
        world_size, 0, [], Backend(backend), PrefixStore(name, store), group_name=GroupName(name), timeout=timeout
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}  # destroy_process_group looks for it
    return group
