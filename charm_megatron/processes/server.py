"""A process that imports what ranks need once, and forks every rank (multiprocessing's "forkserver").

The starter itself need not import it. There is one server in the life of a process.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from charm_megatron.errors import LaunchError


@dataclass(frozen=True)
class ForkServer:
    """The server, by the module that it imports; `package` is what users know of that."""

    preload: str
    package: str

    def start(self) -> None:
        """Starts the server, unless it runs. Returns before its imports are done."""
        multiprocessing.set_forkserver_preload([self.preload])
        with _silence(), _interrupts_ignored():
            forkserver.ensure_running()

    def start_process(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
        """Forks a process from the server, which is started if need be. Raises `LaunchError` where it has ended."""
        self.start()
        process = multiprocessing.get_context("forkserver").Process(target=target, args=args, name=name)
        try:
            process.start()
        except (EOFError, OSError) as error:
            raise LaunchError(
                f"the process that imports {self.package} ended; run `{Path(sys.executable).name} -m {self.preload}` "
                f"to see why"
            ) from error
        return process


@contextmanager
def _silence() -> Iterator[None]:
    """Sends the output of processes that are started inside the block nowhere: imports print warnings."""
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        yield
    finally:
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        os.close(nowhere)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that are started inside the block ignore Ctrl-C; the starter ends them."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
