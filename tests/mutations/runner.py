"""A program that runs pytest in one folder after another, each time in a process forked from itself: whoever wants to run
different copies of the package waits but once for the import of what they have in common.

It reads lines of JSON, a folder and pytest's arguments, and answers each with pytest's exit code (-14 if it took longer than
the argument says, in seconds); the output stands in output.txt of the folder then."""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

COMMON = (
    "pytest",
    "omegaconf",
    "dapo_megatron.policy",  # which comes before Megatron
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


def main() -> None:
    sys.path[0] = str(Path.cwd())
    for name in COMMON:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "dapo_megatron"]:
        del sys.modules[name]
    for line in sys.stdin:
        folder, *arguments = json.loads(line)
        if (pid := os.fork()) == 0:
            os._exit(run(folder, arguments))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run(folder: str, arguments: list[str]) -> int:
    """In a process that ends afterwards."""
    signal.alarm(int(sys.argv[1]))
    os.chdir(folder)
    output, nothing = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
    for file, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(file, standard)
    os.environ["PYTHONPATH"] = folder  # for the processes that the test starts
    sys.path[0] = folder
    import pytest

    code = int(pytest.main(arguments))
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    main()
