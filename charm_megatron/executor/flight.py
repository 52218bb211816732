"""What a rank did last: kept while it runs, written down when a transfer is lost."""

import json
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from charm_megatron.compile import RankProgram
from charm_megatron.errors import TransferTimeout
from charm_megatron.executor.lost import TransferLost
from charm_megatron.files import write_text
from charm_megatron.liveness.standing import transfer_text
from charm_megatron.lowering.storage import WaitStep
from charm_megatron.schedule.actions import Post

NUM_ACTIONS = 200


@dataclass
class FlightRecorder:
    """The last actions of one rank. `folder` is where a record is written; None: nowhere.

    Noting an action costs a clock and a place in a ring, about half a microsecond.
    """

    rank: int
    folder: Path | None = None
    _actions: deque[tuple[float, RankProgram, int]] = field(default_factory=lambda: deque(maxlen=NUM_ACTIONS))

    def note(self, program: RankProgram, position: int) -> None:
        """The rank begins the action at `position`; behind the last one, it has ended the program."""
        self._actions.append((time.monotonic(), program, position))

    @property
    def doing(self) -> tuple[str, float]:
        """The last action in words, empty before the first, and the seconds since it began."""
        if not self._actions:
            return "", 0.0
        at_s, program, position = self._actions[-1]
        name = f"{program.schedule_name} {program.pass_.name}"
        if position < len(program.program):
            text = f"in {name}, action {position} ({program.program[position]})"
        else:
            text = f"after {name}"
        return text, time.monotonic() - at_s

    def awaited(self, peer: int, is_recv: bool) -> str:
        """As in "kv1 kv2": what the transfer with a peer carries that the rank waits for now."""
        if not self._actions:
            return ""
        _, program, position = self._actions[-1]
        return _awaited(program, position, peer, is_recv)

    def lost(self, program: RankProgram, position: int, error: TransferLost) -> TransferTimeout:
        """What to raise for a transfer that was lost in the action at `position`; writes the record."""
        missing = _missing(program, position, error)
        action = program.program[position]
        sentence = (
            f"rank {self.rank} of the context-parallel group gave up {missing} after {error.waited_s:.1f} s: "
            f"{program.schedule_name} {program.pass_.name}, action {position} ({action}): {error.why}; a peer has "
            f"failed or is in another call"
        )
        if self.folder is not None:
            sentence += f"; flight record: {self._write(program, position, error)}"
        return TransferTimeout(sentence)

    def _write(self, program: RankProgram, position: int, error: TransferLost) -> Path:
        assert self.folder is not None, "asked only where there is a folder"
        now_s = time.monotonic()
        path = self.folder / f"flight_record_{self.rank}.json"
        record = {
            "rank": self.rank,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "schedule": program.schedule_name,
            "pass": program.pass_.name,
            "action": str(program.program[position]),
            "waited_s": round(error.waited_s, 3),
            "peer": error.peer,
            "missing": _missing(program, position, error),
            "why": error.why,
            "last_actions": [
                {
                    "seconds_ago": round(now_s - at_s, 6),
                    "pass": of.pass_.name,
                    "position": index,
                    "action": str(of.program[index]) if index < len(of.program) else "end",
                }
                for at_s, of, index in self._actions
            ],
        }
        write_text(path, json.dumps(record, indent=1) + "\n")
        return path


def _missing(program: RankProgram, position: int, error: TransferLost) -> str:
    """As in "kv1 from rank 2": what the lost transfer carries."""
    carried = _awaited(program, position, error.peer, error.is_recv)
    return transfer_text(carried, error.is_recv, error.peer)


def _awaited(program: RankProgram, position: int, peer: int, is_recv: bool) -> str:
    """The pieces between this rank and a peer in the post that the action at `position` waits for."""
    step = program.storage.steps[position] if position < len(program.storage.steps) else None
    if not isinstance(step, WaitStep):
        return ""
    post = next(a for a in program.program[:position][::-1] if isinstance(a, Post) and a.key == step.key)
    messages = post.recvs if is_recv else post.sends
    return " ".join(str(piece) for message in messages if message.peer == peer for piece in message.pieces)
