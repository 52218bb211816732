"""`charm-megatron args`: what a run configuration means, without running it."""

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from charm_megatron.cli import options

if TYPE_CHECKING:
    from charm_megatron.config import RunConfig
    from charm_megatron.train.checks import JobFacts


def args_command(
    config: options.ConfigFile,
    settings: options.Overrides = None,
    out: Annotated[Path, typer.Option(help="Run folder that the paths lead into.")] = Path("runs/run"),
    cpu: options.Cpu = False,
) -> None:
    """Print the Megatron command line of a run configuration, one flag per line.

    Megatron's own parser and checks have accepted it, for the world size of the file; no GPU is needed for that. For
    a script of your own: torchrun ... pretrain_gpt.py $(charm-megatron args CONFIG) --data-path ...; of two
    equal flags the last counts.
    """
    from charm_megatron.config import load_run_config

    for words in by_flag(check_config(load_run_config(config, settings), out, cpu).argv):
        print(shlex.join(words))


def check_config(config: "RunConfig", out: Path, cpu: bool) -> "JobFacts":
    """All that is checked before a run is started, for a machine with CUDA or without.

    Inside an allocation of SLURM, for its nodes.
    """
    from charm_megatron.mcore.compat import require_pretraining
    from charm_megatron.topology.from_launcher import ranks_of_hosts
    from charm_megatron.train.checks import check_job, check_quickly
    from charm_megatron.train.launch import call_in_server
    from charm_megatron.train.run_folder import RunFolder

    check_quickly(config)
    require_pretraining()
    hosts = ranks_of_hosts(os.environ, config.launch.ranks)
    facts: JobFacts = call_in_server(check_job, config, RunFolder(out.absolute()), False, hosts, not cpu)
    return facts


def by_flag(argv: Sequence[str]) -> Iterator[list[str]]:
    """A command line, cut before each flag."""
    words: list[str] = []
    for word in argv:
        if word.startswith("--") and words:
            yield words
            words = []
        words.append(word)
    if words:
        yield words
