"""What can be seen on one card, or else on the CPU: kernels, the work between blocks, a group in one process.

Each check gives rows; one that fails gives a row that says why, and the next one runs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product

import torch
from torch import Tensor

from charm_megatron.compile import compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.errors import error_text
from charm_megatron.executor.attention import ContextParallelAttention, attention_call
from charm_megatron.executor.loopback import LoopbackGroup, LoopbackNetwork
from charm_megatron.executor.memory import Memory
from charm_megatron.kernels import BlockKernel, BlockSizes, ReferenceKernel, select_kernel
from charm_megatron.kernels.elementwise import Elementwise, TorchElementwise, select_elementwise
from charm_megatron.schedule.passes import DIRECTIONS
from charm_megatron.topology import even_domains
from charm_megatron.workload import CAUSAL, Workload

MOST_REASON_CHARACTERS = 200
FAILED = "failed"
"""In place of what was to be seen."""
DTYPE = torch.bfloat16
WIDTHS = ((64, 64), (128, 128), (192, 128))
"""Of heads: q and k, v."""
SCHEDULES = ("ring", "charm")
NUM_LAYERS = 8
WARM_UP, REPETITIONS = 3, 10
BLOCK_FLOPS = (1.0, 2.5)
"""Of each direction: two matrix products, and five."""


@dataclass(frozen=True)
class CardRow:
    """One figure. `limit`: the most that it may be, where there is one; `note`: why there is no figure."""

    check: str
    what: str
    value: float | None
    unit: str
    limit: float | None = None
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Whether nothing speaks against it: a figure within its limit, or none that has one."""
        if self.what == FAILED:
            return False
        return self.limit is None or (self.value is not None and self.value <= self.limit)


@dataclass(frozen=True)
class Sizes:
    """How large the checks are: `tokens` of timed blocks, batch and heads, and rows of the work between blocks."""

    tokens: tuple[int, ...]
    heads: int
    rows: int
    per_rank: int


ON_GPU = Sizes((1024, 4096, 16384), 16, 2**20, 1024)
ON_CPU = Sizes((256,), 2, 2**10, 16)


def check_card(device: torch.device) -> Iterator[CardRow]:
    """All checks, one row after the other. Ten minutes at most on a GPU, some seconds on a CPU."""
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    checks: Sequence[Callable[[torch.device, Sizes], Iterator[CardRow]]] = (
        _kernel_errors,
        _kernel_speed,
        _elementwise_speed,
        _loopback,
        _saved_memory,
    )
    for check in checks:
        name = check.__name__.strip("_").replace("_", " ")
        try:
            for row in check(device, sizes):
                yield replace(row, check=name)
        except Exception as error:  # the next check may still tell something
            yield CardRow(name, FAILED, None, "", note=error_text(error, MOST_REASON_CHARACTERS))


def _draw(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(DTYPE)


def _operands(device: torch.device, tokens: int, heads: int, widths: tuple[int, int]) -> list[Tensor]:
    """q, k, v and dout; two query heads share a KV head."""
    d, d_v = widths
    shapes = ((heads, d), (heads // 2, d), (heads // 2, d_v), (heads, d_v))
    return [_draw(device, tokens, 1, h, width) for h, width in shapes]


def _chosen(device: torch.device, widths: tuple[int, int]) -> BlockKernel:
    return select_kernel("auto", BlockSizes.on(device, DTYPE, *widths)).kernel


def _worst_error(got: Sequence[Tensor], operands: Sequence[Tensor], *, causal: bool, scale: float) -> float:
    """Of out, lse, dq, dk, dv against the formulas in float64: the largest error over the largest value."""
    reference, (q, k, v, dout) = ReferenceKernel(), (x.double() for x in operands)
    out, lse = reference.forward(q, k, v, causal=causal, softmax_scale=scale)
    grads = reference.backward(dout, q, k, v, out, lse, causal=causal, softmax_scale=scale)
    pairs = zip(got, (out, lse, *grads), strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


# ---------------------------------------------------------------------- kernels


def _kernel_errors(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    """Of the chosen kernel, and whether its results repeat."""
    for widths, causal in product(WIDTHS, (False, True)):
        kernel = _chosen(device, widths)
        q, k, v, dout = _operands(device, 256, 4, widths)
        scale = widths[0] ** -0.5
        out, lse = kernel.forward(q, k, v, causal=causal, softmax_scale=scale)
        grads = kernel.backward(dout, q, k, v, out, lse, causal=causal, softmax_scale=scale)
        again = kernel.forward(q, k, v, causal=causal, softmax_scale=scale)
        worst = _worst_error((out, lse, *grads), (q, k, v, dout), causal=causal, scale=scale)
        mask = "causal" if causal else "no mask"
        what = f"{kernel.name}, heads {widths[0]} and {widths[1]}, {mask}"
        yield CardRow("", what, worst, "of the largest value", limit=0.03)
        repeats = all(torch.equal(a, b) for a, b in zip((out, lse), again, strict=True))
        yield CardRow("", f"{what}: forward differs when repeated", float(not repeats), "0 or 1", limit=0)


def _kernel_speed(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    for tokens, widths in product(sizes.tokens, WIDTHS[:2]):
        kernel, scale = _chosen(device, widths), widths[0] ** -0.5
        q, k, v, dout = _operands(device, tokens, sizes.heads, widths)
        out, lse = kernel.forward(q, k, v, causal=True, softmax_scale=scale)
        flops = 2 * tokens * tokens * sizes.heads * sum(widths) / 2

        forward = partial(kernel.forward, q, k, v, causal=True, softmax_scale=scale)
        backward = partial(kernel.backward, dout, q, k, v, out, lse, causal=True, softmax_scale=scale)
        work: tuple[Callable[[], object], ...] = (forward, backward)
        for name, run, factor in zip(DIRECTIONS, work, BLOCK_FLOPS, strict=True):
            rate = flops * factor / _seconds(run, device) / 1e12
            yield CardRow(
                "", f"{kernel.name}, {tokens} tokens, heads {widths[0]}, causal, {name}", rate, "TFLOP/s"
            )


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one run, on the device's own clock; the median."""
    for _ in range(WARM_UP):
        run()
    if device.type != "cuda":
        took = []
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            run()
            took.append(time.perf_counter() - started)
        return sorted(took)[REPETITIONS // 2]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPETITIONS + 1)]  # type: ignore[no-untyped-call]
    for before in marks[:-1]:
        before.record()
        run()
    marks[-1].record()
    torch.cuda.synchronize(device)
    times = sorted(float(a.elapsed_time(b)) for a, b in pairwise(marks))
    return times[REPETITIONS // 2] / 1e3


# ---------------------------------------------------------------------- the work between blocks


def _elementwise_speed(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    """Bytes that must be read and written, over the time."""
    chosen = select_elementwise(device)
    kinds: dict[str, Elementwise] = {
        "torch": TorchElementwise(),
        chosen.implementation.name: chosen.implementation,
    }
    rows, width = sizes.rows // 16, 128
    out_sum, lse_sum = (torch.zeros(rows, 1, 16, *w, device=device) for w in ((width,), ()))
    parts = [(_draw(device, rows, 1, 16, width), torch.randn(rows, 1, 16, device=device)) for _ in range(2)]
    packed = torch.zeros(rows, 1, 16, 2 * width, device=device, dtype=DTYPE)
    (out, lse), (other, _) = parts
    for name, kind in kinds.items():
        merge = partial(kind.merge, out_sum, lse_sum, is_first=False)
        pairs = [(packed[..., :width], out), (packed[..., width:], other)]
        work: dict[str, tuple[Callable[[], object], Sequence[Tensor]]] = {
            "merge of one": (partial(merge, parts[:1]), (out_sum, out_sum, out)),
            "merge of two": (partial(merge, parts), (out_sum, out_sum, out, other)),
            "add": (partial(kind.add, [out_sum], [[out]], is_first=False), (out_sum, out_sum, out)),
            "place": (partial(kind.place, pairs), (packed, packed)),
            "stand-in": (partial(kind.stand_in, out, lse, other), (out, other)),
        }
        for what, (run, tensors) in work.items():
            rate = sum(x.nbytes for x in tensors) / _seconds(run, device) / 1e9
            yield CardRow("", f"{name}: {what}", rate, "GB/s")
    yield CardRow("", f"merged by {chosen.reason}", float(len(kinds)), "implementations")


# ---------------------------------------------------------------------- a group in one process


def _loopback(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    """All ranks of a group on this device: errors against attention over the whole sequence in float64."""
    for schedule, num_ranks in product(SCHEDULES, (4, 8)):
        workload = Workload(1, num_ranks * sizes.per_rank, 8, 4, 64, 64, "bfloat16", CAUSAL)
        config = CharmConfig(schedule=schedule, fuse=False)
        plan = compile_attention(config, even_domains(num_ranks, 2), workload, "zigzag")
        group = LoopbackGroup(
            plan, _chosen(device, (64, 64)), softmax_scale=0.125, device=device, has_two_queues=True
        )
        tensors = [_draw(device, workload.seq_len, 1, h, 64) for h in (8, 4, 4, 8)]
        got = group.attention(*tensors)
        results = (got.out, got.lse, got.dq, got.dk, got.dv)
        worst = _worst_error(results, tensors, causal=True, scale=0.125)
        yield CardRow("", f"{schedule}, {num_ranks} ranks", worst, "of the largest value", limit=0.03)


def _saved_memory(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    """What layers keep for the backward pass beyond q, k, v, out and lse, on a GPU by its allocator."""
    if device.type != "cuda":
        yield CardRow("", "is counted on CPUs by a test", None, "", note="needs a GPU's allocator")
        return
    workload = Workload(1, sizes.per_rank, 16, 16, 64, 64, "bfloat16", CAUSAL)
    plan = compile_attention(CharmConfig(schedule="ring"), even_domains(1, 1), workload, "zigzag")
    call = attention_call(
        plan, 0, _chosen(device, (64, 64)), LoopbackNetwork(1).transport(0), Memory(device, 0)
    )
    x = _draw(device, sizes.per_rank, 1, 16, 64).requires_grad_()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    kept = [ContextParallelAttention.apply(x, x, x, call, 0.125) for _ in range(NUM_LAYERS)]
    torch.cuda.synchronize(device)
    grown = torch.cuda.memory_allocated(device) - before
    needed = sum(y.nbytes for pair in kept for y in pair)
    yield CardRow("", f"{NUM_LAYERS} layers, over out and lse", grown / needed, "times", limit=1.05)
