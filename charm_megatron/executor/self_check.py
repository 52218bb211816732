"""The first use of a plan in a training job, checked on real tensors: once, by all ranks of a group together.

The forward pass is compared with attention over gathered keys and values (`gathered.py`), and the bytes that a rank has
posted in either pass with the plan's. Whether there is anything to check follows from what all ranks share, so that
all take part or none.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.compile import Plan
from charm_megatron.errors import SelfCheckFailed
from charm_megatron.executor.agreement import gather
from charm_megatron.executor.attention import AttentionCall, ForwardResult
from charm_megatron.executor.gathered import RowResults, attention_of_sample
from charm_megatron.executor.positions import tokens_of_shard
from charm_megatron.log import Log
from charm_megatron.schedule.passes import DIRECTIONS, Direction
from charm_megatron.sharding import Sharding, make_sharding

NUM_ROWS = 16
"""Query rows of each rank that are compared."""
MOST_LSE_LIMIT = 0.1
"""Logits so large that rounding alone may change lse by more than this are not judged."""


class CheckedLayer(NamedTuple):
    """On whose behalf a plan is used: `name` as in "layer 1". `tell` gets what was found, a line for each pass."""

    name: str
    tell: Log


class Difference(NamedTuple):
    """The worst element of a tensor: by how much it differs, how much it may, and where and what it is."""

    of: str
    size: float
    limit: float
    where: str = ""

    def __str__(self) -> str:
        return f"{self.of} {self.size:.1e} (limit {self.limit:.1e})"


@dataclass(frozen=True)
class Finding:
    """What one rank found in one pass: its first fault, or why it could not judge, or how near it came."""

    fault: str = ""
    unjudged: str = ""
    differences: tuple[Difference, ...] = ()


class SelfCheck:
    """What is still to be checked of a plan; `group` has agreed on it."""

    def __init__(self, group: dist.ProcessGroup, plan: Plan) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._schedule, self._workload = plan.name, plan.workload
        self._layout = plan.problem.sharding.layout
        self._planned = {way: int(plan.traffic(way).total_bytes[self._rank]) for way in DIRECTIONS}
        self._due = set(DIRECTIONS)

    def watched(self, call: AttentionCall, layer: CheckedLayer) -> AttentionCall:
        """`call`, checked where that is still to be done; not while it is recorded into a CUDA graph."""
        if not self._due or (call.memory.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return call
        parts = {field.name: getattr(call, field.name) for field in fields(AttentionCall)}
        return WatchedCall(**parts, check=self, layer=layer)

    def after_forward(
        self,
        layer: CheckedLayer,
        tensors: tuple[Tensor, Tensor, Tensor],
        result: ForwardResult,
        softmax_scale: float,
        num_bytes: int,
        sink: Tensor | None = None,
    ) -> None:
        """Compares out and lse of some rows, and the bytes. Raises `SelfCheckFailed` on all ranks alike."""

        def found() -> Finding:
            size = dist.get_world_size(self._group)
            workload = self._workload
            sharding = make_sharding(self._layout, size, workload.seq_len, workload.mask.documents)
            rows = sample_rows(sharding, self._rank)
            wanted = attention_of_sample(
                self._group, sharding, workload.mask, rows, *tensors, softmax_scale=softmax_scale
            )
            if sink is not None:
                wanted = wanted.with_sink(sink)
            got = (result.out[rows].double(), result.lse[rows].double())
            return compare(wanted, *got, tokens_of_shard(sharding, self._rank)[rows].tolist())

        self._check(Direction.FORWARD, layer, num_bytes, found)

    def after_backward(self, layer: CheckedLayer, num_bytes: int) -> None:
        """Compares the bytes. Raises `SelfCheckFailed` on all ranks alike."""
        self._check(Direction.BACKWARD, layer, num_bytes, Finding)

    def _check(
        self, direction: Direction, layer: CheckedLayer, num_bytes: int, found: Callable[[], Finding]
    ) -> None:
        if direction not in self._due:
            return
        self._due.remove(direction)
        finding, planned = found(), self._planned[direction]
        if num_bytes != planned and not finding.fault:
            finding = Finding(f"{num_bytes:,} bytes were sent, but {planned:,} are planned")
        findings = gather(self._group, finding)
        where = f"{layer.name}, schedule {self._schedule}, {direction}"
        faulty = [rank for rank, one in enumerate(findings) if one.fault]
        if faulty:
            raise SelfCheckFailed(
                f"self-check failed on {len(faulty)} of {len(findings)} ranks of a context-parallel group; rank "
                f"{faulty[0]}, {where}: {findings[faulty[0]].fault}; charm.schedule, charm.kernel choose others"
            )
        layer.tell(f"self-check: {where}: {summary(findings)}bytes as planned")


@dataclass(frozen=True)
class WatchedCall(AttentionCall):
    """A call whose passes are checked, those that are still to be."""

    check: SelfCheck
    layer: CheckedLayer

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, sink: Tensor | None = None
    ) -> ForwardResult:
        before = self.transport.num_bytes_sent
        result = super().forward(q, k, v, softmax_scale, sink)
        num_bytes = self.transport.num_bytes_sent - before
        self.check.after_forward(self.layer, (q, k, v), result, softmax_scale, num_bytes, sink)
        return result

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: ForwardResult, softmax_scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        before = self.transport.num_bytes_sent
        gradients = super().backward(dout, q, k, v, result, softmax_scale)
        self.check.after_backward(self.layer, self.transport.num_bytes_sent - before)
        return gradients


def sample_rows(sharding: Sharding, rank: int, most: int = NUM_ROWS) -> list[int]:
    """At most `most` rows of a rank's shard: the ends of its chunks, as many as there are places, and rows between."""
    ends, stop = [], 0
    for chunk in sharding.chunks_of(rank):
        start, stop = stop, stop + sharding.chunks[chunk].length
        ends += [start, stop - 1]
    rows = set(_spread(sorted(set(ends)), most))
    between = [row for row in range(stop) if row not in rows] if stop < 4 * most else _even(stop, 4 * most)
    rows.update(_spread([row for row in between if row not in rows], most - len(rows)))
    return sorted(rows)


def _spread(rows: list[int], most: int) -> list[int]:
    """`most` of `rows`, the first and the last among them."""
    if len(rows) <= most:
        return rows
    return [rows[place] for place in _even(len(rows), most)]


def _even(length: int, count: int) -> list[int]:
    """`count` of 0 .. length - 1, evenly apart."""
    return [i * (length - 1) // max(1, count - 1) for i in range(count)]


def compare(wanted: RowResults, out: Tensor, lse: Tensor, positions: list[int]) -> Finding:
    """Of out [r, b, h, d_v] and lse [r, b, h], float64, of the rows at `positions` in the sequence."""
    if not wanted.is_finite:
        return Finding(unjudged="q, k or v holds values that are not finite")
    if not float(wanted.lse_limit.max()) < MOST_LSE_LIMIT:
        return Finding(unjudged="its logits are too large for the accumulator")
    differences = (
        _worst("lse", lse, wanted.lse, wanted.lse_limit, positions),
        _worst("out", out, wanted.out, wanted.out_limit, positions),
    )
    fault = next((found.where for found in differences if not found.size <= found.limit), "")
    return Finding(fault, differences=differences)


def _worst(of: str, got: Tensor, wanted: Tensor, limit: Tensor, positions: list[int]) -> Difference:
    """Of the element that comes nearest to its limit, or exceeds it most; anything not finite exceeds it."""
    size = (got - wanted).abs().nan_to_num(nan=torch.inf)
    place = int((size / limit.clamp_min(torch.finfo(torch.float64).tiny)).argmax())
    row, batch, head, *_ = (int(x) for x in torch.unravel_index(torch.tensor(place), got.shape))
    value, right, most = (float(x.reshape(-1)[place]) for x in (got, wanted, limit))
    where = (
        f"{of} of the token at position {positions[row]} (sequence {batch}, head {head}) is {value:.9g}, but over "
        f"gathered keys and values {right:.9g} (limit {most:.1e})"
    )
    return Difference(of, float(size.reshape(-1)[place]), most, where)


def summary(findings: list[Finding]) -> str:
    """What the ranks found where none found a fault, to be followed by what is said of bytes."""
    unjudged = [(rank, one.unjudged) for rank, one in enumerate(findings) if one.unjudged]
    if unjudged:
        rank, why = unjudged[0]
        return f"results could not be judged, as on rank {rank} {why}; "
    by_tensor = zip(*(one.differences for one in findings), strict=True)
    worst = [max(of, key=lambda one: one.size / max(one.limit, 1e-300)) for of in by_tensor]
    if not worst:
        return ""
    return f"{NUM_ROWS} rows of each rank, largest differences: {', '.join(map(str, worst))}; "
