"""What one rank of the operator benchmark does."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.bench.modelled import ModelledKernel
from charm_megatron.bench.operator import PASSES, OperatorCase, RankTimes, settings_for
from charm_megatron.executor.attention import AttentionCall
from charm_megatron.executor.runtime import AttentionRuntime
from charm_megatron.schedule.actions import Attend
from charm_megatron.schedule.passes import KV, Q
from charm_megatron.workload import Workload

INSTANTLY = float("inf")
STATISTICS = Path("/sys/class/net")


def measure_rank(
    rank: int, num_ranks: int, case: OperatorCase, num_domains: int, flops: dict[str, float]
) -> RankTimes:
    """Times every schedule of the case, repetition by repetition.

    `flops` are those of the busiest rank by pass, to which modelled computation is scaled.
    """
    group = dist.group.WORLD
    assert group is not None
    calls = {}
    for name in case.schedules:
        runtime = AttentionRuntime(settings_for(case, num_domains, name))
        calls[name] = runtime.call(group, case.workload, layout=case.layout)
    shard = _Shard(case.workload, num_ranks, rank)
    first = calls[case.schedules[0]]
    communication_s = _time_both(replace(first, kernel=ModelledKernel(INSTANTLY, INSTANTLY)), shard)
    if case.ccr is None:
        computation_s = _blocks_alone(first)
    else:
        computation_s = {way: case.ccr * took_s for way, took_s in communication_s.items()}
        calls = {name: _modelled(call, flops, computation_s) for name, call in calls.items()}
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    wire_bytes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for repetition in range(case.warm_up + case.repetitions):
        for name, call in calls.items():
            for way, (took_s, sent) in _run(call, shard).items():
                if repetition >= case.warm_up:
                    seconds[name, way].append(took_s)
                    wire_bytes[name, way].append(sent)
    return RankTimes(dict(seconds), dict(wire_bytes), communication_s, computation_s)


class _Shard:
    """Random tensors of one rank."""

    def __init__(self, workload: Workload, num_ranks: int, rank: int):
        random = torch.Generator().manual_seed(rank)
        tokens, dtype = workload.seq_len // num_ranks, getattr(torch, workload.dtype)

        def draw(heads: int, width: int) -> Tensor:
            return torch.randn(tokens, workload.batch, heads, width, generator=random).to(dtype)

        self.q = draw(workload.num_heads, workload.head_dim)
        self.k = draw(workload.num_kv_heads, workload.head_dim)
        self.v = draw(workload.num_kv_heads, workload.head_dim_v)
        self.dout = draw(workload.num_heads, workload.head_dim_v)


def _run(call: AttentionCall, shard: _Shard) -> dict[str, tuple[float, int]]:
    """(seconds, bytes on the wire) of each pass, from a barrier."""
    result = None

    def forward() -> None:
        nonlocal result
        result = call.forward(shard.q, shard.k, shard.v)

    def backward() -> None:
        assert result is not None
        call.backward(shard.dout, shard.q, shard.k, shard.v, result)

    return {way: _timed(run) for way, run in zip(PASSES, (forward, backward), strict=True)}


def _timed(run: Callable[[], None]) -> tuple[float, int]:
    dist.barrier()
    sent = _transmitted_bytes()
    started = time.perf_counter()
    run()
    took_s = time.perf_counter() - started
    dist.barrier()
    return took_s, _transmitted_bytes() - sent


def _time_both(call: AttentionCall, shard: _Shard) -> dict[str, float]:
    """Seconds of each pass on the slowest rank; the better of two runs."""
    runs = [_run(call, shard) for _ in range(2)]
    best = torch.tensor([min(run[way][0] for run in runs) for way in PASSES], dtype=torch.float64)
    dist.all_reduce(best, op=dist.ReduceOp.MAX)
    return dict(zip(PASSES, best.tolist(), strict=True))


def _modelled(call: AttentionCall, flops: dict[str, float], computation_s: dict[str, float]) -> AttentionCall:
    """The call with waits in place of blocks, at the rates by which `flops` take `computation_s`."""
    rates = {way: flops[way] / computation_s[way] if computation_s[way] else INSTANTLY for way in PASSES}
    return replace(call, kernel=ModelledKernel(rates["forward"], rates["backward"]))


def _blocks_alone(call: AttentionCall) -> dict[str, float]:
    """Seconds of all blocks of each pass without any transfer, on the slowest rank, all ranks at once."""
    times = []
    for plans, is_forward in ((call.forward_plans, True), (call.backward_plans, False)):
        blocks = [
            _Block(call, action) for plan in plans for action in plan.program if isinstance(action, Attend)
        ]
        dist.barrier()
        started = time.perf_counter()
        for block in blocks:
            block.forward() if is_forward else block.backward()
        times.append(time.perf_counter() - started)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(PASSES, slowest.tolist(), strict=True))


class _Block:
    """One rectangle with random operands."""

    def __init__(self, call: AttentionCall, action: Attend):
        workload, chunks = call.wire.workload, call.wire.problem.sharding.chunks
        rows, keys = (sum(chunks[name.chunk].length for name in names) for names in (action.q, action.kv))
        dtype, lse_dtype = getattr(torch, workload.dtype), getattr(torch, workload.accumulate_dtype)
        heads = call.wire.heads(Q), call.wire.heads(KV)
        self.kernel, self.scale, self.causal = call.kernel, call.softmax_scale, action.causal
        self.rows, self.keys, self.band = slice(0, rows), slice(0, keys), action.band
        if action.band:
            self.rows, self.keys, self.band = action.band.trimmed(rows, keys)
        self.q = torch.randn(rows, workload.batch, heads[0], workload.head_dim).to(dtype)[self.rows]
        self.k = torch.randn(keys, workload.batch, heads[1], workload.head_dim).to(dtype)[self.keys]
        self.v = torch.randn(keys, workload.batch, heads[1], workload.head_dim_v).to(dtype)[self.keys]
        self.dout = torch.randn(*self.q.shape[:3], workload.head_dim_v).to(dtype)
        self.lse = torch.zeros(self.q.shape[:3], dtype=lse_dtype)

    def forward(self) -> None:
        self.kernel.forward(
            self.q, self.k, self.v, causal=self.causal, softmax_scale=self.scale, band=self.band
        )

    def backward(self) -> None:
        self.kernel.backward(
            self.dout,
            self.q,
            self.k,
            self.v,
            self.lse,
            self.lse,
            causal=self.causal,
            softmax_scale=self.scale,
            band=self.band,
        )


def _transmitted_bytes() -> int:
    """Bytes that have left this rank's interfaces, headers included; those of the rank's namespace, lo left out."""
    return sum(
        int((path / "statistics/tx_bytes").read_text()) for path in STATISTICS.iterdir() if path.name != "lo"
    )
