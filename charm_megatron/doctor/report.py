"""Everything that was found, together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from charm_megatron.doctor.findings import Finding, has_fault
from charm_megatron.doctor.verdicts import ClassSummary, PairMeasured, class_of
from charm_megatron.topology import Domains


@dataclass(frozen=True)
class Report:
    """Findings by part, and the links behind those of the last.

    `where` says what the ranks are, `domains` which of them have fast links; both are empty where no link was checked.
    """

    packages: tuple[Finding, ...]
    settings: tuple[Finding, ...]
    places: tuple[Finding, ...] = ()
    links: tuple[Finding, ...] = ()
    where: str = ""
    domains: Domains = field(default_factory=lambda: Domains(()))
    measured: tuple[PairMeasured, ...] = ()
    classes: tuple[ClassSummary, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.packages + self.settings + self.places + self.links

    @property
    def has_fault(self) -> bool:
        return has_fault(self.findings)

    @property
    def num_faults(self) -> int:
        return sum(finding.verdict == "fault" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """For other programs; units are in the names."""
        pairs = [{**asdict(pair), "class": class_of(pair, self.domains)} for pair in self.measured]
        classes = [
            {
                "class": one.name,
                "num_pairs": one.num_pairs,
                "median_bytes_per_s": one.median_bytes_per_s,
                "median_latency_s": one.median_latency_s,
                "slowest": None if one.slowest is None else list(one.slowest.ranks),
                "judges_speed": one.judges_speed,
            }
            for one in self.classes
        ]
        return {
            "is_well": not self.has_fault,
            **{
                part: _rows(findings)
                for part, findings in (
                    ("packages", self.packages),
                    ("settings", self.settings),
                    ("places", self.places),
                    ("links", self.links),
                )
            },
            "ranks": self.where,
            "domains": [list(members) for members in self.domains.members],
            "classes": classes,
            "pairs": pairs,
        }


def _rows(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [{**asdict(finding), "ranks": list(finding.ranks)} for finding in findings]
