"""Hop and block tables -> the program of one rank, made on demand.

The program of compute step t: start the transfers of step t, take in results that arrived before, compute the
blocks of compute step t. Then `send_results_early` moves results up to where they are complete, `add_waits` puts each
Wait before the first reader, and `add_frees` each Free after the last one.

Why this cannot deadlock: both ends of a hop post it under the same key, every rank posts in key order, and
what a Post or Wait depends on has a smaller key. By induction on the key every transfer is matched, given
one ordered queue of fused groups: the results of a step, then its operands.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from charm_megatron.schedule.actions import (
    Accumulate,
    Action,
    Attend,
    Free,
    Key,
    Message,
    Post,
    Program,
    Wait,
    reads,
    writes,
)
from charm_megatron.schedule.passes import Pass
from charm_megatron.schedule.payload import PAYLOADS
from charm_megatron.schedule.piece import Piece
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.topology import Domains
from charm_megatron.workload import Band

ComputeSteps = dict[int, list[Attend]]


def rank_program(schedule: Schedule, rank: int) -> Program:
    """All actions of one rank, in order."""
    posts = _posts(schedule, rank)
    post_steps = _post_steps(posts, schedule.options.prefetch_depth)
    far = _far(schedule.problem.domains, rank)
    body = _interleave(posts, post_steps, _attends(schedule, rank), far)
    body = send_results_early(body, schedule.pass_)
    return tuple(add_frees(add_waits(body, schedule, rank, far), schedule, rank))


def _far(domains: Domains, rank: int) -> frozenset[int]:
    """The ranks of other domains."""
    return frozenset(peer for peer in range(domains.cp_size) if domains.crosses(rank, peer))


def _posts(schedule: Schedule, rank: int) -> list[Post]:
    """The transfers of one rank, in key order; pieces with equal step, lane and peer are one message."""
    hops, problem = schedule.hops, schedule.problem
    rows = np.nonzero((hops.src == rank) | (hops.dst == rank))[0]
    names: dict[tuple[Key, int, int, bool], list[Piece]] = defaultdict(list)
    for step, payload, piece, src, dst in zip(
        *(c[rows].tolist() for c in (hops.comm_step, hops.payload, hops.piece, hops.src, hops.dst)),
        strict=True,
    ):
        kind, crosses = schedule.pass_.payloads[payload], problem.domains.crosses(src, dst)
        lane = 2 * payload + (not crosses)  # the slower link first
        order = (0 if kind.is_result else 1) if schedule.options.fuse else lane
        is_send = src == rank
        numbering = problem.numbering(kind.side)
        received_from = src if kind.is_result and not is_send else None
        names[Key(step, order), lane, dst if is_send else src, is_send].append(
            numbering.piece(kind.name, piece, received_from)
        )
    grouped: dict[Key, tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for (key, _, peer, is_send), listed in sorted(names.items()):
        message = Message(peer, tuple(sorted(listed, key=lambda name: (name.head, name.chunk))))
        grouped[key][0 if is_send else 1].append(message)
    return [Post(key, tuple(sends), tuple(recvs)) for key, (sends, recvs) in sorted(grouped.items())]


def _post_steps(posts: list[Post], prefetch_depth: int) -> list[int]:
    """When each post is made: `prefetch_depth - 1` compute steps ahead, but not before what it sends is there."""
    arrived: dict[Piece, int] = {}
    compute_steps, latest = [], 0
    for post in posts:
        ready = [post.key.step if PAYLOADS[x.payload].is_result else arrived.get(x, 0) for x in post.sent]
        latest = max(latest, post.key.step - prefetch_depth + 1, *ready)
        compute_steps.append(latest)
        arrived.update((x, post.key.step + 1) for x in post.received)
    return compute_steps


def _attends(schedule: Schedule, rank: int) -> ComputeSteps:
    blocks, problem = schedule.blocks, schedule.problem
    rows: dict[tuple[int, int], dict[int, list[Column]]] = defaultdict(lambda: defaultdict(list))
    mine = np.nonzero(blocks.rank == rank)[0]
    for compute_step, head, q, kv, copy in zip(
        *(c[mine].tolist() for c in (blocks.compute_step, blocks.head, blocks.q, blocks.kv, blocks.kv_copy)),
        strict=True,
    ):
        rows[compute_step, head][q].append((kv, copy))
    attends: ComputeSteps = defaultdict(list)
    q_payload, kv_payload = schedule.pass_.q_down.name, schedule.pass_.kv_down.name
    for (compute_step, head), per_q in sorted(rows.items()):
        kv_head = problem.kv_head_of(head)
        rectangles = list(_rectangles(per_q, problem))
        # Visiting queries first: somebody waits for their results.
        rectangles.sort(key=lambda rectangle: any(problem.sharding.home[q] == rank for q in rectangle.q))
        for qs, columns, causal, band in rectangles:
            q_names = tuple(Piece(q_payload, chunk, head) for chunk in qs)
            kv_names = tuple(Piece(kv_payload, chunk, kv_head, copy=copy) for chunk, copy in columns)
            attends[compute_step].append(Attend(q_names, kv_names, causal, band))
    return attends


Column = tuple[int, int]
"""A KV chunk, and which copy of it."""


class _Rectangle(NamedTuple):
    q: tuple[int, ...]
    columns: tuple[Column, ...]
    causal: bool = False
    band: Band | None = None


def _rectangles(rows: dict[int, list[Column]], problem: Problem) -> Iterable[_Rectangle]:
    """Few rectangles that cover exactly the blocks {q chunk: columns}.

    Chunks that meet themselves causally and all earlier ones in full make one causal rectangle, as a shard
    does with itself; rows with equal full columns make one full rectangle; any other block is one by itself.
    """
    rest: dict[int, set[Column]] = {}
    cut: list[tuple[int, Column]] = []
    for q, columns in rows.items():
        rest[q] = {column for column in columns if problem.is_full(q, column[0])}
        cut += [(q, column) for column in columns if column not in rest[q]]
    diagonal = sorted(
        q for q, (kv, _) in cut if q == kv and problem.band(q, q).is_causal(*problem.block_shape(q, q))
    )
    steps = {q: {(kv, 0) for kv in diagonal if kv < q} for q in diagonal}
    is_staircase = all(steps[q] <= rest[q] for q in diagonal)
    for group in [diagonal] if diagonal and is_staircase else [[q] for q in diagonal]:
        yield _Rectangle(tuple(group), tuple((kv, 0) for kv in group), causal=True)
        for q in group:
            rest[q] -= {(kv, 0) for kv in group}
    for q, column in sorted(cut):
        if q != column[0] or q not in diagonal:
            yield _Rectangle((q,), (column,), band=problem.band(q, column[0]))
    full: dict[tuple[Column, ...], list[int]] = defaultdict(list)
    for q in sorted(rest):
        if rest[q]:
            full[tuple(sorted(rest[q]))].append(q)
    for columns_, qs in full.items():
        yield _Rectangle(tuple(qs), columns_)


def _interleave(
    posts: list[Post], post_steps: list[int], attends: ComputeSteps, far: frozenset[int]
) -> list[Action]:
    """Merges posts, blocks and accumulations by compute step.

    A received result is taken in after the posts of the next compute step, so that no post waits for it, unless
    one of them sends the very result on. One from a `far` rank comes over a slower link, and is taken in when the
    next such result is due.
    """
    by_step = defaultdict(list)
    for post, compute_step in zip(posts, post_steps, strict=True):
        by_step[compute_step].append(post)
    body: list[Action] = []
    arrived: list[tuple[int, Piece]] = []  # (step, received partial result), not yet accumulated
    end = 1 + max([*by_step, *attends, *(post.key.step for post in posts)], default=-1)
    for compute_step in range(end):
        for post in by_step[compute_step]:
            going = set(post.sent)
            due = [(s, x) for s, x in arrived if x.own in going]
            arrived = [item for item in arrived if item not in due]
            body += [*(Accumulate(x) for _, x in due), post]
        next_far = any(x.src in far for post in by_step[compute_step] for x in post.received)
        due = [(s, x) for s, x in arrived if s < compute_step and (next_far or x.src not in far)]
        arrived = [item for item in arrived if item not in due]
        body += [*(Accumulate(x) for _, x in due), *attends[compute_step]]
        arrived += [
            (post.key.step, x) for post in by_step[compute_step] for x in post.received if x.src is not None
        ]
    return [*body, *(Accumulate(x) for _, x in arrived)]


def send_results_early(body: list[Action], pass_: Pass) -> list[Action]:
    """Moves each post of results up to right behind the last action that adds to what it sends (paper, Appendix A).

    It stays behind the posts that come before it, whose order both ends rely on, and passes over no Wait, because there
    are none yet: it can only be reached earlier.
    """
    out: list[Action] = []
    for action in body:
        at = len(out)
        if isinstance(action, Post) and all(
            PAYLOADS[x.payload].is_result for x in (*action.sent, *action.received)
        ):
            going = set(action.sent)
            while (
                at
                and not isinstance(out[at - 1], Post)
                and not going.intersection(writes(out[at - 1], pass_))
            ):
                at -= 1
        out.insert(at, action)
    return out


def add_waits(body: list[Action], schedule: Schedule, rank: int, far: frozenset[int]) -> list[Action]:
    """Waits before the first reader, and so that buffers do not pile up.

    A post that sends is waited for before running more than `prefetch_depth` steps ahead of it, or one step more where
    all that it sends is at home here. One to a `far` rank takes the slower link, and is waited for only where the
    next one of its kind is made.
    """
    home, depth = schedule.problem.sharding.home, schedule.options.prefetch_depth
    out: list[Action] = []
    open_keys: list[Key] = []
    kinds: dict[Key, _PostKind] = {}
    source: dict[Piece, Key] = {}
    for action in body:
        due = {source[name] for name in reads(action) if name in source}
        if isinstance(action, Post):
            kind = kinds[action.key] = _post_kind(action, home, rank, far)
            due |= {key for key in open_keys if kinds[key].holds_up(kind, action.key.step - key.step - depth)}
        out += [Wait(key) for key in open_keys if key in due]
        open_keys = [key for key in open_keys if key not in due]
        if isinstance(action, Post):
            open_keys.append(action.key)
            source.update((name, action.key) for name in action.received)
        out.append(action)
    return [*out, *(Wait(key) for key in open_keys)]


class _PostKind(NamedTuple):
    """What decides how long a post may take: whether it sends, what is not at home here, and to or from a far rank."""

    sends: bool
    sends_foreign: bool
    is_far: bool

    def holds_up(self, following: "_PostKind", steps_late: int) -> bool:
        """Whether a post of the kind `following` has to wait for one of this kind, so many steps beyond the depth."""
        if self.is_far:
            return self.sends and following == self and steps_late > 0
        return self.sends and steps_late > (0 if self.sends_foreign else 1)


def _post_kind(post: Post, home: Sequence[int], rank: int, far: frozenset[int]) -> _PostKind:
    sends_foreign = any(home[piece.chunk] != rank for piece in post.sent)
    is_far = any(message.peer in far for message in (*post.sends, *post.recvs))
    return _PostKind(bool(post.sends), sends_foreign, is_far)


def add_frees(program: list[Action], schedule: Schedule, rank: int) -> Iterable[Action]:
    """Gives back each piece that is not at home here, after its last reader and the end of its last send."""
    ended = {action.key: i for i, action in enumerate(program) if isinstance(action, Wait)}
    last: dict[Piece, int] = {}
    for i, action in enumerate(program):
        for name in (*reads(action), *writes(action, schedule.pass_)):
            last[name] = max(last.get(name, 0), i)
        if isinstance(action, Post):
            for name in (*action.sent, *action.received):
                last[name] = max(last.get(name, 0), ended[action.key])
    after = defaultdict(list)
    for name, i in last.items():
        if name.src is not None or schedule.problem.sharding.home[name.chunk] != rank:
            after[i].append(Free(name))
    for i, action in enumerate(program):
        yield action
        yield from after[i]
