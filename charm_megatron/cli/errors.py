"""How every command ends: a sentence on stderr and an exit code, never a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from charm_megatron.errors import MOST_MESSAGE_CHARACTERS, CharmError, InvalidInput, shortened

EXIT_FAILURE, EXIT_INVALID_INPUT, EXIT_INTERRUPTED = 1, 2, 130


class SentenceGroup(TyperGroup):
    """The whole of `charm-megatron`: what its commands raise, while reading options or later, ends here."""

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        with errors_as_sentences():
            return super().invoke(*args, **kwargs)


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """2 for bad input, in one line; 1 for what went wrong on the way; 130 for an interruption."""
    try:
        yield
    except InvalidInput as error:
        _complain(f"error: {error}")
        raise typer.Exit(EXIT_INVALID_INPUT) from error
    except typer.BadParameter as error:
        error.message = shortened(error.message, MOST_MESSAGE_CHARACTERS)
        raise
    except CharmError as error:
        _complain(f"error: {error}")
        raise typer.Exit(EXIT_FAILURE) from error
    except KeyboardInterrupt as error:
        _complain("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from error


def _complain(sentence: str) -> None:
    print(sentence, file=sys.stderr)
