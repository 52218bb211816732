"""Files are replaced whole, what cannot be written is one sentence, and numbers are in units that people read."""

from pathlib import Path

import pytest

from charm_megatron.errors import InvalidInput
from charm_megatron.files import (
    require_writable,
    require_writable_folder,
    write_atomically,
    write_text,
)
from charm_megatron.units import bytes_text

pytestmark = pytest.mark.pure


def test_a_file_is_replaced_whole_or_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    path.write_text("old", "utf-8")

    def fail(partial: Path) -> None:
        assert partial.suffix == ".svg", "pictures are drawn in the format of their name"
        partial.write_text("half", "utf-8")
        raise OSError(28, "No space left on device")

    with pytest.raises(InvalidInput, match=r"cannot write .*picture\.svg: No space left on device"):
        write_atomically(path, fail)
    assert path.read_text("utf-8") == "old"
    write_text(path, "new\n")
    assert path.read_bytes() == b"new\n"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    require_writable(None, tmp_path / "rows.json")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidInput, match="there is no folder /nowhere"):
        require_writable(Path("/nowhere/rows.json"))
    with pytest.raises(InvalidInput, match="it is a folder"):
        require_writable(tmp_path)
    with pytest.raises(InvalidInput, match=r"cannot write /proc/rows\.json: "):
        require_writable(Path("/proc/rows.json"))
    (tmp_path / "file").touch()
    require_writable_folder(tmp_path / "a" / "b")
    with pytest.raises(InvalidInput, match="file is not a folder"):
        require_writable_folder(tmp_path / "file" / "b")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**30, "1.0 GiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_bytes_are_in_the_largest_unit_of_which_there_is_one(num_bytes: float, text: str) -> None:
    assert bytes_text(num_bytes) == text
