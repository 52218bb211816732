"""The command line on a patched Megatron: our attention comes from the patch alone, not from our installer."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from charm_megatron.cli.main import app


@contextmanager
def nothing_installed(*args: object) -> Iterator[None]:
    """Takes the place of `charm_attention_installed`."""
    yield


if __name__ == "__main__":
    with mock.patch("charm_megatron.train.job.charm_attention_installed", nothing_installed):
        app()
