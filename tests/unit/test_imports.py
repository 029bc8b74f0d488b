"""Who may import whom (the layers of the design), and that the light modules stay light."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dapo_megatron"
OURS = "dapo_megatron"
ALLOWED = {  # layer -> what of ours it may import, itself always included
    "config": (),
    "records": (),
    "weights.mapping": (),
    "config_io": ("config",),
    "machine": (),
    "model_sizes": ("config",),
    "algo": ("records", "config"),
    "reward": ("records",),
    "data": ("records", "config"),
    "rollout": ("records", "config", "weights", "addresses", "stopping"),
}
FORBIDDEN = {"policy": ("rollout", "cluster", "train"), "weights": ("policy", "cluster", "rollout.sampler")}
ONLY_IN = {"ray": "cluster", "megatron": "policy"}
HEAVY = ("torch", "ray", "megatron", "transformers", "sglang", "datasets")
LIGHT = (
    "config",
    "config_io",
    "model_sizes",
    "validation",
    "layout",
    "submit",
    "sweep",
    "telemetry.report",
    "cli",
    "records",
    "reward.verifiers",
    "data.generators",
)


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(source: str, module: str) -> set[str]:
    """Absolute dotted names that a module's text imports, anywhere in it: lazily, under TYPE_CHECKING, relatively."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = f"{OURS}.{module}".split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            # `from package import submodule` names the submodule only here
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def within(name: str, layer: str) -> bool:
    return name == layer or name.startswith(f"{layer}.")


def ours_imported(name: str, path: Path) -> set[str]:
    """Modules of ours that a module imports, relative to the package."""
    known = modules()
    absolute = {full for full in imported(path.read_text(encoding="utf-8"), name) if full.startswith(f"{OURS}.")}
    return {full.removeprefix(f"{OURS}.") for full in absolute} & set(known)


def violations() -> list[str]:
    found = []
    for name, path in modules().items():
        ours = ours_imported(name, path)
        for layer, allowed in ALLOWED.items():
            if within(name, layer):
                found += [f"{name} imports {o}" for o in ours if not any(within(o, x) for x in (layer, *allowed))]
        for layer, forbidden in FORBIDDEN.items():
            if within(name, layer):
                found += [f"{name} imports {o}" for o in ours if any(within(o, x) for x in forbidden)]
        for package, home in ONLY_IN.items():
            if not within(name, home):
                text = imported(path.read_text(encoding="utf-8"), name)
                found += [f"{name} imports {full}" for full in text if within(full, package)]
    return found


def test_layers_are_kept() -> None:
    assert violations() == []


def test_the_import_reader_sees_lazy_relative_and_submodule_imports() -> None:
    lines = ("def f():", "    import ray.util", "from . import engine", "from ..algo.packing import pack")
    found = imported("\n".join([*lines, "from dapo_megatron import policy"]), "rollout.sampler")
    assert {"ray.util", "dapo_megatron.rollout.engine", "dapo_megatron.algo.packing", "dapo_megatron.policy"} <= found


def test_train_names_no_engine_and_no_megatron_file() -> None:
    ours = ours_imported("train", PACKAGE / "train.py")
    engines = ("http_engine", "sglang_client", "vllm_client", "local_engine")
    assert not [o for o in ours if within(o, "policy") or (within(o, "rollout") and o.endswith(engines))]


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_load_nothing_heavy(name: str) -> None:
    code = f"import sys, dapo_megatron.{name}; print(*[m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == []


def test_a_rank_without_a_gpu_loads_no_compilers_and_no_kernels_for_gpus() -> None:
    """They take as long as all the rest."""
    code = "import sys, torch, dapo_megatron.policy.worker; print(*sys.modules, torch.compile.__module__)"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    *loaded, home_of_compile = result.stdout.split()
    heavy = ("torch._inductor.compile_fx", "flash_attn.cute", "flashinfer.jit", "cutlass", "transformers")
    assert "megatron.core" in loaded and [name for name in heavy if name in loaded] == [] and home_of_compile == "torch"
