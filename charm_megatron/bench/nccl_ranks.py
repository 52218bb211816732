"""Several ranks of NCCL on one card: order, hangs, streams and communicators of a real group, not its speed.

NCCL refuses two ranks of a communicator on one device. It can be told to take them, or that each rank is a host of its
own: both ways are tried, in processes that are ended after `LIMIT_S`. `python -m charm_megatron.bench.nccl_ranks` is
one of these ranks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from charm_megatron.bench.card_parts import (
    ERROR_LIMIT,
    MOST_REASON_CHARACTERS,
    NOT_ON_CPU,
    CardRow,
    Sizes,
    draw,
    worst_error,
)
from charm_megatron.config import CharmConfig
from charm_megatron.errors import LaunchError, TransferTimeout, error_text, shortened
from charm_megatron.executor import AttentionRuntime
from charm_megatron.functional import shard, unshard
from charm_megatron.processes.commands import run_commands
from charm_megatron.processes.ports import free_port

LIMIT_S = 60.0
"""For each way, imports and NCCL's set-up included."""
NUM_RANKS = 4
HEADS = (8, 4, 4, 8)
"""Of q, k, v and dout."""
HEAD_DIM = 64
TALKS = "has talked to both neighbours"
"""What a rank writes once it has."""
RANK = "{rank}"
"""Stands for the rank in values of variables."""
WAYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "several ranks per GPU": {
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_MAX_CTAS": "1",
        },
        "each rank as a host": {
            "NCCL_HOSTID": f"charm{RANK}",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
        },
    }
)
"""By name, what NCCL is told: to take several ranks (2.30 and later), or what keeps it from seeing that they share."""


@dataclass(frozen=True)
class Group:
    """The ranks that are started, and what each computes on."""

    device: str
    num_ranks: int
    per_rank: int
    limit_s: float


def nccl_ranks(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    """Errors of attention over four ranks that share this GPU, in two domains, so over two communicators."""
    for way, variables in WAYS.items():
        what = f"charm, {NUM_RANKS} ranks, {way}"
        if device.type != "cuda":
            yield CardRow("", what, None, "", note=NOT_ON_CPU)
        elif not dist.is_nccl_available():
            yield CardRow("", what, None, "", note="this torch has no NCCL")
        else:
            yield row_of(what, variables, Group("cuda", NUM_RANKS, sizes.per_rank, LIMIT_S))


def row_of(what: str, variables: Mapping[str, str], group: Group) -> CardRow:
    """The error of such a group; or no figure, and why there is none, which is right where the ranks cannot talk."""
    unit, talking = "of the largest value", set[int]()
    try:
        worst = error_of_group(variables, group, talking)
    except (LaunchError, TransferTimeout) as error:
        why = shortened(error, MOST_REASON_CHARACTERS)
        if len(talking) < group.num_ranks:
            return CardRow("", what, None, unit, note=why)
        return CardRow("", what, None, unit, limit=ERROR_LIMIT, note=f"the ranks can talk, but {why}")
    return CardRow("", what, worst, unit, limit=ERROR_LIMIT)


def error_of_group(variables: Mapping[str, str], group: Group, talking: set[int]) -> float:
    """The largest error of attention over these ranks, each with its `variables`; adds ranks that talk to `talking`.

    Raises `LaunchError` where a rank fails, `TransferTimeout` where they have not ended after `limit_s`.
    """
    port = free_port()

    def start(rank: int) -> "subprocess.Popen[bytes]":
        own = {name: value.replace(RANK, str(rank)) for name, value in variables.items()}
        place = {"RANK": str(rank), "WORLD_SIZE": str(group.num_ranks)}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        meeting["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # where this process is itself one of torchrun's
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(
            [sys.executable, "-m", __name__, group.device, str(group.per_rank), str(group.limit_s)],
            env={**os.environ, **path, **place, **meeting, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def on_line(rank: int, line: str) -> None:
        if line == TALKS:
            talking.add(rank)

    outputs = run_commands(start, range(group.num_ranks), group.limit_s, on_line)
    told: dict[str, Any] = json.loads(outputs[0].stdout.splitlines()[-1])
    return float(told["worst"])


# ---------------------------------------------------------------------- a rank


def main() -> None:
    """Of one rank; rank 0 writes the error as the last line of standard output."""
    device, per_rank, limit_s = torch.device(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    try:
        worst = _attention(device, per_rank, limit_s)
    except Exception as error:  # whatever NCCL and torch raise
        sys.stderr.write(f"{error_text(error, MOST_REASON_CHARACTERS)}\n")
        code = 1
    else:
        sys.stdout.write(f"\n{json.dumps({'worst': worst})}\n")
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a communicator that has failed may never let go


def _attention(device: torch.device, per_rank: int, limit_s: float) -> float:
    """The largest error of this rank's results, against attention over the whole sequence in float64."""
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=limit_s))
    _talk(device)
    torch.manual_seed(0)  # the same tensors on all ranks
    num_tokens = per_rank * dist.get_world_size()
    *whole, dout = (draw(device, num_tokens, 1, h, HEAD_DIM) for h in HEADS)
    q, k, v = (shard(x, group=None).requires_grad_() for x in whole)
    runtime = AttentionRuntime(CharmConfig(schedule="charm", domains=2))
    out, lse = runtime.attention_with_lse(q, k, v, group=None)
    torch.autograd.backward([out], [shard(dout, group=None)])
    got = [unshard(x, group=None) for x in (out, lse, q.grad, k.grad, v.grad) if x is not None]
    worst = worst_error(got, [*whole, dout], causal=True, scale=HEAD_DIM**-0.5)
    dist.barrier()
    return worst


def _talk(device: torch.device) -> None:
    """Sends a word round, without anything of ours, and writes so."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.ones(1, device=device), torch.zeros(1, device=device)
    ops = [dist.P2POp(dist.irecv, theirs, (rank - 1) % size), dist.P2POp(dist.isend, mine, (rank + 1) % size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if theirs.item() == 1:
        sys.stdout.write(f"{TALKS}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
