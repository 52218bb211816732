"""A Transformer Engine that is missing, broken or unknown is one sentence with the way out."""

import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from charm_megatron.errors import InvalidInput
from charm_megatron.mcore import compat
from charm_megatron.mcore.bridge import SplitAttention
from charm_megatron.mcore.te_attention import te_core_attention_class

pytestmark = pytest.mark.megatron


def extension(**parts: object) -> Any:
    """Stands in for Megatron's module of Transformer Engine classes."""
    return mock.patch.object(compat, "import_module", return_value=SimpleNamespace(**parts))


def test_without_transformer_engine_the_class_is_not_made_from_a_mock() -> None:
    """Megatron's name for the base class exists there too: an object, from which a class statement makes another."""
    stock = importlib.import_module(compat.TE_EXTENSION).TEDotProductAttention
    assert not isinstance(stock, type)
    assert compat.megatron_te() is None
    with pytest.raises(
        InvalidInput, match=r"transformer-engine is not installed; .*--transformer-impl local"
    ):
        te_core_attention_class(SplitAttention(None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [FileNotFoundError("no torch lib"), OSError("libnccl.so.2"), ImportError("x")]
)
def test_a_broken_transformer_engine_is_named(error: Exception) -> None:
    with (
        mock.patch.object(compat, "import_module", side_effect=error),
        pytest.raises(InvalidInput, match=rf"cannot be used \({error}\); `python -c .*; pip install"),
    ):
        compat.megatron_te()


def test_a_transformer_engine_that_megatron_could_not_import_is_named() -> None:
    with (
        extension(HAVE_TE=False, TEDotProductAttention=object()),
        mock.patch.object(compat, "find_spec", return_value=object()),
        pytest.raises(InvalidInput, match=r"Megatron could not import transformer_engine\.pytorch"),
    ):
        compat.megatron_te()


@pytest.mark.parametrize("version", ["2.8.0", "2.21.0", "3.0"])
def test_a_version_out_of_the_range_is_refused(version: str) -> None:
    with (
        extension(HAVE_TE=True, TEDotProductAttention=object, get_te_version=lambda: version),
        pytest.raises(InvalidInput, match=rf"transformer-engine {version} is not supported; .*>=2.9,<2.21"),
    ):
        compat.megatron_te()


@pytest.mark.parametrize("version", ["2.9.0", "2.17.1+4329ff84", "2.20.2"])
def test_versions_in_the_range_are_taken(version: str) -> None:
    with extension(HAVE_TE=True, TEDotProductAttention=object, get_te_version=lambda: version):
        assert compat.megatron_te() is not None
