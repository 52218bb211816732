"""The tables of `charm-megatron memory`."""

from rich.table import Table

from charm_megatron.compile import compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.cost.memory import AttentionMemory, attention_memory
from charm_megatron.errors import InvalidInput
from charm_megatron.paper.equations import memory_bytes
from charm_megatron.paper.table_3 import NUM_DOMAINS, RANKS_PER_DOMAIN, TABLE_3
from charm_megatron.topology import Domains, even_domains
from charm_megatron.workload import Workload

NAMES = ("ring", "charm")
DEFAULT_RANKS_PER_NODE = 8
MOST_RANKS = 64
"""Of larger groups, this many ranks are worked out, evenly spread."""


def domains_for(known: Domains | None, cp_size: int, ranks_per_node: int | None) -> Domains:
    """The domains of a group, those that are `known` unless `ranks_per_node` is given.

    Raises `InvalidInput` where the ranks of a larger group do not fill nodes of so many.
    """
    if ranks_per_node is None and known is not None:
        return known
    size = DEFAULT_RANKS_PER_NODE if ranks_per_node is None else ranks_per_node
    if ranks_per_node is not None and cp_size > size and cp_size % size:
        raise InvalidInput(
            f"--ranks-per-node {size}: {cp_size} context-parallel ranks do not fill nodes of so many; "
            f"a divisor of {cp_size} would work"
        )
    return even_domains(cp_size, max(1, cp_size // size))


def predict(schedule: str, workload: Workload, domains: Domains, config: CharmConfig) -> AttentionMemory:
    """The memory of one schedule, by what the setting `charm.schedule` takes."""
    plan = compile_attention(config.model_copy(update={"schedule": schedule}), domains, workload, "zigzag")
    step = -(-domains.cp_size // MOST_RANKS)
    return attention_memory(plan.schedules, plan.wire, range(0, domains.cp_size, step))


def prediction_table(workload: Workload, domains: Domains, config: CharmConfig) -> Table:
    """The prediction for both schedules, beside the paper's equations."""
    ring, charm = (predict(name, workload, domains, config) for name in NAMES)
    equations = [memory_bytes(name, workload, domains.cp_size) for name in NAMES]
    table = Table("MiB", box=None, pad_edge=False)
    for column in (*NAMES, "charm - ring"):
        table.add_column(column, justify="right")
    for label, pair in {
        "own tensors": (ring.own_bytes, charm.own_bytes),
        "buffers in use": (ring.buffer_bytes, charm.buffer_bytes),
        "peak": (ring.peak_bytes, charm.peak_bytes),
        "pool, after both passes": (ring.pool_bytes, charm.pool_bytes),
        "paper, equations 11 and 12": tuple(equations),
    }.items():
        table.add_row(label, *(_mib(value) for value in (*pair, pair[1] - pair[0])))
    return table


def table_3() -> Table:
    """Table 3 of the paper, beside its equations and our prediction."""
    columns = ("batch", "tokens", "heads", "ring", "charm", "charm - ring", "equations", "predicted")
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    domains = even_domains(NUM_DOMAINS * RANKS_PER_DOMAIN, NUM_DOMAINS)
    for row in TABLE_3:
        ring, charm = (predict(name, row.workload, domains, CharmConfig()).peak_bytes for name in NAMES)
        by_equation = [memory_bytes(name, row.workload, domains.cp_size) for name in NAMES]
        printed = (row.batch, row.seq_len, row.num_heads, row.ring_mb, row.charm_mb, f"{row.difference_mb:+}")
        table.add_row(*map(str, printed), _mib(by_equation[1] - by_equation[0]), _mib(charm - ring))
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}" if abs(num_bytes) >= 10 * 2**20 else f"{num_bytes / 2**20:.2f}"
