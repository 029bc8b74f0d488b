"""Where a model comes from: whatever `model.path` names becomes an HF folder that transformers and SGLang load.

Converted and random models are made once and kept in a cache folder, under a name that holds a hash of what they were
made from. A cache entry appears by a rename, so it is either whole or not there.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dapo_megatron.config import ModelConfig

# Part of every cache key: raise it when a converted folder's content would change.
CACHE_VERSION = 1
# GGUF names of pre-tokenizers that split numbers into single digits; transformers' reader knows only the GPT-2 regex.
DIGIT_PRE_TOKENIZERS = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
ROUND_TRIP_TEXT = "What is 12 + 345?\n  It's (5 * 67) - 8 = 327; caf\u00e9, \u4f60\u597d."
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve_model(model: ModelConfig, cache_dir: str | Path | None = None) -> Path:
    """The HF folder (config.json, *.safetensors, tokenizer) for `model.path`, converted, built or fetched if need be.

    `cache_dir` defaults to $XDG_CACHE_HOME/dapo_megatron or ~/.cache/dapo_megatron. Raises ValueError, naming
    model.path and the remedy, if there is no such model.
    """
    cache = Path(cache_dir) if cache_dir else default_cache_dir()
    name = model.path
    if not name:
        raise ValueError("model.path is empty: give an HF folder, a .gguf file, a hub id, package:NAME or random")
    if name == "random":
        return _random_model(model.random_model, cache)
    if name.startswith("package:"):
        return _from_path(_package_folder(name.removeprefix("package:")), name, cache)
    path = Path(name).expanduser()
    if path.exists():
        return _from_path(path, name, cache)
    if HUB_ID.fullmatch(name) and path.suffix != ".gguf" and not name.startswith("."):
        return _from_hub(name)
    raise ValueError(f"model.path: {name} does not exist and is not a hub id (ORGANISATION/NAME); check the path")


def default_cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dapo_megatron"


def eos_token_ids(hf_folder: str | Path) -> tuple[int, ...]:
    """All token ids that end a response, ascending: the union of config.json, generation_config.json and the tokenizer.

    Checkpoints often name only one of end-of-text and end-of-turn in each of the three places.
    """
    from transformers import AutoTokenizer

    folder = Path(hf_folder)
    ids: set[int] = set()
    for file in ("config.json", "generation_config.json"):
        if (folder / file).is_file():
            value = json.loads((folder / file).read_text()).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    eos = AutoTokenizer.from_pretrained(folder).eos_token_id
    if eos is not None:
        ids.add(eos)
    if not ids:
        raise ValueError(f"{folder}: no EOS token in config.json, generation_config.json or the tokenizer; add eos_token_id")
    return tuple(sorted(ids))


def _is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def _from_path(path: Path, name: str, cache: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model.path: {name} is a file but not a .gguf; give the folder that holds config.json")
        return _from_gguf(path, cache)
    if _is_hf_folder(path):
        if not any((path / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise ValueError(f"model.path: {name} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json); add it")
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0], cache)
    if ggufs:
        raise ValueError(f"model.path: {name} holds several GGUF files ({', '.join(g.name for g in ggufs)}); name one")
    raise ValueError(f"model.path: {name} holds neither config.json with *.safetensors nor a .gguf file")


def _package_folder(package: str) -> Path:
    """The folder of an installed package, found without importing it: its own dependencies may be missing."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"model.path: package:{package} is not an installed package; install it, e.g. with pip")
    return Path(next(iter(spec.submodule_search_locations)))


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # a dozen exception types: offline, not found, gated, bad id, no network
        raise ValueError(
            f"model.path: {name} is no local path, and the hub did not give it ({type(error).__name__}: {error}). "
            "Check the spelling and the network, or download the model and give its folder"
        ) from error
    if not _is_hf_folder(folder):
        raise ValueError(f"model.path: {name} has no config.json with *.safetensors on the hub; choose a safetensors model")
    return folder


def _cached(cache: Path, key: str, build: Callable[[Path], None]) -> Path:
    """`cache`/`key`, made by build(folder) if it isn't there. Several processes may build the same entry at once."""
    target = cache / key
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=cache))
    except OSError as error:
        raise ValueError(f"the model cache {cache} is not writable ({error}); set XDG_CACHE_HOME") from error
    try:
        work.chmod(0o755)  # mkdtemp's 0700 would lock out the other users of a shared cache
        build(work)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # not a lost race
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _from_gguf(file: Path, cache: Path) -> Path:
    with file.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()[:12]
    return _cached(cache, f"{file.stem}-{digest}-v{CACHE_VERSION}", lambda folder: _convert_gguf(file, folder))


def _convert_gguf(file: Path, folder: Path) -> None:
    """Write `file`, dequantised to bf16, as an HF folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # from_pretrained(gguf_file=) would do, but asks for accelerate
    tensors = load_gguf_checkpoint(str(file), True, model_to_load=model, torch_dtype=torch.bfloat16)["tensors"]
    expected = set(model.state_dict())
    if config.tie_word_embeddings:
        expected.discard("lm_head.weight")
    if set(tensors) != expected:
        raise ValueError(
            f"{file}: parameters missing {sorted(expected - set(tensors))}, unknown {sorted(set(tensors) - expected)}"
        )
    # eps is an fp32 in GGUF: 9.999999747e-06 is meant to be 1e-05
    for key in ("rms_norm_eps", "layer_norm_eps"):
        if hasattr(config, key):
            setattr(config, key, float(f"{getattr(config, key):.6g}"))
    _write_model(folder, config, tensors, model.generation_config, "bfloat16")
    _gguf_tokenizer(file).save_pretrained(folder)


def _gguf_tokenizer(file: Path) -> Any:
    """The file's tokenizer, with the digit splitting that transformers' GGUF reader loses."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    field = GGUFReader(str(file)).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() in DIGIT_PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ids = tokenizer(ROUND_TRIP_TEXT, add_special_tokens=False).input_ids
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if decoded != ROUND_TRIP_TEXT:
        raise ValueError(
            f"{file}: its tokenizer was not read right ({ROUND_TRIP_TEXT!r} became {decoded!r}); use the HF folder"
        )
    return tokenizer


def _write_model(folder: Path, config: Any, tensors: dict[str, Any], generation_config: Any, dtype: str) -> None:
    from safetensors.torch import save_file

    config.architectures = config.architectures or [_causal_lm_class(config)]
    values = config.to_dict()
    values.pop("quantization_config", None)  # the weights are plain now
    values.pop("_name_or_path", None)
    values["dtype"] = values["torch_dtype"] = dtype
    # readers older than rope_parameters look for rope_theta at the top level
    rope_theta = (values.get("rope_parameters") or {}).get("rope_theta")
    if rope_theta is not None:
        values["rope_theta"] = rope_theta
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    generation_config.save_pretrained(folder)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def _causal_lm_class(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]


def _random_model(arguments: dict[str, Any], cache: Path) -> Path:
    try:
        text = json.dumps(arguments, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"model.random_model: {arguments!r} holds something other than numbers, strings, lists") from error
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return _cached(cache, f"random-{digest}-v{CACHE_VERSION}", lambda folder: _build_random(arguments, folder))


def _build_random(arguments: dict[str, Any], folder: Path) -> None:
    """fp32 weights drawn by transformers' own initialisation from seed 0, with the built-in character tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from dapo_megatron.weights.char_tokenizer import build_char_tokenizer
    from dapo_megatron.weights.hub_names import hub_tensors

    values = dict(arguments)
    model_type = values.pop("model_type", None)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"model.random_model.model_type: {model_type!r} is unknown; use e.g. llama, qwen2 or qwen3")
    tokenizer = build_char_tokenizer()
    vocab_size = values.setdefault("vocab_size", len(tokenizer))
    if vocab_size < len(tokenizer):
        raise ValueError(f"model.random_model.vocab_size: {vocab_size} is under the tokenizer's {len(tokenizer)}; raise it")
    known = CONFIG_MAPPING[model_type]().to_dict()
    unknown = sorted(set(values) - set(known) - {"rope_theta"})
    if unknown:
        raise ValueError(f"model.random_model: {model_type} has no {', '.join(unknown)}; its keys: {', '.join(sorted(known))}")
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    try:
        config = CONFIG_MAPPING[model_type](**{**values, **special})
    except Exception as error:  # transformers' and huggingface_hub's own exceptions, of several types
        raise ValueError(f"model.random_model: transformers refuses it ({error}); change its sizes") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = dict(item for name, tensor in model.state_dict().items() for item in hub_tensors(name, tensor))
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    _write_model(folder, config, tensors, GenerationConfig(**special), "float32")
    tokenizer.save_pretrained(folder)
