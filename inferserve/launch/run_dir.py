"""The private directory of one boot: sockets and a status file, 0700, held by a lock that dies with the launcher.

A new boot removes what dead boots left and touches nothing that a living one holds. The lock is the kernel's (flock),
so a reused process id cannot fool it; pid and start time stand in the file for people.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from inferserve.config import env
from inferserve.config.machine import process_age
from inferserve.errors import ConfigError

_LOCK = "lock"
_STATUS = "status.json"
_NEW = ".new-"
# A directory without a lock belongs to a launcher that is just starting, or that died while doing so.
_STARTING_S = 60.0


class RunDir:
    """A locked directory. `path` exists until `close()`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls) -> RunDir:
        """Make one below `env.run_base()`, after removing those of dead boots. Raises ConfigError."""
        base = env.run_base()
        try:
            _private(base)
            _clean(base)
            temporary = Path(tempfile.mkdtemp(prefix=_NEW, dir=base))
            fd = os.open(temporary / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            start = time.time() - process_age()
            os.write(fd, json.dumps({"pid": os.getpid(), "started": round(start, 2)}).encode() + b"\n")
            path = temporary.with_name("boot-" + temporary.name.removeprefix(_NEW))
            temporary.rename(path)
        except OSError as error:
            raise ConfigError(f"{base}: cannot be used as run directory ({error.strerror or error})") from error
        return cls(path, fd)

    def write_status(self, **facts: Any) -> None:
        """Replace status.json, for people, tools and tests."""
        temporary = self.path / f".{_STATUS}"
        temporary.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path / _STATUS)

    def close(self) -> None:
        """Remove the directory and let go of the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def _private(base: Path) -> None:
    """`base` exists, is ours and nobody else may enter it (its name in /tmp can be guessed)."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = base.lstat()
    if base.is_symlink() or stat.st_uid != os.getuid():
        raise ConfigError(f"{base}: belongs to somebody else; set INFERSERVE_RUN_DIR")
    if stat.st_mode & 0o077:
        base.chmod(0o700)


def _clean(base: Path) -> None:
    for folder in base.iterdir():
        if folder.name.startswith(("boot-", _NEW)) and _is_dead(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_dead(folder: Path) -> bool:
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:
        with contextlib.suppress(OSError):
            return time.time() - folder.stat().st_mtime > _STARTING_S
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
