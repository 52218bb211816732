"""One writer per run folder: a lock that names its owner, and goes with it however it ends."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from charm_megatron.errors import InvalidInput

NAME = "lock.json"
"""In the run folder, while a run writes to it."""

_TAKEN = (errno.EACCES, errno.EAGAIN)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out of `folder` inside the block. Raises `InvalidInput` where one is in it.

    The kernel's lock of a file, which it takes back when this process ends, also by SIGKILL, and which network file
    systems share between hosts. Processes that are forked inside the block do not hold it.
    """
    path = folder / NAME
    descriptor = _take(path)
    try:
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        }
        # In place: a renamed file would be another one, which is not locked.
        with suppress(OSError):  # a full disk; the lock itself holds
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, (json.dumps(owner) + "\n").encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def require_unlocked(folder: Path) -> None:
    """Raises `InvalidInput` where a run writes to `folder` now. Not to be called by that run: it would unlock."""
    path = folder / NAME
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return
    try:
        _try(descriptor, path)
    finally:
        os.close(descriptor)


def _take(path: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InvalidInput(f"cannot write {path}: {error.strerror}") from error
        try:
            _try(descriptor, path)
            # The owner before may have removed the file since it was opened.
            if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _try(descriptor: int, path: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = _owner(path)
        if error.errno in _TAKEN:
            raise InvalidInput(
                f"{path.parent} is in use by {_named(owner)}; wait for its end, or end it"
            ) from error
        # A file system without locks: what the file says must do.
        if owner and not _is_gone(owner):
            raise InvalidInput(
                f"{path.parent} is in use by {_named(owner)}; wait for its end, or remove {path} if it is gone"
            ) from error


def _owner(path: Path) -> dict[str, Any]:
    """What the file says; nothing where it says nothing yet."""
    try:
        owner = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) and owner.keys() >= {"pid", "host", "since"} else {}


def _named(owner: dict[str, Any]) -> str:
    if not owner:
        return "another run"
    return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"


def _is_gone(owner: dict[str, Any]) -> bool:
    return owner["host"] == socket.gethostname() and not Path(f"/proc/{owner['pid']}").exists()
