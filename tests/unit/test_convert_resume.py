"""A conversion that is killed at any moment goes on where it was, and its result is, byte for byte, that of one that wasn't; a
full disk is said and loses nothing; memory doesn't grow with the model."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools import hf_to_megatron
from checkpoint_tools.cli import main
from tests.small_disk import small_disk
from tests.unit.hf_models import CONFIGS, write_model

COMMANDS = {"hf-to-megatron": ["--tp", "2", "--pp", "2"], "megatron-to-hf": ["--max-shard-size", "20KB"]}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_to_megatron, "PART_BYTES", 30_000)


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """A conversion, but for the output's name."""
    source = write_model(tmp_path / "source", CONFIGS["qwen3"])
    if request.param == "megatron-to-hf":
        assert main(["hf-to-megatron", str(source), str(tmp_path / "megatron")]) == 0
        source = tmp_path / "megatron"
    return [request.param, str(source), *COMMANDS[request.param]]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Photographer:
    """Copies what lies in a folder at every moment at which something is about to change there: what a SIGKILL would leave,
    since Python's buffers are lost with it, and the kernel's aren't."""

    def __init__(self, folder: Path, album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._album, self._numbers, self._busy = folder, album, itertools.count(), False
        self._last: Any = None
        for owner, name in (
            (os, "rename"),
            (os, "fsync"),
            (os, "pwrite"),
            (os, "unlink"),
            (os, "mkdir"),
            (torch, "save"),
            (json, "dump"),
            (shutil, "copy"),
        ):
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._take()
            result = function(*args, **kwargs)
            self._take()
            return result

        return call

    def _take(self) -> None:
        if self._busy:
            return
        self._busy = True
        now = content(self.folder)
        if now != self._last:
            shutil.copytree(self.folder, self._album / f"{next(self._numbers):04d}")
            self._last = now
        self._busy = False


def test_killed_at_any_moment(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, album = tmp_path / "place", tmp_path / "album"
    place.mkdir()
    album.mkdir()
    with monkeypatch.context() as patched:
        Photographer(place, album, patched)
        assert main([*command, str(place / "out")]) == 0
    whole = content(place / "out")
    assert [p.name for p in place.iterdir()] == ["out"]
    capsys.readouterr()
    photos = sorted(album.iterdir())
    num_resumed, num_done = 0, set()
    for photo in photos:
        if (photo / "out").exists():
            assert content(photo / "out") == whole
            continue
        assert main([*command, str(photo / "out")]) == 0, photo
        assert content(photo / "out") == whole, photo
        assert [p.name for p in photo.iterdir()] == ["out"]
        said = capsys.readouterr().err
        num_resumed += "going on with" in said
        num_done.update(line.split(": ")[1] for line in said.splitlines() if line.startswith("going on"))
    parts = len([name for name in whole if name.endswith((".distcp", ".safetensors"))])
    assert parts >= 5 and len(photos) > 3 * parts
    assert num_done == {f"{number + 1} of {parts} files are there" for number in range(parts)}
    assert num_resumed > len(photos) / 2  # the first part is not yet whole in others


@pytest.mark.slow
def test_killed_for_real(command: list[str], tmp_path: Path) -> None:
    """By SIGKILL in its second part."""
    code = f"""
import os, signal
from pathlib import Path
from checkpoint_tools import hf_to_megatron
from checkpoint_tools.cli import main
hf_to_megatron.PART_BYTES = 30_000
original = os.fsync
def fsync(descriptor):
    if any(p.parent.name == "work" and p.name.startswith(("__1_", "model-00002")) for p in Path({str(tmp_path)!r}).rglob("*")):
        os.kill(os.getpid(), signal.SIGKILL)
    original(descriptor)
os.fsync = fsync
main({[*command, str(tmp_path / "out")]!r})
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "out").exists()
    assert main([*command, str(tmp_path / "out")]) == 0
    assert main([*command, str(tmp_path / "other")]) == 0
    assert content(tmp_path / "out") == content(tmp_path / "other")


@pytest.mark.parametrize("change", ["the source", "the options", "nothing"])
def test_another_conversion_starts_anew(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    from checkpoint_tools.output import Output

    def die(_: Output) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Output, "finish", die)
        assert main([*command, str(tmp_path / "out")]) == 130
    capsys.readouterr()
    if change == "the source":
        for file in Path(command[1]).iterdir():
            os.utime(file, ns=(1, 1))
    if change == "the options":
        command += ["--dtype", "float32"]
    assert main([*command, str(tmp_path / "out")]) == 0
    assert ("going on with" in capsys.readouterr().err) == (change == "nothing")
    assert main([*command, str(tmp_path / "other")]) == 0
    assert content(tmp_path / "out") == content(tmp_path / "other")


def test_two_at_once(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from checkpoint_tools.output import Output

    with Output(tmp_path / "out", {}):
        assert main([*command, str(tmp_path / "out")]) == 2
        assert "is being made by another process" in capsys.readouterr().err


# --- a full disk ---


def test_a_full_disk(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", 96) as disk:
        out = disk / "out"
        assert main([*command, str(out)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"checkpoint_tools: {out}: writing failed: [Errno 28] No space left on device")
        assert f"kept in {out}.partial: start the same command again once there is room on the disk" in line
        assert not out.exists()
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        assert main([*command, str(out)]) == 0
        assert "going on with" in capsys.readouterr().err
        assert main([*command, str(tmp_path / "other")]) == 0
        assert content(out) == content(tmp_path / "other")


# --- memory ---


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Of a model of 400 MB a parameter and what it becomes are held: under 100 MB with what torch takes on the way."""
    config = {
        **CONFIGS["qwen2_untied"],
        "num_hidden_layers": 28,
        "hidden_size": 504,
        "intermediate_size": 2048,
        "vocab_size": 1001,
    }
    source = tmp_path / "source"
    write_model(source, config, large_tensors(config), num_files=2)
    code = f"""
import re
from pathlib import Path
from checkpoint_tools import hf_to_megatron, megatron_to_hf
from checkpoint_tools.cli import main
def megabytes(what): return int(re.search(what + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1e3
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = megabytes("VmRSS")
assert main(["hf-to-megatron", {str(source)!r}, {str(tmp_path / "megatron")!r}]) == 0
print(megabytes("VmHWM") - before)
assert main(["megatron-to-hf", {str(tmp_path / "megatron")!r}, {str(tmp_path / "out")!r}]) == 0
print(megabytes("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    grown = [float(line) for line in done.stdout.splitlines() if "/" not in line]
    assert size > 400e6 and len(grown) == 2 and max(grown) < 100, (size, grown)


def large_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    from dapo_megatron.weights.mapping import ModelShape, expected_hf_shapes

    return {name: torch.full(size, 0.5) for name, size in expected_hf_shapes(ModelShape.from_hf(config)).items()}
