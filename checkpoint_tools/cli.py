"""The command line. Importing this loads nothing heavy, so that --help is there at once."""

import argparse
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from checkpoint_tools import UsageError

DTYPES = ("bfloat16", "float16", "float32")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MODEL = "an HF folder with *.safetensors, a .gguf file, a hub id or package:NAME"
_CHECKPOINT = "a torch_dist folder, a run's checkpoint (step_NNNNNN) or a run's folder, whose last good checkpoint is taken"


class Command(NamedTuple):
    """A sub-command. `module` (of this package) has run(args) -> exit code and is imported when it is wanted."""

    module: str
    help: str
    description: str
    arguments: Callable[[argparse.ArgumentParser], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code: 0 done, 1 failed (or a mismatch), 2 wrong use, 130 interrupted. Errors
    meant for users are one line each, without a traceback."""
    args = _parser().parse_args(argv)
    try:
        return int(importlib.import_module(f"checkpoint_tools.{COMMANDS[args.command].module}").run(args))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"checkpoint_tools: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("checkpoint_tools: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        traceback.print_exc()
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"checkpoint_tools: {what}; this is a fault of checkpoint_tools, please report it", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="checkpoint_tools", description="Convert, compare and look at checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        command.arguments(commands.add_parser(name, help=command.help, description=command.description))
    return parser


def _hf_to_megatron(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="HF_DIR", help=_MODEL)
    parser.add_argument("out", metavar="OUT", help="the checkpoint's folder, which must not exist")
    layout = parser.add_argument_group(
        "layout",
        "Ranks of this layout read no more of the files than they need. Any other layout can load them as well.",
    )
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        layout.add_argument(f"--{name}", type=_positive, default=1, metavar="N", help=f"{what}-parallel size (default 1)")
    _add_dtype(parser)


def _megatron_to_hf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CKPT", help=_CHECKPOINT)
    parser.add_argument("out", metavar="OUT", help="the HF folder, which must not exist")
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default="5GB",
        metavar="SIZE",
        help="largest *.safetensors file, such as 5GB (default) or 500MB; a larger tensor has a file of its own",
    )
    parser.add_argument(
        "--hf",
        metavar="DIR",
        default="",
        help="where config.json and tokenizer come from, if not from the checkpoint or the run's configuration",
    )
    _add_dtype(parser)


def _verify(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help=f"{_MODEL}, or {_CHECKPOINT}")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='texts for the log-probs: a line each, or a .jsonl with "prompt" or "text" (built-in ones)',
    )
    parser.add_argument(
        "--tensors-only", action="store_true", help="no log-probs, for which each model in turn is in memory in fp32"
    )


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="an HF folder, a .gguf file, package:NAME, a torch_dist folder or a run's")
    parser.add_argument("--json", action="store_true", help="one JSON object; its keys stand in checkpoint_tools/inspection.py")
    parser.add_argument("--check", action="store_true", help="read a run's checkpoint whole: is it as its manifest says?")


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="",
        help="convert every tensor, rounding to nearest (default: each keeps its dtype)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]*)", text.strip(), re.IGNORECASE)
    factor = _UNITS.get((found[2] or "B").upper()) if found else None
    if not found or not factor or float(found[1]) * factor < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB, 500MB or 4GiB")
    return int(float(found[1]) * factor)


COMMANDS = {
    "hf-to-megatron": Command(
        "hf_to_megatron",
        "HF folder -> Megatron checkpoint",
        "Make a Megatron checkpoint (torch_dist) of an HF model. A conversion that was interrupted goes on where it was.",
        _hf_to_megatron,
    ),
    "megatron-to-hf": Command(
        "megatron_to_hf",
        "Megatron checkpoint -> HF folder",
        "Make an HF folder (safetensors) of a Megatron checkpoint (torch_dist) of any layout. A conversion that was "
        "interrupted goes on where it was.",
        _megatron_to_hf,
    ),
    "verify": Command(
        "verify",
        "are two models the same?",
        "Compare two models: configuration, tensors bit by bit, and the log-probs of texts by transformers and by Megatron. "
        "Exit code 1 if they differ.",
        _verify,
    ),
    "inspect": Command(
        "inspection",
        "what a path holds",
        "Tell what lies at a path: kind, model, dtypes, layout, step, versions. Reads headers and metadata only, no tensor.",
        _inspect,
    ),
}
