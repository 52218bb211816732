"""`charm-megatron bench card`: what can be seen on one card."""

import json
from dataclasses import asdict
from datetime import date
from typing import Annotated

import typer

from charm_megatron.cli import options
from charm_megatron.cli.options import MEASUREMENT, one_of, option


def card_command(
    device: Annotated[
        str | None,
        option(
            "cuda or cpu; cuda where there is one, if not given.",
            MEASUREMENT,
            callback=one_of(("cuda", "cpu")),
        ),
    ] = None,
    json_file: options.JsonRows = None,
) -> None:
    """Check kernels, the work between blocks and a whole group in one process on this card; within ten minutes."""
    import torch
    from rich import box
    from rich.table import Table

    from charm_megatron.bench.card import check_card
    from charm_megatron.cli.bench.races import wide_console
    from charm_megatron.errors import InvalidInput
    from charm_megatron.files import require_writable, write_text

    require_writable(json_file)
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise InvalidInput("torch sees no CUDA device here; --device cpu runs the same checks on the CPU")
    chosen = torch.device(device or ("cuda" if has_cuda else "cpu"))
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else "CPU"
    console, rows = wide_console(), []
    with console.status("checking") as status:
        for row in check_card(chosen):
            rows.append(row)
            status.update(f"{row.check}: {row.what}")
    table = Table(
        box=box.SIMPLE, title=f"{name}, torch {torch.__version__}, {date.today()}", title_justify="left"
    )
    for column in ("check", "what", "value", "unit", "right"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for row in rows:
        value = "-" if row.value is None else f"{row.value:.4g}"
        verdict = "" if row.limit is None else "yes" if row.is_right else "NO"
        table.add_row(row.check, row.what, value, row.note or row.unit, verdict)
    console.print(table)
    if json_file is not None:
        record = {
            "card": name,
            "torch": torch.__version__,
            "date": str(date.today()),
            "rows": [asdict(r) for r in rows],
        }
        write_text(json_file, json.dumps(record, indent=1) + "\n")
    if not all(row.is_right for row in rows):
        raise typer.Exit(1)
