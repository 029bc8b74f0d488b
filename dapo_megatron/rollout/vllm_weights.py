"""The trainer's end of a publish to one vLLM server: as to SGLang, but received by our extension of vLLM's workers."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dapo_megatron.rollout.sglang_weights import SGLangWeightSender, sglang_checksums

_METHODS = {
    "/init_weights_update_group": "dapo_open_group",
    "/update_weights_from_distributed": "dapo_load",
    "/destroy_weights_update_group": "dapo_close_group",
}


class VLLMWeightSender(SGLangWeightSender):
    """Implements WeightSender. Parameters are fused, sharded and padded as by SGLang, which has that from vLLM."""

    kind = "vLLM"

    def _parameter_names(self) -> Iterable[str]:
        return super()._post("/collective_rpc", {"method": "dapo_names"})["results"][0]

    def open_body(self, address: str, port: int) -> dict[str, Any]:
        return super().open_body(address, port) | {"timeout_s": self.timeout_s}

    def send_body(self, bucket: list[tuple[str, Any]], version: int) -> dict[str, Any]:
        body = super().send_body(bucket, version)
        return {key: body[key] for key in ("group_name", "names", "dtypes", "shapes", "weight_version")}

    def _post(self, path: str, body: dict[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        return super()._post("/collective_rpc", {"method": _METHODS[path], "kwargs": body}, timeout_s)

    def checksums(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, str]:
        # vLLM always hashes on the CPU
        return sglang_checksums(tensors, replace(self.layout, device="cpu"))
