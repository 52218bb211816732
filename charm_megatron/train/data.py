"""A folder of text -> Megatron's indexed dataset, one token per byte.

Tokens 0..255 are the bytes of the text in UTF-8, and 256 ends a document. A document is a file.
"""

import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from charm_megatron.errors import MOST_MESSAGE_CHARACTERS, ConfigError, shortened
from charm_megatron.files import write_atomically, write_text

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257
TOKEN_BYTES = 2
"""What Megatron's dataset takes for a vocabulary of that size."""

MAX_PIECE_TOKENS = 65_536
MIN_PIECE_TOKENS = 1_024
NUM_NAMES = 3
"""Files that a sentence names of those left out."""

PIECES = 200
"""A text is stored in about so many pieces or more.

Megatron splits a dataset into training, validation and test by whole pieces, and shuffles pieces. A folder
of one large file would otherwise have no validation text.
"""


@dataclass(frozen=True)
class TextFolder:
    """The files that a model is trained on, in the order of their names."""

    path: Path
    files: tuple[Path, ...]

    @classmethod
    def find(cls, path: Path | None) -> "TextFolder":
        """Finds the regular files of `path`, at any depth; of Python's standard library when it is None.

        Raises `ConfigError` where there is no such folder, or no file with text in it.
        """
        if path is None:
            library = Path(sysconfig.get_paths()["stdlib"])
            return cls._with_text(library, sorted(library.glob("*.py")))
        if not path.is_dir():
            raise ConfigError(f"data.text {path} is not a folder; give a folder of text files")
        try:
            return cls._with_text(path, sorted(file for file in path.rglob("*") if file.is_file()))
        except OSError as error:
            raise ConfigError(f"data.text {path} cannot be read: {error.strerror}") from error

    @classmethod
    def _with_text(cls, path: Path, files: Sequence[Path]) -> "TextFolder":
        folder = cls(path, tuple(files))
        if next(folder.documents(), None) is None:
            raise ConfigError(
                f"data.text {path} holds no text, since {folder._obstacle()}; give files in UTF-8"
            )
        return folder

    def _obstacle(self) -> str:
        """Why none of the files is text."""
        if not self.files:
            return "there is no file in it"
        others = self.not_text()
        if not others:
            return f"all its files are empty: {self.names(self.files)}"
        empty = " and not empty" if len(others) < len(self.files) else ""
        return f"no file in it is in UTF-8{empty}: {self.names(self.files)}"

    def documents(self) -> Iterator[bytes]:
        """The content of each file that is not empty and is UTF-8; pictures, archives and the like are not."""
        for file in self.files:
            content = file.read_bytes()
            if content and _is_utf8(content):
                yield content

    def not_text(self) -> tuple[Path, ...]:
        """The files that are not UTF-8. Reads all files; raises `ConfigError` for one that cannot be read."""
        try:
            return tuple(file for file in self.files if not _is_utf8(file.read_bytes()))
        except OSError as error:
            raise ConfigError(
                f"data.text {self.path}: cannot read {error.filename}: {error.strerror}"
            ) from error

    def notices(self) -> tuple[str, ...]:
        """What should be known before training: that files are left out. As `not_text`, reads all files."""
        others = self.not_text()
        if not others:
            return ()
        are = "is" if len(others) == 1 else "are"
        sentence = (
            f"of {len(self.files)} files in data.text {self.path} {len(others)} {are} not in UTF-8 and left out: "
            f"{self.names(others)}"
        )
        return (shortened(sentence, MOST_MESSAGE_CHARACTERS),)

    def names(self, files: Sequence[Path]) -> str:
        """The first few files by their names in the folder, and how many more there are."""
        names = ", ".join(str(file.relative_to(self.path)) for file in files[:NUM_NAMES])
        return names if len(files) <= NUM_NAMES else f"{names} and {len(files) - NUM_NAMES} more"

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, those included that turn out not to be text."""
        return sum(file.stat().st_size for file in self.files)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def build_dataset(text: TextFolder, prefix: Path) -> None:
    """Writes `prefix`.bin and `prefix`.idx in Megatron's format; keeps them where they are already complete.

    The index appears last and at once, so that a build that was interrupted is never taken for a dataset.
    Raises `ConfigError` as `check_dataset` does.
    """
    source = prefix.with_suffix(".json")
    if prefix.with_suffix(".idx").exists():
        check_dataset(text.path, prefix)
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)

    def write(index: Path) -> None:
        num_documents, num_tokens = _write(text, prefix.with_suffix(".bin"), index)
        facts = {"text": str(text.path.resolve()), "documents": num_documents, "tokens": num_tokens}
        write_text(source, json.dumps(facts) + "\n")

    write_atomically(prefix.with_suffix(".idx"), write)


def check_dataset(text: Path, prefix: Path) -> None:
    """Raises `ConfigError` where the dataset at `prefix` was made of another folder than `text`, or is not whole.

    Folders are compared, not their names: a relative path may lead elsewhere by now. Without a dataset all is well.
    """
    if not prefix.with_suffix(".idx").exists():
        return
    source, tokens = prefix.with_suffix(".json"), prefix.with_suffix(".bin")
    try:
        facts = json.loads(source.read_text("utf-8"))
        used, num_bytes = Path(facts["text"]).resolve(), facts["tokens"] * TOKEN_BYTES
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{source} cannot be read; remove {prefix.parent}, which is made again from data.text"
        ) from error
    if used != text.resolve():
        raise ConfigError(
            f"data.text is {text.resolve()}, but this run was started with {used}; give that one"
        )
    if not tokens.is_file() or tokens.stat().st_size != num_bytes:
        raise ConfigError(
            f"{tokens} is not the {num_bytes} bytes that were written; remove {prefix.parent}, which is made again "
            f"from data.text"
        )


def _write(text: TextFolder, tokens_path: Path, index: Path) -> tuple[int, int]:
    """Returns how many documents and tokens it has written."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(VOCABULARY_SIZE)
    builder = IndexedDatasetBuilder(str(tokens_path), dtype=dtype)
    piece = min(MAX_PIECE_TOKENS, max(MIN_PIECE_TOKENS, text.num_bytes // PIECES))
    num_documents = num_tokens = 0
    for content in text.documents():
        tokens = np.append(np.frombuffer(content, np.uint8).astype(dtype), np.asarray(END_OF_DOCUMENT, dtype))
        full, rest = divmod(len(tokens), piece)
        builder.add_document(tokens, [piece] * full + ([rest] if rest else []))
        num_documents += 1
        num_tokens += len(tokens)
    builder.finalize(str(index))
    return num_documents, num_tokens


def check_size(prefix: Path, split: str, seq_length: int, needs_evaluation: bool) -> None:
    """Raises `ConfigError` where a part of the text is too short for a single sequence.

    Megatron's own dataset would say that some assertion on its index does not hold.
    """
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    # Named and copied: the dataset unmaps its file when it goes, and would leave a view of nothing.
    dataset = IndexedDataset(str(prefix))
    lengths = dataset.sequence_lengths.copy()
    parts = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for name, part in zip(("training", "validation", "test"), parts, strict=True):
        if part is None or (name != "training" and not needs_evaluation):
            continue
        begin, end = (round(bound * len(lengths)) for bound in part)
        num_tokens = int(lengths[begin:end].sum())
        if num_tokens <= seq_length:
            raise ConfigError(
                f"the {name} part of the text has {num_tokens} tokens, but a sequence takes {seq_length + 1}; "
                f"give more text or a shorter megatron.seq_length"
            )
