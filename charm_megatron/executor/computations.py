"""What an Attend computes under each pass: one computation for each, chosen by the pass itself.

A computation takes the operands of a rectangle of blocks and returns a partial result for each of the pass's results,
in their order. Adding a pass is a `Pass` and a `Computation`, nothing else.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from charm_megatron.executor.reduce import Partial
from charm_megatron.kernels import BlockKernel, masked_logits
from charm_megatron.lowering.storage import AttendStep
from charm_megatron.schedule.passes import (
    BACKWARD,
    FORWARD,
    LOGITS,
    LOGITS_BACKWARD,
    VALUES,
    VALUES_BACKWARD,
    Pass,
)
from charm_megatron.workload import Band

BlockKey = tuple[int, int, int]
"""(query chunk, KV chunk, query head group)."""


@dataclass
class BlockContext:
    """What computing blocks needs beside its operands.

    `logits` holds whole blocks between the rounds of ring self-attention, which keeps them all: probabilities
    [b, h_k, g, s_q, s_k], then their gradients.
    """

    kernel: BlockKernel
    softmax_scale: float
    head_dim: int
    logits: dict[BlockKey, Tensor] = field(default_factory=dict)


class Operand(NamedTuple):
    """One side of a rectangle: values [s, b, h, w] and statistics [s, b, h, c]."""

    values: Tensor
    stats: Tensor


Attended = Sequence[Partial]
"""A partial result for each of `Pass.results`."""


def _nothing(context: BlockContext, chunks: Sequence[int], tensors: MutableMapping[str, Tensor]) -> None:
    """Most passes need nothing before their first block."""


@dataclass(frozen=True)
class Computation:
    """`attend` computes a rectangle; `prepare` runs before the pass, on the tensors of the rank's chunks by name."""

    attend: Callable[[BlockContext, AttendStep, Operand, Operand], Attended]
    prepare: Callable[[BlockContext, Sequence[int], MutableMapping[str, Tensor]], None] = _nothing


def _forward(context: BlockContext, step: AttendStep, q: Operand, kv: Operand) -> Attended:
    """(q, k, v) -> (out, lse)."""
    rows, keys, band = _trim(step.action.band, q.values, kv.values)
    k, v = kv.values[keys, ..., : context.head_dim], kv.values[keys, ..., context.head_dim :]
    out, lse = context.kernel.forward(
        q.values[rows], k, v, causal=step.action.causal, softmax_scale=context.softmax_scale, band=band
    )
    return [Partial((out,), lse, rows)]


def _backward(context: BlockContext, step: AttendStep, q: Operand, kv: Operand) -> Attended:
    """(q, dout, lse, delta, k, v) -> dq and (dk, dv)."""
    d = context.head_dim
    rows, keys, band = _trim(step.action.band, q.values, kv.values)
    values, stats, keys_values = q.values[rows], q.stats[rows], kv.values[keys]
    dq, dk, dv = context.kernel.backward(
        values[..., d:],
        values[..., :d],
        keys_values[..., :d],
        keys_values[..., d:],
        stats[..., 0],
        stats[..., 1],
        causal=step.action.causal,
        softmax_scale=context.softmax_scale,
        band=band,
    )
    return [Partial((dq,), rows=rows), Partial((dk, dv), rows=keys)]


def _trim(band: Band | None, q: Tensor, kv: Tensor) -> tuple[slice, slice, Band | None]:
    """The rows and keys of a block that have anything unmasked, and the band within them."""
    if band is None:
        return slice(None), slice(None), None
    rows, keys, within = band.trimmed(q.shape[0], kv.shape[0])
    is_full = within.is_full(rows.stop - rows.start, keys.stop - keys.start)
    return rows, keys, None if is_full else within


# ---------------------------------------------------------------------- ring self-attention (arXiv:2105.13120)


def _logits(context: BlockContext, step: AttendStep, q: Operand, k: Operand) -> Attended:
    """First round: keeps the masked logits of each block."""
    for block in _single_blocks(step):
        rows, keys = q.values[block.rows], k.values[block.keys]
        context.logits[block.key] = masked_logits(rows, keys, False, context.softmax_scale, block.band)
    return []


def _softmax_of_rows(
    context: BlockContext, chunks: Sequence[int], tensors: MutableMapping[str, Tensor]
) -> None:
    """Between the rounds: turns kept logits into probabilities, and adds lse [s, b, h] to the tensors."""
    rows: dict[int, list[Tensor]] = {}
    for (q, _, _), logits in context.logits.items():
        rows.setdefault(q, []).append(logits)
    lse = {q: torch.logsumexp(torch.cat(blocks, dim=-1), dim=-1) for q, blocks in rows.items()}
    for (q, _, _), logits in context.logits.items():
        logits.sub_(lse[q].unsqueeze(-1)).exp_()
    # [b, h_k, g, s] -> [s, b, h]
    tensors["lse"] = torch.cat([lse[chunk].permute(3, 0, 1, 2).flatten(2, 3) for chunk in chunks])


def _values(context: BlockContext, step: AttendStep, p: Operand, v: Operand) -> Attended:
    """Second round: probabilities times V. There is no online softmax: parts of out add up."""
    out = _zeros(p.values, v.values.shape[-1], context.logits)
    for block in _single_blocks(step):
        probabilities = context.logits[block.key]
        values = v.values[block.keys].to(probabilities.dtype)
        out[block.rows] += torch.einsum("bkgqs,sbkd->qbkgd", probabilities, values).flatten(2, 3)
    return [Partial((out,))]


def _values_backward(context: BlockContext, step: AttendStep, dp: Operand, v: Operand) -> Attended:
    """dv from the probabilities, and the gradient of the logits in their place."""
    dv = _zeros(v.values, v.values.shape[-1], context.logits)
    for block in _single_blocks(step):
        probabilities, values = context.logits[block.key], v.values[block.keys]
        dout = _grouped(dp.values[block.rows], probabilities)
        delta = dp.stats[block.rows, ..., 0].reshape(dout.shape[:-1]).permute(1, 2, 3, 0)  # -> [b, k, g, s]
        dv[block.keys] += torch.einsum("bkgqs,qbkgd->sbkd", probabilities, dout)
        d_probabilities = torch.einsum("qbkgd,sbkd->bkgqs", dout, values.to(dout.dtype))
        context.logits[block.key] = (
            probabilities * (d_probabilities - delta.unsqueeze(-1)) * context.softmax_scale
        )
    return [Partial((dv,))]


def _logits_backward(context: BlockContext, step: AttendStep, ds: Operand, k: Operand) -> Attended:
    """dq and dk from the gradient of the logits."""
    dq = _zeros(ds.values, ds.values.shape[-1], context.logits)
    dk = _zeros(k.values, k.values.shape[-1], context.logits)
    for block in _single_blocks(step):
        dlogits, keys = context.logits[block.key], k.values[block.keys]
        dq[block.rows] += torch.einsum("bkgqs,sbkd->qbkgd", dlogits, keys.to(dlogits.dtype)).flatten(2, 3)
        dk[block.keys] += torch.einsum("bkgqs,qbkgd->sbkd", dlogits, _grouped(ds.values[block.rows], dlogits))
    return [Partial((dq,)), Partial((dk,))]


class _Block(NamedTuple):
    key: BlockKey
    rows: slice
    keys: slice
    band: Band | None


def _single_blocks(step: AttendStep) -> Iterator[_Block]:
    """The blocks of a rectangle one by one, each with its mask as a band."""
    action = step.action
    for i, q in enumerate(action.q):
        for j, kv in enumerate(action.kv):
            if not (action.causal and kv.chunk > q.chunk):
                rows = slice(step.q_rows[i], step.q_rows[i + 1])
                keys = slice(step.kv_rows[j], step.kv_rows[j + 1])
                on_diagonal = action.causal and q.chunk == kv.chunk
                diagonal = Band(0, rows.stop - rows.start - 1) if on_diagonal else None
                yield _Block((q.chunk, kv.chunk, q.head), rows, keys, action.band or diagonal)


def _zeros(like: Tensor, width: int, blocks: Mapping[BlockKey, Tensor]) -> Tensor:
    """[s, b, h, width] in the dtype of the kept blocks."""
    return torch.zeros((*like.shape[:3], width), dtype=next(iter(blocks.values())).dtype, device=like.device)


def _grouped(x: Tensor, blocks: Tensor) -> Tensor:
    """[s, b, h, d] -> [s, b, h_k, g, d] in the dtype of `blocks` [b, h_k, g, ..]."""
    return x.to(blocks.dtype).reshape(*x.shape[:2], *blocks.shape[1:3], x.shape[3])


COMPUTATIONS: Mapping[Pass, Computation] = {
    FORWARD: Computation(_forward),
    BACKWARD: Computation(_backward),
    LOGITS: Computation(_logits),
    VALUES: Computation(_values, _softmax_of_rows),
    VALUES_BACKWARD: Computation(_values_backward),
    LOGITS_BACKWARD: Computation(_logits_backward),
}
