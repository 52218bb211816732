"""Which rank is blamed, and what a rank says of its failure."""

from pathlib import Path

import pytest

from charm_megatron.errors import ConfigError
from charm_megatron.train.external import is_rank
from charm_megatron.train.launch import free_port, last_lines, threads_per_rank
from charm_megatron.train.rank import Place, failure_of, reason

pytestmark = pytest.mark.pure


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_callers_mistake_keeps_its_sentence() -> None:
    failure = failure_of(raised(ConfigError("a value\nis wrong")))
    assert (failure.message, failure.is_invalid_input) == ("a value is wrong", True)


def test_another_exception_is_named() -> None:
    failure = failure_of(raised(RuntimeError("it broke")))
    assert (failure.message, failure.is_invalid_input) == ("RuntimeError: it broke", False)


def test_a_bare_assertion_says_what_does_not_hold() -> None:
    two = 2
    with pytest.raises(AssertionError) as caught:
        exec(compile("assert two < 1", __file__, "exec"), {"two": two})
    assert reason(AssertionError("some words")) == "some words"
    assert reason(caught.value).endswith("does not hold")


def test_a_rank_finds_its_place_in_the_environment() -> None:
    environment = Place(rank=1, world_size=4, port=1234, num_threads=1).environment
    assert environment["RANK"] == environment["LOCAL_RANK"] == "1"
    assert environment["WORLD_SIZE"] == "4"
    assert is_rank(environment)
    assert not is_rank({"WORLD_SIZE": "4"})


def test_cores_are_shared_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_rank(10_000) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank(10_000) == 3


def test_ports_are_free_and_logs_may_be_missing(tmp_path: Path) -> None:
    assert 1024 <= free_port() < 65536
    assert last_lines(tmp_path / "missing.log") == ""
    (tmp_path / "log").write_text("one\ntwo\nthree\n")
    assert last_lines(tmp_path / "log", 2) == "  two\n  three"
