"""Which files are text to train on."""

import json
from pathlib import Path

import pytest

from charm_megatron.errors import ConfigError
from charm_megatron.train.data import TextFolder, check_dataset

pytestmark = pytest.mark.pure


def test_text_is_found_at_any_depth_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "inner.txt").write_text("third")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "a.unknown").write_text("sécond")
    assert list(TextFolder.find(tmp_path).documents()) == [b"first", "sécond".encode(), b"third"]


def test_empty_files_and_files_that_are_not_text_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "text.txt").write_text("text")
    assert list(TextFolder.find(tmp_path).documents()) == [b"text"]


def test_files_that_are_not_text_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    assert TextFolder.find(tmp_path).notices() == ()
    (tmp_path / "b").mkdir()
    for name in ("a.zip", "b/c.png", "d.bin", "e.bin", "f.bin"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
    assert TextFolder.find(tmp_path).notices() == (
        f"of 7 files in data.text {tmp_path} 5 are not in UTF-8 and left out: a.zip, b/c.png, d.bin and 2 more",
    )


def test_why_a_folder_holds_no_text_is_said(tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(ConfigError) as caught:
            TextFolder.find(tmp_path)
        return str(caught.value)

    assert "since there is no file in it" in refusal()
    (tmp_path / "empty.txt").touch()
    assert "since all its files are empty: empty.txt" in refusal()
    (tmp_path / "picture").write_bytes(b"\xff\xfe")
    assert "since no file in it is in UTF-8 and not empty: empty.txt, picture" in refusal()
    (tmp_path / "empty.txt").unlink()
    assert "since no file in it is in UTF-8: picture" in refusal()


def test_the_default_is_the_standard_library() -> None:
    text = TextFolder.find(None)
    assert "argparse.py" in {file.name for file in text.files}
    assert text.num_bytes > 1_000_000


@pytest.mark.parametrize("make", ["missing", "file", "empty", "binary"])
def test_a_folder_without_text_is_one_sentence(tmp_path: Path, make: str) -> None:
    path = tmp_path / "text"
    if make == "file":
        path.touch()
    elif make != "missing":
        path.mkdir()
    if make == "binary":
        (path / "picture").write_bytes(b"\xff\xfe\x00")
    sentence = "is not a folder" if make in ("missing", "file") else "holds no text"
    with pytest.raises(ConfigError, match=f"data.text .*text {sentence}"):
        TextFolder.find(path)


def dataset_of(text: Path, prefix: Path) -> None:
    prefix.with_suffix(".idx").touch()
    prefix.with_suffix(".bin").write_bytes(bytes(20))
    prefix.with_suffix(".json").write_text(json.dumps({"text": str(text), "documents": 1, "tokens": 10}))


def test_a_resumed_run_compares_folders_of_text_not_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "a" / "text"
    text.mkdir(parents=True)
    (tmp_path / "b" / "text").mkdir(parents=True)
    (tmp_path / "link").symlink_to(text)
    prefix = tmp_path / "prefix"
    check_dataset(text, prefix)  # a run that has no dataset yet
    dataset_of(text, prefix)
    monkeypatch.chdir(tmp_path / "a")
    for same in (text, Path("text"), Path("../link")):
        check_dataset(same, prefix)
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"data.text is .*/b/text, but this run was started with .*/a/text"):
        check_dataset(Path("text"), prefix)


def test_a_dataset_that_is_not_whole_is_one_sentence(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    dataset_of(tmp_path, prefix)
    prefix.with_suffix(".bin").write_bytes(bytes(19))
    with pytest.raises(ConfigError, match=r"prefix.bin is not the 20 bytes that were written; remove "):
        check_dataset(tmp_path, prefix)
    prefix.with_suffix(".json").write_text("")
    with pytest.raises(ConfigError, match=r"prefix.json cannot be read; remove "):
        check_dataset(tmp_path, prefix)
