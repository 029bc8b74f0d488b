"""An output folder that appears when it is whole, and is gone on with if whoever made it was killed."""

import errno
import fcntl
import hashlib
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from checkpoint_tools import UsageError
from dapo_megatron.checkpoint_files import sync

_VERSION = 1  # of what a conversion leaves for going on: raise it when that changes


class Output:
    """OUT.partial/ with content/, which becomes OUT, work/ for what isn't whole, and conversion.json: what is made of what.

    `made_of` must tell sources and options apart: if a killed conversion left an OUT.partial of the same, its content stays
    (`resumed`), otherwise it is removed. UsageError if OUT exists, is being made by another process, or OUT.partial is
    something else's. Used as a context manager.
    """

    def __init__(self, out: Path, made_of: dict[str, Any]) -> None:
        self.out, self._partial = out, out.with_name(f"{out.name}.partial")
        self.content, self.work = self._partial / "content", self._partial / "work"
        note = self._partial / "conversion.json"
        text = json.dumps({"version": _VERSION, **made_of}, indent=1, sort_keys=True)
        check_new(out)
        lock = self._partial / ".lock"  # made first: by it the folder is known, however early its conversion was killed
        if self._partial.is_dir() and any(self._partial.iterdir()) and not (lock.exists() or note.exists()):
            raise UsageError(f"{self._partial}: is not what a conversion has left; move it away or choose another output")
        try:
            self._partial.mkdir(parents=True, exist_ok=True)
            self._lock = lock.open("w")
        except OSError as error:
            raise UsageError(f"{out}: can't be made ({error}); choose another output") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise UsageError(f"{out}: is being made by another process; wait for it or choose another output") from error
        self.resumed = note.is_file() and note.read_text(encoding="utf-8") == text
        if not self.resumed:
            note.unlink(missing_ok=True)  # first: what is half removed must not be gone on with
            for folder in (self.content, self.work):
                shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.content, self.work):
            folder.mkdir(exist_ok=True)
        new = self._partial / "new.json"
        new.write_text(text, encoding="utf-8")
        new.rename(note)

    def finish(self) -> int:
        """Bring everything to the disk and give it its name. Returns the number of bytes."""
        files = [path for path in self.content.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        for path in (*files, *{path.parent for path in files}):
            sync(path)
        check_new(self.out)
        self.content.rename(self.out)
        sync(self.out.parent)
        shutil.rmtree(self._partial)
        return size

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """A full disk gets a message that says what remains (RuntimeError)."""
        self._lock.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RuntimeError(
                f"{self.out}: writing failed: {error}; what is done is kept in {self._partial}: start the same command again "
                "once there is room on the disk, and it goes on from there"
            ) from error


def check_new(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out}: exists; remove it or choose another output")


def fingerprint(folder: Path, names: Iterable[str], *texts: bytes) -> dict[str, Any]:
    """Tells a source from another, and from itself after a change: path, sizes and times of files, and the hash of `texts`."""
    stats = {name: (folder / name).stat() for name in sorted(set(names))}
    return {
        "folder": str(folder.resolve()),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "sha256": hashlib.sha256(b"\0".join(texts)).hexdigest(),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
