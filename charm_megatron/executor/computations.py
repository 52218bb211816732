"""What an Attend computes under each pass: one computation for each, chosen by the pass itself.

A computation takes the operands of a rectangle of blocks, field by field, and returns a partial result for each of the
pass's results, in their order. Adding a pass is a `Pass` and a `Computation`, nothing else.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from charm_megatron.kernels import BlockKernel, masked_logits
from charm_megatron.lowering.storage import AttendStep
from charm_megatron.schedule.actions import Attend
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
    logits: dict[BlockKey, Tensor] = field(default_factory=dict)


class Partial(NamedTuple):
    """A partial result: its fields [s, b, h, ..], and their lse [s, b, h] where they are merged by it."""

    values: Sequence[Tensor]
    lse: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """What a computation is to know of a rectangle: its chunks and its mask.

    `q_rows` and `kv_rows` are the bounds of the chunks in tokens, beginning with 0. Where computations take only the
    rows and keys that a band leaves, `band` is that of those.
    """

    action: Attend
    band: Band | None
    q_rows: tuple[int, ...]
    kv_rows: tuple[int, ...]


Attended = Sequence[Partial]
"""A partial result for each of `Pass.results`."""


def _nothing(context: BlockContext, chunks: Sequence[int], tensors: MutableMapping[str, Tensor]) -> None:
    """Most passes need nothing before their first block."""


@dataclass(frozen=True)
class Computation:
    """`attend` computes a rectangle from the fields of its operands; `prepare` runs before the pass.

    `prepare` gets the tensors of the rank's chunks by name. `trims`: blocks are cut to what their band leaves.
    """

    attend: Callable[[BlockContext, Block, Sequence[Tensor], Sequence[Tensor]], Attended]
    q_fields: tuple[str, ...]
    kv_fields: tuple[str, ...]
    prepare: Callable[[BlockContext, Sequence[int], MutableMapping[str, Tensor]], None] = _nothing
    trims: bool = False


def block_of(step: AttendStep, computation: Computation) -> tuple[Block, slice, slice]:
    """The rectangle of a step, and those of its rows and keys that the computation is to get."""
    action, band = step.action, step.action.band
    # Kernels see only what is left of a band after trimming, so they cannot tell.
    assert not (action.causal and band), "a rectangle is causal or a band, not both"
    rows = keys = slice(None)
    if band is not None and computation.trims:
        num_rows, num_keys = step.q_rows[-1], step.kv_rows[-1]
        rows, keys, within = band.trimmed(num_rows, num_keys)
        band = None if within.is_full(rows.stop - rows.start, keys.stop - keys.start) else within
        rows = slice(None) if rows == slice(0, num_rows) else rows
        keys = slice(None) if keys == slice(0, num_keys) else keys
    return Block(action, band, step.q_rows, step.kv_rows), rows, keys


def _forward(context: BlockContext, block: Block, q: Sequence[Tensor], kv: Sequence[Tensor]) -> Attended:
    """(q, k, v) -> (out, lse)."""
    out, lse = context.kernel.forward(
        *q, *kv, causal=block.action.causal, softmax_scale=context.softmax_scale, band=block.band
    )
    return [Partial((out,), lse)]


def _backward(context: BlockContext, block: Block, q: Sequence[Tensor], kv: Sequence[Tensor]) -> Attended:
    """(q, dout, out, lse, k, v) -> dq and (dk, dv)."""
    (query, dout, out, lse), (k, v) = q, kv
    dq, dk, dv = context.kernel.backward(
        dout,
        query,
        k,
        v,
        out,
        lse,
        causal=block.action.causal,
        softmax_scale=context.softmax_scale,
        band=block.band,
    )
    return [Partial((dq,)), Partial((dk, dv))]


# ---------------------------------------------------------------------- ring self-attention (arXiv:2105.13120)


def _logits(context: BlockContext, block: Block, q: Sequence[Tensor], kv: Sequence[Tensor]) -> Attended:
    """First round: keeps the masked logits of each block."""
    (query,), (k,) = q, kv
    for one in _single_blocks(block):
        rows, keys = query[one.rows], k[one.keys]
        context.logits[one.key] = masked_logits(rows, keys, False, context.softmax_scale, one.band)
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


def _values(context: BlockContext, block: Block, q: Sequence[Tensor], kv: Sequence[Tensor]) -> Attended:
    """Second round: probabilities times V. There is no online softmax: parts of out add up."""
    (v,) = kv
    out: Tensor | None = None
    for one in _single_blocks(block):
        probabilities = context.logits[one.key]
        values = v[one.keys].to(probabilities.dtype)
        part = torch.einsum("bkgqs,sbkd->qbkgd", probabilities, values).flatten(2, 3)
        if out is None:
            out = part.new_zeros(block.q_rows[-1], *part.shape[1:])
        out[one.rows] += part
    assert out is not None, "a rectangle has blocks"
    return [Partial((out,))]


def _delta(context: BlockContext, chunks: Sequence[int], tensors: MutableMapping[str, Tensor]) -> None:
    """Before the gradients: adds delta [s, b, h] = rowsum(dout * out) to the tensors."""
    dtype = tensors["lse"].dtype
    tensors["delta"] = (tensors["dout"].to(dtype) * tensors["out"].to(dtype)).sum(-1)


def _values_backward(
    context: BlockContext, block: Block, q: Sequence[Tensor], kv: Sequence[Tensor]
) -> Attended:
    """dv from the probabilities, and the gradient of the logits in their place."""
    (dout_of_rows, delta_of_rows), (v,) = q, kv
    dv = _zeros(v, context.logits)
    for one in _single_blocks(block):
        probabilities, values = context.logits[one.key], v[one.keys]
        dout = _grouped(dout_of_rows[one.rows], probabilities)
        delta = delta_of_rows[one.rows].reshape(dout.shape[:-1]).permute(1, 2, 3, 0)  # -> [b, k, g, s]
        dv[one.keys] += torch.einsum("bkgqs,qbkgd->sbkd", probabilities, dout)
        d_probabilities = torch.einsum("qbkgd,sbkd->bkgqs", dout, values.to(dout.dtype))
        context.logits[one.key] = (
            probabilities * (d_probabilities - delta.unsqueeze(-1)) * context.softmax_scale
        )
    return [Partial((dv,))]


def _logits_backward(
    context: BlockContext, block: Block, q: Sequence[Tensor], kv: Sequence[Tensor]
) -> Attended:
    """dq and dk from the gradient of the logits."""
    (query,), (k,) = q, kv
    dq, dk = _zeros(query, context.logits), _zeros(k, context.logits)
    for one in _single_blocks(block):
        dlogits, keys = context.logits[one.key], k[one.keys]
        dq[one.rows] += torch.einsum("bkgqs,sbkd->qbkgd", dlogits, keys.to(dlogits.dtype)).flatten(2, 3)
        dk[one.keys] += torch.einsum("bkgqs,qbkgd->sbkd", dlogits, _grouped(query[one.rows], dlogits))
    return [Partial((dq,)), Partial((dk,))]


class _Block(NamedTuple):
    key: BlockKey
    rows: slice
    keys: slice
    band: Band | None


def _single_blocks(block: Block) -> Iterator[_Block]:
    """The blocks of a rectangle one by one, each with its mask as a band."""
    action = block.action
    for i, q in enumerate(action.q):
        for j, kv in enumerate(action.kv):
            if not (action.causal and kv.chunk > q.chunk):
                rows = slice(block.q_rows[i], block.q_rows[i + 1])
                keys = slice(block.kv_rows[j], block.kv_rows[j + 1])
                on_diagonal = action.causal and q.chunk == kv.chunk
                diagonal = Band(0, rows.stop - rows.start - 1) if on_diagonal else None
                yield _Block((q.chunk, kv.chunk, q.head), rows, keys, action.band or diagonal)


def _zeros(like: Tensor, blocks: Mapping[BlockKey, Tensor]) -> Tensor:
    """Shaped like an operand, in the dtype of the kept blocks."""
    return torch.zeros_like(like, dtype=next(iter(blocks.values())).dtype)


def _grouped(x: Tensor, blocks: Tensor) -> Tensor:
    """[s, b, h, d] -> [s, b, h_k, g, d] in the dtype of `blocks` [b, h_k, g, ..]."""
    return x.to(blocks.dtype).reshape(*x.shape[:2], *blocks.shape[1:3], x.shape[3])


COMPUTATIONS: Mapping[Pass, Computation] = {
    FORWARD: Computation(_forward, ("q",), ("k", "v"), trims=True),
    BACKWARD: Computation(_backward, ("q", "dout", "out", "lse"), ("k", "v"), trims=True),
    LOGITS: Computation(_logits, ("q",), ("k",)),
    VALUES: Computation(_values, (), ("v",), _softmax_of_rows),
    VALUES_BACKWARD: Computation(_values_backward, ("dout", "delta"), ("v",), _delta),
    LOGITS_BACKWARD: Computation(_logits_backward, ("q",), ("k",)),
}
