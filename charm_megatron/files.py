"""Output files: replaced as a whole, and checked before hours of work rather than after."""

import os
from collections.abc import Callable
from pathlib import Path

from charm_megatron.errors import InvalidInput


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Has `write` make a file beside `path` and renames it, so that readers find the whole file or the old one.

    Raises `InvalidInput` where that is not possible, and leaves nothing behind then.
    """
    partial = _partial(path)
    try:
        write(partial)
        partial.replace(path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces the content of `path` by `text`, in UTF-8, as `write_atomically` does."""
    write_atomically(path, lambda partial: partial.write_text(text, "utf-8", newline=""))


def exists(path: Path) -> bool:
    """Whether there is such a file or folder, as far as can be seen: False also for what cannot be a path."""
    try:
        return path.exists()
    except OSError:  # a name that is too long, a folder that may not be looked into
        return False


def require_writable(*paths: Path | None) -> None:
    """Raises `InvalidInput` unless each file, where one is given, can be written. Leaves no file behind."""
    for path in paths:
        if path is None:
            continue
        try:
            if not path.parent.is_dir():
                raise InvalidInput(f"cannot write {path}: there is no folder {path.parent}")
            if path.is_dir():
                raise InvalidInput(f"cannot write {path}: it is a folder")
            partial = _partial(path)
            partial.touch()
            partial.unlink()
        except OSError as error:
            raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from error


def require_writable_folder(path: Path) -> None:
    """Raises `InvalidInput` unless files can be made in the folder `path`, or the folder itself can be made."""
    existing = next(folder for folder in (path, *path.absolute().parents) if exists(folder))
    if not existing.is_dir():
        raise InvalidInput(f"cannot write to {path}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidInput(f"cannot write to {path}: no permission to write in {existing}")


def _partial(path: Path) -> Path:
    """The name ends as that of `path` does: writers choose a format by it."""
    return path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
