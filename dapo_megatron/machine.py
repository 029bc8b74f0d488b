"""What this machine has to offer, found out without loading torch."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU that this process may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return False
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or shutil.which("nvidia-smi") is not None


def why_not_writable(folder: Path) -> str:
    """Why a folder can't be made and written, empty if it can; leaves nothing behind."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir():
        return f"{existing} is a file, so the folder {folder} can't be made"
    try:  # permissions alone don't tell: root has them all, and a file system may still refuse
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"nothing can be written in {existing} ({error.strerror})"


def why_not_listenable(ports: Iterable[int]) -> str:
    """Why one of the ports can't be listened on at 127.0.0.1, empty if all can."""
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server would: TIME_WAIT is no obstacle
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                return f"port {port}: {error.strerror}"
    return ""
