"""What was looked at, and what follows from it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "absent", "hint", "fault"]
"""`absent` is something optional that is not there; `hint` something that may cost time; only a `fault` is wrong."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    found: str
    verdict: Verdict = "ok"
    remedy: str = ""
    """What to do, and why; empty where nothing is to be done."""
    ranks: tuple[int, ...] = ()
    """Of a launched job, where it is not so for all."""


def has_fault(findings: Iterable[Finding]) -> bool:
    """Whether anything is wrong."""
    return any(finding.verdict == "fault" for finding in findings)
