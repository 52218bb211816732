"""`charm-megatron memory`: what attention holds on a rank, by schedule."""

from pathlib import Path
from typing import Annotated

import typer

from charm_megatron.cli import options
from charm_megatron.cli.args import check_config
from charm_megatron.cli.options import between
from charm_megatron.limits import MOST_RANKS


def memory_command(
    config: options.ConfigFile,
    settings: options.Overrides = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            help="Context-parallel ranks in a domain; if not given, as charm.domains or SLURM's allocation "
            "says, else 8.",
            callback=between(1, MOST_RANKS),
        ),
    ] = None,
    schedules: Annotated[
        str | None,
        options.option(
            f"{options.SCHEDULES_HELP}.", options.SCHEDULE, show_default="ring, and the configuration's"
        ),
    ] = None,
    cpu: options.Cpu = False,
) -> None:
    """Predict the memory of one layer's attention on a rank, forward and backward, for some schedules.

    Foreign buffers are all that a rank holds beside its own tensors and results, at the worst moment of the worst rank.
    Beside them: equations 11 and 12 of the CHARM+ paper, and its Table 3, measured, with the same prediction. Kernels'
    own memory, other layers, and what an allocator keeps are not in it.
    """
    from rich.console import Console

    from charm_megatron.cli.memory_tables import domains_for, predict, prediction_table, table_3
    from charm_megatron.config import load_run_config
    from charm_megatron.paper.table_3 import HEAD_DIM, NUM_DOMAINS, RANKS_PER_DOMAIN

    run_config = load_run_config(config, settings)
    facts = check_config(run_config, Path("runs/run"), cpu)
    domains = domains_for(facts.domains, facts.cp_size, ranks_per_node)
    workload, charm = facts.workload, run_config.charm
    named = f"ring,{charm.schedule}" if schedules is None else schedules
    predictions = [
        predict(name, workload, domains, charm) for name in dict.fromkeys(options.schedule_names(named))
    ]
    console = Console(highlight=False, emoji=False)
    console.print(
        f"one layer's attention on a rank, of {facts.cp_size} in {domains.num_domains} domains: "
        f"batch {workload.batch}, {workload.seq_len} tokens, {workload.num_heads} heads, {workload.num_kv_heads} KV "
        f"x {workload.head_dim}, {workload.dtype}",
        markup=False,
        soft_wrap=True,
    )
    console.print(prediction_table(predictions))
    for line in filter(None, (prediction.remark for prediction in predictions)):
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        f"\nTable 3 of the CHARM+ paper, MB: {NUM_DOMAINS * RANKS_PER_DOMAIN} L20, measured, and "
        f"what is predicted for heads of {HEAD_DIM}",
        markup=False,
        soft_wrap=True,
    )
    console.print(table_3())
