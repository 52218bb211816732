"""From a check of links to the report."""

from charm_megatron.doctor.findings import Finding
from charm_megatron.doctor.link import LinkPlan
from charm_megatron.doctor.packages import version_differences
from charm_megatron.doctor.places import merged_settings, place_findings
from charm_megatron.doctor.ranks import domains_by
from charm_megatron.doctor.report import Report
from charm_megatron.doctor.rounds import JOIN_S, LinkCheck
from charm_megatron.doctor.verdicts import link_findings, summaries
from charm_megatron.units import bytes_text


def report_of(
    packages: tuple[Finding, ...],
    settings: tuple[Finding, ...],
    check: LinkCheck,
    num_domains: int | None,
    plan: LinkPlan,
    where: str,
) -> Report:
    """All findings. `settings` are those of this process; ranks of a job add their own, and their versions."""
    num_ranks = len(check.told) + len(check.missing)
    domains = domains_by(num_domains, num_ranks, check.told)
    words = f"{bytes_text(plan.size_bytes)} within {plan.deadline_s:g} s"
    absent = tuple(
        Finding(f"rank {rank}", f"did not come within {JOIN_S:g} s", "fault", "see whether its process runs")
        for rank in check.missing
    )
    return Report(
        packages + version_differences({rank: one.versions for rank, one in check.told.items()}),
        settings + merged_settings(check.told),
        place_findings(check.told),
        absent + link_findings(check.measured, domains, words),
        where,
        domains,
        check.measured,
        summaries(check.measured, domains),
    )
