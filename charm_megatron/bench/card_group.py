"""Whole groups in one process on one card, or else on the CPU: errors, the host's part, streams, synchronisation."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity

from charm_megatron.bench.card_parts import (
    ERROR_LIMIT,
    MOST_REASON_CHARACTERS,
    NOT_ON_CPU,
    SCHEDULES,
    CardRow,
    Sizes,
    chosen_kernel,
    draw,
    worst_error,
)
from charm_megatron.bench.host import (
    Nowhere,
    Shard,
    counts,
    host_times,
    lane_by_lane,
    phases_of,
    times_without_work,
    zero_shard,
)
from charm_megatron.bench.streams import StreamedNetwork, random_pauses
from charm_megatron.compile import Plan, compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.errors import error_text
from charm_megatron.executor.attention import AttentionCall, ContextParallelAttention, attention_call
from charm_megatron.executor.loopback import (
    GuardedMemory,
    LoopbackGroup,
    LoopbackNetwork,
    run_phases_together,
)
from charm_megatron.executor.memory import Memory
from charm_megatron.executor.transport import Transport
from charm_megatron.kernels.elementwise import select_elementwise
from charm_megatron.schedule.passes import DIRECTIONS, Direction
from charm_megatron.topology import even_domains
from charm_megatron.workload import CAUSAL, Workload

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
SCALE = HEAD_DIM**-0.5
DOMAINS = even_domains(4, 2)
NUM_SEEDS = 20
SYNCHRONISES = "called a synchronizing CUDA operation"
"""How torch refuses what makes the host wait, in `set_sync_debug_mode("error")`."""
WAITS = frozenset({"Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event", "Unknown Sync"})
"""Names under which torch's profiler shows on the device's line that somebody waits for it."""
PACKAGE = Path(__file__).parents[1]


def _workload(num_ranks: int, per_rank: int) -> Workload:
    return Workload(1, num_ranks * per_rank, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, "bfloat16", CAUSAL)


def _plan(schedule: str, num_ranks: int, per_rank: int) -> Plan:
    return lane_by_lane(schedule, even_domains(num_ranks, 2), _workload(num_ranks, per_rank))


def _call(plan: Plan, rank: int, transport: Transport, memory: Memory) -> AttentionCall:
    """With the kernels that a job would run."""
    device = memory.device
    kernel = chosen_kernel(device, (HEAD_DIM, HEAD_DIM))
    elementwise = select_elementwise(device).implementation
    return attention_call(plan, rank, kernel, transport, memory, elementwise=elementwise)


def loopback(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    """All ranks of a group on this device: errors against attention over the whole sequence in float64."""
    for schedule, num_ranks in product(SCHEDULES, (4, 8)):
        plan = _plan(schedule, num_ranks, sizes.per_rank)
        kernel = chosen_kernel(device, (HEAD_DIM, HEAD_DIM))
        group = LoopbackGroup(plan, kernel, softmax_scale=SCALE, device=device, has_two_queues=True)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        tensors = [draw(device, plan.workload.seq_len, 1, h, HEAD_DIM) for h in heads]
        got = group.attention(*tensors)
        results = (got.out, got.lse, got.dq, got.dk, got.dv)
        worst = worst_error(results, tensors, causal=True, scale=SCALE)
        yield CardRow("", f"{schedule}, {num_ranks} ranks", worst, "of the largest value", limit=ERROR_LIMIT)


# ---------------------------------------------------------------------- the host


def host(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    """What rank 0 of four costs the host in one layer, and what it launches, an action on average.

    On a GPU with the kernels of a job, and with the launches that its profiler saw; on a CPU with no work to do, and
    with the launches that there would be.
    """
    for schedule in SCHEDULES:
        plan = lane_by_lane(schedule, DOMAINS, _workload(DOMAINS.cp_size, sizes.host_tokens))
        on_gpu = device.type == "cuda"
        times = _times_on(device, plan) if on_gpu else times_without_work(schedule, DOMAINS)
        counted = counts(plan)
        for direction in DIRECTIONS:
            num_actions, what = len(times[direction]), f"{schedule}, {direction}"
            yield CardRow(
                "", f"{what}: time of the host", sum(times[direction]) / num_actions * 1e6, "us per action"
            )
            launches: int | str = counted[direction].launches
            if on_gpu:
                launches = _launches_on(device, plan, direction)
            value, note = (None, launches) if isinstance(launches, str) else (launches / num_actions, "")
            yield CardRow("", f"{what}: launches", value, "per action", note=note)


def _times_on(device: torch.device, plan: Plan) -> dict[Direction, list[float]]:
    size = plan.problem.cp_size
    network = LoopbackNetwork(size, watches=False)
    calls = [_call(plan, rank, network.transport(rank), Memory(device, 0)) for rank in range(size)]
    return host_times(calls, zero_shard(plan.workload, size, device), network)


def _launches_on(device: torch.device, plan: Plan, direction: Direction) -> int | str:
    """Kernels, copies and fills that rank 0 launches beside its transfers, or why they cannot be counted."""
    if ProfilerActivity.CUDA not in torch.profiler.supported_activities():  # type: ignore[no-untyped-call]
        return "this torch's profiler does not see GPUs (CUPTI)"
    call = _call(plan, 0, Nowhere(), Memory(device, 0))
    shard = zero_shard(plan.workload, plan.problem.cp_size, device)
    _run(call, direction, shard)  # what is compiled or chosen at first use
    torch.cuda.synchronize(device)
    try:
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
            _run(call, direction, shard)
            torch.cuda.synchronize(device)
        events = profiler.events() or ()
    except RuntimeError as error:
        return f"the profiler fails: {error_text(error, MOST_REASON_CHARACTERS)}"
    on_device = [e for e in events if e.device_type == DeviceType.CUDA and e.name not in WAITS]
    # Labels of actions are shown on the device's line too.
    num_launches = sum(not event.is_user_annotation for event in on_device)
    return num_launches or "the profiler saw no kernel (CUPTI); the driver may show them to root only"


def _run(call: AttentionCall, direction: Direction, shard: Shard) -> None:
    for run in phases_of(call, direction, shard):
        run.run()


# ---------------------------------------------------------------------- streams


@dataclass(frozen=True)
class _Ranks:
    """All ranks of a group, with q, k, v and dout of each."""

    network: LoopbackNetwork
    calls: Sequence[AttentionCall]
    shards: Sequence[Sequence[Tensor]]

    def attention(self) -> list[Tensor]:
        """out, lse, dq, dk and dv of each rank, one after the other."""
        both = list(zip(self.calls, self.shards, strict=True))
        forward = [call.forward_phases(q, k, v, SCALE) for call, (q, k, v, _) in both]
        results = run_phases_together(forward, self.network)
        backward = [
            call.backward_phases(dout, q, k, v, result, SCALE)
            for (call, (q, k, v, dout)), result in zip(both, results, strict=True)
        ]
        grads = run_phases_together(backward, self.network)
        return [x for of, grad in zip(results, grads, strict=True) for x in (of.out, of.lse, *grad)]


def draw_shards(device: torch.device, workload: Workload, num_ranks: int) -> list[list[Tensor]]:
    """q, k, v and dout of each rank."""
    rows, heads = workload.seq_len // num_ranks, (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [[draw(device, rows, 1, h, HEAD_DIM) for h in heads] for _ in range(num_ranks)]


def attention_on(network: LoopbackNetwork, plan: Plan, shards: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Forward and backward of all ranks; memory that a rank has freed is spoilt."""
    device = shards[0][0].device
    calls = [
        _call(plan, rank, network.transport(rank), GuardedMemory(device, network, rank))
        for rank in range(plan.problem.cp_size)
    ]
    return _Ranks(network, calls, shards).attention()


def stream_fuzz(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    """Attention on a stream for each rank and others for transfers, which pause at random, against a single stream."""
    size = DOMAINS.cp_size
    for schedule in SCHEDULES:
        what = f"{schedule}, {size} ranks: results that random delays of streams change"
        if device.type != "cuda":
            yield CardRow("", what, None, "", note=NOT_ON_CPU)
            continue
        plan = _plan(schedule, size, sizes.per_rank)
        shards = draw_shards(device, plan.workload, size)
        with _deterministic():
            expected = attention_on(LoopbackNetwork(size, watches=False, domains=DOMAINS), plan, shards)
            num_wrong = 0
            for seed in range(NUM_SEEDS):
                torch.cuda.synchronize(device)
                network = StreamedNetwork(size, DOMAINS, device, random_pauses(seed))
                got = attention_on(network, plan, shards)
                torch.cuda.synchronize(device)
                num_wrong += not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        yield CardRow("", what, float(num_wrong), f"of {NUM_SEEDS}", limit=0)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Flash attention adds up dq in another order every time, unless torch is told not to."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# ---------------------------------------------------------------------- synchronisation


def synchronisation(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    """Whether anything in attention makes the host wait for the GPU, after a first pass that compiles and chooses."""
    size = DOMAINS.cp_size
    for schedule in SCHEDULES:
        what = f"{schedule}, {size} ranks: the host waits for the GPU"
        if device.type != "cuda":
            yield CardRow("", what, None, "", note=NOT_ON_CPU)
            continue
        plan = _plan(schedule, size, sizes.per_rank)
        network = LoopbackNetwork(size, watches=False, domains=DOMAINS)
        calls = [_call(plan, rank, network.transport(rank), Memory(device, 0)) for rank in range(size)]
        ranks = _Ranks(network, calls, draw_shards(device, plan.workload, size))
        yield waiting_row(what, ranks.attention)
    if device.type == "cuda":
        yield waiting_row("one rank, through autograd: the host waits for the GPU", _autograd(device, sizes))


def _autograd(device: torch.device, sizes: Sizes) -> Callable[[], object]:
    plan = compile_attention(
        CharmConfig(schedule="ring"), even_domains(1, 1), _workload(1, sizes.per_rank), "zigzag"
    )
    call = _call(plan, 0, LoopbackNetwork(1).transport(0), Memory(device, 0))
    (*operands, dout) = draw_shards(device, plan.workload, 1)[0]

    def attention() -> None:
        q, k, v = (x.detach().requires_grad_() for x in operands)
        out, _ = ContextParallelAttention.apply(q, k, v, call, SCALE)
        out.backward(dout)

    return attention


def waiting_row(what: str, attention: Callable[[], object]) -> CardRow:
    """0 where `attention`, on its second run, makes the host wait for nothing; else 1, and for what."""
    attention()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    reason = ""
    try:
        attention()
    except RuntimeError as error:
        if SYNCHRONISES not in str(error):
            raise
        reason = f"{error_text(error, MOST_REASON_CHARACTERS)}{_place(error)}"
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return CardRow("", what, float(bool(reason)), "0 or 1", limit=0, note=reason)


def _place(error: BaseException) -> str:
    """The innermost line of this package that the error comes from."""
    ours = [at for at in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(at.filename).parents]
    return f", in {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
