"""From the names of transformers' models in memory to those of their files."""

from torch import Tensor


def hub_tensors(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A parameter of a transformers model (or its gradient) under the names that its files have. Only experts differ: one by
    one there, as views here, of what transformers holds in [num_experts, 2 * ffn, hidden] and [num_experts, hidden, ffn]."""
    layer, found, projection = name.rpartition(".mlp.experts.")
    if not found:
        return [(name, tensor)]
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[projection]
    return [
        (f"{layer}.mlp.experts.{expert}.{part}.weight", view)
        for expert, weight in enumerate(tensor)
        for part, view in zip(parts, weight.chunk(len(parts)), strict=True)
    ]
