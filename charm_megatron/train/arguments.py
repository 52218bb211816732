"""YAML section `megatron` -> Megatron's command line, refused in one sentence where it is wrong.

Everything here runs before a rank is started. Importing Megatron's parser imports all of
`megatron.training`, which takes seconds; this module itself imports nothing heavy.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn
from unittest import mock

from charm_megatron.config import MegatronValue
from charm_megatron.errors import ConfigError, InvalidInput, nearest, quoted
from charm_megatron.mcore import CP_COMM_TYPE
from charm_megatron.processes.failure import reason
from charm_megatron.train.flags import CPU_NEEDS, DEFAULTS, OWNED

Flags = Mapping[str, MegatronValue]

TE = "transformer_engine"
"""Megatron's default for `transformer_impl`."""
TE_COMM_TYPES = ("p2p", "a2a", "all_gather", "a2a+p2p")
"""Context parallelism of Transformer Engine's own."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing the usage, 2,000 lines of it, and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"megatron: {message}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """argparse's own lets through what a type raises besides its two errors: `KeyError`, of an enumeration."""
        try:
            return super()._get_value(action, arg_string)
        except KeyError as error:
            known = ", ".join(str(getattr(choice, "name", choice)) for choice in action.choices or ())
            raise argparse.ArgumentError(
                action, f"invalid choice: {arg_string!r} (choose from {known})"
            ) from error


def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's own parser of its flags; what it refuses raises `ConfigError`."""
    from megatron.training.arguments import add_megatron_arguments

    parser = _Parser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    return parser


def effective_flags(written: Flags, cuda: bool) -> dict[str, MegatronValue]:
    """The flags of a configuration, with those added that a run needs. Nothing written is changed.

    Raises `ConfigError` for a flag that the run owns, and for a value that cannot work on a CPU.
    """
    flags = {name.replace("-", "_"): value for name, value in written.items()}
    for name, why in OWNED.items():
        if flags.get(name) not in (None, False):
            raise ConfigError(f"megatron.{name} must be left out: {why}")
    for name, needed in ({} if cuda else CPU_NEEDS).items():
        if flags.setdefault(name, needed) != needed:
            raise ConfigError(
                f"megatron.{name} must be {as_yaml(needed)} without CUDA, but is {as_yaml(flags[name])}"
            )
    for name, value in DEFAULTS.items():
        flags.setdefault(name, value)
    if flags.get("context_parallel_size", 1) != 1:
        has_te = cuda and flags.get("transformer_impl", TE) == TE
        _require_known_types(flags.setdefault("cp_comm_type", CP_COMM_TYPE), has_te)
    return flags


def _require_known_types(cp_comm_type: MegatronValue, has_te: bool) -> None:
    """Transformer Engine's own may be named where its layers are used: to race them."""
    layers = cp_comm_type if isinstance(cp_comm_type, list) else [cp_comm_type]
    for value in layers:
        if value == CP_COMM_TYPE or (has_te and value in TE_COMM_TYPES):
            continue
        if value in TE_COMM_TYPES:
            raise ConfigError(
                f"megatron.cp_comm_type {value!r} needs Transformer Engine; without it every layer must have "
                f"{CP_COMM_TYPE!r}, and charm.schedule chooses the algorithm"
            )
        known = (CP_COMM_TYPE, *TE_COMM_TYPES)
        raise ConfigError(f"megatron.cp_comm_type {quoted(value)} is unknown{nearest(str(value), known)}")


def to_argv(flags: Flags, parser: argparse.ArgumentParser) -> list[str]:
    """Flags by name -> command line. Raises `ConfigError` for an unknown name or an unfitting value."""
    actions = _actions_by_name(parser)
    argv: list[str] = []
    for name, value in flags.items():
        if name not in actions:
            (closest,) = get_close_matches(name, actions, n=1, cutoff=0.0)
            raise ConfigError(f"megatron.{name} is not a flag of Megatron; did you mean {closest!r}?")
        argv += _words(name, value, *actions[name])
    return argv


def _actions_by_name(parser: argparse.ArgumentParser) -> dict[str, tuple[str, argparse.Action]]:
    """YAML name -> the option as Megatron spells it, and what the parser does with it."""
    return {
        option.removeprefix("--").replace("-", "_"): (option, action)
        for action in parser._actions
        for option in action.option_strings
    }


def _words(name: str, value: MegatronValue, option: str, action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool | None):
            raise ConfigError(f"megatron.{name} is a switch: true or false, but is {as_yaml(value)}")
        if value is False and isinstance(action, argparse.BooleanOptionalAction):
            return [f"--no-{option.removeprefix('--').removeprefix('no-')}"]
        return [option] if value else []
    if value is None or value is False:
        return []
    if value is True:
        raise ConfigError(f"megatron.{name} needs a value, not a bare true")
    if isinstance(value, list):
        if action.nargs is None:
            raise ConfigError(f"megatron.{name} takes one value, but is {as_yaml(value)}")
        return [option, *map(str, value)]
    # "=" keeps a value that starts with a dash from being read as a flag.
    return [f"{option}={value}"] if action.nargs is None else [option, str(value)]


def as_yaml(value: MegatronValue) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


@contextlib.contextmanager
def command_line(argv: list[str]) -> Iterator[None]:
    """Megatron reads its flags from `sys.argv`: inside the block, these."""
    with mock.patch.object(sys, "argv", ["charm-megatron", *argv]):
        yield


def validate(argv: list[str], world_size: int) -> tuple[Any, Any]:
    """Megatron's own checks of its flags, silently; its namespace of arguments, and its `TransformerConfig`.

    Raises `ConfigError` with what Megatron says where it refuses them.
    """
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    environment = mock.patch.dict(os.environ, RANK="0", WORLD_SIZE=str(world_size))
    output = io.StringIO()
    try:
        with command_line(argv), environment, contextlib.redirect_stdout(output):
            args = parse_args()
            validate_args(args)
            transformer = gpt_config_from_args(args).transformer
    except InvalidInput:
        raise
    except SystemExit as error:
        last = output.getvalue().strip().splitlines()[-1:] or ["no reason given"]
        raise ConfigError(f"Megatron refuses these flags: {last[0]}") from error
    except Exception as error:
        raise ConfigError(f"Megatron refuses these flags: {reason(error)}") from error
    return args, transformer
