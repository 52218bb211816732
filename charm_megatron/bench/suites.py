"""Ready-made benchmarks: which networks, workloads and contestants. Schedules return in the model's dtype."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from charm_megatron.bench.network import load_profile
from charm_megatron.bench.operator import OperatorCase
from charm_megatron.config import CharmConfig
from charm_megatron.workload import CAUSAL, NO_MASK, Mask, Workload

SETTINGS = CharmConfig(fuse=False, grad_return_dtype="model")
SCHEDULES = ("ring", "rm_plus", "charm", "double_ring", "ulysses")
PEERS = ("torch_ring", "ring_flash_attn_ring", "yunchang_ulysses", "yunchang_usp_2")
"""Those that compute blocks by an operator which waits can replace."""
ALL_PEERS = (*PEERS, "torch_allgather", "ringmaster_ring", "ringmaster_allgather")
CAUSAL_PEERS = (
    "torch_ring",
    "ring_flash_attn_zigzag",
    "yunchang_ulysses",
    "yunchang_usp_2",
)
CURVE = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
HEADS, HEAD_DIM = 8, 64


@dataclass(frozen=True)
class Race:
    """One workload on one network, at one ratio of computation to communication or at several.

    `ratios` are CCRs of modelled computation; None: real.
    """

    title: str
    profile: str
    case: OperatorCase
    ratios: tuple[float | None, ...]

    @property
    def cases(self) -> list[OperatorCase]:
        return [replace(self.case, ccr=ratio) for ratio in self.ratios]


def _case(
    profile: str,
    tokens_per_rank: int,
    *,
    repetitions: int,
    schedules: tuple[str, ...] = SCHEDULES,
    peers: tuple[str, ...] = (),
    mask: Mask = NO_MASK,
    heads: int = HEADS,
    kv_heads: int | None = None,
) -> OperatorCase:
    num_ranks = load_profile(profile).num_ranks
    workload = Workload(
        1, tokens_per_rank * num_ranks, heads, kv_heads or heads, HEAD_DIM, HEAD_DIM, "bfloat16", mask
    )
    layout = "zigzag" if mask == CAUSAL else "contiguous"
    return OperatorCase(workload, schedules, layout, SETTINGS, repetitions=repetitions, peers=peers)


def _smoke() -> tuple[Race, ...]:
    few = ("ring", "charm")
    fast = _case("nvlink_2x4", 64, repetitions=2, schedules=few, peers=("torch_ring",))
    return (
        Race("MHA, no mask", "nvlink_2x4", fast, (0.1,)),
        Race("MHA, no mask, real computation", "nvlink_2x4", replace(fast, repetitions=1), (None,)),
    )


def _quick() -> tuple[Race, ...]:
    curve = _case("nvlink_2x4", 256, repetitions=3)
    others = ("nvlink_4x2", "nvlink_2x4_shared_nic", "pcie_numa_2x4", "flat_8")
    real = _case("nvlink_2x4", 48, heads=32, repetitions=2, schedules=("ring", "charm"), peers=ALL_PEERS)
    return (
        Race("MHA, no mask", "nvlink_2x4", curve, CURVE),
        Race("MHA, no mask, with peers", "nvlink_2x4", replace(curve, peers=PEERS), (0.1,)),
        *(
            Race("MHA, no mask, with peers", name, _case(name, 256, repetitions=2, peers=PEERS), (0.2,))
            for name in others
        ),
        Race("MHA, no mask, real computation", "nvlink_2x4", real, (None,)),
        Race(
            "MHA, causal",
            "nvlink_2x4",
            _case("nvlink_2x4", 256, repetitions=2, mask=CAUSAL, peers=CAUSAL_PEERS),
            (0.1,),
        ),
        Race(
            "GQA 8:2, no mask",
            "nvlink_2x4",
            _case(
                "nvlink_2x4", 256, repetitions=2, kv_heads=2, schedules=SCHEDULES[:-1], peers=("torch_ring",)
            ),
            (0.1,),
        ),
    )


def _full() -> tuple[Race, ...]:
    names = ("nvlink_2x4", "nvlink_4x2", "nvlink_2x4_shared_nic", "pcie_numa_2x4", "flat_8")
    more = (*SCHEDULES, "merge", "charm_per_domain", "charm_together", "all_gather", "pass_q", "hierarchical")
    return (
        *(
            Race("MHA, no mask", name, _case(name, 512, repetitions=5, schedules=more, peers=PEERS), CURVE)
            for name in names
        ),
        *_quick()[-3:],
    )


SUITES: Mapping[str, str] = {
    "smoke": "a minute: the ring, charm and torch's ring on nvlink_2x4",
    "quick": "under 10 minutes: every network, every peer, the whole curve on nvlink_2x4",
    "full": "hours: more schedules, the whole curve on every network",
}


def races(name: str) -> tuple[Race, ...]:
    """The races of a suite of `SUITES`."""
    return {"smoke": _smoke, "quick": _quick, "full": _full}[name]()
