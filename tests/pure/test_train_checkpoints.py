"""What is wrong with a folder of checkpoints is said ahead, and the newest whole one is offered."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from charm_megatron.errors import InvalidInput
from charm_megatron.train.checkpoints import iteration_to_continue, newest_whole, require_private
from tests.checkpoints import save_checkpoint

pytestmark = pytest.mark.pure

OFFER = r"; iteration 4 is whole: `echo 4 > .*/latest_checkpointed_iteration.txt` continues from there$"

TORN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda at: at.rename(at.with_name("elsewhere")), "there is no folder iter_0000006"),
    "no shard": (lambda at: (at / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "half a shard": (
        lambda at: (at / "__1_0.distcp").write_bytes(bytes(100)),
        "__1_0.distcp is cut short: 100 of 200 bytes",
    ),
    "no table": (lambda at: (at / ".metadata").unlink(), "/.metadata is missing"),
    "half a table": (
        lambda at: (at / ".metadata").write_bytes((at / ".metadata").read_bytes()[:50]),
        "/.metadata is cut short, or no table of contents",
    ),
    "zeros": (lambda at: (at / ".metadata").write_bytes(bytes(50)), "/.metadata is cut short"),
    "another pickle": (
        lambda at: (at / ".metadata").write_bytes(pickle.dumps([1])),
        "no table of contents",
    ),
    "no format": (lambda at: (at / "metadata.json").unlink(), "/metadata.json is missing"),
    "empty format": (
        lambda at: (at / "metadata.json").write_text(""),
        "metadata.json does not name the format",
    ),
}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for iteration in (2, 4, 6):
        save_checkpoint(tmp_path / "checkpoints", iteration)
    return tmp_path / "checkpoints"


def test_the_tracker_names_the_iteration_to_continue(checkpoints: Path) -> None:
    assert iteration_to_continue(checkpoints) == 6
    assert iteration_to_continue(checkpoints.parent / "absent") is None


@pytest.mark.parametrize("damage", TORN)
def test_a_torn_checkpoint_is_named_and_an_older_one_offered(checkpoints: Path, damage: str) -> None:
    tear, sentence = TORN[damage]
    tear(checkpoints / "iter_0000006")
    with pytest.raises(InvalidInput, match=f"names iteration 6, but .*{sentence}.*{OFFER}"):
        iteration_to_continue(checkpoints)
    assert newest_whole(checkpoints) == 4


@pytest.mark.parametrize(
    ("text", "shown"),
    [("banana", "'banana'"), ("", "nothing"), ("-1", "'-1'"), ("²", "'²'"), ("9" * 5000, "'9")],
)
def test_a_tracker_that_names_no_iteration_is_said(checkpoints: Path, text: str, shown: str) -> None:
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(
        InvalidInput, match=f"txt holds {shown}.*, which is no iteration; iteration 6 is whole"
    ):
        iteration_to_continue(checkpoints)


def test_a_tracker_that_is_missing_hides_no_checkpoint(checkpoints: Path) -> None:
    (checkpoints / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(InvalidInput, match=r"iteration.txt is missing; iteration 6 is whole"):
        iteration_to_continue(checkpoints)


def test_without_a_whole_checkpoint_nothing_is_offered(tmp_path: Path) -> None:
    (save_checkpoint(tmp_path, 2) / "__0_0.distcp").unlink()
    with pytest.raises(
        InvalidInput, match=r"no checkpoint in .* is whole: start the run again with another --out"
    ):
        iteration_to_continue(tmp_path)


def test_nothing_that_a_table_names_is_run(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "was_run"),)

    (save_checkpoint(tmp_path, 2) / ".metadata").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(InvalidInput, match="no table of contents"):
        iteration_to_continue(tmp_path)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("what", ["", "iter_0000006", "iter_0000006/__0_0.distcp"])
def test_what_others_may_write_is_not_loaded(checkpoints: Path, what: str) -> None:
    folders = (checkpoints, checkpoints / "iter_0000006")
    require_private(*folders)
    (checkpoints / what).chmod(0o777)
    with pytest.raises(InvalidInput, match="can be written by everybody, and loading a checkpoint runs code"):
        require_private(*folders)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_somebody_else_is_not_loaded(checkpoints: Path) -> None:
    os.chown(checkpoints / "iter_0000006", 12345, -1)
    with pytest.raises(InvalidInput, match="iter_0000006 belongs to user 12345, and loading"):
        require_private(checkpoints)
