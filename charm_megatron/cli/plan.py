"""`charm-megatron plan`: a schedule as a grid, as numbers, as a picture, as JSON, or beside others."""

from pathlib import Path
from typing import Annotated

import typer

from charm_megatron.errors import InvalidInput, nearest
from charm_megatron.paper.table_2 import H100


def plan_command(
    schedule: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the schedule.")] = None,
    nodes: Annotated[int, typer.Option(help="Nodes: domains of fast links.")] = 1,
    ranks_per_node: Annotated[int, typer.Option(help="Context-parallel ranks on each node.")] = 8,
    mask: Annotated[
        str,
        typer.Option(
            help="causal, none, window:LEFT,RIGHT or documents:LENGTH,..; joined by + where wanted."
        ),
    ] = "causal",
    layout: Annotated[str, typer.Option(help="zigzag, contiguous, striped or document_zigzag.")] = "zigzag",
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads; as many as query heads if not given.")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 128,
    tokens_per_rank: Annotated[int, typer.Option(help="Tokens of each rank.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences side by side.")] = 1,
    dtype: Annotated[str, typer.Option(help="Dtype of q, k, v and out.")] = "bfloat16",
    pass_: Annotated[
        str | None,
        typer.Option("--pass", help="forward or backward; both if not given, but pictures only of forward."),
    ] = None,
    prefetch_depth: Annotated[int, typer.Option(help="Steps that a transfer may start ahead, plus one.")] = 1,
    fuse: Annotated[
        bool,
        typer.Option(
            "--fuse/--no-fuse", help="Post all transfers of a step together, or each lane by itself."
        ),
    ] = True,
    out_return_dtype: Annotated[
        str, typer.Option(help="Returned outputs travel in: model or float32.")
    ] = "model",
    grad_return_dtype: Annotated[
        str, typer.Option(help="Returned gradients travel in: model or float32.")
    ] = "float32",
    compare: Annotated[
        str | None, typer.Option(metavar="NAME,NAME,..", help="Several schedules side by side.")
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Write the schedule itself to standard output, and nothing else.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the timeline; .svg, .png or .pdf.", metavar="FILE")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Draw this rank alone, all its links apart.", metavar="RANK")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(help="Write the timeline as a Chrome trace, for ui.perfetto.dev.", metavar="FILE"),
    ] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Show every rank and step, however many.")
    ] = False,
    flops_per_s: Annotated[float, typer.Option(help="Rate of a rank; default: H100.")] = H100.flops_per_s,
    inside_bytes_per_s: Annotated[
        float, typer.Option(help="Rate of a rank's link inside a node; default: H100.")
    ] = H100.inside_bytes_per_s,
    across_bytes_per_s: Annotated[
        float, typer.Option(help="Rate of a rank's link across nodes; default: H100.")
    ] = H100.across_bytes_per_s,
    latency_s: Annotated[float, typer.Option(help="Latency of every transfer.")] = 0.0,
    own_links: Annotated[
        bool, typer.Option("--own-links", help="In pictures no transfer waits for another of its rank.")
    ] = False,
) -> None:
    """Show a schedule: who computes and sends what in each step, and what that costs each rank.

    Times, in pictures and comparisons, come from a model with one rate for blocks and one for each class of links.
    """
    from charm_megatron.cli.planning import Output, Prices, Setting, run_plan
    from charm_megatron.config import CharmConfig
    from charm_megatron.schedule.passes import DIRECTIONS, Direction

    _require_one_of("--pass", pass_ or DIRECTIONS[0], DIRECTIONS)
    _require_one_of("--out-return-dtype", out_return_dtype, ("model", "float32"))
    _require_one_of("--grad-return-dtype", grad_return_dtype, ("model", "float32"))
    if prefetch_depth < 1:
        raise InvalidInput(f"--prefetch-depth must be at least 1, but is {prefetch_depth}")
    setting = Setting(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        mask=mask,
        layout=layout,
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        tokens_per_rank=tokens_per_rank,
        batch=batch,
        dtype=dtype,
        config=CharmConfig.model_validate(
            {
                "prefetch_depth": prefetch_depth,
                "fuse": fuse,
                "out_return_dtype": out_return_dtype,
                "grad_return_dtype": grad_return_dtype,
            }
        ),
    )
    output = Output(
        names=_names(schedule, compare),
        is_comparison=compare is not None,
        directions=(Direction(pass_),) if pass_ else DIRECTIONS,
        as_json=json_,
        picture=svg,
        only_rank=rank,
        trace=perfetto,
        all_ranks=all_ranks,
        own_links=own_links,
    )
    run_plan(setting, output, Prices(flops_per_s, inside_bytes_per_s, across_bytes_per_s, latency_s))


def _require_one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidInput(f"{option} {value!r} is unknown{nearest(value, known)}")


def _names(schedule: str | None, compare: str | None) -> tuple[str, ...]:
    if (schedule is None) == (compare is None):
        raise InvalidInput("give either --schedule NAME or --compare NAME,NAME,..")
    return tuple(name.strip() for name in (compare or schedule or "").split(","))
