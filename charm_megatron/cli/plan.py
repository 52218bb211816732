"""`charm-megatron plan`: a schedule as a grid, as numbers, as a picture, as JSON, or beside others."""

from pathlib import Path
from typing import Annotated

from charm_megatron.cli import options
from charm_megatron.cli.options import MODEL, OUTPUT, SCHEDULE, one_of, option
from charm_megatron.errors import InvalidInput, quoted
from charm_megatron.paper.table_2 import H100
from charm_megatron.schedule.passes import DIRECTIONS, Direction

COMMUNICATORS = ("host", "one", "two")
"""The number of each is how many there are."""


def plan_command(
    schedule: Annotated[
        str | None, option("A planner's name, or the path of a .json file.", SCHEDULE, metavar="NAME")
    ] = None,
    compare: Annotated[
        str | None, option("Several of these side by side.", SCHEDULE, metavar="NAME,NAME,..")
    ] = None,
    prefetch_depth: options.PrefetchDepth = None,
    fuse: Annotated[
        bool | None, option(options.FUSE_HELP, SCHEDULE, options.FUSE_FLAGS, show_default="fuse")
    ] = None,
    out_return_dtype: options.OutReturnDtype = "model",
    grad_return_dtype: options.GradReturnDtype = "by_link",
    nodes: options.Nodes = None,
    ranks_per_node: options.RanksPerNode = None,
    mask: options.MaskText = None,
    layout: options.Layout = None,
    tokens_per_rank: options.TokensPerRank = None,
    heads: options.Heads = 32,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = 128,
    batch: options.Batch = 1,
    dtype: options.Dtype = "bfloat16",
    flops_per_s: Annotated[
        float, option("FLOP/s of a rank.", MODEL, show_default=f"H100, {H100.flops_per_s:g}")
    ] = H100.flops_per_s,
    inside_bytes_per_s: Annotated[
        float,
        option(
            "Bytes/s of a rank's link inside a node.",
            MODEL,
            show_default=f"H100, {H100.inside_bytes_per_s:g}",
        ),
    ] = H100.inside_bytes_per_s,
    across_bytes_per_s: Annotated[
        float,
        option(
            "Bytes/s of a rank's link across nodes.", MODEL, show_default=f"H100, {H100.across_bytes_per_s:g}"
        ),
    ] = H100.across_bytes_per_s,
    latency_s: Annotated[float, option("Latency of every transfer.", MODEL)] = 0.0,
    communicators: Annotated[
        str,
        option(
            "Times as over NCCL with one communicator, or with two, inside domains and across; host: each transfer "
            "goes by itself.",
            MODEL,
            callback=one_of(COMMUNICATORS),
        ),
    ] = "host",
    own_links: Annotated[
        bool, option("In pictures no transfer waits for another of its rank.", MODEL, "--own-links")
    ] = False,
    pass_: Annotated[
        str | None,
        option(
            f"{' or '.join(DIRECTIONS)}; both if not given, but pictures only of {DIRECTIONS[0]}.",
            OUTPUT,
            "--pass",
            callback=one_of(DIRECTIONS),
        ),
    ] = None,
    all_ranks: Annotated[
        bool, option("Show every rank and step, however many.", OUTPUT, "--all-ranks")
    ] = False,
    json_: Annotated[
        bool, option("Write the schedule itself to standard output, and nothing else.", OUTPUT, "--json")
    ] = False,
    svg: Annotated[
        Path | None, option("Draw the timeline; .svg, .png or .pdf.", OUTPUT, metavar="FILE")
    ] = None,
    rank: Annotated[
        int | None, option("Draw this rank alone, with each of its links.", OUTPUT, metavar="RANK")
    ] = None,
    perfetto: Annotated[
        Path | None,
        option("Write the timeline as a Chrome trace, for ui.perfetto.dev.", OUTPUT, metavar="FILE"),
    ] = None,
) -> None:
    """Show a schedule: who computes and sends what in each step, and what that costs each rank.

    Times, in pictures and comparisons, come from a model with one rate for blocks and one for each class of links.
    """
    from charm_megatron.cli.plan_output import ModelRates, PlanOutput, show_plans
    from charm_megatron.cli.plan_request import PlanRequest

    if communicators == "two" and fuse:
        raise InvalidInput("with --communicators two posts are made lane by lane; leave --fuse out")
    request = PlanRequest(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        mask=mask,
        layout=layout,
        tokens_per_rank=tokens_per_rank,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        batch=batch,
        dtype=dtype,
        prefetch_depth=prefetch_depth,
        fuse=False if fuse is None and communicators == "two" else fuse,
        out_return_dtype=out_return_dtype,
        grad_return_dtype=grad_return_dtype,
    )
    output = PlanOutput(
        names=_names(schedule, compare),
        is_comparison=compare is not None,
        directions=(Direction(pass_),) if pass_ else DIRECTIONS,
        as_json=json_,
        picture=svg,
        only_rank=rank,
        trace=perfetto,
        all_ranks=all_ranks,
        own_links=own_links,
        rates=ModelRates(
            flops_per_s,
            inside_bytes_per_s,
            across_bytes_per_s,
            latency_s,
            COMMUNICATORS.index(communicators),
        ),
    )
    show_plans(request, output)


def _names(schedule: str | None, compare: str | None) -> tuple[str, ...]:
    from charm_megatron.compile import is_schedule_file

    names = options.listed(compare or "") if schedule is None else (schedule,)
    if (schedule is None) == (compare is None) or not names:
        raise InvalidInput("give either --schedule NAME or --compare NAME,NAME,..")
    if schedule is not None and len(options.listed(schedule)) > 1 and not is_schedule_file(schedule):
        raise InvalidInput(f"--schedule takes one name, but is {quoted(schedule)}; --compare takes several")
    return names
