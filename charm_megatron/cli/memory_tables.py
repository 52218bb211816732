"""The tables of `charm-megatron memory`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from charm_megatron.compile import Plan, compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.cost.memory import AttentionMemory, attention_memory
from charm_megatron.errors import InvalidInput
from charm_megatron.paper.equations import memory_bytes
from charm_megatron.paper.table_3 import NUM_DOMAINS, RANKS_PER_DOMAIN, TABLE_3
from charm_megatron.schedule.passes import DIRECTIONS
from charm_megatron.topology import Domains, even_domains
from charm_megatron.workload import Workload

DEFAULT_RANKS_PER_NODE = 8
EQUATIONS = {"ring": "ring", "charm": "charm", "charm_keep_kv": "charm"}
"""The schedules of which the paper's equations 11 and 12 speak."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a schedule was asked for as, its plan, and the memory of that."""

    name: str
    plan: Plan
    memory: AttentionMemory

    @property
    def remark(self) -> str | None:
        """A line that says why it is planned so, where that is not simply as it was set."""
        return None if self.plan.reason in ("as set", "as written") else f"{self.name}: {self.plan.reason}"


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


def predict(schedule: str, workload: Workload, domains: Domains, config: CharmConfig) -> Prediction:
    """The memory of one schedule, by what the setting `charm.schedule` takes.

    Raises `PlanError` for an unknown one, and for one that cannot do these sizes.
    """
    plan = compile_attention(config.model_copy(update={"schedule": schedule}), domains, workload, "zigzag")
    return Prediction(schedule, plan, attention_memory(plan.schedules, plan.wire))


def prediction_table(predictions: Sequence[Prediction]) -> Table:
    """A column for each schedule, a block of rows for each pass."""
    table = Table("MiB", box=None, pad_edge=False)
    for prediction in predictions:
        table.add_column(prediction.name, justify="right", overflow="fold")
    for label, cells in _rows(predictions).items():
        table.add_row(label, *cells)
    return table


def _rows(predictions: Sequence[Prediction]) -> Mapping[str, list[str]]:
    rows = {}
    for direction in DIRECTIONS:
        passes = [prediction.memory.passes[direction] for prediction in predictions]
        rows[f"{direction}: foreign buffers"] = [_mib(memory.buffer_bytes) for memory in passes]
        rows[f"{direction}: own tensors"] = [_mib(memory.own_bytes) for memory in passes]
        rows[f"{direction}: total"] = [_mib(memory.peak_bytes) for memory in passes]
    memories = [prediction.memory for prediction in predictions]
    rows["saved between the passes"] = [_mib(memory.saved_bytes) for memory in memories]
    rows["pool, after both passes"] = [_mib(memory.pool_bytes) for memory in memories]
    rows["paper, equations 11 and 12"] = [_equation(prediction) for prediction in predictions]
    return rows


def _equation(prediction: Prediction) -> str:
    if prediction.name not in EQUATIONS:
        return "-"
    plan = prediction.plan
    return _mib(memory_bytes(EQUATIONS[prediction.name], plan.workload, plan.problem.cp_size))


def table_3() -> Table:
    """Table 3 of the paper, beside its equations and the predictions for `charm_keep_kv` and `charm`, less the ring."""
    columns = ("batch", "tokens", "heads", "ring", "charm", "charm - ring", "equations")
    schedules = ("charm_keep_kv", "charm")
    table = Table(box=None, pad_edge=False)
    for column in (*columns, "predicted, KV kept", "predicted"):
        table.add_column(column, justify="right")
    domains = even_domains(NUM_DOMAINS * RANKS_PER_DOMAIN, NUM_DOMAINS)
    for row in TABLE_3:
        ring, *others = (
            predict(name, row.workload, domains, CharmConfig()).memory.worst.peak_bytes
            for name in ("ring", *schedules)
        )
        by_equation = [memory_bytes(name, row.workload, domains.cp_size) for name in ("ring", "charm")]
        printed = (row.batch, row.seq_len, row.num_heads, row.ring_mb, row.charm_mb, f"{row.difference_mb:+}")
        differences = (by_equation[1] - by_equation[0], *(other - ring for other in others))
        table.add_row(*map(str, printed), *map(_mib, differences))
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}" if abs(num_bytes) >= 10 * 2**20 else f"{num_bytes / 2**20:.2f}"
