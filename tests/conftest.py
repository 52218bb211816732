"""Fixtures of all tiers."""

from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")
    parser.addoption(
        "--fuzz",
        type=int,
        metavar="N",
        help="examples for each reader of test_bounded_input.py; others each time",
    )
    parser.addoption(
        "--faults", type=int, metavar="N", help="faults that tests/faults puts into jobs; some 25 s each"
    )
    parser.addoption(
        "--mutants", type=int, metavar="N", help="mutants of each case of test_mutants.py; others each time"
    )
    parser.addoption(
        "--leaks", type=int, metavar="N", help="groups, and lengths, that test_leaks.py goes through"
    )
    parser.addoption("--soak", type=int, metavar="N", help="steps of test_soak.py")
    parser.addoption(
        "--exhaustive", action="store_true", help="check all planners in all their programs; hours"
    )


@pytest.fixture
def golden(request):
    """`golden(name, text)` compares text with a file of tests/golden, or writes it under --update-golden."""

    def compare(name, text):
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{name} differs; if that is meant, --update-golden"

    return compare
