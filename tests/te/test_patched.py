"""What the patches of Megatron call gives our class in place of Transformer Engine's too."""

from collections.abc import Iterator

import pytest
from megatron.core.extensions import transformer_engine as te
from megatron.core.transformer.dot_product_attention import DotProductAttention

from charm_megatron.mcore import patched

pytestmark = pytest.mark.te


@pytest.fixture(autouse=True)
def _asked_by_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    file = tmp_path_factory.mktemp("charm") / "charm.yaml"
    file.write_text("schedule: ring")
    monkeypatch.setenv("CHARM_CONFIG", str(file))
    yield
    patched._module_classes.cache_clear()


def test_each_stock_class_has_its_own() -> None:
    ours = patched.core_attention(te.TEDotProductAttention)
    assert issubclass(ours, te.TEDotProductAttention)
    assert ours is not te.TEDotProductAttention
    local = patched.core_attention(DotProductAttention)
    assert issubclass(local, DotProductAttention)
