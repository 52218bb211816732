"""What attention costs beside its blocks, counted on one CPU: launches, bytes, time of the host, memory for transfers.

Nothing is computed: tensors are without data (meta), and where the host is timed kernels return at once.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from charm_megatron.compile import Plan, compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.cost.buffers import peak_buffers
from charm_megatron.cost.model import CostModel, Link
from charm_megatron.cost.timeline import evaluate
from charm_megatron.executor.attention import AttentionCall, ForwardResult, Phases, attention_call
from charm_megatron.executor.loopback import LoopbackNetwork, run_together
from charm_megatron.executor.memory import Memory
from charm_megatron.executor.run import ProgramRun
from charm_megatron.executor.steps import Attending
from charm_megatron.executor.transport import Transfer
from charm_megatron.kernels.elementwise import Merged
from charm_megatron.schedule.passes import DIRECTIONS, Direction
from charm_megatron.schedule.queues import Queues
from charm_megatron.topology import Domains
from charm_megatron.workload import CAUSAL, Band, Workload

MODELS = MappingProxyType(
    {
        "gpt_350m_64x4096": Workload(64, 4096, 16, 16, 64, 64, "bfloat16", CAUSAL),
        "gpt_8b_32k": Workload(1, 32768, 32, 8, 128, 128, "bfloat16", CAUSAL),
    }
)
RATES = CostModel(400e12, Link(350e9, 8e-6), Link(42e9, 15e-6))
"""Of an H100: attention, NVLink, and a network card of 400 Gbit/s."""
NUM_ROUNDS = 5
"""Of timed runs; the best counts."""
TOKENS_PER_RANK = 2
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class HostRow:
    """One pass of one layer on rank 0, but buffers of the rank that needs most.

    `launches_per_attend`: of the most expensive Attend, with all that adds up its results. `elementwise_bytes`: read
    and written by everything but attention itself. `host_us_per_action`: the median, with no work to do; `host_us`: all
    actions together. `nccl_ms`: modelled on two communicators, at `RATES`. `buffers_fp32_units`: in shards of q in
    float32.
    """

    model: str
    schedule: str
    pass_: Direction
    launches_per_attend: int
    launches: int
    elementwise_bytes: int
    host_us_per_action: float
    host_us: float
    nccl_ms: float
    buffers_fp32_units: float


def measure_host(models: Sequence[str], schedules: Sequence[str], domains: Domains) -> Iterator[HostRow]:
    """A row for each model, schedule and pass, over these ranks."""
    for schedule in schedules:
        times = times_without_work(schedule, domains)
        for model in models:
            plan = lane_by_lane(schedule, domains, MODELS[model])
            for direction, count in counts(plan).items():
                per_action = times[direction]
                yield HostRow(
                    model,
                    schedule,
                    direction,
                    max(count.of_attends, default=0),
                    count.launches,
                    count.elementwise_bytes,
                    statistics.median(per_action) * 1e6,
                    sum(per_action) * 1e6,
                    sum(
                        evaluate(phase, plan.wire, RATES, Queues(2)).makespan_s
                        for phase in plan.phases(direction)
                    )
                    * 1e3,
                    _buffer_units(plan, direction),
                )


def lane_by_lane(schedule: str, domains: Domains, workload: Workload) -> Plan:
    """With posts lane by lane, as NCCL gets them."""
    config = CharmConfig(schedule=schedule, fuse=False)
    return compile_attention(config, domains, workload, "zigzag")


def _buffer_units(plan: Plan, direction: Direction) -> float:
    workload, size = plan.workload, plan.problem.cp_size
    most = max(
        peak_buffers(phase, plan.wire, rank).pool_bytes
        for phase in plan.phases(direction)
        for rank in range(size)
    )
    rows = workload.batch * workload.seq_len // size * workload.num_heads
    return most / (rows * workload.head_dim * FLOAT32_BYTES)


# ---------------------------------------------------------------------- launches and bytes


@dataclass
class Count:
    """What was launched so far."""

    launches: int = 0
    elementwise_bytes: int = 0
    of_attends: list[int] = field(default_factory=list)
    operators: set[str] = field(default_factory=set)
    """Of torch, views and memory left out."""

    def note(self, *tensors: Tensor) -> None:
        """One launch that reads or writes these."""
        self.launches += 1
        self.elementwise_bytes += sum(x.numel() * x.element_size() for x in tensors)


class CountedElementwise:
    """One launch for each call, as fused kernels make of it."""

    name = "counted"

    def __init__(self, count: Count):
        self.count = count

    def merge(self, out_sum: Tensor, lse_sum: Tensor, parts: Sequence[Merged], *, is_first: bool) -> None:
        sums = (out_sum, lse_sum)
        self.count.note(*sums, *(() if is_first else sums), *(x for part in parts for x in part))

    def add(self, sums: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], *, is_first: bool) -> None:
        self.count.note(*sums, *(() if is_first else sums), *(x for part in parts for x in part))

    def place(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.count.note(*(x for pair in pairs for x in pair))

    def row_dot(self, dout: Tensor, out: Tensor, into: Tensor) -> None:
        self.count.note(dout, out, into)

    def stand_in(self, dout: Tensor, delta: Tensor, into: Tensor) -> None:
        self.count.note(dout, delta, into)


class _NoKernel:
    """Attention as one launch, whose operands are no elementwise work: returns tensors of the right shapes."""

    name = "none"

    def __init__(self, count: Count):
        self.count = count
        self._made: dict[tuple[torch.Size, int], tuple[Tensor, Tensor]] = {}

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float, band: Band | None = None
    ) -> tuple[Tensor, Tensor]:
        self.count.note()
        key = q.shape, v.shape[3]
        if key not in self._made:
            out = q.new_empty((*q.shape[:3], v.shape[3]))
            self._made[key] = out, q.new_empty(q.shape[:3], dtype=torch.float32)
        return self._made[key]

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        softmax_scale: float,
        band: Band | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.count.note()
        return q, k, v


class _Others(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's own operators: copies and conversions, which no fused kernel has taken over."""

    def __init__(self, count: Count):
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
            self.count.note(*(x for x in leaves if isinstance(x, Tensor)))
            self.count.operators.add(name)
        return result


class Nowhere:
    """A transport that ends everything at once."""

    num_bytes_sent = 0

    def announce(self, words: str, device: torch.device) -> None:
        """Nobody listens."""

    def post(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> object:
        return None

    def wait(self, handle: object) -> None:
        """There is nothing to wait for."""


def counts(plan: Plan) -> dict[Direction, Count]:
    """What rank 0 launches in each pass of one layer."""
    found = {direction: Count() for direction in DIRECTIONS}
    shard = zero_shard(plan.workload, plan.problem.cp_size, torch.device("meta"))
    for direction, count in found.items():
        memory = Memory(torch.device("meta"), 0)
        call = attention_call(
            plan, 0, _NoKernel(count), Nowhere(), memory, elementwise=CountedElementwise(count)
        )
        with _Others(count):
            for run in phases_of(call, direction, shard):
                _run_counted(run, count)
    return found


def _run_counted(run: ProgramRun, count: Count) -> None:
    for operation in run.bound.operations:
        before = count.launches
        run.step()
        if isinstance(operation, Attending):
            count.of_attends.append(count.launches - before)


Shard = tuple[Tensor, Tensor, Tensor, Tensor, ForwardResult]


def phases_of(call: AttentionCall, direction: Direction, shard: Shard) -> Phases[object]:
    q, k, v, dout, result = shard
    if direction is Direction.FORWARD:
        return call.forward_phases(q, k, v, 1.0)
    return call.backward_phases(dout, q, k, v, result, 1.0)


def zero_shard(workload: Workload, size: int, device: torch.device) -> Shard:
    """q, k, v, dout and what the forward pass gave, of one rank; zeros."""
    rows, dtype = workload.seq_len // size, getattr(torch, workload.dtype)

    def make(heads: int, width: int) -> Tensor:
        return torch.zeros(rows, workload.batch, heads, width, dtype=dtype, device=device)

    q, out = (make(workload.num_heads, width) for width in (workload.head_dim, workload.head_dim_v))
    k, v = (make(workload.num_kv_heads, width) for width in (workload.head_dim, workload.head_dim_v))
    lse = torch.zeros(q.shape[:3], dtype=getattr(torch, workload.accumulate_dtype), device=device)
    return q, k, v, out, ForwardResult(out, lse, {})


# ---------------------------------------------------------------------- time of the host


class _NoElementwise:
    """Does nothing."""

    name = "none"

    def merge(self, out_sum: Tensor, lse_sum: Tensor, parts: Sequence[Merged], *, is_first: bool) -> None: ...

    def add(self, sums: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], *, is_first: bool) -> None: ...

    def place(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None: ...

    def row_dot(self, dout: Tensor, out: Tensor, into: Tensor) -> None: ...

    def stand_in(self, dout: Tensor, delta: Tensor, into: Tensor) -> None: ...


def times_without_work(schedule: str, domains: Domains) -> dict[Direction, list[float]]:
    """As `host_times` on a CPU, with no work to do."""
    size = domains.cp_size
    workload = Workload(1, TOKENS_PER_RANK * size, 16, 16, 8, 8, "float32", CAUSAL)
    plan = lane_by_lane(schedule, domains, workload)
    network = LoopbackNetwork(size, watches=False)
    calls = [
        attention_call(
            plan,
            rank,
            _NoKernel(Count()),
            network.transport(rank),
            Memory(torch.device("cpu"), sys.maxsize),
            elementwise=_NoElementwise(),
        )
        for rank in range(size)
    ]
    return host_times(calls, zero_shard(workload, size, torch.device("cpu")), network)


def host_times(
    calls: Sequence[AttentionCall], shard: Shard, network: LoopbackNetwork
) -> dict[Direction, list[float]]:
    """Seconds of the host for each action of rank 0, in the round that took least; every rank has this shard."""
    device = shard[0].device
    rounds: dict[Direction, list[list[float]]] = defaultdict(list)
    for _ in range(NUM_ROUNDS):
        for direction in DIRECTIONS:
            if device.type == "cuda":  # else launches wait where those of the round before fill the queue
                torch.cuda.synchronize(device)
            rounds[direction].append(_timed(calls, direction, shard, network))
    return {direction: min(of, key=sum) for direction, of in rounds.items()}


def _timed(
    calls: Sequence[AttentionCall],
    direction: Direction,
    shard: Shard,
    network: LoopbackNetwork,
) -> list[float]:
    of_ranks = [phases_of(call, direction, shard) for call in calls]
    seconds: list[float] = []
    while runs := [run for phases in of_ranks if (run := next(phases, None)) is not None]:
        watched, step = runs[0], runs[0].step

        def timed(step=step) -> None:  # type: ignore[no-untyped-def]
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)

        watched.step = timed  # type: ignore[method-assign]
        run_together(runs, network)
    return seconds
