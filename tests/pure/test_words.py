"""The words of the code: every word of the glossary is used, and passes are named in one place."""

import re
import tokenize
from pathlib import Path

import pytest

import charm_megatron.schedule
from charm_megatron.schedule.passes import PASSES

pytestmark = pytest.mark.pure

PACKAGE = Path(charm_megatron.__file__).parent
GLOSSARY = PACKAGE / "schedule" / "__init__.py"
SOURCES = [path for path in PACKAGE.rglob("*.py") if path != GLOSSARY]


def glossary() -> list[str]:
    text = charm_megatron.schedule.__doc__ or ""
    heads = re.findall(r"^\* ([^:]+):", text, re.MULTILINE) + re.findall(r"; ([a-z ]+):", text)
    return [word.strip() for head in heads for word in head.split(",")]


def test_every_word_of_the_glossary_is_used() -> None:
    words = glossary()
    assert len(words) >= 20
    text = "\n".join(path.read_text("utf-8") for path in SOURCES)
    for word in words:
        joined = word.replace(" ", r"[\s_]*")
        assert re.search(rf"(?<![a-z]){joined}", text, re.IGNORECASE), word


def test_no_pass_is_named_outside_its_definition() -> None:
    """Code asks a pass what it carries and computes, or uses `Direction`; it compares no names."""
    found = []
    for path in SOURCES:
        if path == PACKAGE / "schedule" / "passes.py":
            continue
        with path.open("rb") as file:
            found += [
                f"{path.relative_to(PACKAGE)}:{token.start[0]}: {token.string}"
                for token in tokenize.tokenize(file.readline)
                if token.type == tokenize.STRING and token.string.strip("\"'") in PASSES
            ]
    assert found == []
