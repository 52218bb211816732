"""`charm-megatron bench operator`: schedules, and other libraries' attention, against each other."""

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from charm_megatron.cli.races import Results, Runner, as_rows, require_writable, wide_console, write_whole
from charm_megatron.errors import ConfigError, InvalidInput, nearest

if TYPE_CHECKING:
    pass

Width = Literal["model", "float32"]
PICTURES = (".png", ".svg", ".pdf")
OF_SUITES = {"suite", "json_file", "csv_file", "picture"}
"""Parameters that go with --suite."""
MODELLED_RATIOS = "0.1,0.2,0.5,1,2"


def operator_command(
    context: typer.Context,
    schedules: Annotated[
        str, typer.Option(help="Schedules, separated by commas; ratios are to the first.")
    ] = "ring,rm_plus,charm",
    peers: Annotated[str, typer.Option(help="Other libraries' attention, separated by commas, or all.")] = "",
    profile: Annotated[
        str | None,
        typer.Option(help="Shaped network, by name or YAML file; needs root. Loopback if not given."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="smoke, quick or full: ready-made races; goes with --json, --csv and --picture only."
        ),
    ] = None,
    passes: Annotated[str, typer.Option(help="forward, backward or both.")] = "forward,backward",
    mask: Annotated[str, typer.Option(help="causal, none, window:LEFT,RIGHT ..")] = "none",
    layout: Annotated[
        str | None,
        typer.Option(help="zigzag, contiguous or striped. If not given, zigzag for causal, else contiguous."),
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads; as many as query heads if not given.", min=1)
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Width of a head.", min=1)] = 64,
    tokens_per_rank: Annotated[int, typer.Option(help="Tokens of each rank.", min=1)] = 256,
    batch: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="Dtype of q, k, v and out.")] = "bfloat16",
    out_return_dtype: Annotated[
        Width, typer.Option(help="Width of partial outputs on their way home.")
    ] = "model",
    grad_return_dtype: Annotated[Width, typer.Option(help="The same for partial gradients.")] = "float32",
    compute: Annotated[
        Literal["real", "modelled"] | None,
        typer.Option(help="modelled: waits in place of blocks, as an accelerator leaves the CPU alone."),
    ] = None,
    ccr: Annotated[
        str | None,
        typer.Option(
            help="Ratios of modelled computation to the first schedule's communication, separated by commas; "
            f"{MODELLED_RATIOS} if not given."
        ),
    ] = None,
    fuse: Annotated[
        bool,
        typer.Option("--fuse/--no-fuse", help="Post all transfers of a step together, as NCCL needs it."),
    ] = False,
    nodes: Annotated[
        int | None, typer.Option(help="Without --profile: domains that the ranks fall into.", min=1)
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Without --profile: ranks of each domain.", min=1)
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Timed repetitions, interleaved.", min=1)] = 5,
    warm_up: Annotated[int, typer.Option(help="Repetitions before them.", min=0)] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write rows as JSON.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write rows as CSV.")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw speed-up, against CCR where there are several.")
    ] = None,
) -> None:
    """Time attention on the slowest rank: on a shaped network, on loopback, or as a job of torchrun."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each rank tells that its peers have no names
    from charm_megatron.bench.operator import OperatorCase
    from charm_megatron.bench.suites import SUITES, Race, races
    from charm_megatron.config import CharmConfig
    from charm_megatron.peers.registry import PEERS
    from charm_megatron.workload import CAUSAL, Workload, parse_mask

    require_writable(json_file, csv_file, picture)
    if picture is not None and picture.suffix not in PICTURES:
        raise InvalidInput(f"--picture {picture} does not end in {' or '.join(PICTURES)}")
    runner = Runner(wide_console(), profile, nodes, ranks_per_node)
    if suite is not None:
        if suite not in SUITES:
            known = "; ".join(f"{name}: {what}" for name, what in SUITES.items())
            raise InvalidInput(f"no suite {suite!r}{nearest(suite, SUITES)}; there are {known}")
        if runner.is_launched:
            raise InvalidInput("a suite shapes networks of its own; start it without torchrun")
        _require_alone(context)
        made = races(suite)
    else:
        seen = parse_mask(mask)
        workload = Workload(
            batch,
            tokens_per_rank * runner.num_ranks,
            heads,
            kv_heads or heads,
            head_dim,
            head_dim,
            dtype,
            seen,
        )
        settings = CharmConfig(
            fuse=fuse, out_return_dtype=out_return_dtype, grad_return_dtype=grad_return_dtype
        )
        case = OperatorCase(
            workload,
            tuple(_listed(schedules)),
            layout or ("zigzag" if seen == CAUSAL else "contiguous"),
            settings,
            repetitions=repetitions,
            warm_up=warm_up,
            peers=tuple(PEERS if peers == "all" else _listed(peers)),
            passes=_passes(passes),
        )
        grouped = (
            "MHA" if case.workload.num_heads == case.workload.num_kv_heads else f"GQA {heads}:{kv_heads}"
        )
        made = (Race(f"{grouped}, mask {seen}", runner.profile, case, tuple(_ratios(compute, ccr))),)
    results = runner.run(made, after_each=lambda results: _write(results, json_file, csv_file, picture))
    if results and picture:
        runner.console.print(f"picture: {picture}")


def _require_alone(context: typer.Context) -> None:
    """A suite has all settings of its races."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in OF_SUITES and source is not None and source.name == "COMMANDLINE":
            raise InvalidInput(f"--suite has its own races; leave {parameter.opts[0]} out")


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _passes(text: str) -> Any:
    from charm_megatron.schedule.passes import DIRECTIONS

    words = _listed(text)
    if not words or not set(words) <= set(DIRECTIONS):
        raise ConfigError(f"--passes {text!r} is not forward, backward or forward,backward")
    return tuple(direction for direction in DIRECTIONS if direction in words)


def _ratios(compute: str | None, text: str | None) -> list[float | None]:
    if compute == "real" and text is not None:
        raise ConfigError("--ccr sets modelled computation, but --compute is real; give one of the two")
    if compute != "modelled" and text is None:
        return [None]
    text = MODELLED_RATIOS if text is None else text
    try:
        ratios = [float(ratio) for ratio in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--ccr {text!r} is not a list of numbers, such as 0.1,0.5,1,2") from error
    if not all(0 < ratio < math.inf for ratio in ratios):
        raise ConfigError(f"--ccr {text!r} must be positive")
    return list(ratios)


def _write(results: Results, json_file: Path | None, csv_file: Path | None, picture: Path | None) -> None:
    """All rows so far, so that a race which fails after hours takes no others with it."""
    from charm_megatron.bench.picture import draw_speed_up

    listed = as_rows(results)
    if json_file:
        write_whole(json_file, json.dumps(listed, indent=1) + "\n")
    if csv_file:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)
        write_whole(csv_file, text.getvalue())
    if picture:
        draw_speed_up(results, picture)
