"""What `charm-megatron plan` and `check` are asked for, completed from a schedule's file and from defaults."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from charm_megatron.compile import Plan, compile_attention, is_schedule_file
from charm_megatron.config import CharmConfig
from charm_megatron.errors import InvalidInput
from charm_megatron.files import exists
from charm_megatron.schedule.json_form import load_schedule
from charm_megatron.schedule.problem import Problem
from charm_megatron.topology import Domains, even_domains
from charm_megatron.workload import CAUSAL, Mask, Workload, parse_mask

NODES, RANKS_PER_NODE = 1, 8
TOKENS_PER_RANK = 4096
LAYOUT = "zigzag"


@dataclass(frozen=True)
class PlanRequest:
    """Group, attention and settings as the user gave them; None: as in the schedule's file, or the default."""

    nodes: int | None = None
    ranks_per_node: int | None = None
    mask: str | None = None
    layout: str | None = None
    tokens_per_rank: int | None = None
    num_heads: int = 32
    num_kv_heads: int | None = None
    head_dim: int = 128
    batch: int = 1
    dtype: str = "bfloat16"
    prefetch_depth: int | None = None
    fuse: bool | None = None
    out_return_dtype: str = "model"
    grad_return_dtype: str = "by_link"

    def complete(self, schedules: Sequence[str]) -> "PlanSettings":
        """With all that is not given: from the first file among `schedules`, or by default.

        Raises a kind of `InvalidInput` for what cannot be.
        """
        for name in schedules:
            if Path(name).suffix and not is_schedule_file(name) and exists(Path(name)):
                raise InvalidInput(f"{name} is not a schedule file: their names end in .json")
        files = [name for name in schedules if is_schedule_file(name)]
        if len(files) == len(schedules):
            self._require_nothing_for_planners(files[0])
        known = load_schedule(Path(files[0])).problem if files else None
        domains, mask = self._domains(known), self._mask(known)
        layout = self.layout
        if layout is None:
            layout = LAYOUT if known is None else known.sharding.layout
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        workload = Workload(
            self.batch,
            self._seq_len(known, domains.cp_size),
            self.num_heads,
            kv_heads,
            self.head_dim,
            self.head_dim,
            self.dtype,
            mask,
        )
        return PlanSettings(domains, workload, layout, self._config())

    def _require_nothing_for_planners(self, file: str) -> None:
        for name, value in (("--prefetch-depth", self.prefetch_depth), ("--fuse/--no-fuse", self.fuse)):
            if value is not None:
                raise InvalidInput(f"{name} is for planners; {file} has its own, so leave the option out")

    def _config(self) -> CharmConfig:
        settings = {
            "prefetch_depth": self.prefetch_depth,
            "fuse": self.fuse,
            "out_return_dtype": self.out_return_dtype,
            "grad_return_dtype": self.grad_return_dtype,
        }
        return CharmConfig.model_validate({key: x for key, x in settings.items() if x is not None})

    def _domains(self, known: Problem | None) -> Domains:
        if known is not None and self.nodes is None and self.ranks_per_node is None:
            return known.domains
        theirs = (
            (NODES, RANKS_PER_NODE)
            if known is None
            else (known.domains.num_domains, len(known.domains.members[0]))
        )
        nodes, ranks_per_node = self.nodes or theirs[0], self.ranks_per_node or theirs[1]
        return even_domains(nodes * ranks_per_node, nodes)

    def _mask(self, known: Problem | None) -> Mask:
        if self.mask is not None:
            return parse_mask(self.mask)
        return CAUSAL if known is None else known.mask

    def _seq_len(self, known: Problem | None, cp_size: int) -> int:
        if self.tokens_per_rank is None and known is not None:
            return known.sharding.seq_len * cp_size // known.cp_size
        return (self.tokens_per_rank or TOKENS_PER_RANK) * cp_size


@dataclass(frozen=True)
class PlanSettings:
    """All that schedules are planned for."""

    domains: Domains
    workload: Workload
    layout: str
    config: CharmConfig

    @property
    def cp_size(self) -> int:
        return self.domains.cp_size

    def plan(self, schedule: str) -> Plan:
        """Both directions of what the setting `charm.schedule` takes: a planner's name, or the path of a .json file."""
        config = self.config.model_copy(update={"schedule": schedule})
        return compile_attention(config, self.domains, self.workload, self.layout)

    def __str__(self) -> str:
        """One line, for titles."""
        workload, domains = self.workload, self.domains
        heads, kv_heads = workload.num_heads, workload.num_kv_heads
        kv = "" if kv_heads == heads else f", {kv_heads} KV"
        size = (
            f"{domains.num_domains} x {len(domains.members[0])} ranks"
            if domains.are_even
            else f"{domains.cp_size} ranks in domains [{domains}]"
        )
        return (
            f"{size}, {self.layout}, mask {workload.mask}, {workload.seq_len // self.cp_size} tokens per rank, "
            f"{heads} heads{kv} x {workload.head_dim}, {workload.dtype}"
        )
