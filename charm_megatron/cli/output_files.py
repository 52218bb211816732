"""Files that commands write: whole or not at all, and refused before the work rather than after it."""

import os
from collections.abc import Callable
from pathlib import Path

from charm_megatron.errors import InvalidInput


def require_writable(*paths: Path | None) -> None:
    """Raises `InvalidInput` for a file that could not be written; None is no file."""
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise InvalidInput(f"cannot write {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise InvalidInput(f"cannot write {path}: it is a folder")
        trial = _partial(path)
        try:
            trial.touch()
            trial.unlink()
        except OSError as error:
            raise InvalidInput(f"cannot write {path}: {error.strerror}") from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Has `write` write beside `path` and renames the result, so that nobody ever finds half a file."""
    partial = _partial(path)
    try:
        write(partial)
        partial.replace(path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`write_atomically` of text, whose line ends stay as they are."""
    write_atomically(path, lambda partial: partial.write_text(text, "utf-8", newline=""))


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
