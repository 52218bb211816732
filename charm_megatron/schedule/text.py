"""The text form of actions, which reads back: `parse_action(str(action)) == action`.

    post 1.0 | send 0 q3 q4 | recv 0 q0 q7 | send 1 kv3 kv4 | recv 1 kv1 kv6
    wait 1.0
    attend q3 q4 kv3 kv4 causal
    accumulate o3<0
    free kv1

A piece is a payload (q, kv, o, g, dq, dkv), a chunk, `.head group` when not 0, and `<rank` for a partial result
received from that rank; `~copy` marks a piece that is resent. A post is identified by step and order. An
attend without a mask word is of full blocks; `causal` is the lower triangle of chunks that meet themselves;
`band LOWEST:HIGHEST` the elements (a, b) of one block with LOWEST <= a - b <= HIGHEST.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from charm_megatron.errors import ScheduleSyntaxError, nearest, quoted, shortened
from charm_megatron.limits import MOST_CHUNKS, MOST_COPIES, MOST_HEADS, MOST_RANKS, MOST_STEPS, MOST_TOKENS
from charm_megatron.reading import whole_number
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
)
from charm_megatron.schedule.payload import PAYLOADS
from charm_megatron.schedule.piece import Piece
from charm_megatron.schedule.schedule import Schedule
from charm_megatron.workload import Band

_NAME = re.compile(
    r"(?P<payload>[a-z]+)(?P<chunk>[0-9]+)(?:\.(?P<head>[0-9]+))?(?:~(?P<copy>[0-9]+))?(?:<(?P<src>[0-9]+))?"
)
_BAND = re.compile(r"(-?)([0-9]+):(-?)([0-9]+)")
_KEY = re.compile(r"([0-9]+)\.([0-9]+)")
_DIGITS = re.compile("[0-9]+")
_WORDS = ("post", "wait", "attend", "accumulate", "free")


NAMES_REMEMBERED = 2**15
MOST_EXCERPT_CHARACTERS = 300
"""Of one action in an excerpt."""


def parse_action(text: str) -> Action:
    """Reads one action. Raises `ScheduleSyntaxError` with the offending words."""
    word, _, rest = text.strip().partition(" ")
    words = rest.split()
    match word:
        case "post":
            return _parse_post(text)
        case "wait":
            return Wait(_parse_key(rest.strip(), text))
        case "attend":
            return _parse_attend(words, text)
        case "accumulate" | "free":
            if len(words) != 1:
                raise ScheduleSyntaxError(
                    f"{quoted(text.strip())}: {word} takes one piece, but has {len(words)}"
                )
            name = _parse_name(words[0], text)
            return Accumulate(name) if word == "accumulate" else Free(name)
    raise ScheduleSyntaxError(f"{quoted(text.strip())}: unknown action {quoted(word)}{nearest(word, _WORDS)}")


def parse_program(lines: Iterable[str]) -> Program:
    """Reads a program, one action a line; blank lines and lines that begin with # are passed over."""
    stripped = (line.strip() for line in lines)
    return tuple(parse_action(line) for line in stripped if line and not line.startswith("#"))


def _parse_key(text: str, line: str) -> Key:
    match = _KEY.fullmatch(text)
    if not match:
        raise ScheduleSyntaxError(f"{quoted(line.strip())}: {quoted(text)} is not STEP.ORDER, such as 2.0")
    return Key(_number(match[1], MOST_STEPS, "steps", line), _number(match[2], MOST_STEPS, "posts", line))


def _parse_name(word: str, line: str) -> Piece:
    try:
        return _piece(word)
    except ScheduleSyntaxError as error:
        raise ScheduleSyntaxError(f"{quoted(line.strip())}: {error}") from error


@lru_cache(NAMES_REMEMBERED)
def _piece(word: str) -> Piece:
    """The piece of a name, once for all the places where a schedule names it."""
    match = _NAME.fullmatch(word)
    if not match or match["payload"] not in PAYLOADS:
        raise ScheduleSyntaxError(
            f"{quoted(word)} is not a piece, such as q3, kv3.1 or o3<5; payloads are {', '.join(PAYLOADS)}"
        )
    return Piece(
        match["payload"],
        _number(match["chunk"], MOST_CHUNKS, "chunks"),
        _number(match["head"] or "0", MOST_HEADS, "head groups"),
        None if match["src"] is None else _number(match["src"], MOST_RANKS, "ranks"),
        _number(match["copy"] or "0", MOST_COPIES, "copies"),
    )


def _number(digits: str, most: int, what: str, line: str = "") -> int:
    number = whole_number(digits, most)
    if number is None:
        where = f"{quoted(line.strip())}: " if line else ""
        raise ScheduleSyntaxError(f"{where}{quoted(digits)} is above {most}, the most {what} there are")
    return number


def _parse_attend(words: list[str], line: str) -> Attend:
    causal, band = words[-1:] == ["causal"], None
    if causal:
        words = words[:-1]
    elif words[-2:-1] == ["band"]:
        band, words = _parse_band(words[-1], line), words[:-2]
    names = [_parse_name(word, line) for word in words]
    q = tuple(name for name in names if PAYLOADS[name.payload].side == "q")
    kv = tuple(name for name in names if PAYLOADS[name.payload].side == "kv")
    if not q or not kv:
        raise ScheduleSyntaxError(
            f"{quoted(line.strip())}: attend needs pieces of both sides, such as q3 kv1"
        )
    if band and len(q) + len(kv) > 2:
        raise ScheduleSyntaxError(f"{quoted(line.strip())}: a band is of one block, such as q3 kv1 band 0:7")
    return Attend(q, kv, causal, band)


def _parse_band(word: str, line: str) -> Band:
    match = _BAND.fullmatch(word)
    if not match:
        raise ScheduleSyntaxError(
            f"{quoted(line.strip())}: {quoted(word)} is not LOWEST:HIGHEST, such as 0:7"
        )
    lo_sign, lo, hi_sign, hi = match.groups()
    lowest, highest = (_number(digits, MOST_TOKENS, "tokens", line) for digits in (lo, hi))
    return Band(-lowest if lo_sign else lowest, -highest if hi_sign else highest)


def _parse_post(line: str) -> Post:
    head, *parts = (part.strip() for part in line.split("|"))
    key = _parse_key(head.removeprefix("post").strip(), line)
    sends: list[Message] = []
    recvs: list[Message] = []
    for part in parts:
        words = part.split()
        if len(words) < 3 or words[0] not in ("send", "recv") or not _DIGITS.fullmatch(words[1]):
            raise ScheduleSyntaxError(
                f"{quoted(line.strip())}: {quoted(part)} is not send|recv RANK PIECE .."
            )
        peer = _number(words[1], MOST_RANKS, "ranks", line)
        message = Message(peer, tuple(_parse_name(word, line) for word in words[2:]))
        (sends if words[0] == "send" else recvs).append(message)
    return Post(key, tuple(sends), tuple(recvs))


def schedule_header(schedule: Schedule) -> str:
    """One line that says what the schedule is for."""
    problem = schedule.problem
    return (
        f"{schedule.name} {schedule.pass_.name}: {schedule.cp_size} ranks, domains [{problem.domains}], "
        f"layout {problem.sharding.layout}, mask {problem.mask}, {schedule.num_comm_steps} steps, "
        f"digest {schedule.digest[:16]}"
    )


def format_schedule(schedule: Schedule) -> str:
    """The whole schedule: a header, then the program of each rank."""
    lines = [f"# {schedule_header(schedule)}"]
    for rank in range(schedule.cp_size):
        lines += ["", f"# rank {rank}", *map(str, schedule.program(rank))]
    return "\n".join(lines) + "\n"


def excerpt(program: Sequence[Action], position: int, *, around: int = 3) -> str:
    """The actions around `position`, an arrow at the one itself."""
    first = max(0, position - around)
    lines = []
    for i, action in enumerate(program[first : position + around + 1], start=first):
        lines.append(
            f"{'-->' if i == position else '   '} {i:4} {shortened(action, MOST_EXCERPT_CHARACTERS)}"
        )
    return "\n".join(lines)
