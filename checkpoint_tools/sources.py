"""What is converted: the HF folder or the torch_dist folder behind the name on the command line."""

from pathlib import Path

from checkpoint_tools import UsageError
from checkpoint_tools.locate import Place, last_good, locate
from dapo_megatron.checkpoint_files import damage
from dapo_megatron.config import ModelConfig


def hf_folder(name: str) -> Path:
    """`name` itself, or what a .gguf file, a hub id or package:NAME stands for. UsageError if there is no such model."""
    place = locate(name)
    if place and place.is_megatron:
        raise UsageError(f"{place.path}: is {place.title.removesuffix(f' {place.path}')}, not an HF model")
    return place.path if place and place.kind == "hf" else _resolved(ModelConfig(path=name))


def checkpoint(name: str) -> Place:
    """A torch_dist folder or a run's checkpoint; of a run's folder the last good one. UsageError if there is none, ValueError
    if it is damaged."""
    place = locate(name)
    if place is None or not place.is_megatron:
        raise UsageError(f"{name}: is {'not on this machine' if place is None else 'an HF model'}; give a Megatron checkpoint")
    if place.kind == "run":
        return last_good(place)
    if place.kind == "checkpoint" and (problem := damage(place.path)):
        raise ValueError(f"{place.path}: the checkpoint is damaged: {problem}; use another one")
    return place


def settings_of(place: Place, hf: str) -> Path:
    """The folder with config.json and tokenizer: `hf` if given, else what lies with the weights, else the model that the run's
    configuration names. UsageError if there is none."""
    if hf:
        if not (Path(hf).expanduser() / "config.json").is_file():
            raise UsageError(f"--hf {hf}: no config.json there; give the model's folder")
        return Path(hf).expanduser()
    if place.hf:
        return place.hf
    advice = "give the model's folder with --hf DIR"
    if place.kind != "checkpoint":
        raise UsageError(f"{place.path}: has no hf/config.json, which says what model it is; {advice}")
    try:
        model = place.state()["config"]["model"]
        return _resolved(ModelConfig(path=model["path"], random_model=model["random_model"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{place.path}: the model of its run can't be found ({error}); {advice}") from error


def _resolved(model: ModelConfig) -> Path:
    from dapo_megatron.weights.source import resolve_model

    try:
        return resolve_model(model)
    except ValueError as error:
        raise UsageError(str(error).removeprefix("model.path: ")) from error  # no configuration's field is meant here
