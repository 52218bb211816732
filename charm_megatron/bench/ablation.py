"""The shape of the CHARM+ paper's Table 4: ring, RM+ and its charm on one domain, two PCIe domains and two nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

from charm_megatron.bench.case import OperatorCase, OperatorRow
from charm_megatron.bench.suites import HEAD_DIM, HEADS, SETTINGS, Race
from charm_megatron.paper.tables_4_8 import TABLE_4, Ablation
from charm_megatron.schedule.passes import Direction
from charm_megatron.testbed.profile import Profile, load_profile
from charm_megatron.workload import NO_MASK, Workload

RATIOS = (0.25, 1.0)
"""CCRs as far apart as the two lengths of Table 4, with which CCR grows."""


@dataclass(frozen=True)
class PaperNetwork:
    """A network that stands for one of the paper's."""

    title: str
    profile: Profile
    num_gpus: int
    gpu: str
    crosses: bool

    @property
    def paper(self) -> list[Ablation]:
        """The paper's rows, the shorter sequence first."""
        key = (self.num_gpus, self.gpu, self.crosses)
        return [row for row in TABLE_4 if (row.num_gpus, row.gpu, row.crosses) == key]


def paper_networks() -> tuple[PaperNetwork, ...]:
    """All five, in the paper's order."""
    pcie, nodes, flat = (load_profile(name) for name in ("pcie_numa_2x4", "nvlink_2x4", "flat_8"))
    alone = {"domains": 1, "across_bytes_per_s": None, "nic": "rank"}
    return (
        PaperNetwork("one PCIe domain", pcie.model_copy(update={**alone, "name": "pcie_4"}), 4, "L20", False),
        PaperNetwork("two PCIe domains", pcie, 8, "L20", True),
        PaperNetwork(
            "one node, 4", flat.model_copy(update={"name": "flat_4", "ranks_per_domain": 4}), 4, "H20", False
        ),
        PaperNetwork("one node, 8", flat, 8, "H20", False),
        PaperNetwork("two nodes", nodes, 16, "H20", True),
    )


def race(network: PaperNetwork, *, tokens_per_rank: int, repetitions: int) -> Race:
    """The paper's charm, which keeps KV, takes part where there are domains to cross, as in the paper."""
    workload = Workload(
        1, tokens_per_rank * network.profile.num_ranks, HEADS, HEADS, HEAD_DIM, HEAD_DIM, "bfloat16", NO_MASK
    )
    schedules = ("ring", "rm_plus", *(("charm_keep_kv",) if network.crosses else ()))
    case = OperatorCase(workload, schedules, "contiguous", SETTINGS, repetitions=repetitions)
    return Race(network.title, network.profile, case, RATIOS)


@dataclass(frozen=True)
class AblationRow:
    """Speed-up over the ring of one schedule: measured here, and the paper's forward pass; None where it has none."""

    network: PaperNetwork
    seq_len: int
    ccr: float
    schedule: str
    forward: float
    backward: float
    paper: float | None


def compare(network: PaperNetwork, rows: Sequence[OperatorRow]) -> list[AblationRow]:
    """The ratios of a race on this network, beside the paper's."""
    compared = []
    for ccr, paper in zip(RATIOS, network.paper, strict=True):
        theirs = {"rm_plus": paper.rm_plus_ms, "charm_keep_kv": paper.charm_ms}
        for name, time_ms in theirs.items():
            ours = {
                row.direction: row.ratio_to_first
                for row in rows
                if row.schedule == name and row.ccr is not None and abs(row.ccr - ccr) < 1e-6 * ccr
            }
            forward, backward = ours.get(Direction.FORWARD), ours.get(Direction.BACKWARD)
            if forward is not None and backward is not None:
                ratio = None if time_ms is None else paper.ring_ms / time_ms
                compared.append(AblationRow(network, paper.seq_len, ccr, name, forward, backward, ratio))
    return compared
