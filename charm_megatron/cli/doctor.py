"""`charm-megatron doctor`: what is wrong with packages, settings and links, ahead of a job."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from charm_megatron.cli.errors import EXIT_FAILURE
from charm_megatron.cli.options import GROUP, MEASUREMENT, OUTPUT, between, option
from charm_megatron.errors import InvalidInput
from charm_megatron.limits import MOST_OWN_RANKS, MOST_RANKS

if TYPE_CHECKING:
    from charm_megatron.doctor.findings import Finding
    from charm_megatron.doctor.link import LinkPlan
    from charm_megatron.doctor.report import Report
    from charm_megatron.processes.environment import RankPlacement
    from charm_megatron.testbed.network import Network
    from charm_megatron.testbed.profile import Profile

MOST_SIZE_MIB, MOST_LINK_DEADLINE_S = 4096, 3600
SIZE_MIB, SIZE_MIB_ON_GPUS = 4, 64
OWN_RANKS = 2


def doctor_command(
    ranks: Annotated[
        int | None,
        option(
            "Processes of this machine whose links are checked.",
            GROUP,
            callback=between(1, MOST_OWN_RANKS),
            show_default=f"{OWN_RANKS}, or one per GPU",
        ),
    ] = None,
    domains: Annotated[
        int | None,
        option(
            "Domains of fast links; links inside and across are judged apart.",
            GROUP,
            callback=between(1, MOST_RANKS),
            show_default="one per host",
        ),
    ] = None,
    network: Annotated[
        str | None,
        option("Check a shaped network instead, by name or YAML file; needs root.", GROUP, metavar="PROFILE"),
    ] = None,
    size: Annotated[
        int | None,
        option(
            "MiB that are sent to measure a rate.",
            MEASUREMENT,
            callback=between(1, MOST_SIZE_MIB),
            show_default=f"{SIZE_MIB}, or {SIZE_MIB_ON_GPUS} on GPUs",
        ),
    ] = None,
    deadline: Annotated[
        int,
        option(
            "Seconds after which a pair of ranks counts as dead.",
            MEASUREMENT,
            callback=between(1, MOST_LINK_DEADLINE_S),
        ),
    ] = 10,
    as_json: Annotated[bool, option("Print one JSON object in place of tables.", OUTPUT, "--json")] = False,
) -> None:
    """Look at packages, settings, the places of ranks and the links between all of them.

    Started by torchrun or srun, the ranks are those of the job, and rank 0 prints. Ends with code 0 when nothing is
    wrong, with 1 and what to do when something is; what is absent but optional, and hints, are no fault.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each rank warns that its peers have no names
    from charm_megatron.processes.environment import (
        launched_rank,
        require_meeting_point,
        require_single_task,
    )

    placement = launched_rank(os.environ)
    wish = _Wish(ranks, domains, network, size, float(deadline))
    if placement is None:
        require_single_task(os.environ)
        report: Report | None = _of_own_ranks(wish)
    else:
        require_meeting_point(os.environ)
        report = _of_job(placement, wish)
    code = 0 if report is None else _print(report, as_json)
    _leave_threads_behind(code)
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True)
class _Wish:
    """What the command line says."""

    ranks: int | None
    domains: int | None
    network: str | None
    size_mib: int | None
    deadline_s: float

    def plan(self, on_gpus: bool) -> "LinkPlan":
        from charm_megatron.doctor.link import LinkPlan

        return LinkPlan((self.size_mib or (SIZE_MIB_ON_GPUS if on_gpus else SIZE_MIB)) << 20, self.deadline_s)


def _print(report: "Report", as_json: bool) -> int:
    """Returns the exit code."""
    from charm_megatron.cli.doctor_output import print_json, print_report

    if as_json:
        print_json(report)
    else:
        print_report(report)
    return EXIT_FAILURE if report.has_fault else 0


def _leave_threads_behind(code: int) -> None:
    """Ends a rank at once where NCCL still waits for a dead peer: the end of Python would wait for it too."""
    if "charm_megatron.doctor.link" not in sys.modules:
        return
    from charm_megatron.doctor.link import is_stuck

    if is_stuck():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _of_own_ranks(wish: _Wish) -> "Report":
    """Of ranks of this machine; without torch, of packages alone."""
    from charm_megatron.doctor.packages import installed_versions, package_findings
    from charm_megatron.doctor.places import interfaces
    from charm_megatron.doctor.probe import probe
    from charm_megatron.doctor.report import Report
    from charm_megatron.doctor.settings import settings_findings
    from charm_megatron.testbed.namespaces import require_available
    from charm_megatron.testbed.profile import load_profile

    profile = None if wish.network is None else load_profile(wish.network)
    if profile is not None:
        if wish.ranks is not None or wish.domains is not None:
            raise InvalidInput("--network has ranks and domains of its own; leave --ranks and --domains out")
        require_available()
    torch_facts = probe("torch")
    gpus = len(torch_facts.get("gpus", ())) if profile is None else 0
    num_ranks = profile.num_ranks if profile is not None else wish.ranks or gpus or OWN_RANKS
    if gpus and num_ranks > gpus:
        raise InvalidInput(f"--ranks {num_ranks} are more than the {gpus} GPUs; each rank takes one")
    _require_split(num_ranks, wish.domains)
    packages = package_findings(
        installed_versions(), lambda name: torch_facts if name == "torch" else probe(name)
    )
    settings = settings_findings(os.environ, interfaces(), 1)
    if torch_facts["problem"]:
        return Report(packages, settings)
    return _with_links(wish, profile, num_ranks, gpus > 0, packages, settings)


def _with_links(
    wish: _Wish,
    profile: "Profile | None",
    num_ranks: int,
    on_gpus: bool,
    packages: "tuple[Finding, ...]",
    settings: "tuple[Finding, ...]",
) -> "Report":
    from charm_megatron.cli.doctor_output import shown_progress
    from charm_megatron.doctor.check import report_of
    from charm_megatron.doctor.ranks import OwnRanks, check_own
    from charm_megatron.testbed.namespaces import enter

    plan = wish.plan(on_gpus)
    if profile is None:
        with shown_progress(False) as on_progress:
            check = check_own(OwnRanks(num_ranks, on_gpus), wish.domains, plan, on_progress)
        return report_of(packages, settings, check, wish.domains, plan, "processes of this machine")
    with _up(profile) as net, shown_progress(False) as on_progress:
        own = OwnRanks(num_ranks, interface="eth0", enter=lambda rank: enter(net.names.rank(rank)))
        check = check_own(own, profile.domains, plan, on_progress)
    return report_of(packages, settings, check, profile.domains, plan, f"ranks on {profile.name}")


def _up(profile: "Profile") -> "AbstractContextManager[Network]":
    """The network of that profile which is up, or a passing one."""
    from charm_megatron.testbed.network import Testbed
    from charm_megatron.testbed.persistent import attach, is_up

    return nullcontext(attach(profile)) if is_up(profile) else Testbed(profile)


def _of_job(placement: "RankPlacement", wish: _Wish) -> "Report | None":
    """Of the job that this process is a rank of; None on ranks other than the first."""
    if wish.ranks is not None or wish.network is not None:
        raise InvalidInput(
            "--ranks and --network start ranks of their own; start doctor without torchrun or srun"
        )
    _require_split(placement.world_size, wish.domains)
    import torch

    from charm_megatron.cli.doctor_output import shown_progress
    from charm_megatron.doctor.check import report_of
    from charm_megatron.doctor.packages import installed_versions, package_findings
    from charm_megatron.doctor.places import interfaces
    from charm_megatron.doctor.probe import probe
    from charm_megatron.doctor.ranks import check_as_rank
    from charm_megatron.doctor.settings import settings_findings

    versions = installed_versions()
    settings = settings_findings(os.environ, interfaces(), placement.local_world_size)
    plan = wish.plan(torch.cuda.is_available())
    with shown_progress(placement.rank > 0) as on_progress:
        check = check_as_rank(placement, wish.domains, plan, versions, settings, on_progress)
    if check is None:
        return None
    return report_of(package_findings(versions, probe), (), check, wish.domains, plan, "ranks of this job")


def _require_split(num_ranks: int, num_domains: int | None) -> None:
    """Raises `TopologyError` where ranks do not split into as many domains."""
    from charm_megatron.topology import even_domains

    if num_domains is not None:
        even_domains(num_ranks, num_domains)
