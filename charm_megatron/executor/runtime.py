"""The entry point: attention over a sequence that is split over the ranks of a group.

An `AttentionRuntime` holds all state of one process, keyed by group and by sizes: domains, schedules that the
ranks have agreed on, buffers. There is no state outside it.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.compile import Plan, compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.errors import ConfigError, WorkloadError, quoted
from charm_megatron.executor.agreement import agreed_record, require_agreement
from charm_megatron.executor.attention import AttentionCall, ContextParallelAttention, attention_call
from charm_megatron.executor.discovery import find_domains
from charm_megatron.executor.flight import FlightRecorder
from charm_megatron.executor.groups import (
    backend_of,
    destroy,
    group_place,
    is_destroyed,
    require_sends,
    twin_of,
)
from charm_megatron.executor.machine import Machine
from charm_megatron.executor.memory import Memory
from charm_megatron.executor.self_check import CheckedLayer, SelfCheck
from charm_megatron.executor.sink import require_sink
from charm_megatron.executor.stopwatch import Stopwatch
from charm_megatron.executor.transport import GroupTransport
from charm_megatron.executor.uncompiled import uncompiled
from charm_megatron.kernels import BlockSizes, Selection, select_kernel
from charm_megatron.kernels.elementwise import ElementwiseSelection, select_elementwise
from charm_megatron.liveness.process import combined, watch
from charm_megatron.liveness.standing import Standing
from charm_megatron.schedule.passes import DIRECTIONS
from charm_megatron.sharding import require_layout
from charm_megatron.topology import Domains
from charm_megatron.units import bytes_text
from charm_megatron.workload import CAUSAL, Mask, Workload, as_mask, require_softmax_scale

MOST_PLANS = 64
"""Plans kept for a group: with more, the one used longest ago is made again. All ranks call alike, so drop alike."""


@dataclass(frozen=True)
class Receipt:
    """What a group of ranks has agreed to do, to be shown when a job starts."""

    domains: Domains
    domains_reason: str
    plan: Plan
    kernel_reason: str

    def lines(self) -> list[str]:
        """The receipt for people."""
        domains = f"{self.domains.num_domains} domains" if self.domains.num_domains > 1 else "one domain"
        sent = {direction: self.plan.traffic(direction) for direction in DIRECTIONS}
        return [
            f"context parallelism: {self.domains.cp_size} ranks in {domains} [{self.domains}], "
            f"{self.domains_reason}",
            f"schedule: {self.schedule_line}",
            *(
                f"sent by a rank, {direction}, one layer: inside a domain {_span(of.inside_bytes.tolist())}, "
                f"across domains {_span(of.across_bytes.tolist())}"
                for direction, of in sent.items()
            ),
            f"kernel: {self.kernel_reason}",
        ]

    @property
    def schedule_line(self) -> str:
        """Which schedule it is, why, how long, and what tells it from others."""
        forward, backward = (
            sum(phase.num_comm_steps for phase in self.plan.phases(direction)) for direction in DIRECTIONS
        )
        digests = " ".join(schedule.digest[:12] for schedule in self.plan.schedules)
        return (
            f"{self.plan.name}, {self.plan.reason}; forward {forward} steps, backward {backward}; "
            f"digests {digests}"
        )

    @property
    def schedule_text(self) -> str:
        """Both passes in the text form of schedules."""
        return self.plan.text


@dataclass(frozen=True)
class _Agreed:
    """A plan that the ranks of a group have agreed on, and what runs it."""

    plan: Plan
    call: AttentionCall
    kernel_reason: str


_Key = tuple[Workload, str, torch.device]


@dataclass
class _Group:
    """What is known about one process group."""

    domains: Domains
    domains_reason: str
    transport: Stopwatch
    recorder: FlightRecorder
    memories: dict[torch.device, Memory]
    agreed: OrderedDict[_Key, _Agreed]
    checks: dict[_Key, SelfCheck]


class AttentionRuntime:
    """Context-parallel attention of one process, by the settings of `config`.

    `machine` is where the process runs; another one stands for it in tests.
    """

    def __init__(self, config: CharmConfig, machine: Machine | None = None):
        if not isinstance(config, CharmConfig):
            raise ConfigError(
                f"a runtime takes a CharmConfig, but got {type(config).__name__} {quoted(config)}; "
                f"AttentionRuntime(CharmConfig(schedule=..)) would work"
            )
        self.config = config
        self._machine = machine or Machine()
        self._groups: dict[dist.ProcessGroup, _Group] = {}
        self._elementwise_on: dict[torch.device, ElementwiseSelection] = {}
        self._is_timed = False
        watch(self)

    @uncompiled
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        group: dist.ProcessGroup | None,
        mask: Mask | str = CAUSAL,
        softmax_scale: float | None = None,
        sink: Tensor | None = None,
        layout: str = "zigzag",
        checked: CheckedLayer | None = None,
    ) -> Tensor:
        """Exact attention of this rank's queries over the whole sequence; differentiable.

        q [s, b, h, d], k [s, b, h_k, d], v [s, b, h_k, d_v] are this rank's shard in `layout`; returns
        out [s, b, h, d_v] in q's dtype. `softmax_scale` is 1/sqrt(d) when None. Collective over `group`. `sink` [h]: a
        logit of each head that is in every softmax and reads no value; its gradient is that of this rank's queries.

        `checked` says for which layer of a model this is, on all ranks or none: then the first use of each plan is
        checked, as `self_check` in the configuration says. Raises `SelfCheckFailed` on all ranks of the group.
        """
        out: Tensor
        out, _ = self.attention_with_lse(
            q,
            k,
            v,
            group=group,
            mask=mask,
            softmax_scale=softmax_scale,
            sink=sink,
            layout=layout,
            checked=checked,
        )
        return out

    @uncompiled
    def attention_with_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        group: dist.ProcessGroup | None,
        mask: Mask | str = CAUSAL,
        softmax_scale: float | None = None,
        sink: Tensor | None = None,
        layout: str = "zigzag",
        checked: CheckedLayer | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `attention`, and lse [s, b, h] in float32 (float64 for float64), which carries no gradient."""
        group, _, cp_size = group_place(group)
        require_layout(layout)
        workload = _workload(q, k, v, cp_size, as_mask(mask))
        scale = workload.softmax_scale if softmax_scale is None else softmax_scale
        require_softmax_scale(scale)
        if sink is not None:
            require_sink(sink, q)
        agreed = self._agreed(group, workload, layout, q.device)
        call = agreed.call
        if sink is not None and call.keeps_logits:
            raise WorkloadError(
                f"{agreed.plan.name} keeps the probabilities of all blocks, which a sink would change; another "
                f"schedule would work"
            )
        if checked is not None and self.config.self_check:
            check = self._self_check(group, agreed.plan, (workload, layout, q.device))
            call = call if check is None else check.watched(call, checked)
        out, lse = ContextParallelAttention.apply(q, k, v, call, scale, sink)
        return out, lse

    def forget(self, group: dist.ProcessGroup | None) -> None:
        """Drops all that is kept for `group`: its domains, plans and buffers. To be called before it is destroyed.

        Every rank of the group must do so, or none: the next call agrees on everything again.
        """
        self._drop(group_place(group)[0])

    def receipt(
        self,
        group: dist.ProcessGroup,
        workload: Workload,
        *,
        layout: str = "zigzag",
        device: torch.device | None = None,
    ) -> Receipt:
        """Plans `workload` ahead of the first call and says what was planned. Collective over `group`."""
        agreed = self._agreed(group, workload, layout, device or torch.device("cpu"))
        known = self._groups[group]
        return Receipt(known.domains, known.domains_reason, agreed.plan, agreed.kernel_reason)

    def call(
        self,
        group: dist.ProcessGroup,
        workload: Workload,
        *,
        layout: str = "zigzag",
        device: torch.device | None = None,
    ) -> AttentionCall:
        """Both passes of `workload` without autograd, for those who time or drive them. Collective over `group`."""
        return self._agreed(group, workload, layout, device or torch.device("cpu")).call

    def num_bytes_sent(self, group: dist.ProcessGroup) -> int:
        """Bytes that this rank has posted to its peers in `group` so far."""
        return self._groups[group].transport.num_bytes_sent if group in self._groups else 0

    def time_waits(self) -> None:
        """From now on waits for transfers are timed; on a GPU that costs two events each."""
        self._is_timed = True
        for known in self._groups.values():
            known.transport.is_running = True

    @property
    def exposed_s(self) -> float:
        """Seconds that this rank has stood still for transfers since `time_waits`, in all groups."""
        return sum(known.transport.exposed_s for known in self._groups.values())

    @property
    def standing(self) -> Standing:
        """What this process does in its groups, asked from another thread: the latest action, and all exchanges."""
        return combined(
            [
                Standing(*known.recorder.doing, (known.transport.transport.exchange(known.recorder.awaited),))
                for known in list(self._groups.values())
            ]
        )

    @property
    def num_bytes_sent_to_all(self) -> int:
        """Bytes that this rank has posted to its peers in all groups so far."""
        return sum(known.transport.num_bytes_sent for known in self._groups.values())

    @property
    def num_bytes_held(self) -> int:
        """Bytes of buffers that are kept for further calls, in all groups."""
        return sum(one.num_bytes for known in self._groups.values() for one in known.memories.values())

    # ------------------------------------------------------------------ planning

    def _group(self, group: dist.ProcessGroup, device: torch.device) -> _Group:
        if group not in self._groups:
            self._forget_destroyed()
            domains, reason = find_domains(group, self.config.domains, device, self._machine)
            transport = Stopwatch(self._transport(group, domains, device), is_running=self._is_timed)
            recorder = FlightRecorder(dist.get_rank(group), self.config.flight_folder)
            self._groups[group] = _Group(domains, reason, transport, recorder, {}, OrderedDict(), {})
        return self._groups[group]

    def _transport(self, group: dist.ProcessGroup, domains: Domains, device: torch.device) -> GroupTransport:
        wanted, rank = self.config.communicators, dist.get_rank(group)
        has_two = wanted == "two" or (wanted == "auto" and backend_of(group, device) == "nccl")
        far = frozenset(peer for peer in range(domains.cp_size) if domains.crosses(rank, peer))
        across = twin_of(group, device) if has_two and domains.num_domains > 1 else None
        return GroupTransport(
            group,
            self.config.deadline_s,
            checks_calls=self.config.check_calls,
            across=across,
            far_peers=far,
        )

    def _forget_destroyed(self) -> None:
        """Programs that make groups as they go destroy them without a word to us."""
        for group in [group for group in self._groups if is_destroyed(group)]:
            self._drop(group)

    def _drop(self, group: dist.ProcessGroup) -> None:
        known = self._groups.pop(group, None)
        if known is not None and known.transport.transport.across is not None:
            destroy(known.transport.transport.across)

    def _agreed(
        self, group: dist.ProcessGroup, workload: Workload, layout: str, device: torch.device
    ) -> _Agreed:
        known = self._group(group, device)
        key = (workload, layout, device)
        if key not in known.agreed:
            require_sends(group, device)  # of the first device all ranks have told each other
            # Before the ranks agree together: others may be in a call that they know.
            known.transport.announce(f"plans {workload.summary}, {layout}, for the first time", device)
            known.transport.transport.verify()
            known.agreed[key] = self._agree(group, known, workload, layout, device)
            if len(known.agreed) > MOST_PLANS:
                known.agreed.popitem(last=False)
        known.agreed.move_to_end(key)
        return known.agreed[key]

    def _self_check(self, group: dist.ProcessGroup, plan: Plan, key: _Key) -> SelfCheck | None:
        """The check of a plan; None after the first `MOST_PLANS`, as where every step has another length."""
        checks = self._groups[group].checks
        if key not in checks and len(checks) < MOST_PLANS:
            checks[key] = SelfCheck(group, plan)
        return checks.get(key)

    def _agree(
        self, group: dist.ProcessGroup, known: _Group, workload: Workload, layout: str, device: torch.device
    ) -> _Agreed:
        posts = known.transport.transport
        # One NCCL communicator works in order: whole steps wait for each other less than lanes do.
        is_fused = posts.across is None and (self.config.fuse or backend_of(group, device) == "nccl")
        config = self.config.model_copy(update={"fuse": is_fused})
        plan = compile_attention(config, known.domains, workload, layout)
        dtype = getattr(torch, workload.dtype)
        sizes = BlockSizes.on(device, dtype, workload.head_dim, workload.head_dim_v)
        sizes = sizes._replace(sm_margin=self.config.sm_margin, has_bands=plan.problem.has_bands)
        selection = self._select(sizes)
        chosen = selection.kernel.name if isinstance(selection, Selection) else f"none ({selection})"
        require_agreement(group, agreed_record(self.config, chosen, plan.digest), str(plan))
        if not isinstance(selection, Selection):
            raise selection
        memory = known.memories.setdefault(device, Memory(device, self.config.idle_memory_mib * 2**20))
        recorder, rank = known.recorder, dist.get_rank(group)
        elementwise = self._elementwise(device)
        call = attention_call(
            plan, rank, selection.kernel, known.transport, memory, recorder, elementwise.implementation
        )
        if device.type == "cuda":
            posts.connect(call.posts, device)
        return _Agreed(plan, call, f"{selection}; merged by {elementwise.reason}")

    def _select(self, sizes: BlockSizes) -> Selection | ConfigError:
        """The kernel, or why there is none: what one rank's device or packages refuse, all ranks must hear of."""
        try:
            return select_kernel(self.config.kernel, sizes)
        except ConfigError as error:
            return error

    def _elementwise(self, device: torch.device) -> ElementwiseSelection:
        """Tried once for each device of the process."""
        if device not in self._elementwise_on:
            self._elementwise_on[device] = select_elementwise(device)
        return self._elementwise_on[device]


def _workload(q: Tensor, k: Tensor, v: Tensor, cp_size: int, mask: Mask) -> Workload:
    """The whole group's workload, from one rank's shard. Raises `WorkloadError` for tensors that do not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise WorkloadError(f"attention takes tensors, but {name} is {type(x).__name__}")
        if x.is_nested or x.layout != torch.strided or x.device.type == "meta":
            kind = "nested" if x.is_nested else "without data (meta)" if x.device.type == "meta" else x.layout
            raise WorkloadError(f"attention takes dense tensors, but {name} is {kind}")
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise WorkloadError(f"attention takes tensors [tokens, batch, heads, width], but got {shapes}")
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise WorkloadError(f"tokens, batch, KV heads or the width of q and k differ: {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise WorkloadError(
            f"q, k and v must share dtype and device, but are {q.dtype} {k.dtype} {v.dtype} on "
            f"{q.device} {k.device} {v.device}; k.to(q) and v.to(q) would work"
        )
    tokens, batch, heads, head_dim = q.shape
    dtype = str(q.dtype).removeprefix("torch.")
    return Workload(batch, tokens * cp_size, heads, k.shape[2], head_dim, v.shape[3], dtype, mask)


def _span(num_bytes: list[int]) -> str:
    low, high = min(num_bytes), max(num_bytes)
    return bytes_text(high) if low == high else f"{bytes_text(low)} to {bytes_text(high)}"
