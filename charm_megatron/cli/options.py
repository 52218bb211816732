"""The options that several commands share, by the panel of `--help` in which they stand, and how values are checked."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from charm_megatron.errors import InvalidInput, nearest, quoted
from charm_megatron.limits import (
    MOST_BATCH,
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_RANKS,
    MOST_STEPS,
    MOST_TOKENS,
)
from charm_megatron.schedule.passes import DIRECTIONS

GROUP, ATTENTION, SCHEDULE = "Group", "Attention", "Schedule"
MODEL, MEASUREMENT, OUTPUT = "Model", "Measurement", "Output"

BOTH_PASSES = ",".join(DIRECTIONS)
RETURN_DTYPES = ("model", "float32")
GRAD_RETURN_DTYPES = (*RETURN_DTYPES, "by_link")


def option(help: str, panel: str, *names: str, **rest: Any) -> Any:  # noqa: A002  # typer's own word
    """An option of one panel."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **rest)


# ---------------------------------------------------------------------- checks of values


def between(least: int, most: int) -> Callable[[typer.CallbackParam, Any], Any]:
    """Refuses smaller and larger numbers."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise InvalidInput(f"{param.opts[0]} must be {bound}, but is {quoted(value)}")
        return value

    return check


def one_of(known: Sequence[str]) -> Callable[[typer.CallbackParam, Any], Any]:
    """Refuses other words, and names the nearest."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is not None and value not in known:
            raise InvalidInput(f"{param.opts[0]} {quoted(value)} is unknown{nearest(value, known)}")
        return value

    return check


def known_dtype(param: typer.CallbackParam, value: str) -> str:
    """Refuses dtypes that attention does not take."""
    from charm_megatron.workload import ITEMSIZE_BYTES

    checked: str = one_of(tuple(ITEMSIZE_BYTES))(param, value)
    return checked


def listed(text: str) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def schedule_names(text: str) -> tuple[str, ...]:
    """The schedules of a list with commas. Raises `InvalidInput` for none."""
    names = listed(text)
    if not names:
        raise InvalidInput(f"--schedules {quoted(text)} names no schedule; give some, such as ring,charm")
    return names


# ---------------------------------------------------------------------- group

Nodes = Annotated[
    int | None,
    option(
        "Nodes: domains of fast links.",
        GROUP,
        callback=between(1, MOST_RANKS),
        show_default="1, or as in the file",
    ),
]
RanksPerNode = Annotated[
    int | None,
    option(
        "Context-parallel ranks on each node.",
        GROUP,
        callback=between(1, MOST_RANKS),
        show_default="8, or as in the file",
    ),
]

# ---------------------------------------------------------------------- attention

MASK_HELP = "causal, none, window:LEFT,RIGHT or documents:LENGTH,..; several joined by +."
LAYOUT_HELP = "zigzag, contiguous, striped or document_zigzag."

MaskText = Annotated[str | None, option(MASK_HELP, ATTENTION, show_default="causal, or as in the file")]
Layout = Annotated[str | None, option(LAYOUT_HELP, ATTENTION, show_default="zigzag, or as in the file")]
TokensPerRank = Annotated[
    int | None,
    option(
        "Tokens of each rank.",
        ATTENTION,
        callback=between(1, MOST_TOKENS),
        show_default="4096, or as in the file",
    ),
]
Heads = Annotated[int, option("Query heads.", ATTENTION, callback=between(1, MOST_HEADS))]
KvHeads = Annotated[
    int | None,
    option("KV heads.", ATTENTION, callback=between(1, MOST_HEADS), show_default="as many as query heads"),
]
HeadDim = Annotated[int, option("Width of a head.", ATTENTION, callback=between(1, MOST_HEAD_DIM))]
Batch = Annotated[int, option("Sequences side by side.", ATTENTION, callback=between(1, MOST_BATCH))]
Dtype = Annotated[str, option("Dtype of q, k, v and out.", ATTENTION, callback=known_dtype)]

# ---------------------------------------------------------------------- schedule

SCHEDULES_HELP = "Schedules, separated by commas: planners' names, or .json files"
FUSE_HELP = "Post all transfers of a step as one group, or each lane by itself."
FUSE_FLAGS = "--fuse/--no-fuse"

PrefetchDepth = Annotated[
    int | None,
    option(
        "Steps that a transfer may start ahead of the computation that needs it.",
        SCHEDULE,
        callback=between(1, MOST_STEPS),
        show_default="1",
    ),
]
OutReturnDtype = Annotated[
    str, option("Partial outputs travel home in: model or float32.", SCHEDULE, callback=one_of(RETURN_DTYPES))
]
GradReturnDtype = Annotated[
    str,
    option(
        "Partial gradients travel home in: model, float32, or by_link (float32 inside domains, model across).",
        SCHEDULE,
        callback=one_of(GRAD_RETURN_DTYPES),
    ),
]

# ---------------------------------------------------------------------- output

JsonRows = Annotated[Path | None, option("Write rows as JSON.", OUTPUT, "--json", metavar="FILE")]

# ---------------------------------------------------------------------- run configurations

ConfigFile = Annotated[Path, typer.Argument(help="YAML file: sections launch, charm, data and megatron.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the file; repeatable."),
]
Cpu = Annotated[
    bool, typer.Option("--cpu", help="For machines without CUDA: gloo, local layers, no fused kernels.")
]
