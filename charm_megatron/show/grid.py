"""A schedule as a grid: steps down, ranks across. Each cell says what a rank computes and sends in that step.

The words are those of the text form (`text`), and two abbreviations keep cells narrow: three or more consecutive
chunks are written `kv4..kv7`, and what goes to several peers alike is written once, behind all their numbers.
"""

import textwrap
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from charm_megatron.schedule.actions import Attend, Message, Post
from charm_megatron.schedule.piece import Piece
from charm_megatron.schedule.schedule import Schedule

CELL_WIDTH = 26
VERBS = ("attend", "send", "recv")


@dataclass
class Cell:
    """What one rank does in one step, by verb; `crossing` are the sends that leave the rank's domain."""

    attend: list[str] = field(default_factory=list)
    send: list[str] = field(default_factory=list)
    recv: list[str] = field(default_factory=list)
    crossing: set[str] = field(default_factory=set)

    def lines(self, verb: str, width: int = CELL_WIDTH) -> list[str]:
        """The lines of one verb, wrapped; what continues a line is indented."""
        texts: list[str] = {"attend": self.attend, "send": self.send, "recv": self.recv}[verb]
        return [line for text in texts for line in textwrap.wrap(text, width, subsequent_indent="  ")]


def num_rows(schedule: Schedule) -> int:
    """Steps and compute steps in which anything happens."""
    return max(schedule.num_comm_steps, schedule.num_compute_steps)


def grid_column(schedule: Schedule, rank: int) -> dict[int, Cell]:
    """The cells of one rank, by step.

    Blocks are in the compute step of the schedule's table; those that are in no table, in the step of the last post
    before them.
    """
    cells: dict[int, Cell] = defaultdict(Cell)
    compute_steps = _compute_steps(schedule, rank)
    step = 0
    for action in schedule.program(rank):
        match action:
            case Post(key, sends, recvs):
                step = key.step
                _add_messages(cells[step], sends, recvs, schedule, rank)
            case Attend():
                known = compute_steps.get((action.q[0].chunk, action.kv[0].chunk, action.q[0].head))
                cells[known.popleft() if known else step].attend.append(_attend_words(action))
            case _:
                pass
    return dict(cells)


def _compute_steps(schedule: Schedule, rank: int) -> dict[tuple[int, int, int], deque[int]]:
    """The compute steps of this rank's blocks; more than one where a faulty schedule computes a block again."""
    blocks = schedule.blocks
    mine = np.nonzero(blocks.rank == rank)[0]
    compute_steps: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)
    columns = (blocks.q, blocks.kv, blocks.head, blocks.compute_step)
    for q, kv, head, compute_step in sorted(zip(*(column[mine].tolist() for column in columns), strict=True)):
        compute_steps[q, kv, head].append(compute_step)
    return compute_steps


def _add_messages(
    cell: Cell, sends: Sequence[Message], recvs: Sequence[Message], schedule: Schedule, rank: int
) -> None:
    domain_of = schedule.problem.domains.domain_of
    for message_list, lines in ((sends, cell.send), (recvs, cell.recv)):
        peers: dict[tuple[str, bool], list[int]] = defaultdict(list)
        for message in message_list:
            exists = 0 <= message.peer < len(domain_of)  # a faulty schedule may name any
            crosses = not exists or domain_of[message.peer] != domain_of[rank]
            peers[words(message.pieces), crosses].append(message.peer)
        for (pieces, crosses), numbers in peers.items():
            line = f"{' '.join(map(str, numbers))} {pieces}"
            lines.append(line)
            if crosses and lines is cell.send:
                cell.crossing.add(line)


def _attend_words(action: Attend) -> str:
    mask = str(Attend((), (), action.causal, action.band)).removeprefix("attend").strip()
    return " ".join(part for part in (words(action.q), words(action.kv), mask) if part)


def words(pieces: Iterable[Piece]) -> str:
    """Pieces in words, runs of consecutive chunks as `first..last`."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and piece == runs[-1][-1]._replace(chunk=runs[-1][-1].chunk + 1):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return " ".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def format_grid(
    schedule: Schedule,
    steps: Iterable[int] | None = None,
    ranks: Iterable[int] | None = None,
    *,
    recvs: bool = False,
) -> str:
    """The grid as plain text, all of it or some steps and ranks; `recvs` adds what is received.

    Steps and ranks that the schedule has not are passed over, so that a range may reach beyond its ends.
    """
    shown = [rank for rank in ranks or range(schedule.cp_size) if 0 <= rank < schedule.cp_size]
    columns = {rank: grid_column(schedule, rank) for rank in shown}
    rows = [(["step", ""], [[f"rank {rank}"] for rank in shown])]
    for step in range(num_rows(schedule)) if steps is None else steps:
        label = str(step)
        for verb in VERBS if recvs else VERBS[:2]:
            cells = [columns[rank].get(step, Cell()).lines(verb) for rank in shown]
            if any(cells):
                rows.append(([label, verb], cells))
                label = ""
    return _layout(rows, [schedule.problem.domains.domain_of[rank] for rank in shown])


def _layout(rows: list[tuple[list[str], list[list[str]]]], domains: list[int]) -> str:
    """Aligns columns; a bar stands between domains."""
    widths = [max(len(line) for _, cells in rows for line in ("", *cells[i])) for i in range(len(domains))]
    out = []
    for (label, verb), cells in rows:
        for n in range(max(map(len, cells), default=1)):
            text = f"{label if n == 0 else '':<4}  {verb if n == 0 else '':<6}"
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
                bar = " | " if i and domains[i] != domains[i - 1] else "  "
                text += bar + (cell[n] if n < len(cell) else "").ljust(width)
            out.append(text.rstrip())
    return "\n".join(out) + "\n"
