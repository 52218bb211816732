"""Which versions of megatron-core are taken, and what is said of the others."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from charm_megatron.errors import InvalidInput
from charm_megatron.mcore import compat

pytestmark = pytest.mark.pure


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: version)


@pytest.mark.parametrize("version", ["0.16.1", "0.17.0rc1", "0.19.2", "0.19.10+abc"])
def test_known_versions_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version)
    compat.require_megatron()


@pytest.mark.parametrize("version", ["0.16.0", "0.20.0", "1.0"])
def test_other_versions_are_one_sentence(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version)
    with pytest.raises(InvalidInput, match=f"megatron-core {version} is not supported; .*>=0.16.1,<0.20"):
        compat.require_megatron()


def test_pretraining_needs_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "0.18.2")
    with pytest.raises(InvalidInput, match=r"pretraining needs >=0\.19\.2,<0\.20"):
        compat.require_pretraining()


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", _raise_not_found)
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match="megatron-core is not installed; pip install"):
        compat.installed_version()


def test_a_checkout_without_metadata_says_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 3\nPRE_RELEASE = ''\n")
    monkeypatch.setattr(metadata, "version", _raise_not_found)
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(compat, "find_spec", lambda name: found)
    assert compat.installed_version() == "0.19.3"


def _raise_not_found(name: str) -> str:
    raise metadata.PackageNotFoundError(name)
