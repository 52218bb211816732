"""What can be seen on one card, or else on the CPU: kernels, the work between blocks, a group in one process.

Each check gives rows; one that fails gives a row that says why, and the next one runs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import torch
from torch import Tensor

from charm_megatron.bench.card_group import host, loopback, stream_fuzz, synchronisation
from charm_megatron.bench.card_parts import (
    DTYPE,
    ERROR_LIMIT,
    FAILED,
    MOST_REASON_CHARACTERS,
    ON_CPU,
    ON_GPU,
    CardRow,
    Sizes,
    chosen_kernel,
    draw,
    worst_error,
)
from charm_megatron.bench.nccl_ranks import nccl_ranks
from charm_megatron.compile import compile_attention
from charm_megatron.config import CharmConfig
from charm_megatron.errors import error_text
from charm_megatron.executor.attention import ContextParallelAttention, attention_call
from charm_megatron.executor.loopback import LoopbackNetwork
from charm_megatron.executor.memory import Memory
from charm_megatron.kernels.elementwise import Elementwise, TorchElementwise, select_elementwise
from charm_megatron.schedule.passes import DIRECTIONS
from charm_megatron.topology import even_domains
from charm_megatron.workload import CAUSAL, Workload

WIDTHS = ((64, 64), (128, 128), (192, 128))
"""Of heads: q and k, v."""
NUM_LAYERS = 8
WARM_UP, REPETITIONS = 3, 10
BLOCK_FLOPS = (1.0, 2.5)
"""Of each direction: two matrix products, and five."""


def check_card(device: torch.device) -> Iterator[CardRow]:
    """All checks, one row after the other. Ten minutes at most on a GPU, some seconds on a CPU."""
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    checks: Sequence[Callable[[torch.device, Sizes], Iterator[CardRow]]] = (
        _kernel_errors,
        _kernel_speed,
        _elementwise_speed,
        loopback,
        host,
        stream_fuzz,
        synchronisation,
        nccl_ranks,
        _saved_memory,
    )
    for check in checks:
        name = check.__name__.strip("_").replace("_", " ")
        try:
            for row in check(device, sizes):
                yield replace(row, check=name)
        except Exception as error:  # the next check may still tell something
            yield CardRow(name, FAILED, None, "", note=error_text(error, MOST_REASON_CHARACTERS))


def _operands(device: torch.device, tokens: int, heads: int, widths: tuple[int, int]) -> list[Tensor]:
    """q, k, v and dout; two query heads share a KV head."""
    d, d_v = widths
    shapes = ((heads, d), (heads // 2, d), (heads // 2, d_v), (heads, d_v))
    return [draw(device, tokens, 1, h, width) for h, width in shapes]


# ---------------------------------------------------------------------- kernels


def _kernel_errors(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    """Of the chosen kernel, and whether its results repeat."""
    for widths, causal in product(WIDTHS, (False, True)):
        kernel = chosen_kernel(device, widths)
        q, k, v, dout = _operands(device, 256, 4, widths)
        scale = widths[0] ** -0.5
        out, lse = kernel.forward(q, k, v, causal=causal, softmax_scale=scale)
        grads = kernel.backward(dout, q, k, v, out, lse, causal=causal, softmax_scale=scale)
        again = kernel.forward(q, k, v, causal=causal, softmax_scale=scale)
        worst = worst_error((out, lse, *grads), (q, k, v, dout), causal=causal, scale=scale)
        mask = "causal" if causal else "no mask"
        what = f"{kernel.name}, heads {widths[0]} and {widths[1]}, {mask}"
        yield CardRow("", what, worst, "of the largest value", limit=ERROR_LIMIT)
        repeats = all(torch.equal(a, b) for a, b in zip((out, lse), again, strict=True))
        yield CardRow("", f"{what}: forward differs when repeated", float(not repeats), "0 or 1", limit=0)


def _kernel_speed(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    for tokens, widths in product(sizes.tokens, WIDTHS[:2]):
        kernel, scale = chosen_kernel(device, widths), widths[0] ** -0.5
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
    parts = [(draw(device, rows, 1, 16, width), torch.randn(rows, 1, 16, device=device)) for _ in range(2)]
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


# ---------------------------------------------------------------------- memory


def _saved_memory(device: torch.device, sizes: Sizes) -> Iterator[CardRow]:
    """What layers keep for the backward pass beyond q, k, v, out and lse, on a GPU by its allocator."""
    if device.type != "cuda":
        yield CardRow("", "is counted on CPUs by a test", None, "", note="needs a GPU's allocator")
        return
    workload = Workload(1, sizes.per_rank, 16, 16, 64, 64, "bfloat16", CAUSAL)
    plan = compile_attention(CharmConfig(schedule="ring"), even_domains(1, 1), workload, "zigzag")
    call = attention_call(
        plan, 0, chosen_kernel(device, (64, 64)), LoopbackNetwork(1).transport(0), Memory(device, 0)
    )
    x = draw(device, sizes.per_rank, 1, 16, 64).requires_grad_()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    kept = [ContextParallelAttention.apply(x, x, x, call, 0.125) for _ in range(NUM_LAYERS)]
    torch.cuda.synchronize(device)
    grown = torch.cuda.memory_allocated(device) - before
    needed = sum(y.nbytes for pair in kept for y in pair)
    yield CardRow("", f"{NUM_LAYERS} layers, over out and lse", grown / needed, "times", limit=1.05)
