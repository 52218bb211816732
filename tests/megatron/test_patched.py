"""What the patches of Megatron call gives the stock class back unless the run asks for ours."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.transformer.dot_product_attention import DotProductAttention

from charm_megatron.errors import ConfigError
from charm_megatron.mcore import patched
from charm_megatron.mcore.patched import core_attention

pytestmark = pytest.mark.megatron


@pytest.fixture(autouse=True)
def _nothing_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CHARM_CONFIG", raising=False)
    yield
    patched._module_classes.cache_clear()


def with_arguments(monkeypatch: pytest.MonkeyPatch, **arguments: object) -> None:
    module = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(**arguments))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)


def test_other_runs_keep_the_stock_class(monkeypatch: pytest.MonkeyPatch) -> None:
    assert core_attention(DotProductAttention) is DotProductAttention
    with_arguments(monkeypatch, cp_comm_type=["p2p"], charm_config=None)
    assert core_attention(DotProductAttention) is DotProductAttention


def test_a_run_asks_by_its_communication_type(monkeypatch: pytest.MonkeyPatch) -> None:
    with_arguments(monkeypatch, cp_comm_type=["p2p", "charm"])
    ours = core_attention(DotProductAttention)
    assert ours is not DotProductAttention
    assert issubclass(ours, DotProductAttention)
    assert core_attention(DotProductAttention) is ours, "all layers share one runtime"


def test_settings_come_from_the_file_and_are_strict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "charm.yaml"
    file.write_text("schedule: ring")
    with_arguments(monkeypatch, cp_comm_type=["charm"], charm_config=str(file))
    assert issubclass(core_attention(DotProductAttention), DotProductAttention)
    file.write_text("shedule: ring")
    patched._module_classes.cache_clear()
    with pytest.raises(ConfigError, match="unknown key 'shedule'; did you mean 'schedule'"):
        core_attention(DotProductAttention)


def test_a_variable_stands_in_where_megatrons_arguments_are_not_in_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "charm.yaml"
    file.write_text("schedule: ring")
    monkeypatch.setenv("CHARM_CONFIG", str(file))
    assert core_attention(DotProductAttention) is not DotProductAttention
