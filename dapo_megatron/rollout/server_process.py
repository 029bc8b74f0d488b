"""Starting and stopping one rollout server, on CPU or GPU, so that it never outlives the process that owns it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Self

import httpx

from dapo_megatron.addresses import free_port, tcp_socket, url_host

# Becomes the server after it has asked the kernel to kill it when its owner dies, however that dies (PR_SET_PDEATHSIG
# is 1). A program of its own instead of Popen's preexec_fn, which may deadlock in a process with threads.
# Its children need not notice its death (vLLM's don't): a forked process waits for it, and then ends the whole group.
# The servers spawn their processes, which then import everything again: 20 CPU seconds and a gigabyte each. Without CUDA
# there is no reason against forking them, and what serves GPUs only, or SGLang's dumps of a trainer's tensors, isn't imported.
_LAUNCHER = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(1, signal.SIGKILL)
owner, module, device = sys.argv[1:4]
del sys.argv[1:4]
if os.getppid() != int(owner):
    sys.exit("the owner died before its server started")
server = os.getpid()
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    libc.prctl(1, signal.SIGTERM)
    while os.getppid() == server:
        signal.pause()
    os.killpg(0, signal.SIGKILL)
if device != "cpu":
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
sys.modules |= dict.fromkeys(("flash_attn", "flashinfer", "megatron"))
import multiprocessing, runpy
set_start_method, get_context = multiprocessing.set_start_method, multiprocessing.get_context
multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force=True)
multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def check_port_free(port: int, host: str = "127.0.0.1") -> None:
    """Raise ValueError if `port` cannot be listened on."""
    with tcp_socket(host) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise ValueError(
                f"rollout.base_port: cannot listen on {host}:{port} ({e.strerror}); choose another port, or 0 for any"
            ) from e


class ServerProcess:
    """One server process and its children, in a process group of their own. What program it is, a subclass says.

    `start` blocks until the server answers; `stop` ends the whole group. If the owner dies, even by SIGKILL, the kernel
    ends the server, and its children end with it.

    Args:
        port: 0 chooses a free one.
        tp: tensor parallel size; that many GPUs, or that many processes on CPU.
        device: "cpu" or "cuda".
        max_total_tokens: KV cache in tokens (CPU; on GPUs the server sizes it from mem_fraction).
        num_threads: OpenMP threads of each process on CPU.
        python: the interpreter of the environment that the server is installed in; empty: this one.
    """

    module: str  # is run as __main__
    kind: str  # for messages

    def __init__(
        self,
        model_dir: str | Path,
        *,
        port: int = 0,
        tp: int = 1,
        dtype: str = "auto",
        device: str = "cpu",
        max_total_tokens: int = 8192,
        mem_fraction: float = 0.6,
        extra_args: Sequence[str] = (),
        log_path: str | Path,
        startup_timeout_s: float = 600.0,
        seed: int = 1,
        num_threads: int = 1,
        host: str = "127.0.0.1",
        python: str = "",
    ):
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device: {device!r} is unknown; use 'cpu' or 'cuda'")
        if not (Path(model_dir) / "config.json").is_file():
            raise ValueError(f"model_dir: {str(model_dir)!r} has no config.json; give a folder in Hugging Face's format")
        self.model_dir = Path(model_dir)
        self.port = port or free_port(host)
        self.host, self.tp, self.dtype, self.device = host, tp, dtype, device
        self.max_total_tokens, self.mem_fraction = max_total_tokens, mem_fraction
        self.extra_args, self.seed, self.num_threads = list(extra_args), seed, num_threads
        self.log_path, self.startup_timeout_s = Path(log_path), startup_timeout_s
        self.python = python or sys.executable
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://{url_host(self.host)}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server; also the id of its process group and session."""
        return self._process.pid if self._process else None

    def command(self) -> list[str]:
        """Arguments after `python -m {module}`."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """The owner's environment with what the server needs."""
        raise NotImplementedError

    def start(self, progress: Callable[[float, str], None] | None = None) -> None:
        """Start and wait until the server answers.

        `progress(elapsed_s, last_log_line)` is called about once a second.

        Raises:
            ValueError: the port is taken.
            RuntimeError: the server ended, or did not answer within startup_timeout_s; with its last log lines.
        """
        if self._process is not None:
            raise RuntimeError("the server was already started")
        check_port_free(self.port, self.host)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        launcher = [self.python, "-c", _LAUNCHER, str(os.getpid()), self.module, self.device]
        with self.log_path.open("ab") as log:
            self._process = _spawn([*launcher, *self.command()], self.environment(), log)
        try:
            self._wait_ready(progress)
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self, progress: Callable[[float, str], None] | None) -> None:
        begin, reported = time.monotonic(), 0.0
        while True:
            elapsed = time.monotonic() - begin
            code = self._process.poll() if self._process else None
            if code is not None:
                raise RuntimeError(f"the {self.kind} server on {self.url} ended with exit code {code}:\n{self.log_tail()}")
            if self._answers():
                return
            if elapsed > self.startup_timeout_s:
                raise RuntimeError(
                    f"rollout.startup_timeout_s: the {self.kind} server on {self.url} did not answer within "
                    f"{self.startup_timeout_s:.0f} s; raise it or read {self.log_path}:\n{self.log_tail()}"
                )
            if progress and elapsed - reported >= 1:
                reported = elapsed
                progress(elapsed, self.log_tail(1))
            time.sleep(0.2)

    @property
    def alive(self) -> bool:
        """Whether its process runs. (A server may leave /health unanswered for long while it computes.)"""
        return self._process is not None and self._process.poll() is None

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def log_tail(self, num_lines: int = 30) -> str:
        """The last lines of the server's log, each cut at 500 characters."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 64 * 1024))
            lines = f.read().decode(errors="replace").splitlines()
            # SGLang prints all its arguments in one line of 20,000 characters.
            lines = [line[:500] for line in lines if line.strip() and "server_args=" not in line]
            return "\n".join(lines[-num_lines:])
        return ""

    def stop(self) -> None:
        """End the server and every process of its group. Does nothing if it was never started."""
        if self._process is None:
            return
        # No SIGTERM first: SGLang looks for it every five seconds, to finish requests that nobody waits for any more.
        deadline = time.monotonic() + 30
        while _kill_group(self._process.pid):
            self._process.poll()  # reaps the leader, otherwise its group never ends
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes of the {self.kind} server's group {self._process.pid} survive SIGKILL")
            time.sleep(0.05)
        self._process.wait(timeout=30)
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc) -> None:
        self.stop()


def _kill_group(pgid: int) -> bool:
    """Send SIGKILL to the group; False if there is no such group any more."""
    try:
        os.killpg(pgid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _spawn(args: list[str], env: dict[str, str], log: IO[bytes]) -> subprocess.Popen:
    """Popen in a session of its own, by a thread that lives as long as the child: PR_SET_PDEATHSIG fires at the end of
    the thread that made the child, and the caller's may be one of a pool."""
    made: Future[subprocess.Popen] = Future()

    def own() -> None:
        try:
            process = subprocess.Popen(args, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except BaseException as e:
            made.set_exception(e)
        else:
            made.set_result(process)
            process.wait()

    threading.Thread(target=own, name="server-owner", daemon=True).start()
    return made.result()
