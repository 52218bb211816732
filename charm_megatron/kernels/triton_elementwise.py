"""The work between blocks of attention as fused Triton kernels: one launch for each call of `Elementwise`.

A program of a kernel has some rows, [s, b, h] counted through, and their whole width. Arithmetic is in the dtype of the
accumulators, float32 or float64; offsets are int64.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from charm_megatron.kernels.elementwise import Merged

ELEMENTS = 4096
"""Of one program: 16 rows of 256, some 32 for each thread."""
NUM_WARPS = 4
MOST_PAIRS = 4
MOST_SUMS = 2


class TritonElementwise:
    """One launch each. Tensors of up to 65,536 values a row."""

    name = "triton"

    def merge(self, out_sum: Tensor, lse_sum: Tensor, parts: Sequence[Merged], *, is_first: bool) -> None:
        (first, lse_first), (second, lse_second) = parts[0], parts[-1]
        grid, shape = _grid(out_sum, out_sum.shape[3])
        _merge[grid](
            *_operand(out_sum), *_operand(lse_sum), *_operand(first), *_operand(lse_first), *_operand(second),
            *_operand(lse_second), *shape, out_sum.shape[3], IS_FIRST=is_first, NUM_PARTS=len(parts),
            DOUBLE=_is_double(lse_sum), **_blocks(out_sum.shape[3]),
        )  # fmt: skip

    def add(self, sums: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], *, is_first: bool) -> None:
        assert len(sums) <= MOST_SUMS, "more sums than a launch takes"
        widths = [x.shape[3] for x in sums]
        grid, shape = _grid(sums[0], max(widths))
        _add[grid](
            *_operand(sums[0]), *_operand(parts[0][0]), *_operand(parts[-1][0]),
            *_operand(sums[-1]), *_operand(parts[0][-1]), *_operand(parts[-1][-1]),
            *shape, widths[0], widths[-1], IS_FIRST=is_first, NUM_PARTS=len(parts), NUM_SUMS=len(sums),
            DOUBLE=_is_double(sums[0]), **_blocks(max(widths)),
        )  # fmt: skip

    def place(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        assert len(pairs) <= MOST_PAIRS, "more pairs than a launch takes"
        widths = [_width(into) for into, _ in pairs]
        padded = [*pairs, *[pairs[-1]] * (MOST_PAIRS - len(pairs))]
        operands = [part for into, source in padded for part in (*_operand(into), *_operand(source))]
        grid, shape = _grid(pairs[0][0], max(widths))
        _place[grid](
            *operands,
            *shape,
            *(_width(into) for into, _ in padded),
            NUM_PAIRS=len(pairs),
            **_blocks(max(widths)),
        )

    def row_dot(self, dout: Tensor, out: Tensor, into: Tensor) -> None:
        grid, shape = _grid(dout, dout.shape[3])
        _row_dot[grid](
            *_operand(dout), *_operand(out), *_operand(into), *shape, dout.shape[3],
            DOUBLE=_is_double(into), **_blocks(dout.shape[3]),
        )  # fmt: skip

    def stand_in(self, dout: Tensor, delta: Tensor, into: Tensor) -> None:
        grid, shape = _grid(dout, dout.shape[3])
        _stand_in[grid](
            *_operand(dout), *_operand(delta), *_operand(into), *shape, dout.shape[3],
            DOUBLE=_is_double(delta), **_blocks(dout.shape[3]),
        )  # fmt: skip


def _operand(x: Tensor) -> tuple[Any, ...]:
    """A tensor and the strides of its rows."""
    return x, *x.stride()[:3]


def _is_double(x: Tensor) -> bool:
    return x.dtype == torch.float64


def _width(x: Tensor) -> int:
    return x.shape[3] if x.dim() == 4 else 1


def _blocks(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {"COLUMNS": columns, "ROWS": max(1, ELEMENTS // columns), "num_warps": NUM_WARPS}


def _grid(x: Tensor, width: int) -> tuple[tuple[int], tuple[int, int, int]]:
    """How many programs there are, and (rows in all, b, h)."""
    tokens, batch, heads = x.shape[:3]
    num_rows = tokens * batch * heads
    return (triton.cdiv(num_rows, _blocks(width)["ROWS"]),), (num_rows, batch, heads)


# ---------------------------------------------------------------------- kernels
# Of each tensor: where it begins, and the strides of s, b and h.


@triton.jit
def _row(row, batch, heads, stride_s, stride_b, stride_h):  # type: ignore[no-untyped-def]
    """Where rows begin, [rows, 1]."""
    head = (row % heads).to(tl.int64)
    sequence = (row // heads % batch).to(tl.int64)
    token = (row // heads // batch).to(tl.int64)
    return (token * stride_s + sequence * stride_b + head * stride_h)[:, None]


@triton.jit
def _read(at, mask, DOUBLE: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(at, mask=mask, other=0.0)
    if DOUBLE:
        return x.to(tl.float64)
    return x.to(tl.float32)


@triton.jit
def _merged(out, lse, x, lse_x):  # type: ignore[no-untyped-def]
    """(out, lse) with another partial result (x, lse_x): [rows, columns] and [rows, 1]."""
    difference = lse_x - lse
    weight = tl.where(lse_x == float("-inf"), 0.0, 1.0 / (1.0 + tl.exp(-difference)))
    out = tl.where(weight < 0.5, out + weight * (x - out), x - (x - out) * (1.0 - weight))
    larger = tl.where(lse > lse_x, lse, lse_x)
    added = larger + tl.log(1.0 + tl.exp(-tl.abs(difference)))
    is_none = (lse == float("-inf")) & (lse_x == float("-inf"))
    return out, tl.where(is_none, float("-inf"), added)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out_sum, os, ob, oh, lse_sum, ls, lb, lh, first, fs, fb, fh, first_lse, gs, gb, gh, second, ss, sb, sh,
    second_lse, ts, tb, th, num_rows, batch, heads, width,
    IS_FIRST: tl.constexpr, NUM_PARTS: tl.constexpr, DOUBLE: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    is_row = (row < num_rows)[:, None]
    is_in = is_row & (column < width)
    sum_at = out_sum + _row(row, batch, heads, os, ob, oh) + column
    lse_at = lse_sum + _row(row, batch, heads, ls, lb, lh)
    x = _read(first + _row(row, batch, heads, fs, fb, fh) + column, is_in, DOUBLE)
    lse_x = _read(first_lse + _row(row, batch, heads, gs, gb, gh), is_row, DOUBLE)
    if IS_FIRST:
        out, lse = x, lse_x
    else:
        out, lse = _merged(_read(sum_at, is_in, DOUBLE), _read(lse_at, is_row, DOUBLE), x, lse_x)
    if NUM_PARTS == 2:
        x = _read(second + _row(row, batch, heads, ss, sb, sh) + column, is_in, DOUBLE)
        lse_x = _read(second_lse + _row(row, batch, heads, ts, tb, th), is_row, DOUBLE)
        out, lse = _merged(out, lse, x, lse_x)
    tl.store(sum_at, out.to(out_sum.dtype.element_ty), mask=is_in)
    tl.store(lse_at, lse.to(lse_sum.dtype.element_ty), mask=is_row)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    row, column, is_row, total, os, ob, oh, first, fs, fb, fh, second, ss, sb, sh, batch, heads, width,
    IS_FIRST: tl.constexpr, NUM_PARTS: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    is_in = is_row & (column < width)
    at = total + _row(row, batch, heads, os, ob, oh) + column
    x = _read(first + _row(row, batch, heads, fs, fb, fh) + column, is_in, DOUBLE)
    if not IS_FIRST:
        x = _read(at, is_in, DOUBLE) + x
    if NUM_PARTS == 2:
        x += _read(second + _row(row, batch, heads, ss, sb, sh) + column, is_in, DOUBLE)
    tl.store(at, x.to(total.dtype.element_ty), mask=is_in)


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    total, os, ob, oh, first, fs, fb, fh, second, ss, sb, sh,
    total_2, os_2, ob_2, oh_2, first_2, fs_2, fb_2, fh_2, second_2, ss_2, sb_2, sh_2,
    num_rows, batch, heads, width, width_2,
    IS_FIRST: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_SUMS: tl.constexpr, DOUBLE: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    is_row = (row < num_rows)[:, None]
    _sum(
        row, column, is_row, total, os, ob, oh, first, fs, fb, fh, second, ss, sb, sh, batch, heads, width,
        IS_FIRST, NUM_PARTS, DOUBLE,
    )  # fmt: skip
    if NUM_SUMS == 2:
        _sum(
            row, column, is_row, total_2, os_2, ob_2, oh_2, first_2, fs_2, fb_2, fh_2, second_2, ss_2, sb_2, sh_2,
            batch, heads, width_2, IS_FIRST, NUM_PARTS, DOUBLE,
        )  # fmt: skip


@triton.jit
def _copy(row, column, is_row, into, os, ob, oh, source, fs, fb, fh, batch, heads, width):  # type: ignore[no-untyped-def]
    is_in = is_row & (column < width)
    x = tl.load(source + _row(row, batch, heads, fs, fb, fh) + column, mask=is_in)
    tl.store(into + _row(row, batch, heads, os, ob, oh) + column, x.to(into.dtype.element_ty), mask=is_in)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    a, as_, ab, ah, b, bs, bb, bh, c, cs, cb, ch, d, ds, db, dh, e, es, eb, eh, f, fs, fb, fh,
    g, gs, gb, gh, i, is_, ib, ih, num_rows, batch, heads, width_1, width_2, width_3, width_4,
    NUM_PAIRS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    is_row = (row < num_rows)[:, None]
    _copy(row, column, is_row, a, as_, ab, ah, b, bs, bb, bh, batch, heads, width_1)
    if NUM_PAIRS > 1:
        _copy(row, column, is_row, c, cs, cb, ch, d, ds, db, dh, batch, heads, width_2)
    if NUM_PAIRS > 2:
        _copy(row, column, is_row, e, es, eb, eh, f, fs, fb, fh, batch, heads, width_3)
    if NUM_PAIRS > 3:
        _copy(row, column, is_row, g, gs, gb, gh, i, is_, ib, ih, batch, heads, width_4)


@triton.jit
def _row_dot(  # type: ignore[no-untyped-def]
    dout, ds, db, dh, out, os, ob, oh, into, ts, tb, th, num_rows, batch, heads, width,
    DOUBLE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    is_row = (row < num_rows)[:, None]
    is_in = is_row & (column < width)
    x = _read(dout + _row(row, batch, heads, ds, db, dh) + column, is_in, DOUBLE)
    y = _read(out + _row(row, batch, heads, os, ob, oh) + column, is_in, DOUBLE)
    delta = tl.sum(x * y, axis=1)[:, None]
    tl.store(into + _row(row, batch, heads, ts, tb, th), delta.to(into.dtype.element_ty), mask=is_row)


@triton.jit
def _stand_in(  # type: ignore[no-untyped-def]
    dout, ds, db, dh, delta, es, eb, eh, into, ts, tb, th, num_rows, batch, heads, width,
    DOUBLE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """See `elementwise.stand_in_out`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    is_row = (row < num_rows)[:, None]
    is_in = is_row & (column < width)
    x = _read(dout + _row(row, batch, heads, ds, db, dh) + column, is_in, DOUBLE)
    largest = tl.max(tl.abs(x), axis=1)[:, None]
    total = tl.sum(tl.abs(x), axis=1)[:, None]  # NaN shows in a sum, not in a maximum
    no_gradient = total == 0.0
    largest = tl.where(no_gradient, 1.0, largest)
    direction = x / largest
    square = tl.where(no_gradient, 1.0, tl.sum(direction * direction, axis=1)[:, None])
    length = _read(delta + _row(row, batch, heads, es, eb, eh), is_row, DOUBLE) / largest / square
    at = into + _row(row, batch, heads, ts, tb, th) + column
    tl.store(at, (direction * length).to(into.dtype.element_ty), mask=is_in)
