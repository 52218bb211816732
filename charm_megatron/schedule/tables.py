"""Hops and blocks as tables: the canonical form of a schedule, of which each rank's program is made on demand.

Columns are numpy arrays, so that a group of a thousand ranks is planned in seconds.
"""

from dataclasses import dataclass

import numpy as np

from charm_megatron.schedule.piece import IntArray

AT_HOME = -1
"""The comm step in which a piece arrives at its home: before the first."""

NEVER = np.iinfo(np.int64).max
"""The comm step in which a piece arrives where it does not go."""


@dataclass(frozen=True, eq=False)
class Hops:
    """One row per transfer of one piece between two ranks.

    `payload` indexes `Pass.payloads`; `piece` is a number, see `piece.Numbering`.
    """

    comm_step: IntArray
    payload: IntArray
    piece: IntArray
    src: IntArray
    dst: IntArray


@dataclass(frozen=True, eq=False)
class Blocks:
    """One row per unmasked block: who computes it, in which compute step, against which copy of the KV piece."""

    q: IntArray
    kv: IntArray
    head: IntArray
    rank: IntArray
    compute_step: IntArray
    kv_copy: IntArray
