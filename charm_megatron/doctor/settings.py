"""Variables of NCCL, torch and CUDA that make a job slow, or let it hang. Text in, findings out.

Sources: NCCL's "Environment Variables", torch's "ProcessGroupNCCL Environment Variables" with the header of that
class, torch.distributed's "Debugging", and Megatron's `validate_args`.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from charm_megatron.doctor.findings import Finding, Verdict
from charm_megatron.errors import MOST_QUOTED_CHARACTERS, shortened

_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]{1,18}|[0-9]{1,18})")


@dataclass(frozen=True)
class Setting:
    """A variable, the values that hurt, and what to do about them."""

    name: str
    hurts: Callable[[str], bool]
    remedy: str
    verdict: Verdict = "fault"


def number(text: str) -> int | None:
    """The number at the beginning of `text`, as C reads it: 0x.., 0.., decimal; None where there is none."""
    match = _NUMBER.match(text)
    if match is None:
        return None
    sign, digits = match.groups()
    base = (
        16 if digits[:2] in ("0x", "0X") else 8 if digits[0] == "0" and set(digits) <= set("01234567") else 10
    )
    return int(digits, base) * (-1 if sign == "-" else 1)


def _is_one(text: str) -> bool:
    return number(text) == 1


def _is_on(text: str) -> bool:
    """As torch reads its switches."""
    return text.strip().lower() in ("1", "y", "yes", "t", "true")


def _never(text: str) -> bool:
    """The level of NCCL's path types at which nothing is near enough; 0 is its older name."""
    return text.strip().upper() == "LOC" or number(text) == 0


UNSET = "unset it"

SETTINGS = (
    Setting("NCCL_P2P_DISABLE", _is_one, f"GPUs of a host copy through host memory, not NVLink; {UNSET}"),
    Setting("NCCL_P2P_LEVEL", _never, f"GPUs of a host copy through host memory, not NVLink; {UNSET}"),
    Setting("NCCL_SHM_DISABLE", _is_one, f"GPUs of a host without P2P talk over the network; {UNSET}"),
    Setting(
        "NCCL_IB_DISABLE",
        _is_one,
        "hosts talk over IP sockets; unset it where they have InfiniBand or RoCE",
        "hint",
    ),
    Setting("NCCL_NET_GDR_LEVEL", _never, f"network cards do not reach GPU memory by themselves; {UNSET}"),
    Setting("NCCL_MAX_NCHANNELS", _is_one, f"NCCL gets one channel, too few for fast links; {UNSET}"),
    Setting("NCCL_MAX_CTAS", _is_one, f"NCCL gets one channel, too few for fast links; {UNSET}"),
    Setting(
        "NCCL_DEBUG",
        lambda text: text.strip().upper() in ("INFO", "TRACE"),
        "every rank writes long logs; set it to WARN once the cause is found",
        "hint",
    ),
    *(
        Setting(name, _is_on, f"the host waits for each transfer, so that none overlaps; {UNSET}")
        for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
    ),
    *(
        Setting(name, lambda text: number(text) == 0, f"a lost peer is a hang, not an end; {UNSET}")
        for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
    ),
    Setting(
        "CUDA_LAUNCH_BLOCKING",
        lambda text: number(text) not in (None, 0),
        f"the host waits for each kernel, so that nothing overlaps; {UNSET}",
    ),
    Setting(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda text: text.strip().upper() == "DETAIL",
        "torch compares every collective across ranks before it runs; set it to OFF or INFO",
    ),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda text: text != "1",
        "Megatron refuses it with context parallelism on GPUs before Blackwell; set it to 1",
    ),
)


def settings_findings(
    environment: Mapping[str, str], interfaces: Collection[str], ranks_on_host: int
) -> tuple[Finding, ...]:
    """All that hurts in `environment`, on a host with these network interfaces; an empty variable is none."""
    present = {name: value for name, value in environment.items() if value.strip()}
    findings = [
        Finding(one.name, _shown(present[one.name]), one.verdict, one.remedy)
        for one in SETTINGS
        if one.name in present and one.hurts(present[one.name])
    ]
    findings += _interface_findings(present, interfaces)
    if ranks_on_host > 1 and "OMP_NUM_THREADS" not in present:
        remedy = f"each of {ranks_on_host} ranks takes all cores of the host; set it to 1, or a share of them"
        findings.append(Finding("OMP_NUM_THREADS", "not set", "hint", remedy))
    return tuple(findings)


def _interface_findings(present: Mapping[str, str], interfaces: Collection[str]) -> Iterator[Finding]:
    known = shortened(", ".join(sorted(interfaces)), MOST_QUOTED_CHARACTERS)
    nccl, gloo = present.get("NCCL_SOCKET_IFNAME"), present.get("GLOO_SOCKET_IFNAME")
    if nccl is not None and not nccl_interfaces(nccl, interfaces):
        remedy = f"no interface of this host is left for NCCL; there are {known}"
        yield Finding("NCCL_SOCKET_IFNAME", _shown(nccl), "fault", remedy)
    missing = [name for name in (gloo or "").split(",") if name and name not in interfaces]
    if gloo is not None and missing:
        remedy = f"this host has no {shortened(', '.join(missing), 40)}, and gloo takes exact names; there are {known}"
        yield Finding("GLOO_SOCKET_IFNAME", _shown(gloo), "fault", remedy)


def nccl_interfaces(text: str, interfaces: Collection[str]) -> tuple[str, ...]:
    """The interfaces that NCCL_SOCKET_IFNAME leaves: prefixes, after = whole names, after ^ those to leave out."""
    words = text.strip()
    leaves_out = words.startswith("^")
    words = words.removeprefix("^")
    is_exact = words.startswith("=")
    names = [word.partition(":")[0] for word in words.removeprefix("=").split(",") if word]

    def is_named(interface: str) -> bool:
        return interface in names if is_exact else any(interface.startswith(name) for name in names)

    return tuple(sorted(one for one in interfaces if is_named(one) != leaves_out))


def _shown(value: str) -> str:
    return shortened(value, MOST_QUOTED_CHARACTERS)
