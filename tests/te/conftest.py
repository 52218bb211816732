"""Without Transformer Engine this tier fails, it does not skip: scripts/test-te puts it on the path."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def transformer_engine() -> None:
    import torch  # noqa: F401  # first: it loads the libraries that Transformer Engine is linked with

    from charm_megatron.mcore.compat import require_te

    require_te()
