"""`charm-megatron bench operator`: schedules, and other libraries' attention, against each other."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from charm_megatron.cli import options
from charm_megatron.cli.options import (
    ATTENTION,
    BOTH_PASSES,
    GROUP,
    MEASUREMENT,
    OUTPUT,
    SCHEDULE,
    between,
    one_of,
    option,
)
from charm_megatron.errors import ConfigError, InvalidInput, nearest
from charm_megatron.limits import MOST_DEADLINE_S, MOST_RANKS, MOST_REPETITIONS, MOST_TOKENS
from charm_megatron.schedule.passes import DIRECTIONS, Direction

if TYPE_CHECKING:
    from charm_megatron.bench.suites import Race
    from charm_megatron.cli.bench.races import Results, Runner

REAL, MODELLED = "real", "modelled"
MODELLED_RATIOS = "0.1,0.2,0.5,1,2"
WITH_SUITE = {"suite", "json_file", "csv_file", "picture"}
"""Parameters that go with --suite."""


def operator_command(
    context: typer.Context,
    schedules: Annotated[
        str, option(f"{options.SCHEDULES_HELP}; ratios are to the first.", SCHEDULE)
    ] = "ring,rm_plus,charm",
    peers: Annotated[str, option("Other libraries' attention, separated by commas, or all.", SCHEDULE)] = "",
    prefetch_depth: options.PrefetchDepth = None,
    fuse: Annotated[
        bool,
        option(
            f"{options.FUSE_HELP} Over NCCL the domains decide: of one, all as one group.",
            SCHEDULE,
            options.FUSE_FLAGS,
        ),
    ] = False,
    out_return_dtype: options.OutReturnDtype = "model",
    grad_return_dtype: options.GradReturnDtype = "by_link",
    profile: Annotated[
        str | None,
        option("Shaped network, by name or YAML file; needs root. Loopback if not given.", GROUP),
    ] = None,
    nodes: Annotated[
        int | None,
        option(
            "On loopback: domains of the ranks.", GROUP, callback=between(1, MOST_RANKS), show_default="2"
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        option(
            "On loopback: ranks of each domain.", GROUP, callback=between(1, MOST_RANKS), show_default="2"
        ),
    ] = None,
    mask: Annotated[str, option(options.MASK_HELP, ATTENTION)] = "none",
    layout: Annotated[
        str | None,
        option(options.LAYOUT_HELP, ATTENTION, show_default="zigzag for causal, else contiguous"),
    ] = None,
    tokens_per_rank: Annotated[
        int, option("Tokens of each rank.", ATTENTION, callback=between(1, MOST_TOKENS))
    ] = 256,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = 64,
    batch: options.Batch = 1,
    dtype: options.Dtype = "bfloat16",
    suite: Annotated[
        str | None,
        option(
            "smoke, quick or full: ready-made races; goes with --json, --csv and --picture only.", MEASUREMENT
        ),
    ] = None,
    passes: Annotated[str, option(f"{', '.join(DIRECTIONS)} or both.", MEASUREMENT)] = BOTH_PASSES,
    compute: Annotated[
        str | None,
        option(
            "real, or modelled: waits in place of blocks, since an accelerator would leave the CPU alone.",
            MEASUREMENT,
            callback=one_of((REAL, MODELLED)),
        ),
    ] = None,
    ccr: Annotated[
        str | None,
        option(
            "Ratios of modelled computation to the first schedule's communication, separated by commas.",
            MEASUREMENT,
            show_default=MODELLED_RATIOS,
        ),
    ] = None,
    repetitions: Annotated[
        int, option("Timed repetitions, interleaved.", MEASUREMENT, callback=between(1, MOST_REPETITIONS))
    ] = 5,
    warm_up: Annotated[
        int, option("Repetitions before them.", MEASUREMENT, callback=between(0, MOST_REPETITIONS))
    ] = 1,
    deadline: Annotated[
        float,
        option(
            "Longest that a transfer may take, a rank be silent or a link carry nothing, in seconds.",
            MEASUREMENT,
            callback=between(0.1, MOST_DEADLINE_S),
        ),
    ] = 60.0,
    json_file: options.JsonRows = None,
    csv_file: Annotated[Path | None, option("Write rows as CSV.", OUTPUT, "--csv", metavar="FILE")] = None,
    picture: Annotated[
        Path | None,
        option("Draw speed-up, against CCR where there are several.", OUTPUT, metavar="FILE"),
    ] = None,
) -> None:
    """Time attention on the slowest rank: on a shaped network, on loopback, or as a job of torchrun."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each rank warns that its peers have no names
    from charm_megatron.bench.case import OperatorCase
    from charm_megatron.bench.suites import Race
    from charm_megatron.cli.bench.races import Runner, wide_console
    from charm_megatron.config import CharmConfig
    from charm_megatron.files import require_writable
    from charm_megatron.peers.registry import PEERS
    from charm_megatron.show.draw import PICTURE_FORMATS
    from charm_megatron.workload import CAUSAL, Workload, parse_mask

    require_writable(json_file, csv_file, picture)
    if picture is not None and picture.suffix not in PICTURE_FORMATS:
        raise InvalidInput(f"cannot draw {picture}: names of pictures end in {', '.join(PICTURE_FORMATS)}")
    runner = Runner(wide_console(), profile, nodes, ranks_per_node)
    if suite is not None:
        made = _suite(suite, context, runner)
    else:
        seen = parse_mask(mask)
        case = OperatorCase(
            Workload(
                batch,
                tokens_per_rank * runner.num_ranks,
                heads,
                kv_heads or heads,
                head_dim,
                head_dim,
                dtype,
                seen,
            ),
            options.schedule_names(schedules),
            ("zigzag" if seen == CAUSAL else "contiguous") if layout is None else layout,
            CharmConfig.model_validate(
                {
                    "prefetch_depth": prefetch_depth or 1,
                    "fuse": fuse,
                    "out_return_dtype": out_return_dtype,
                    "grad_return_dtype": grad_return_dtype,
                    "deadline_s": deadline,
                }
            ),
            repetitions=repetitions,
            warm_up=warm_up,
            peers=tuple(PEERS) if peers == "all" else options.listed(peers),
            passes=_passes(passes),
        )
        runner.cluster.require_fits(case.workload)
        grouped = "MHA" if kv_heads in (None, heads) else f"GQA {heads}:{kv_heads}"
        made = (Race(f"{grouped}, mask {seen}", runner.profile, case, _ratios(compute, ccr)),)
    results = runner.run(made, after_each=lambda results: _write(results, json_file, csv_file, picture))
    if results and picture:
        runner.console.print(f"picture: {picture}")


def _suite(suite: str, context: typer.Context, runner: "Runner") -> "tuple[Race, ...]":
    """The races of a suite, which has all their settings. Raises `InvalidInput` for others beside it."""
    from charm_megatron.bench.suites import SUITES, races

    if suite not in SUITES:
        known = "; ".join(f"{name}: {what}" for name, what in SUITES.items())
        raise InvalidInput(f"no suite {suite!r}{nearest(suite, SUITES)}; there are {known}")
    if runner.is_launched:
        raise InvalidInput("a suite shapes networks of its own; start it without torchrun")
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in WITH_SUITE and source is not None and source.name == "COMMANDLINE":
            raise InvalidInput(f"--suite has its own races; leave {parameter.opts[0]} out")
    return races(suite)


def _passes(text: str) -> tuple[Direction, ...]:
    words = options.listed(text)
    if not words or not set(words) <= set(DIRECTIONS):
        raise ConfigError(f"--passes {text!r} is not {', '.join(DIRECTIONS)} or {BOTH_PASSES}")
    return tuple(direction for direction in DIRECTIONS if direction in words)


def _ratios(compute: str | None, text: str | None) -> tuple[float | None, ...]:
    if compute == REAL and text is not None:
        raise ConfigError(f"--ccr sets modelled computation, but --compute is {REAL}; give one of the two")
    if compute != MODELLED and text is None:
        return (None,)
    text = MODELLED_RATIOS if text is None else text
    try:
        ratios = tuple(float(ratio) for ratio in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--ccr {text!r} is not a list of numbers, such as 0.1,0.5,1,2") from error
    if not all(0 < ratio < math.inf for ratio in ratios):
        raise ConfigError(f"--ccr {text!r} must be positive")
    return ratios


def _write(results: "Results", json_file: Path | None, csv_file: Path | None, picture: Path | None) -> None:
    """All rows so far, so that a race which fails after hours takes no others with it."""
    from charm_megatron.bench.picture import draw_speed_up
    from charm_megatron.cli.bench.races import as_rows, write_csv, write_json

    write_json(as_rows(results), json_file)
    write_csv(as_rows(results), csv_file)
    if picture:
        draw_speed_up(results, picture)
