"""`charm-megatron memory`: what attention holds on a rank, ring beside CHARM+."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from charm_megatron.cli.job import ConfigFile, Cpu, Settings, check
from charm_megatron.compile import compile_attention
from charm_megatron.config import CharmConfig, load_run_config
from charm_megatron.cost.memory import AttentionMemory, attention_memory
from charm_megatron.errors import InvalidInput
from charm_megatron.paper.equations import memory_bytes
from charm_megatron.paper.table_3 import HEAD_DIM, NUM_DOMAINS, RANKS_PER_DOMAIN, TABLE_3
from charm_megatron.topology import Domains, even_domains
from charm_megatron.workload import Workload

NAMES = ("ring", "charm")
DEFAULT_RANKS_PER_NODE = 8
MOST_RANKS = 64
"""Of larger groups, this many ranks are worked out, evenly spread."""


def memory_command(
    config: ConfigFile,
    settings: Settings = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            help="Context-parallel ranks in a domain; if not given, as charm.domains or SLURM's allocation "
            "says, else 8."
        ),
    ] = None,
    cpu: Cpu = False,
) -> None:
    """Predict the peak memory of one layer's attention on a rank, for ring and charm.

    Beside it: equations 11 and 12 of the CHARM+ paper, and its Table 3, measured, with the same prediction. Kernels'
    own memory, other layers, and what an allocator keeps are not in it.
    """
    run_config = load_run_config(config, settings)
    facts = check(run_config, Path("runs/run"), cpu)
    domains = _domains(facts.domains, facts.cp_size, ranks_per_node)
    console = Console(highlight=False, emoji=False)
    workload = facts.workload
    console.print(
        f"one layer's attention on a rank, of {facts.cp_size} in {domains.num_domains} domains: "
        f"batch {workload.batch}, {workload.seq_len} tokens, {workload.num_heads} heads, {workload.num_kv_heads} KV "
        f"x {workload.head_dim}, {workload.dtype}",
        markup=False,
        soft_wrap=True,
    )
    console.print(_prediction(workload, domains, run_config.charm))
    console.print(
        f"\nTable 3 of the CHARM+ paper, MB: {NUM_DOMAINS * RANKS_PER_DOMAIN} L20, measured, and what is predicted for "
        f"heads of {HEAD_DIM}",
        markup=False,
        soft_wrap=True,
    )
    console.print(_table_3())


def _domains(known: Domains | None, cp_size: int, ranks_per_node: int | None) -> Domains:
    if ranks_per_node is None and known is not None:
        return known
    size = DEFAULT_RANKS_PER_NODE if ranks_per_node is None else ranks_per_node
    if size < 1:
        raise InvalidInput(f"--ranks-per-node must be at least 1, but is {size}")
    return even_domains(cp_size, max(1, cp_size // size))


def predict(name: str, workload: Workload, domains: Domains, config: CharmConfig) -> AttentionMemory:
    """The memory of one schedule by its planner's name."""
    plan = compile_attention(config.model_copy(update={"schedule": name}), domains, workload, "zigzag")
    step = -(-domains.cp_size // MOST_RANKS)
    return attention_memory(plan.schedules, plan.wire, range(0, domains.cp_size, step))


def _prediction(workload: Workload, domains: Domains, config: CharmConfig) -> Table:
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


def _table_3() -> Table:
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
