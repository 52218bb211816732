"""What the operator benchmark times, and what comes of it: the case, what one rank measures of it, and the rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from charm_megatron.compile import Plan, compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.errors import InvalidInput
from charm_megatron.kernels.unsharded import Shard, draw_shard
from charm_megatron.peers.registry import PEERS, peer_named, tokens_of
from charm_megatron.schedule.passes import DIRECTIONS, Direction
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import Domains
from charm_megatron.workload import Workload

MOST_LOGITS = 2**27
"""Of one KV head, in float64: with more, unsharded attention takes longer than the benchmark, and too much memory."""

TokensByRank = tuple[tuple[int, ...], ...]

TimingKey = tuple[str, Direction]
"""The name of an implementation, and a direction."""


@dataclass(frozen=True)
class OperatorCase:
    """One workload, and the implementations that are timed on it: our schedules, and peers, both by name.

    A schedule is what the setting `charm.schedule` takes: a planner's name, or the path of a .json file. `ccr` is the
    target of modelled computation; None: real.
    """

    workload: Workload
    schedules: tuple[str, ...]
    layout: str = "zigzag"
    settings: CharmConfig = field(default_factory=lambda: CharmConfig(fuse=False))
    ccr: float | None = None
    repetitions: int = 5
    warm_up: int = 1
    peers: tuple[str, ...] = ()
    passes: tuple[Direction, ...] = DIRECTIONS

    def __post_init__(self) -> None:
        if not self.schedules:
            raise InvalidInput("there is no schedule to time; name one, such as --schedules ring,charm")
        if len(set(self.schedules)) != len(self.schedules):
            raise InvalidInput(f"a schedule is named twice: {','.join(self.schedules)}")
        if len(set(self.peers)) != len(self.peers):
            raise InvalidInput(f"a peer is named twice: {','.join(self.peers)}")
        for name in self.peers:
            peer_named(name)

    @property
    def is_modelled(self) -> bool:
        return self.ccr is not None

    @property
    def can_be_checked(self) -> bool:
        """Whether its results can be compared with unsharded attention."""
        workload = self.workload
        rows = workload.batch * workload.num_heads // workload.num_kv_heads * workload.seq_len
        return rows * workload.seq_len <= MOST_LOGITS

    @property
    def num_stages(self) -> int:
        """How many lines of progress a run reports."""
        return 3 + (self.warm_up + self.repetitions) * len(self.implementations)

    @property
    def implementations(self) -> tuple[str, ...]:
        """All that is timed; ratios are to the first."""
        return (*self.schedules, *self.peers)

    def settings_for(self, name: str, num_domains: int) -> CharmConfig:
        """The case's settings for one schedule."""
        return self.settings.model_copy(update={"schedule": name, "domains": num_domains})

    def plan(self, name: str, domains: Domains) -> Plan:
        """The plan of one schedule, which the ranks agree on."""
        settings = self.settings_for(name, domains.num_domains)
        return compile_attention(settings, domains, self.workload, self.layout)

    def tokens_by_rank(self, name: str, num_ranks: int) -> TokensByRank:
        """Which tokens each rank holds for one implementation."""
        workload = self.workload
        if name in self.peers:
            return tuple(tokens_of(PEERS[name], workload, num_ranks, rank) for rank in range(num_ranks))
        return make_sharding(self.layout, num_ranks, workload.seq_len, workload.mask.documents).tokens_by_rank


@dataclass(frozen=True)
class OperatorRow:
    """One pass of one implementation. Times in seconds; bytes are those of the busiest sender.

    `note` says why an implementation was not timed, its numbers being None, or what is wrong with its results. Also
    None: what is planned or bounded, for peers; what came over the wire, on loopback; bounds, where the rates of the
    links are not known; `error`, the largest difference to unsharded attention over the largest entry, where nothing
    was computed.
    """

    schedule: str
    direction: Direction
    network: str
    is_modelled: bool
    is_peer: bool = False
    median_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    ratio_to_first: float | None = None
    ccr: float | None = None
    bytes_planned: int | None = None
    bytes_wire: int | None = None
    busiest_s: float | None = None
    bound_s: float | None = None
    error: float | None = None
    note: str = ""

    @property
    def fraction_of_bound(self) -> float | None:
        """How much of the critical path's speed is reached."""
        return None if self.bound_s is None or self.median_s is None else self.bound_s / self.median_s

    @property
    def fraction_of_busiest(self) -> float | None:
        """How much of the busiest link's, or the computation's, speed is reached."""
        return None if self.busiest_s is None or self.median_s is None else self.busiest_s / self.median_s


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured: seconds and bytes that left its interface, by repetition.

    `computation_s`, `communication_s`: of the first schedule, by direction. `outputs`: out, dq, dk, dv of this rank,
    where they were computed. `notes` says why an implementation was not timed, or that its results are wrong.
    """

    seconds: Mapping[TimingKey, Sequence[float]]
    wire_bytes: Mapping[TimingKey, Sequence[int]]
    communication_s: Mapping[Direction, float]
    computation_s: Mapping[Direction, float]
    outputs: Mapping[str, Sequence[NDArray[np.float64]]]
    notes: Mapping[str, str]


def shard_of(workload: Workload, rank: int, num_ranks: int) -> Shard:
    """q, k, v and dout of one rank, [s, b, h, d]."""
    return draw_shard(rank, workload.seq_len // num_ranks, workload)


def as_json(row: OperatorRow) -> dict[str, Any]:
    """A row for other programs."""
    return {
        "network": row.network,
        "schedule": row.schedule,
        "peer": row.is_peer,
        "pass": row.direction,
        "median_s": row.median_s,
        "min_s": row.min_s,
        "max_s": row.max_s,
        "ratio_to_first": row.ratio_to_first,
        "ccr": row.ccr,
        "compute": "modelled" if row.is_modelled else "real",
        "bytes_planned": row.bytes_planned,
        "bytes_wire": row.bytes_wire,
        "busiest_s": row.busiest_s,
        "bound_s": row.bound_s,
        "fraction_of_bound": row.fraction_of_bound,
        "error": row.error,
        "note": row.note,
    }
