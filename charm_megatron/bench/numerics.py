"""How far distributed attention is from unsharded attention, as the CHARM+ paper's Table 8 (C.3).

Q, K, V and dout are normal random numbers. Each schedule runs on all ranks; rank 0 puts the results together and
subtracts unsharded attention: torch's operator in the model's dtype, as the paper does, and float64.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.bench.cluster import Cluster
from charm_megatron.bench.ranks import run_on_ranks
from charm_megatron.compile import compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.executor.runtime import AttentionRuntime
from charm_megatron.kernels.unsharded import (
    TENSORS,
    assembled,
    draw_shard,
    flash_attention,
    unsharded_attention,
)
from charm_megatron.log import Log, silent
from charm_megatron.sharding import make_sharding
from charm_megatron.workload import Workload

UNSHARDED = "unsharded"
"""The implementation that is torch's operator on the whole sequence: its error is that of the dtype itself."""


@dataclass(frozen=True)
class ScheduleVariant:
    """A schedule, and the dtypes in which its partial results travel home."""

    schedule: str
    out_return_dtype: str
    grad_return_dtype: str

    def settings(self, num_domains: int) -> CharmConfig:
        """The settings of an attention runtime."""
        return CharmConfig.model_validate(
            {
                "schedule": self.schedule,
                "domains": num_domains,
                "out_return_dtype": self.out_return_dtype,
                "grad_return_dtype": self.grad_return_dtype,
            }
        )

    def __str__(self) -> str:
        widths = {"model": "narrow", "float32": "wide", "by_link": "narrow across"}
        return f"{self.schedule}, {widths[self.out_return_dtype]} out, {widths[self.grad_return_dtype]} gradients"


def variants_of(schedules: Sequence[str]) -> tuple[ScheduleVariant, ...]:
    """Each schedule with all results narrow, with gradients wide inside domains, with them wide, and with all wide."""
    dtypes = (("model", "model"), ("model", "by_link"), ("model", "float32"), ("float32", "float32"))
    return tuple(ScheduleVariant(name, *pair) for name in schedules for pair in dtypes)


@dataclass(frozen=True)
class NumericsRow:
    """Differences of one tensor, averages over the draws of each draw's largest and mean.

    `to_flash` and `to_float64` are (largest, mean): to torch's operator on the whole sequence, and to float64.
    """

    implementation: str
    tensor: str
    to_flash: tuple[float, float] | None
    to_float64: tuple[float, float]


@dataclass(frozen=True)
class NumericsCase:
    """What to draw, how often, and who runs."""

    workload: Workload
    variants: tuple[ScheduleVariant, ...]
    num_draws: int
    layout: str


def measure_numerics(case: NumericsCase, cluster: Cluster, progress: Log = silent) -> list[NumericsRow]:
    """Runs all draws on all ranks. Raises `InvalidInput`, before any rank starts, for a schedule that cannot be."""
    for variant in case.variants:
        compile_attention(variant.settings(cluster.num_domains), cluster.domains, case.workload, case.layout)
    deadline_s = CharmConfig().deadline_s
    results = run_on_ranks(
        _measure, cluster, case, cluster.num_domains, deadline_s=deadline_s, progress=progress
    )
    return [] if results is None else results[0]


def _measure(log: Log, rank: int, num_ranks: int, case: NumericsCase, num_domains: int) -> list[NumericsRow]:
    group = dist.group.WORLD
    assert group is not None
    workload = case.workload
    calls = {
        str(variant): AttentionRuntime(variant.settings(num_domains)).call(
            group, workload, layout=case.layout
        )
        for variant in case.variants
    }
    tokens = make_sharding(case.layout, num_ranks, workload.seq_len, workload.mask.documents).tokens_by_rank
    scale = workload.softmax_scale
    totals: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for draw in range(case.num_draws):
        log(f"draw {draw + 1} of {case.num_draws}")
        whole = draw_shard(draw, workload.seq_len, workload)  # the same on every rank
        q, k, v, dout = (x[list(tokens[rank])] for x in whole)
        got = {}
        for name, call in calls.items():
            result = call.forward(q, k, v, scale)
            shard = (result.out, result.lse, *call.backward(dout, q, k, v, result, scale))
            got[name] = [_gather(x, rank, num_ranks, tokens) for x in shard]
        if rank == 0:
            _subtract(totals, got, whole, workload)
    return [
        NumericsRow(
            name,
            tensor,
            None if name == UNSHARDED else _average(totals[name, tensor, "flash"], case.num_draws),
            _average(totals[name, tensor, "float64"], case.num_draws),
        )
        for name in (UNSHARDED, *calls)
        for tensor in TENSORS
    ]


def _gather(part: Tensor, rank: int, num_ranks: int, tokens: tuple[tuple[int, ...], ...]) -> Tensor | None:
    """The whole of what the ranks hold, on rank 0; in float64, since not every gloo gathers bfloat16."""
    wide = part.detach().double().contiguous()
    parts = [torch.empty_like(wide) for _ in range(num_ranks)] if rank == 0 else None
    dist.gather(wide, parts)
    return None if parts is None else assembled(parts, tokens)


def _subtract(
    totals: dict[tuple[str, str, str], list[float]],
    got: Mapping[str, list[Tensor | None]],
    whole: tuple[Tensor, Tensor, Tensor, Tensor],
    workload: Workload,
) -> None:
    exact = unsharded_attention(*whole, workload.mask)
    flash = flash_attention(*whole, workload.mask)
    for i, tensor in enumerate(TENSORS):
        _add(totals[UNSHARDED, tensor, "float64"], flash[tensor], exact[tensor])
        for name, tensors in got.items():
            value = tensors[i]
            assert value is not None, "rank 0 has gathered it"
            _add(totals[name, tensor, "flash"], value, flash[tensor])
            _add(totals[name, tensor, "float64"], value, exact[tensor])


def _add(total: list[float], value: Tensor, reference: Tensor) -> None:
    difference = (value - reference).abs()
    total[0] += float(difference.max())
    total[1] += float(difference.mean())


def _average(total: list[float], num_draws: int) -> tuple[float, float]:
    return total[0] / num_draws, total[1] / num_draws
