"""What measurements of all pairs say: which links are dead or slow, and whether one rank explains them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, median_high
from typing import Literal

from charm_megatron.doctor.findings import Finding
from charm_megatron.topology import Domains

SLOW_SHARE = 0.5
"""Of the median of its class, below which a link is slow."""
LEAST_PAIRS = 3
"""That a class must have before its median says anything."""

LinkClass = Literal["inside", "across"]
Kind = Literal["dead", "stalled", "slow"]


@dataclass(frozen=True)
class PairMeasured:
    """A pair of ranks, `first` < `second`; None for what was not measured before the deadline."""

    first: int
    second: int
    latency_s: float | None = None
    there_bytes_per_s: float | None = None
    back_bytes_per_s: float | None = None
    problem: str | None = None

    @property
    def ranks(self) -> tuple[int, int]:
        return self.first, self.second

    @property
    def bytes_per_s(self) -> float | None:
        """Of its slower direction."""
        if self.there_bytes_per_s is None or self.back_bytes_per_s is None:
            return None
        return min(self.there_bytes_per_s, self.back_bytes_per_s)


@dataclass(frozen=True)
class ClassSummary:
    """The links inside all domains, or across them. Rates are of those that were measured, latencies too."""

    name: LinkClass
    num_pairs: int
    median_bytes_per_s: float | None
    slowest: PairMeasured | None
    median_latency_s: float | None

    @property
    def judges_speed(self) -> bool:
        return self.num_pairs >= LEAST_PAIRS


@dataclass(frozen=True)
class BadPair:
    """A link that is not as the others of its class."""

    measured: PairMeasured
    kind: Kind
    of: ClassSummary


def class_of(pair: PairMeasured, domains: Domains) -> LinkClass:
    """Whether a link is inside a domain."""
    return "across" if domains.crosses(*pair.ranks) else "inside"


def summaries(measured: Sequence[PairMeasured], domains: Domains) -> tuple[ClassSummary, ...]:
    """The classes of which there are links."""
    found = []
    names: tuple[LinkClass, ...] = ("inside", "across")
    for name in names:
        pairs = [pair for pair in measured if class_of(pair, domains) == name]
        rates = {pair: pair.bytes_per_s for pair in pairs if pair.bytes_per_s is not None}
        latencies = [pair.latency_s for pair in pairs if pair.latency_s is not None]
        if pairs:
            # The higher of two: where one rank of four has slow links, these are half of all.
            middle = median_high(rates.values()) if rates else None
            slowest = min(rates, key=rates.__getitem__) if rates else None
            latency_s = median(latencies) if latencies else None
            found.append(ClassSummary(name, len(pairs), middle, slowest, latency_s))
    return tuple(found)


def bad_pairs(measured: Sequence[PairMeasured], domains: Domains) -> tuple[BadPair, ...]:
    """Links that are dead, that answer but let nothing large through, or that are slow for their class."""
    of_class = {summary.name: summary for summary in summaries(measured, domains)}
    found = []
    for pair in measured:
        summary = of_class[class_of(pair, domains)]
        if (kind := _kind(pair, summary)) is not None:
            found.append(BadPair(pair, kind, summary))
    return tuple(found)


def _kind(pair: PairMeasured, of: ClassSummary) -> Kind | None:
    if pair.latency_s is None:
        return "dead"
    if pair.bytes_per_s is None:
        return "stalled"
    if of.judges_speed and of.median_bytes_per_s and pair.bytes_per_s < SLOW_SHARE * of.median_bytes_per_s:
        return "slow"
    return None


def culprits(bad: Sequence[BadPair], measured: Sequence[PairMeasured]) -> tuple[int, ...]:
    """Ranks of which all links, two or more, are bad; none where that is true of all ranks."""
    links: dict[int, int] = {}
    faults: dict[int, int] = {}
    for counts, pairs in ((links, measured), (faults, [one.measured for one in bad])):
        for pair in pairs:
            for rank in pair.ranks:
                counts[rank] = counts.get(rank, 0) + 1
    found = tuple(rank for rank, count in sorted(links.items()) if count > 1 and faults.get(rank) == count)
    return found if len(found) < len(links) else ()


def link_findings(measured: Sequence[PairMeasured], domains: Domains, plan_words: str) -> tuple[Finding, ...]:
    """A finding for each rank whose links are all bad, and for each bad pair of other ranks.

    `plan_words` says what was sent, and how long that might take.
    """
    bad = bad_pairs(measured, domains)
    blamed = culprits(bad, measured)
    findings = [_of_rank(rank, [one for one in bad if rank in one.measured.ranks]) for rank in blamed]
    findings += [_of_pair(one, plan_words) for one in bad if not set(blamed) & set(one.measured.ranks)]
    return tuple(findings)


def _of_rank(rank: int, bad: Sequence[BadPair]) -> Finding:
    kinds = {one.kind: sum(other.kind == one.kind for other in bad) for one in bad}
    counted = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    rates = [rate for one in bad if (rate := one.measured.bytes_per_s) is not None]
    fastest = f"; at most {rate_text(max(rates))}" if rates else ""
    middles = {one.of.name: one.of.median_bytes_per_s for one in bad if one.kind == "slow"}
    medians = "".join(f"; median {name} {rate_text(rate)}" for name, rate in middles.items() if rate)
    remedy = "take its host or GPU out of the job, or look at its card, cable and port"
    return Finding(f"rank {rank}", f"all {len(bad)} links bad: {counted}{fastest}{medians}", "fault", remedy)


def _of_pair(bad: BadPair, plan_words: str) -> Finding:
    pair = bad.measured
    name = f"ranks {pair.first} and {pair.second}"
    match bad.kind:
        case "dead":
            found = f"dead: {pair.problem or 'no answer'}"
            remedy = "look at routes, firewalls and cables between their hosts, and at *_SOCKET_IFNAME"
        case "stalled":
            found = f"small messages pass in {latency_text(pair.latency_s)}, but not {plan_words}"
            remedy = "look for different MTUs on the way, or give a longer --deadline"
        case "slow":
            found = (
                f"slow: {rate_text(pair.there_bytes_per_s)} there, {rate_text(pair.back_bytes_per_s)} back; "
                f"median {bad.of.name} {rate_text(bad.of.median_bytes_per_s)}"
            )
            remedy = "slow also while all others were quiet; look at cables, ports and cards between them"
    return Finding(name, found, "fault", remedy)


def rate_text(bytes_per_s: float | None) -> str:
    """Returns "1.23 GB/s", "41.2 MB/s", "310 kB/s", or "-"."""
    if bytes_per_s is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}/s"
    return f"{bytes_per_s / 1e3:.3g} kB/s"


def latency_text(seconds: float | None) -> str:
    """Returns "85 us", "1.2 ms", or "-"."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def suspects(measured: Sequence[PairMeasured], domains: Domains) -> Iterator[PairMeasured]:
    """Pairs that answered, but were slow or stalled while others were measured at the same time."""
    for bad in bad_pairs(measured, domains):
        if bad.kind != "dead":
            yield bad.measured


def better_of(pair: PairMeasured, alone: PairMeasured) -> PairMeasured:
    """Each direction at its best."""

    def best(one: float | None, other: float | None) -> float | None:
        return max((rate for rate in (one, other) if rate is not None), default=None)

    latencies = [seconds for seconds in (pair.latency_s, alone.latency_s) if seconds is not None]
    return PairMeasured(
        *pair.ranks,
        min(latencies, default=None),
        best(pair.there_bytes_per_s, alone.there_bytes_per_s),
        best(pair.back_bytes_per_s, alone.back_bytes_per_s),
    )
