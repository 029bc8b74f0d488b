"""The Ray session a run lives in: a local one of its own, or an existing cluster if RAY_ADDRESS is set."""

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Ray reads these when it is imported, which in its workers has happened already.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # `uv run` would make Ray rebuild the environment for every worker
os.environ.update(
    {}
    if os.environ.get("RAY_ADDRESS", "local") != "local" or "ray" in sys.modules
    else {  # a session of the run's own: by token, and on loopback only, which Ray else does on other systems
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
)

import ray
from ray.exceptions import RayError, RayTaskError

from dapo_megatron.stopping import ProcessLost

NODE_ADDRESS = "DAPO_NODE_ADDRESS"  # in a cluster that a Slurm job has started: this node's
LOCAL_OBJECT_STORE_BYTES = 512 * 2**20  # batches of token ids; Ray's default takes 30% of a laptop's memory


def is_own_session() -> bool:
    """In the controller: whether the session is one of the run's own, all of it on this machine."""
    return os.environ.get("RAY_ADDRESS", "local") == "local"


@contextmanager
def ray_session(hide_gpus: bool) -> Iterator[None]:
    """Everything that the run started in Ray is gone afterwards, whatever ended it."""
    if hide_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    address = os.environ.get("RAY_ADDRESS", "local")  # local: a new one, even beside a cluster that runs here already
    options: dict[str, Any] = {"address": address}
    if is_own_session():
        options["object_store_memory"] = LOCAL_OBJECT_STORE_BYTES
        options["include_dashboard"] = False
    elif NODE_ADDRESS in os.environ:
        options["_node_ip_address"] = os.environ[NODE_ADDRESS]
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **options)
    except Exception as error:  # Ray raises plain ones too
        where = "be started on this machine" if address == "local" else f"be joined at RAY_ADDRESS={address}"
        raise RuntimeError(f"Ray could not {where}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def get_all(refs: Iterable[Any]) -> list[Any]:
    """Results in order; the first failure of any of them raises at once, since the others may wait for it for ever."""
    refs = list(refs)
    pending = list(refs)
    try:
        while pending:
            ready, pending = ray.wait(pending, num_returns=1)
            ray.get(ready[0])
        return ray.get(refs)
    except RayError as error:
        raise readable(error) from error


async def gather_all(refs: Iterable[Any]) -> list[Any]:
    """get_all for a coroutine, which can be cancelled meanwhile."""
    try:
        return list(await asyncio.gather(*refs))
    except RayError as error:
        raise readable(error) from error


def readable(error: RayError) -> Exception:
    """The worker's own exception where it is one that our users may get to read, so that it reads the same as without Ray."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, ValueError | RuntimeError | OSError) else RuntimeError(str(error))
    return ProcessLost(f"a process of the run died (out of memory, or killed?): {error}")


def redirect_output(log: str) -> None:
    """In a worker: what it and its children print goes into the run's folder."""
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    file = Path(log).open("a", buffering=1)  # noqa: SIM115 - lives as long as the process
    os.dup2(file.fileno(), sys.stdout.fileno())
    os.dup2(file.fileno(), sys.stderr.fileno())
