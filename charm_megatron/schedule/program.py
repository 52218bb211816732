"""Hop and block tables -> the program of one rank, made on demand.

The program of tick t: start the transfers of step t, take in results that arrived before, compute the
blocks of tick t. Then `add_waits` puts each Wait before the first reader, and `add_frees` each Free after
the last one.

Why this cannot deadlock: both ends of a hop post it under the same key, every rank posts in key order, and
what a Post or Wait depends on has a smaller key. By induction on the key every transfer is matched, given
one ordered queue, or one fused group a step.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from charm_megatron.schedule.actions import (
    Accumulate,
    Action,
    Attend,
    Free,
    Key,
    Message,
    Name,
    Post,
    Program,
    Wait,
)
from charm_megatron.schedule.passes import CARGOS, Pass

if TYPE_CHECKING:
    from charm_megatron.schedule.schedule import Schedule

Ticks = dict[int, list[Attend]]


def rank_program(schedule: "Schedule", rank: int) -> Program:
    """All actions of one rank, in order."""
    posts = _posts(schedule, rank)
    body = _interleave(posts, _post_ticks(posts, schedule.depth), _attends(schedule, rank))
    return tuple(add_frees(add_waits(body, schedule.depth, schedule.pass_), schedule, rank))


def _posts(schedule: "Schedule", rank: int) -> list[Post]:
    """The transfers of one rank, in key order; pieces with equal step, lane and peer are one message."""
    hops, problem = schedule.hops, schedule.problem
    rows = np.nonzero((hops.src == rank) | (hops.dst == rank))[0]
    names: dict[tuple[Key, int, int, bool], list[Name]] = defaultdict(list)
    for step, cargo, piece, src, dst in zip(
        *(c[rows].tolist() for c in (hops.step, hops.cargo, hops.piece, hops.src, hops.dst)), strict=True
    ):
        kind, crosses = schedule.pass_.cargos[cargo], problem.domains.crosses(src, dst)
        lane = 2 * cargo + (not crosses)  # the slower link first
        chunk, head = divmod(piece, problem.head_groups(kind.side))
        is_send = src == rank
        received_from = src if kind.is_result and not is_send else -1
        name = Name(kind.name, chunk, head, received_from)
        names[Key(step, 0 if schedule.fuse else lane), lane, dst if is_send else src, is_send].append(name)
    grouped: dict[Key, tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for (key, _, peer, is_send), listed in sorted(names.items()):
        message = Message(peer, tuple(sorted(listed, key=lambda name: (name.head, name.chunk))))
        grouped[key][0 if is_send else 1].append(message)
    return [Post(key, tuple(sends), tuple(recvs)) for key, (sends, recvs) in sorted(grouped.items())]


def _post_ticks(posts: list[Post], depth: int) -> list[int]:
    """When each post is made: `depth - 1` ticks ahead of its step, but not before what it sends is there."""
    arrived: dict[Name, int] = {}
    ticks, latest = [], 0
    for post in posts:
        ready = [post.key.step if CARGOS[x.cargo].is_result else arrived.get(x, 0) for x in sent(post)]
        latest = max(latest, post.key.step - depth + 1, *ready)
        ticks.append(latest)
        arrived.update((x, post.key.step + 1) for x in received(post))
    return ticks


def _attends(schedule: "Schedule", rank: int) -> Ticks:
    blocks, problem = schedule.blocks, schedule.problem
    rows: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    mine = np.nonzero(blocks.rank == rank)[0]
    for tick, head, q, kv in zip(
        *(c[mine].tolist() for c in (blocks.tick, blocks.head, blocks.q, blocks.kv)), strict=True
    ):
        rows[tick, head][q].append(kv)
    attends: Ticks = defaultdict(list)
    q_cargo, kv_cargo = schedule.pass_.q_down.name, schedule.pass_.kv_down.name
    for (tick, head), per_q in sorted(rows.items()):
        kv_head = head * problem.kv_head_groups // problem.q_head_groups
        rectangles = list(_rectangles(per_q, problem.causal))
        # Visiting queries first: somebody waits for their results.
        rectangles.sort(key=lambda rectangle: any(problem.sharding.home[q] == rank for q in rectangle[0]))
        for qs, kvs, causal in rectangles:
            q_names = tuple(Name(q_cargo, chunk, head) for chunk in qs)
            kv_names = tuple(Name(kv_cargo, chunk, kv_head) for chunk in kvs)
            attends[tick].append(Attend(q_names, kv_names, causal))
    return attends


def _rectangles(
    rows: dict[int, list[int]], causal: bool
) -> Iterable[tuple[tuple[int, ...], tuple[int, ...], bool]]:
    """Few rectangles (q chunks, KV chunks, causal) that cover exactly the blocks {q: KV chunks}.

    The chunks on the diagonal make one causal rectangle when each of them meets all those before it, as a
    shard does with itself; rows with equal KV chunks make one full rectangle.
    """
    rest = {q: set(kvs) for q, kvs in rows.items()}
    diagonal = sorted(q for q, kvs in rest.items() if causal and q in kvs)
    staircase = [{kv for kv in diagonal if kv <= q} for q in diagonal]
    if all(steps <= rest[q] for q, steps in zip(diagonal, staircase, strict=True)):
        groups = [diagonal] if diagonal else []
    else:
        groups = [[q] for q in diagonal]
    for group in groups:
        yield tuple(group), tuple(group), True
        for q in group:
            rest[q] -= {kv for kv in group if kv <= q}
    full: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for q in sorted(rest):
        if rest[q]:
            full[tuple(sorted(rest[q]))].append(q)
    for kvs, qs in full.items():
        yield tuple(qs), kvs, False


def _interleave(posts: list[Post], post_ticks: list[int], attends: Ticks) -> list[Action]:
    """Merges posts, blocks and accumulations by tick.

    A received result is taken in after the posts of the next tick, so that no post waits for it, unless
    one of them sends the very result on.
    """
    by_tick = defaultdict(list)
    for post, tick in zip(posts, post_ticks, strict=True):
        by_tick[tick].append(post)
    body: list[Action] = []
    arrived: list[tuple[int, Name]] = []  # (step, received partial result), not yet accumulated
    end = 1 + max([*by_tick, *attends, *(post.key.step for post in posts)], default=-1)
    for tick in range(end):
        for post in by_tick[tick]:
            going = set(sent(post))
            due = [(s, x) for s, x in arrived if x._replace(src=-1) in going]
            arrived = [item for item in arrived if item not in due]
            body += [*(Accumulate(x) for _, x in due), post]
        due = [(s, x) for s, x in arrived if s < tick]
        arrived = [item for item in arrived if item not in due]
        body += [*(Accumulate(x) for _, x in due), *attends[tick]]
        arrived += [(post.key.step, x) for post in by_tick[tick] for x in received(post) if x.src >= 0]
    return [*body, *(Accumulate(x) for _, x in arrived)]


def sent(post: Post) -> list[Name]:
    """What a post sends."""
    return [name for message in post.sends for name in message.names]


def received(post: Post) -> list[Name]:
    """What a post receives."""
    return [name for message in post.recvs for name in message.names]


def reads(action: Action) -> list[Name]:
    """The pieces that an action reads."""
    match action:
        case Post():
            return sent(action)
        case Attend(q, kv, _):
            return [*q, *kv]
        case Accumulate(name):
            return [name]
        case Wait() | Free():
            return []


def writes(action: Action, pass_: Pass) -> list[Name]:
    """The results that an action adds to."""
    match action:
        case Attend(q, kv, _):
            sides = ((q, pass_.q_up), (kv, pass_.kv_up))
            return [Name(up.name, x.chunk, x.head) for names, up in sides if up for x in names]
        case Accumulate(name):
            return [name._replace(src=-1)]
        case Post() | Wait() | Free():
            return []


def add_waits(body: list[Action], depth: int, pass_: Pass) -> list[Action]:
    """Waits before the first reader, and before running more than `depth` steps ahead of a transfer."""
    out: list[Action] = []
    open_keys: list[Key] = []
    source: dict[Name, Key] = {}
    for action in body:
        due = {source[name] for name in reads(action) if name in source}
        if isinstance(action, Post):
            due |= {key for key in open_keys if key.step < action.key.step - depth}
        out += [Wait(key) for key in open_keys if key in due]
        open_keys = [key for key in open_keys if key not in due]
        if isinstance(action, Post):
            open_keys.append(action.key)
            source.update((name, action.key) for name in received(action))
        out.append(action)
    return [*out, *(Wait(key) for key in open_keys)]


def add_frees(program: list[Action], schedule: "Schedule", rank: int) -> Iterable[Action]:
    """Gives back each piece that is not at home here, after its last reader and the end of its last send."""
    ended = {action.key: i for i, action in enumerate(program) if isinstance(action, Wait)}
    last: dict[Name, int] = {}
    for i, action in enumerate(program):
        for name in (*reads(action), *writes(action, schedule.pass_)):
            last[name] = max(last.get(name, 0), i)
        if isinstance(action, Post):
            for name in (*sent(action), *received(action)):
                last[name] = max(last.get(name, 0), ended[action.key])
    after = defaultdict(list)
    for name, i in last.items():
        if name.src >= 0 or schedule.problem.sharding.home[name.chunk] != rank:
            after[i].append(Free(name))
    for i, action in enumerate(program):
        yield action
        yield from after[i]
