"""Waiting on the host for one transfer, and what is raised where it is lost."""

import time
from datetime import timedelta

import torch.distributed as dist

from charm_megatron.liveness.standing import transfer_text


class TransferLost(RuntimeError):
    """A transfer has not ended in time, or its peer is gone: `peer` is that one, `why` is torch's reason."""

    def __init__(self, peer: int, is_recv: bool, waited_s: float, why: str):
        super().__init__(f"{transfer_text('', is_recv, peer)} was given up after {waited_s:.1f} s: {why}")
        self.peer, self.is_recv, self.waited_s, self.why = peer, is_recv, waited_s, why


def wait_on_host(work: dist.Work, peer: int, is_recv: bool, started_s: float, deadline_s: float) -> None:
    """Waits until `deadline_s` after `started_s`, of the monotonic clock. Raises `TransferLost`."""
    left_s = max(0.001, started_s + deadline_s - time.monotonic())
    try:
        work.wait(timedelta(seconds=left_s))
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise TransferLost(peer, is_recv, time.monotonic() - started_s, why) from error
