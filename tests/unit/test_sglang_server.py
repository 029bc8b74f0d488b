"""The server process's life, with a program in SGLang's place that starts in no time."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from dapo_megatron.rollout.sglang_server import SGLangServer

_FAKE_SGLANG = """
import http.server, os, subprocess, sys
if "--fail" in sys.argv:
    print("no such model")
    sys.exit(3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("child", child.pid, "threads", os.environ["OMP_NUM_THREADS"], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "--never" in sys.argv else 200)
        self.end_headers()
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {"vocab_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def fake_server(model_dir, tmp_path, monkeypatch) -> Callable[..., SGLangServer]:
    package = tmp_path / "fake" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(_FAKE_SGLANG)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return lambda *extra, **kwargs: SGLangServer(
        model_dir, dtype="float32", log_path=tmp_path / "server.log", extra_args=extra, **kwargs
    )


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stop_ends_the_server_and_its_children(fake_server, tmp_path):
    with fake_server(num_threads=3) as server:
        pid = server.pid
        words = (tmp_path / "server.log").read_text().split()
        child = int(words[1])
        assert words[2:] == ["threads", "3"] and server.alive and runs(pid) and runs(child)
    assert not server.alive and not runs(pid) and not runs(child)
    server.stop()  # again: nothing to do


def test_a_taken_port_is_found_before_the_start(fake_server):
    with fake_server() as server, pytest.raises(ValueError, match=rf"rollout.base_port: .*:{server.port} "):
        fake_server(port=server.port).start()


def test_a_server_that_ends_early_shows_its_log(fake_server):
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3:.*no such model"):
        fake_server("--fail").start()


def test_a_server_that_never_answers_is_given_up_and_ended(fake_server, tmp_path):
    seen: list[tuple[float, str]] = []
    with pytest.raises(RuntimeError, match=r"rollout\.startup_timeout_s"):
        fake_server("--never", startup_timeout_s=2.5).start(lambda *progress: seen.append(progress))
    assert seen and seen[0][0] >= 1 and "child" in seen[0][1]
    assert not runs(int((tmp_path / "server.log").read_text().split()[1]))


def test_the_server_dies_with_its_owner_but_not_with_the_thread_that_started_it(fake_server, model_dir, tmp_path):
    owner = textwrap.dedent("""
        import sys, threading, time
        from dapo_megatron.rollout.sglang_server import SGLangServer
        server = SGLangServer(sys.argv[1], dtype="float32", log_path=sys.argv[2])
        thread = threading.Thread(target=server.start)
        thread.start()
        thread.join()
        time.sleep(0.5)
        print(server.pid, server.alive, flush=True)
        time.sleep(100)
    """)
    command = [sys.executable, "-c", owner, str(model_dir), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        pid, alive = process.stdout.readline().split()
        assert alive == "True" and runs(int(pid))
        process.kill()
        process.wait()
        child = int((tmp_path / "log").read_text().split()[1])  # which doesn't watch its parent
        for _ in range(100):
            if not runs(int(pid)) and not runs(child):
                break
            asyncio.run(asyncio.sleep(0.05))
        assert not runs(int(pid)) and not runs(child)


def test_environment(model_dir, monkeypatch):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    cpu = SGLangServer(model_dir, dtype="float32", log_path="log").environment()
    gpu = SGLangServer(model_dir, dtype="float32", device="cuda", log_path="log").environment()
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" not in cpu and "SGLANG_RETURN_ORIGINAL_LOGPROB" not in gpu
    stub, other = cpu["PYTHONPATH"].split(os.pathsep)
    assert (Path(stub) / "sgl_kernel" / "__init__.py").is_file() and other == "/elsewhere"
    assert gpu["PYTHONPATH"] == "/elsewhere"
