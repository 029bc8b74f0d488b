"""What a Slurm job's nodes wait for, and how they call themselves. That they come up: tests/integration/slurm."""

import socket
from contextlib import nullcontext
from typing import Any

import pytest
import ray

from dapo_megatron.cluster import session, slurm_node


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """This node's name stands for these."""
    real = socket.getaddrinfo

    def resolve(host: str, *args: Any, **kwargs: Any) -> Any:
        if host != "this-node":
            return real(host, *args, **kwargs)
        return [(None, None, None, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "gethostname", lambda: "this-node")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_a_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "fd00::7", "10.0.0.7")
    assert slurm_node.own_address("10.0.0.8") == "10.0.0.7"
    named(monkeypatch, "::1", "fd00::7")
    assert slurm_node.own_address("fd00::8") == "fd00::7"
    named(monkeypatch, "127.0.0.12")  # such as the tests' nodes have
    assert slurm_node.own_address("127.0.0.11") == "127.0.0.12"
    named(monkeypatch, "127.0.1.1")  # Debian's way: of no use to others, who are reached from another address
    assert slurm_node.own_address("127.0.0.1") == "127.0.0.1"


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAPO_START_TIMEOUT_S", "0.01")
    monkeypatch.setenv("DAPO_NODES", "n1 n2 n3")


def test_the_nodes_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, seconds: None, capsys: Any) -> None:
    def node(name: str, gpus: int, alive: bool = True) -> dict[str, Any]:
        return {"NodeName": name, "Alive": alive, "Resources": {"GPU": gpus} if gpus else {}}

    there = [node("n1", 8), node("n2", 7), node("n3", 8, alive=False)]
    monkeypatch.setattr(session, "ray_session", lambda hide_gpus: nullcontext())
    monkeypatch.setattr(ray, "nodes", lambda: there)
    with pytest.raises(RuntimeError, match=r"not come up on n2 \(7 of 8 GPUs\), n3; .* \(DAPO_START_TIMEOUT_S\)"):
        slurm_node.wait_for_nodes(["n1", "n2", "n3"], 8)
    slurm_node.wait_for_nodes(["n1", "n2"], 0)
    assert capsys.readouterr().out == "Ray is up: n1 (8 GPUs), n2 (7 GPUs)\n"


def test_a_first_node_that_never_listens_is_named(tmp_path: Any, seconds: None, capsys: Any) -> None:
    for text in (None, "127.0.0.1 1"):
        if text:
            (tmp_path / "address").write_text(text)
        assert slurm_node.main(["run", str(tmp_path), "true"]) == slurm_node.LOST
        assert "Ray on the job's first node (n1) doesn't answer after 0 s (DAPO_START_TIMEOUT_S)" in capsys.readouterr().err


def test_the_first_node_is_found_once_it_listens(tmp_path: Any, seconds: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (tmp_path / "address").write_text(f"127.0.0.1 {port}")
        assert slurm_node.wait_for_head(tmp_path) == ("127.0.0.1", port)
