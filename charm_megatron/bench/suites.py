"""Ready-made benchmarks: which networks, workloads and implementations. Schedules return in the model's dtype."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from charm_megatron.bench.case import OperatorCase
from charm_megatron.config import CharmConfig
from charm_megatron.testbed.profile import Profile, load_profile
from charm_megatron.workload import CAUSAL, NO_MASK, Mask, Workload

SETTINGS = CharmConfig(fuse=False, grad_return_dtype="model")
SCHEDULES = ("ring", "rm_plus", "charm", "double_ring", "ulysses")
PEERS = ("torch_ring", "ring_flash_attn_ring", "yunchang_ulysses", "yunchang_usp_2")
"""Those that compute blocks by an operator which waits can replace."""
FEW_PEERS = ("torch_ring", "yunchang_ulysses")
ALL_PEERS = (*PEERS, "torch_allgather", "ringmaster_ring", "ringmaster_allgather")
CAUSAL_PEERS = ("torch_ring", "ring_flash_attn_zigzag", "yunchang_ulysses")
CURVE = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
HEADS, HEAD_DIM = 8, 64
REAL = "MHA, no mask, real computation"


@dataclass(frozen=True)
class Race:
    """One workload on one network, at one ratio of computation to communication or at several.

    `profile`: None for the ranks of the command line. `ratios` are CCRs of modelled computation; None: real.
    """

    title: str
    profile: Profile | None
    case: OperatorCase
    ratios: tuple[float | None, ...]

    @property
    def cases(self) -> list[OperatorCase]:
        return [replace(self.case, ccr=ratio) for ratio in self.ratios]


def _race(
    title: str,
    profile: str,
    ratios: tuple[float | None, ...],
    tokens_per_rank: int,
    *,
    repetitions: int,
    schedules: tuple[str, ...] = SCHEDULES,
    peers: tuple[str, ...] = (),
    mask: Mask = NO_MASK,
    heads: int = HEADS,
    kv_heads: int | None = None,
) -> Race:
    shape = load_profile(profile)
    workload = Workload(
        1,
        tokens_per_rank * shape.num_ranks,
        heads,
        kv_heads or heads,
        HEAD_DIM,
        HEAD_DIM,
        "bfloat16",
        mask,
    )
    layout = "zigzag" if mask == CAUSAL else "contiguous"
    case = OperatorCase(workload, schedules, layout, SETTINGS, repetitions=repetitions, peers=peers)
    return Race(title, shape, case, ratios)


def _smoke() -> tuple[Race, ...]:
    few, peers = ("ring", "charm"), ("torch_ring",)
    return (
        _race("MHA, no mask", "nvlink_2x4", (0.1,), 64, repetitions=2, schedules=few, peers=peers),
        _race(REAL, "nvlink_2x4", (None,), 64, repetitions=1, schedules=few, peers=peers),
    )


def _special() -> tuple[Race, ...]:
    """What differs from MHA without a mask, or computes for real."""
    few = ("ring", "rm_plus", "charm", "double_ring")
    return (
        _race(
            REAL,
            "nvlink_2x4",
            (None,),
            48,
            heads=32,
            repetitions=1,
            schedules=("ring", "charm"),
            peers=ALL_PEERS,
        ),
        _race(
            "MHA, causal",
            "nvlink_2x4",
            (0.1,),
            256,
            repetitions=2,
            mask=CAUSAL,
            peers=CAUSAL_PEERS,
        ),
        _race(
            "GQA 8:2, no mask",
            "nvlink_2x4",
            (0.1,),
            256,
            repetitions=2,
            kv_heads=2,
            schedules=few,
            peers=("torch_ring",),
        ),
    )


def _quick() -> tuple[Race, ...]:
    title, beside = "MHA, no mask", "MHA, no mask, beside peers"
    others = ("nvlink_4x2", "nvlink_2x4_shared_nic", "pcie_numa_2x4", "flat_8")
    return (
        _race(title, "nvlink_2x4", CURVE, 256, repetitions=2),
        _race(beside, "nvlink_2x4", (0.1,), 256, repetitions=2, peers=PEERS),
        *(_race(beside, name, (0.2,), 256, repetitions=2, peers=FEW_PEERS) for name in others),
        *_special(),
    )


def _full() -> tuple[Race, ...]:
    names = ("nvlink_2x4", "nvlink_4x2", "nvlink_2x4_shared_nic", "pcie_numa_2x4", "flat_8")
    more = (
        *SCHEDULES,
        "merge",
        "charm_keep_kv",
        "charm_per_domain",
        "charm_together",
        "all_gather",
        "pass_q",
        "hierarchical",
    )
    title = "MHA, no mask, beside peers"
    return (
        *(_race(title, name, CURVE, 512, repetitions=5, schedules=more, peers=PEERS) for name in names),
        *_special(),
    )


SUITES: Mapping[str, str] = {
    "smoke": "a minute: the ring, charm and torch's ring on nvlink_2x4",
    "quick": "under 10 minutes: every network, most peers, the whole curve on nvlink_2x4",
    "full": "hours: more schedules, the whole curve on every network",
}


def races(name: str) -> tuple[Race, ...]:
    """The races of a suite of `SUITES`."""
    return {"smoke": _smoke, "quick": _quick, "full": _full}[name]()
