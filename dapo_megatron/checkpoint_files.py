"""A checkpoint's files: on disk before it gets its name, and known to be unchanged before it is used.

`checkpoints/step_NNNNNN/` holds policy/ (Megatron's torch_dist, and in hf/ the model's config and tokenizer), state.json and
MANIFEST with the size and the SHA-256 of every file. Megatron's own manifest (`verify_integrity`) covers neither state.json nor
sizes, and is read by the trainer ranks only, when it is too late to fall back to another checkpoint.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
NUM_THREADS = 16  # hashing leaves Python's lock to others; a core does about 2 GB/s
MAX_NAMED = 3  # damaged files that a message names


def checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoints, oldest first, damaged ones among them."""
    numbered = {folder: step_of(folder) for folder in (run_dir / "checkpoints").glob("step_*") if folder.is_dir()}
    return sorted((folder for folder, step in numbered.items() if step >= 0), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name; -1 if it is no checkpoint's name."""
    match = re.fullmatch(r"step_(\d+)", checkpoint.name)
    return int(match.group(1)) if match else -1


def seal(folder: Path) -> None:
    """Write the manifest of a complete checkpoint and bring all of it to the disk: afterwards it may get its final name, and
    not even a power cut leaves one under that name whose content is missing. OSError if the disk is full."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    digests = _map(_hash_and_sync, (folder / name for name in names))
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": digest} for name, digest in zip(names, digests, strict=True)
    }
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for directory in {(folder / name).parent for name in names} | {folder}:
        sync(directory)


def sync(path: Path) -> None:
    """Bring a file's content, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def os_error_within(error: BaseException) -> BaseException:
    """On a full disk torch's writer fails once more while it is left, and with a riddle ("unexpected pos")."""
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, OSError):
        chain = chain.__cause__ or chain.__context__
    return chain or error


def damage(checkpoint: Path, read: bool = True) -> str:
    """What is wrong with a checkpoint's files, by their manifest; "" if nothing is. Reads all of it, unless sizes differ.
    Without `read` it looks at the sizes only."""
    try:
        entries = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in entries.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} can't be read ({type(error).__name__})"
    problems = [_size_problem(checkpoint / name, name, size) for name, (size, _) in expected.items()]
    if read and not any(problems):
        problems = _map(_hash_problem, ((checkpoint / name, name, digest) for name, (_, digest) in expected.items()))
    problems = [problem for problem in problems if problem]
    more = f" and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    return "; ".join(problems[:MAX_NAMED]) + more


def _size_problem(path: Path, name: str, size: int) -> str:
    if not path.is_file():
        return f"{name} is missing"
    found = path.stat().st_size
    return f"{name} has {found} bytes instead of {size}" if found != size else ""


def _hash_problem(file: tuple[Path, str, str]) -> str:
    path, name, expected = file
    try:
        return "" if _hash(path) == expected else f"the content of {name} has changed since it was written (SHA-256 differs)"
    except OSError as error:
        return f"{name} can't be read ({error.strerror})"


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_and_sync(path: Path) -> str:
    digest = _hash(path)
    sync(path)
    return digest


def _map(function: Callable[[Any], str], items: Iterable[Any]) -> list[str]:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(function, items))
