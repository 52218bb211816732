"""The entry point: attention over a sequence that is split over the ranks of a group.

An `AttentionRuntime` holds all state of one process, keyed by group and by sizes: domains, schedules that the
ranks have agreed on, buffers. There is no state outside it.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.config import CharmConfig
from charm_megatron.cost.wire import Traffic, WireFormat, make_wire_format, traffic
from charm_megatron.errors import PlanError, WorkloadError
from charm_megatron.executor.agreement import require_agreement
from charm_megatron.executor.attention import AttentionCall, ContextParallelAttention
from charm_megatron.executor.buffers import BufferPool
from charm_megatron.executor.discovery import find_domains
from charm_megatron.executor.machine import Machine
from charm_megatron.executor.run import rank_plan
from charm_megatron.executor.transport import GroupTransport
from charm_megatron.kernels import Selection, select_kernel
from charm_megatron.lowering.decisions import Problem
from charm_megatron.planner import cut_problem, plan
from charm_megatron.schedule.json_form import load_schedule
from charm_megatron.schedule.schedule import Schedule, make_schedules
from charm_megatron.schedule.text import format_schedule, schedule_header
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import Domains
from charm_megatron.verify.programs import check_schedule
from charm_megatron.workload import CAUSAL, Mask, Workload


@dataclass(frozen=True)
class Receipt:
    """What a group of ranks has agreed to do, to be shown when a job starts."""

    domains: Domains
    domains_reason: str
    schedule_reason: str
    forward: tuple[Schedule, ...]
    backward: tuple[Schedule, ...]
    forward_traffic: Traffic
    backward_traffic: Traffic
    kernel_reason: str

    def lines(self) -> list[str]:
        """The receipt for people."""
        domains = f"{self.domains.num_domains} domains" if self.domains.num_domains > 1 else "one domain"
        steps = [sum(phase.num_comm_steps for phase in phases) for phases in (self.forward, self.backward)]
        digests = " ".join(schedule.digest[:12] for schedule in (*self.forward, *self.backward))
        return [
            f"context parallelism: {self.domains.cp_size} ranks in {domains} [{self.domains}], "
            f"{self.domains_reason}",
            f"schedule: {self.forward[0].name}, {self.schedule_reason}; forward {steps[0]} steps, "
            f"backward {steps[1]}; digests {digests}",
            *(
                f"sent by a rank, {name}, one layer: inside a domain {_span(sent.inside_bytes.tolist())}, "
                f"across domains {_span(sent.across_bytes.tolist())}"
                for name, sent in (("forward", self.forward_traffic), ("backward", self.backward_traffic))
            ),
            f"kernel: {self.kernel_reason}",
        ]

    @property
    def schedule_text(self) -> str:
        """Both passes in the text form of schedules."""
        return "\n".join(format_schedule(schedule) for schedule in (*self.forward, *self.backward))


@dataclass(frozen=True)
class _Plan:
    """Both passes of one workload, as agreed by the ranks of a group."""

    schedules: "Schedules"
    wire: WireFormat
    call: AttentionCall
    selection: Selection
    schedule_reason: str


@dataclass
class _Group:
    """What is known about one process group."""

    domains: Domains
    domains_reason: str
    transport: GroupTransport
    pools: dict[torch.device, BufferPool]
    plans: dict[tuple[Workload, str, torch.device], _Plan]


class AttentionRuntime:
    """Context-parallel attention of one process, by the settings of `config`.

    `machine` is where the process runs; another one stands for it in tests.
    """

    def __init__(self, config: CharmConfig, machine: Machine | None = None):
        self.config = config
        self._machine = machine or Machine()
        self._groups: dict[dist.ProcessGroup, _Group] = {}

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        group: dist.ProcessGroup,
        mask: Mask = CAUSAL,
        softmax_scale: float | None = None,
        layout: str = "zigzag",
    ) -> Tensor:
        """Exact attention of this rank's queries over the whole sequence; differentiable.

        q [s, b, h, d], k [s, b, h_k, d], v [s, b, h_k, d_v] are this rank's shard in `layout`; gives
        out [s, b, h, d_v] in q's dtype. `softmax_scale` is 1/sqrt(d) when None. Collective over `group`.
        """
        return self.attention_with_lse(
            q, k, v, group=group, mask=mask, softmax_scale=softmax_scale, layout=layout
        )[0]

    def attention_with_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        group: dist.ProcessGroup,
        mask: Mask = CAUSAL,
        softmax_scale: float | None = None,
        layout: str = "zigzag",
    ) -> tuple[Tensor, Tensor]:
        """As `attention`, and lse [s, b, h] in float32 (float64 for float64), which carries no gradient."""
        workload = _workload(q, k, v, dist.get_world_size(group), mask)
        call = self._plan(group, workload, layout, q.device).call
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = ContextParallelAttention.apply(q, k, v, replace(call, softmax_scale=scale))
        return out, lse

    def receipt(
        self,
        group: dist.ProcessGroup,
        workload: Workload,
        *,
        layout: str = "zigzag",
        device: torch.device | None = None,
    ) -> Receipt:
        """Plans `workload` ahead of the first call and says what was planned. Collective over `group`."""
        made = self._plan(group, workload, layout, device or torch.device("cpu"))
        known = self._groups[group]
        forward, backward = made.schedules["forward"], made.schedules["backward"]
        return Receipt(
            domains=known.domains,
            domains_reason=known.domains_reason,
            schedule_reason=made.schedule_reason,
            forward=forward,
            backward=backward,
            forward_traffic=traffic(*forward, wire=made.wire),
            backward_traffic=traffic(*backward, wire=made.wire),
            kernel_reason=made.selection.reason,
        )

    def call(
        self,
        group: dist.ProcessGroup,
        workload: Workload,
        *,
        layout: str = "zigzag",
        device: torch.device | None = None,
    ) -> AttentionCall:
        """Both passes of `workload` without autograd, for those who time or drive them. Collective over `group`."""
        made = self._plan(group, workload, layout, device or torch.device("cpu")).call
        return replace(made, softmax_scale=workload.head_dim**-0.5)

    def num_bytes_sent(self, group: dist.ProcessGroup) -> int:
        """Bytes that this rank has posted to its peers in `group` so far."""
        return self._groups[group].transport.num_bytes_sent if group in self._groups else 0

    @property
    def exposed_s(self) -> float:
        """Seconds that this rank has stood still for transfers so far, in all groups."""
        return sum(known.transport.exposed_s for known in self._groups.values())

    @property
    def num_bytes_sent_to_all(self) -> int:
        """Bytes that this rank has posted to its peers in all groups so far."""
        return sum(known.transport.num_bytes_sent for known in self._groups.values())

    # ------------------------------------------------------------------ planning

    def _group(self, group: dist.ProcessGroup, device: torch.device) -> _Group:
        if group not in self._groups:
            domains, reason = find_domains(group, self.config.domains, device, self._machine)
            transport = GroupTransport(group, self.config.deadline_s)
            self._groups[group] = _Group(domains, reason, transport, {}, {})
        return self._groups[group]

    def _plan(self, group: dist.ProcessGroup, workload: Workload, layout: str, device: torch.device) -> _Plan:
        known = self._group(group, device)
        key = (workload, layout, device)
        if key not in known.plans:
            known.plans[key] = self._make_plan(group, known, workload, layout, device)
        return known.plans[key]

    def _make_plan(
        self, group: dist.ProcessGroup, known: _Group, workload: Workload, layout: str, device: torch.device
    ) -> _Plan:
        config, rank = self.config, dist.get_rank(group)
        schedules, reason = plan_schedules(config, known.domains, workload, layout)
        problem = schedules["forward"][0].problem
        wire = make_wire_format(
            workload,
            problem,
            out_return_dtype=config.return_dtype,
            grad_return_dtype=config.grad_return_dtype,
        )
        selection = select_kernel(
            config.kernel, device.type, getattr(torch, workload.dtype), workload.head_dim, workload.head_dim_v
        )
        phases = [*schedules["forward"], *schedules["backward"]]
        digest = hashlib.sha256(repr((*(phase.digest for phase in phases), wire)).encode()).hexdigest()
        require_agreement(group, digest, f"{schedule_header(phases[0])}, {workload}")
        call = AttentionCall(
            rank=rank,
            forward_plans=tuple(rank_plan(phase, rank) for phase in schedules["forward"]),
            backward_plans=tuple(rank_plan(phase, rank) for phase in schedules["backward"]),
            wire=wire,
            kernel=selection.kernel,
            transport=known.transport,
            pool=known.pools.setdefault(device, BufferPool(device)),
            softmax_scale=1.0,  # each call has its own
        )
        return _Plan(schedules, wire, call, selection, reason)


Schedules = dict[str, tuple[Schedule, ...]]
"""The phases of "forward" and of "backward"."""


def plan_schedules(
    config: CharmConfig, domains: Domains, workload: Workload, layout: str
) -> tuple[Schedules, str]:
    """What `config.schedule` names, for these ranks and sizes: a planner, or a file that `plan --json` wrote.

    Gives the schedules and why these. Raises `PlanError` for what the planner or the file does not fit, and
    `ScheduleFault` for a file whose schedule is wrong.
    """
    sharding = make_sharding(layout, domains.cp_size, workload.seq_len, workload.mask.documents)
    if config.schedule.endswith(".json"):
        return _written(Path(config.schedule), Problem(sharding, domains, workload.mask)), "as written"
    name, reason = _schedule_for(config.schedule, domains)
    problem = cut_problem(
        name,
        sharding,
        domains,
        workload.mask,
        num_heads=workload.num_heads,
        num_kv_heads=workload.num_kv_heads,
    )
    method = plan(name, problem)
    return {
        way: make_schedules(method, way, depth=config.prefetch_depth, fuse=config.fuse)
        for way in ("forward", "backward")
    }, reason


def _written(path: Path, problem: Problem) -> Schedules:
    loaded = load_schedule(path)
    theirs = loaded.problem
    wanted = (problem.sharding.tokens_by_rank, problem.domains, problem.mask)
    if (theirs.sharding.tokens_by_rank, theirs.domains, theirs.mask) != wanted:
        raise PlanError(
            f"schedule {path} is for {_problem_text(theirs)}, but this group has {_problem_text(problem)}"
        )
    schedules = {way: loaded.direction(way) for way in ("forward", "backward")}
    for way, phases in schedules.items():
        if not phases:
            raise PlanError(f"schedule {path} has no {way} pass; write both with plan --json")
        for phase in phases:
            check_schedule(phase)
    return schedules


def _problem_text(problem: Problem) -> str:
    sharding = problem.sharding
    return (
        f"{problem.cp_size} ranks in domains [{problem.domains}], {sharding.seq_len} tokens in {sharding.layout} "
        f"layout, mask {problem.mask}"
    )


def _schedule_for(name: str, domains: Domains) -> tuple[str, str]:
    """The planner to use and why: charm cannot use domains of different sizes, as found on real hosts."""
    if name == "charm" and not domains.are_even:
        return "rm_plus", "in place of charm, as the domains have different sizes"
    return name, "as set"


def _workload(q: Tensor, k: Tensor, v: Tensor, cp_size: int, mask: Mask) -> Workload:
    """The whole group's workload, from one rank's shard. Raises `WorkloadError` for shapes that do not fit."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise WorkloadError(f"attention takes tensors [tokens, batch, heads, width], but got {shapes}")
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise WorkloadError(f"tokens, batch, KV heads or the width of q and k differ: {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise WorkloadError(
            f"q, k and v must share dtype and device, but are {q.dtype} {k.dtype} {v.dtype} on "
            f"{q.device} {k.device} {v.device}"
        )
    tokens, batch, heads, head_dim = q.shape
    dtype = str(q.dtype).removeprefix("torch.")
    return Workload(batch, tokens * cp_size, heads, k.shape[2], head_dim, v.shape[3], dtype, mask)


def _span(num_bytes: list[int]) -> str:
    low, high = min(num_bytes), max(num_bytes)
    return _size(high) if low == high else f"{_size(low)} to {_size(high)}"


def _size(num_bytes: int) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} B"
    if num_bytes < 1024**2:
        return f"{num_bytes / 1024:.1f} KiB"
    return f"{num_bytes / 1024**2:.1f} MiB"
