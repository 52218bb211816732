"""Whether a run can be continued from its checkpoints, judged from names, sizes and their table of contents.

latest_checkpointed_iteration.txt   the iteration to continue from, Megatron's tracker; written last
iter_0000004/metadata.json          the format
iter_0000004/.metadata              the table: which bytes of which file hold what
iter_0000004/__<R>_<N>.distcp       those bytes

The table is a pickle of `torch.distributed.checkpoint`. Here nothing of it is run and torch is not needed: whatever
class it names, an inert record takes its place. Loading, later, runs what the files say; hence `require_private`.
"""

import grp
import json
import os
import pickle
import pwd
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from charm_megatron.errors import InvalidInput

TRACKER = "latest_checkpointed_iteration.txt"
FORMAT, TABLE = "metadata.json", ".metadata"
DEFAULT_FORMAT = "torch_dist"
"""Megatron's `--ckpt-format` unless it is set: the one whose folders hold a `metadata.json`."""


class _Torn(Exception):
    """What keeps a checkpoint from being loaded, as a clause."""


def iteration_folder(checkpoints: Path, iteration: int) -> Path:
    """Where Megatron keeps the checkpoint of an iteration."""
    return checkpoints / f"iter_{iteration:07d}"


def iteration_to_continue(checkpoints: Path, ckpt_format: str = DEFAULT_FORMAT) -> int | None:
    """The iteration that Megatron would load; None where there is no checkpoint at all.

    Raises `InvalidInput` where it could not load it, and names the newest one that it could.
    """
    tracker = checkpoints / TRACKER
    text = _text(tracker)
    if text is None:
        if next(_iterations(checkpoints), None) is None:
            return None
        raise InvalidInput(f"{TRACKER} is missing{_offer(checkpoints, ckpt_format)}")
    if not re.fullmatch(r"[0-9]{1,12}", text.strip()):
        raise InvalidInput(
            f"{TRACKER} holds {_short(text)}, which is no iteration{_offer(checkpoints, ckpt_format)}"
        )
    iteration = int(text)
    fault = _fault(iteration_folder(checkpoints, iteration), ckpt_format)
    if fault is not None:
        inside = fault.replace(f"{checkpoints}/", "")  # the whole path stands in what is offered
        raise InvalidInput(
            f"{TRACKER} names iteration {iteration}, but {inside}{_offer(checkpoints, ckpt_format)}"
        )
    return iteration


def newest_whole(checkpoints: Path, ckpt_format: str = DEFAULT_FORMAT) -> int | None:
    """The newest iteration whose checkpoint could be loaded, whatever the tracker says."""
    whole = (
        i for i in _iterations(checkpoints) if _fault(iteration_folder(checkpoints, i), ckpt_format) is None
    )
    return next(whole, None)


def _offer(checkpoints: Path, ckpt_format: str) -> str:
    whole = newest_whole(checkpoints, ckpt_format)
    if whole is None:
        return f"; no checkpoint in {checkpoints} is whole: start the run again with another --out"
    return f"; iteration {whole} is whole: `echo {whole} > {checkpoints / TRACKER}` continues from there"


def _iterations(checkpoints: Path) -> Iterator[int]:
    """Those that have a folder, the newest first."""
    names = (child.name for child in checkpoints.iterdir()) if checkpoints.is_dir() else ()
    found = (re.fullmatch(r"iter_([0-9]{7,12})", name) for name in names)
    return iter(sorted((int(match[1]) for match in found if match), reverse=True))


def _text(path: Path) -> str | None:
    """None where there is no such file."""
    try:
        return path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from error


def _short(text: str) -> str:
    return repr(text if len(text) <= 20 else f"{text[:20]}...") if text.strip() else "nothing"


# ---------------------------------------------------------------------- one checkpoint


def _fault(folder: Path, ckpt_format: str) -> str | None:
    """Why a checkpoint cannot be loaded, as a clause that names a path; None where nothing speaks against it."""
    try:
        if not folder.is_dir():
            return f"there is no folder {folder}"
        if ckpt_format == "torch":  # pickles of whole ranks, without a table
            return None if any(folder.glob("mp_rank_*/*.pt")) else f"{folder} holds no mp_rank_*/*.pt"
        if ckpt_format == DEFAULT_FORMAT:
            _check_format(folder / FORMAT)
        for name, num_bytes in _files(folder / TABLE).items():
            _check_size(folder / name, num_bytes)
    except _Torn as torn:
        return str(torn)
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error.strerror or error}"
    return None


def _check_format(path: Path) -> None:
    if not path.is_file():
        raise _Torn(f"{path} is missing")
    try:
        is_named = isinstance(json.loads(path.read_text("utf-8"))["sharded_backend"], str)
    except (ValueError, KeyError, TypeError):
        is_named = False
    if not is_named:
        raise _Torn(f"{path} does not name the format of the checkpoint")


def _check_size(path: Path, num_bytes: int) -> None:
    if not path.is_file():
        raise _Torn(f"{path} is missing")
    found = path.stat().st_size
    if found < num_bytes:
        raise _Torn(f"{path} is cut short: {found} of {num_bytes} bytes")


def _files(table: Path) -> dict[str, int]:
    """The files that a table of contents names, and how many bytes each must have at least."""
    if not table.is_file():
        raise _Torn(f"{table} is missing")
    sizes: dict[str, int] = {}
    try:
        with table.open("rb") as file:
            contents = _InertUnpickler(file).load()
        for entry in contents.state["storage_data"].values():
            name, offset, length = (entry.state[key] for key in ("relative_path", "offset", "length"))
            sizes[name] = max(sizes.get(name, 0), offset + length)
    except OSError:
        raise
    except Exception as error:  # a pickle that is cut short or garbage raises nearly anything
        raise _Torn(f"{table} is cut short, or no table of contents") from error
    outside = next((name for name in sizes if Path(name).name != name), None)
    if outside is not None or not sizes:
        raise _Torn(f"{table} names {'no file' if outside is None else f'{outside}, in another folder'}")
    return sizes


class _Record:
    """What any class of a table becomes."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Imports and runs nothing that a pickle names."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """A record for every class and every function."""
        return _Record


# ---------------------------------------------------------------------- who may have written it


def require_private(*folders: Path) -> None:
    """Raises `InvalidInput` where a user other than this one or root may write to a folder or a file in it.

    Checkpoints and indexes of datasets are pickles: who can write them can run code as whoever loads them.
    """
    for folder in folders:
        for path in (folder, *(folder.iterdir() if folder.is_dir() else ())):
            if not path.exists():
                continue
            who = _others_who_may_write(path)
            if who is not None:
                raise InvalidInput(
                    f"{path} {who}, and loading a checkpoint runs code from it; `chmod -R go-w` on the run folder, or "
                    f"--trust-folder if you trust all who could write there"
                )


def _others_who_may_write(path: Path) -> str | None:
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to {_user_name(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH:
        return "can be written by everybody"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
        return "can be written by its group"
    return None


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _is_private_group(gid: int) -> bool:
    """Whether a group is this user's own, named like the user and without other members; or root's."""
    if gid == 0:
        return True
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and user.pw_gid == gid and set(group.gr_mem) <= {user.pw_name}
