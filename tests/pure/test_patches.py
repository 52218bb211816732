"""The patches for Megatron-LM are small and say why they exist; scripts/check-patches applies them."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

FOLDER = Path(__file__).parents[2] / "patches"
PATCHES = sorted(FOLDER.glob("*/*.patch"))


def test_both_versions_have_theirs() -> None:
    assert [f"{path.parent.name}/{path.stem}" for path in PATCHES] == [
        "core_v0.16.1/charm-config",
        "core_v0.16.1/core-attention",
        "core_v0.16.1/cp-comm-type-index",
        "core_v0.19.0/charm-config",
        "core_v0.19.0/core-attention",
    ]


@pytest.mark.parametrize("path", PATCHES, ids=str)
def test_a_patch_is_short_and_says_why(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("--- a/megatron/"))
    header, body = lines[:start], lines[start:]
    assert len(lines) < 40
    assert header[0].endswith(".")
    assert any(line.startswith("Why: ") for line in header)
    context = [line for line in body if line.startswith(" ")]
    hunks = [line for line in body if line.startswith("@@")]
    assert len(context) <= 2 * len(hunks)
