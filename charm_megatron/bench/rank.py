"""What one rank of the operator benchmark does."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from charm_megatron.bench.case import OperatorCase, RankTimes, TimingKey, shard_of
from charm_megatron.bench.modelled import ModelledKernel
from charm_megatron.executor.attention import AttentionCall, ForwardResult
from charm_megatron.executor.runtime import AttentionRuntime
from charm_megatron.kernels import BlockKernel
from charm_megatron.kernels.unsharded import Shard
from charm_megatron.log import Log
from charm_megatron.peers.calls import make_call
from charm_megatron.peers.check import check_peer
from charm_megatron.peers.protocol import Implementation
from charm_megatron.peers.registry import PEERS, why_not
from charm_megatron.schedule.actions import Attend
from charm_megatron.schedule.passes import DIRECTIONS, Direction
from charm_megatron.schedule.payload import KV, Q
from charm_megatron.testbed.commands import HEADER_BYTES

INSTANTLY = float("inf")
NUM_ROUNDS = 3


@dataclass
class _OurSchedule:
    """One of our schedules on this rank's shard: an `Implementation`."""

    call: AttentionCall
    shard: Shard
    result: ForwardResult | None = None
    grads: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def softmax_scale(self) -> float:
        return self.call.wire.workload.softmax_scale

    def forward(self) -> None:
        self.result = self.call.forward(*self.shard[:3], self.softmax_scale)

    def backward(self) -> None:
        assert self.result is not None, "forward comes first"
        q, k, v, dout = self.shard
        self.grads = self.call.backward(dout, q, k, v, self.result, self.softmax_scale)

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert self.result is not None, "forward comes first"
        assert self.grads is not None, "backward comes first"
        return self.result.out, *self.grads


def measure_rank(
    log: Log,
    rank: int,
    num_ranks: int,
    case: OperatorCase,
    num_domains: int,
    flops: Mapping[Direction, float],
) -> RankTimes:
    """Times every implementation of the case, repetition by repetition.

    `flops` are those of the busiest rank by pass, to which modelled computation is scaled.
    """
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    q, k, v, dout = (x.to(device) for x in shard_of(case.workload, rank, num_ranks))
    shard = q, k, v, dout
    # Kept to the end: they say what this rank does.
    runtimes = {name: AttentionRuntime(case.settings_for(name, num_domains)) for name in case.schedules}
    calls = {
        name: runtime.call(group, case.workload, layout=case.layout, device=device)
        for name, runtime in runtimes.items()
    }
    log("communication alone")
    first = calls[case.schedules[0]]
    silent = replace(first, kernel=ModelledKernel(INSTANTLY, INSTANTLY))
    communication_s = _time_both(_OurSchedule(silent, shard), case.passes)
    kernel: BlockKernel | None = None
    if case.ccr is None:
        log("computation alone")
        computation_s = _blocks_alone(first, device)
    else:
        log("modelled computation")
        computation_s = {direction: case.ccr * took_s for direction, took_s in communication_s.items()}
        kernel = _modelled(flops, computation_s)
        calls = {name: replace(call, kernel=kernel) for name, call in calls.items()}
    implementations: dict[str, Implementation] = {
        name: _OurSchedule(call, shard) for name, call in calls.items()
    }
    log("checking peers")
    peers, notes = _peers(case, group, shard, kernel)
    implementations |= peers
    seconds, wire_bytes = _time_all(log, case, implementations)
    outputs = _outputs(implementations) if _are_outputs_checked(case) else {}
    return RankTimes(seconds, wire_bytes, communication_s, computation_s, outputs, notes)


def _are_outputs_checked(case: OperatorCase) -> bool:
    return not case.is_modelled and Direction.BACKWARD in case.passes and case.can_be_checked


def _outputs(implementations: Mapping[str, Implementation]) -> dict[str, tuple[NDArray[np.float64], ...]]:
    """out, dq, dk and dv of each implementation."""
    return {
        name: tuple(x.detach().cpu().double().numpy() for x in implementation.results())
        for name, implementation in implementations.items()
    }


def _time_all(
    log: Log, case: OperatorCase, implementations: Mapping[str, Implementation]
) -> tuple[dict[TimingKey, list[float]], dict[TimingKey, list[int]]]:
    """Seconds and bytes on the wire, by repetition; repetitions are interleaved."""
    seconds: dict[TimingKey, list[float]] = defaultdict(list)
    wire_bytes: dict[TimingKey, list[int]] = defaultdict(list)
    for repetition in range(case.warm_up + case.repetitions):
        is_warm_up = repetition < case.warm_up
        number = "warm-up" if is_warm_up else f"{repetition - case.warm_up + 1} of {case.repetitions}"
        for name, implementation in implementations.items():
            log(f"{number}: {name}")
            for direction, (took_s, sent) in _run(implementation, case.passes).items():
                if not is_warm_up:
                    seconds[name, direction].append(took_s)
                    wire_bytes[name, direction].append(sent)
    return dict(seconds), dict(wire_bytes)


def _peers(
    case: OperatorCase, group: dist.ProcessGroup, shard: Shard, kernel: BlockKernel | None
) -> tuple[dict[str, Implementation], dict[str, str]]:
    """The peers to time, and why the others are not: they cannot run the case, or their results are wrong."""
    running: dict[str, Implementation] = {}
    notes: dict[str, str] = {}
    for name in case.peers:
        reason = why_not(PEERS[name], case.workload, dist.get_world_size(group), is_modelled=case.is_modelled)
        if reason is None:
            reason = check_peer(PEERS[name], group, case.workload).fault
        if reason is None:
            running[name] = make_call(PEERS[name], group, case.workload, kernel).prepare(*shard)
        else:
            notes[name] = reason
    return running, notes


def _run(implementation: Implementation, passes: Sequence[Direction]) -> dict[Direction, tuple[float, int]]:
    """(seconds, bytes on the wire) of each pass, from a barrier."""
    runs = {Direction.FORWARD: implementation.forward, Direction.BACKWARD: implementation.backward}
    needed = {Direction.FORWARD, *passes}  # the backward pass needs what the forward pass leaves
    return {direction: _timed(run) for direction, run in runs.items() if direction in needed}


def _timed(run: Callable[[], None]) -> tuple[float, int]:
    _finish()
    dist.barrier()
    sent = _payload_bytes()
    started = time.perf_counter()
    run()
    _finish()
    took_s = time.perf_counter() - started
    dist.barrier()
    return took_s, _payload_bytes() - sent


def _finish() -> None:
    if dist.get_backend() == "nccl":  # not where a GPU merely is there: asking would make a context on it
        torch.cuda.synchronize()


def _time_both(implementation: Implementation, passes: Sequence[Direction]) -> dict[Direction, float]:
    """Seconds of each pass on the slowest rank; the better of two runs. A pass that is not run takes none."""
    runs = []
    for _ in range(2):
        run = _run(implementation, passes)
        runs.append(_slowest([run[direction][0] if direction in run else 0.0 for direction in DIRECTIONS]))
    return {direction: min(run[direction] for run in runs) for direction in DIRECTIONS}


def _slowest(times: list[float]) -> dict[Direction, float]:
    """The largest of all ranks, by pass."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(DIRECTIONS, slowest.tolist(), strict=True))


def _modelled(flops: Mapping[Direction, float], computation_s: Mapping[Direction, float]) -> ModelledKernel:
    """Waits in place of blocks, at the rates by which `flops` take `computation_s`."""
    rates = {
        direction: flops[direction] / took_s if took_s else INSTANTLY
        for direction, took_s in computation_s.items()
    }
    return ModelledKernel(rates[Direction.FORWARD], rates[Direction.BACKWARD])


def _blocks_alone(call: AttentionCall, device: torch.device) -> dict[Direction, float]:
    """Seconds of all blocks of each pass without any transfer, on the slowest rank, all ranks at once.

    The best of some rounds after a first one, in which kernels are loaded and memory is found.
    """
    best: dict[Direction, float] = {}
    programs = {Direction.FORWARD: call.forward_programs, Direction.BACKWARD: call.backward_programs}
    for direction, phases in programs.items():
        blocks = [
            _TimedBlock(call, action, device)
            for phase in phases
            for action in phase.compiled.program
            if isinstance(action, Attend)
        ]
        rounds = [_time_blocks(blocks, direction) for _ in range(1 + NUM_ROUNDS)]
        best[direction] = min(rounds[1:])
    return best


def _time_blocks(blocks: Sequence["_TimedBlock"], direction: Direction) -> float:
    _finish()
    dist.barrier()
    started = time.perf_counter()
    for block in blocks:
        block.run(direction)
    _finish()
    took_s = time.perf_counter() - started
    return _slowest([took_s] * len(DIRECTIONS))[direction]


class _TimedBlock:
    """One rectangle with random operands."""

    def __init__(self, call: AttentionCall, action: Attend, device: torch.device):
        workload, chunks = call.wire.workload, call.wire.problem.sharding.chunks
        rows, keys = (sum(chunks[name.chunk].length for name in names) for names in (action.q, action.kv))
        dtype, lse_dtype = getattr(torch, workload.dtype), getattr(torch, workload.accumulate_dtype)
        heads = call.wire.heads(Q), call.wire.heads(KV)
        self.kernel, self.scale, self.causal = call.kernel, workload.softmax_scale, action.causal
        self.rows, self.keys, self.band = slice(0, rows), slice(0, keys), action.band
        if action.band:
            self.rows, self.keys, self.band = action.band.trimmed(rows, keys)

        def draw(tokens: int, num_heads: int, width: int) -> Tensor:
            return torch.randn(tokens, workload.batch, num_heads, width, device=device).to(dtype)

        self.q = draw(rows, heads[0], workload.head_dim)[self.rows]
        self.k = draw(keys, heads[1], workload.head_dim)[self.keys]
        self.v = draw(keys, heads[1], workload.head_dim_v)[self.keys]
        self.dout = draw(self.q.shape[0], heads[0], workload.head_dim_v)
        self.lse = torch.zeros(self.q.shape[:3], dtype=lse_dtype, device=device)

    def run(self, direction: Direction) -> None:
        """Computes the rectangle in one direction."""
        {Direction.FORWARD: self._forward, Direction.BACKWARD: self._backward}[direction]()

    def _forward(self) -> None:
        self.kernel.forward(
            self.q, self.k, self.v, causal=self.causal, softmax_scale=self.scale, band=self.band
        )

    def _backward(self) -> None:
        self.kernel.backward(
            self.dout,
            self.q,
            self.k,
            self.v,
            self.dout,
            self.lse,
            causal=self.causal,
            softmax_scale=self.scale,
            band=self.band,
        )


def _payload_bytes() -> int:
    """TCP payload that has left this rank's namespace, by the counters of its interfaces, lo left out.

    Each packet's headers are subtracted, so that one without payload counts nothing.
    """
    lines = Path("/proc/thread-self/net/dev").read_text("ascii").splitlines()[2:]
    total = 0
    for line in lines:
        device, numbers = line.split(":", 1)
        if device.strip() != "lo":
            columns = numbers.split()
            total += int(columns[8]) - HEADER_BYTES * int(columns[9])
    return total
