"""What an Attend computes under each pass, and how its results add up.

Accumulators are fp32 (fp64 for a float64 model), and partial results merge in program order, whatever arrives
first: with a deterministic kernel results are bitwise repeatable.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from charm_megatron.executor.store import PieceStore, columns
from charm_megatron.kernels import BlockKernel, masked_logits
from charm_megatron.schedule.actions import Attend, Piece
from charm_megatron.workload import Band

BlockKey = tuple[int, int, int]
"""(query chunk, KV chunk, query head group)."""


@dataclass
class BlockContext:
    """What computing blocks needs beside the pieces.

    `logits` holds whole blocks between the rounds of ring self-attention, which keeps them all: probabilities
    [b, h_k, g, s_q, s_k], then their gradients.
    """

    kernel: BlockKernel
    softmax_scale: float
    head_dim: int
    logits: dict[BlockKey, Tensor] = field(default_factory=dict)


def attend_forward(store: PieceStore, context: BlockContext, action: Attend) -> None:
    """(q, k, v) -> (out, lse), merged into the accumulators of the queries."""
    q, _ = store.operand(action.q)
    kv, _ = store.operand(action.kv)
    rows, keys, band = _trim(action.band, q, kv)
    k, v = kv[keys, ..., : context.head_dim], kv[keys, ..., context.head_dim :]
    out, lse = context.kernel.forward(
        q[rows], k, v, causal=action.causal, softmax_scale=context.softmax_scale, band=band
    )
    add_out(store, _results("o", action.q), out, lse, rows)


def attend_backward(store: PieceStore, context: BlockContext, action: Attend) -> None:
    """(q, dout, lse, delta, k, v) -> dq and (dk, dv), added to their accumulators."""
    d = context.head_dim
    wide, scalars = store.operand(action.q)
    kv, _ = store.operand(action.kv)
    rows, keys, band = _trim(action.band, wide, kv)
    wide, scalars, kv = wide[rows], scalars[rows], kv[keys]
    dq, dk, dv = context.kernel.backward(
        wide[..., d:],
        wide[..., :d],
        kv[..., :d],
        kv[..., d:],
        scalars[..., 0],
        scalars[..., 1],
        causal=action.causal,
        softmax_scale=context.softmax_scale,
        band=band,
    )
    add_gradient(store, _results("dq", action.q), (dq,), rows)
    add_gradient(store, _results("dkv", action.kv), (dk, dv), keys)


def attend_logits(store: PieceStore, context: BlockContext, action: Attend) -> None:
    """Keeps the masked logits of each block (arXiv:2105.13120, first round)."""
    for q_name, k_name, band in _single_blocks(store, action):
        q, _ = store.operand([q_name])
        k, _ = store.operand([k_name])
        context.logits[_key(q_name, k_name)] = masked_logits(q, k, False, context.softmax_scale, band)


def softmax_rows(context: BlockContext) -> dict[tuple[int, int], Tensor]:
    """Turns kept logits into probabilities; gives lse [b, h_k, g, s_q] by (query chunk, query head group)."""
    rows: dict[tuple[int, int], list[Tensor]] = {}
    for (q, _, head), logits in context.logits.items():
        rows.setdefault((q, head), []).append(logits)
    lse = {row: torch.logsumexp(torch.cat(blocks, dim=-1), dim=-1) for row, blocks in rows.items()}
    for key, logits in context.logits.items():
        logits.sub_(lse[key[0], key[2]].unsqueeze(-1)).exp_()
    return lse


def attend_values(store: PieceStore, context: BlockContext, action: Attend) -> None:
    """Probabilities times V (arXiv:2105.13120, second round); no online softmax: parts of out add up."""
    for p_name, v_name, _ in _single_blocks(store, action):
        v, _ = store.operand([v_name])
        probabilities = context.logits[_key(p_name, v_name)]
        out = torch.einsum("bkgqs,sbkd->qbkgd", probabilities, v.to(probabilities.dtype))
        add_gradient(store, _results("o", [p_name]), (out.flatten(2, 3),))


def attend_values_backward(store: PieceStore, context: BlockContext, action: Attend) -> None:
    """dv from the probabilities, and the gradient of the logits in their place; dout and delta stay at home."""
    for name, v_name, _ in _single_blocks(store, action):
        v, _ = store.operand([v_name])
        wide, scalars = store.operand([name])
        probabilities = context.logits[_key(name, v_name)]
        dout = _grouped(wide, probabilities)
        delta = scalars[..., 0].reshape(*dout.shape[:-1]).permute(1, 2, 3, 0)  # [s, b, k, g] -> [b, k, g, s]
        dv = torch.einsum("bkgqs,qbkgd->sbkd", probabilities, dout)
        dp = torch.einsum("qbkgd,sbkd->bkgqs", dout, v.to(dout.dtype))
        context.logits[_key(name, v_name)] = (
            probabilities * (dp - delta.unsqueeze(-1)) * context.softmax_scale
        )
        add_gradient(store, _results("dv", [v_name]), (dv,))


def attend_logits_backward(store: PieceStore, context: BlockContext, action: Attend) -> None:
    """dq and dk from the gradient of the logits."""
    for name, k_name, _ in _single_blocks(store, action):
        q, _ = store.operand([name])
        k, _ = store.operand([k_name])
        dlogits = context.logits[_key(name, k_name)]
        dq = torch.einsum("bkgqs,sbkd->qbkgd", dlogits, k.to(dlogits.dtype)).flatten(2, 3)
        dk = torch.einsum("bkgqs,qbkgd->sbkd", dlogits, _grouped(q, dlogits))
        add_gradient(store, _results("dq", [name]), (dq,))
        add_gradient(store, _results("dk", [k_name]), (dk,))


ATTENDS: Mapping[str, Callable[[PieceStore, BlockContext, Attend], None]] = {
    "forward": attend_forward,
    "backward": attend_backward,
    "logits": attend_logits,
    "values": attend_values,
    "values_backward": attend_values_backward,
    "logits_backward": attend_logits_backward,
}
"""By name of the pass."""


def accumulate(store: PieceStore, pass_name: str, name: Piece) -> None:
    """Adds a received partial result to this rank's own."""
    place = store.place(name)
    wide = place.parcel.wide(place.index, place.index + 1)
    if pass_name == "forward":
        scalars = place.parcel.scalars(place.index, place.index + 1)
        add_out(store, [name.own], wide, scalars[..., 0])
    else:
        add_gradient(store, [name.own], (wide,))


def add_out(
    store: PieceStore, names: Sequence[Piece], out: Tensor, lse: Tensor, rows: slice = slice(None)
) -> None:
    """Merges a partial (out [s, b, h, d_v], lse [s, b, h]) into the accumulators of `names`, or `rows` of them."""
    for run in store.accumulators(names):
        out_sum, lse_sum, part = run.wide, run.scalars[..., 0], run.rows
        if _is_part(rows, out_sum.shape[0]):
            if run.is_fresh:
                out_sum.zero_()
                lse_sum.fill_(-torch.inf)
            merge_partial(out_sum[rows], lse_sum[rows], out, lse)
        elif run.is_fresh:
            out_sum.copy_(out[part])
            lse_sum.copy_(lse[part])
        else:
            merge_partial(out_sum, lse_sum, out[part], lse[part])


def add_gradient(
    store: PieceStore, names: Sequence[Piece], parts: Sequence[Tensor], rows: slice = slice(None)
) -> None:
    """Adds partial gradients [s, b, h, ..], side by side in a row, to accumulators of `names`, or to `rows` of them."""
    for run in store.accumulators(names):
        for column, part in zip(columns(run.wide, parts), parts, strict=True):
            if _is_part(rows, column.shape[0]):
                if run.is_fresh:
                    column.zero_()
                column[rows].add_(part)
            elif run.is_fresh:
                column.copy_(part[run.rows])
            else:
                column.add_(part[run.rows])


def merge_partial(out_sum: Tensor, lse_sum: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merges a partial result into (out_sum [s, b, h, d_v], lse_sum [s, b, h]), in place.

    lse = logaddexp(lse_a, lse_b); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b, whose second weight
    is sigmoid(lse_b - lse_a). A row without keys has lse -inf; two of them merge into one.
    """
    weight = torch.sigmoid(lse - lse_sum).unsqueeze(-1)
    out_sum.lerp_(out.to(out_sum.dtype), weight.nan_to_num_(0.0))
    torch.logaddexp(lse_sum, lse, out=lse_sum)


def _trim(band: Band | None, q: Tensor, kv: Tensor) -> tuple[slice, slice, Band | None]:
    """The rows and keys of a block that have anything unmasked, and the band within them."""
    if band is None:
        return slice(None), slice(None), None
    rows, keys, within = band.trimmed(q.shape[0], kv.shape[0])
    is_full = within.is_full(rows.stop - rows.start, keys.stop - keys.start)
    return rows, keys, None if is_full else within


def _is_part(rows: slice, num_rows: int) -> bool:
    return (rows.start or 0, num_rows if rows.stop is None else rows.stop) != (0, num_rows)


def _single_blocks(store: PieceStore, action: Attend) -> list[tuple[Piece, Piece, Band | None]]:
    """The blocks of a rectangle one by one, each with its mask as a band."""
    blocks = []
    for q in action.q:
        for kv in action.kv:
            if not (action.causal and kv.chunk > q.chunk):
                (length,) = store.tokens([q])
                diagonal = Band(0, length - 1) if action.causal and q.chunk == kv.chunk else None
                blocks.append((q, kv, action.band or diagonal))
    return blocks


def _key(q: Piece, kv: Piece) -> BlockKey:
    return q.chunk, kv.chunk, q.head


def _grouped(x: Tensor, blocks: Tensor) -> Tensor:
    """[s, b, h, d] -> [s, b, h_k, g, d] in the dtype of `blocks` [b, h_k, g, ..]."""
    return x.to(blocks.dtype).reshape(*x.shape[:2], *blocks.shape[1:3], x.shape[3])


def _results(payload_name: str, operands: Sequence[Piece]) -> list[Piece]:
    return [name._replace(payload=payload_name) for name in operands]
