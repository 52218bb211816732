"""Text from outside -> plain data, with limits on everything before anything is built.

YAML here is the part that configurations need: one document of mappings, lists, texts, numbers, true, false and null.
Aliases are refused, since few lines of them stand for gigabytes; dates are texts.
"""

import json
import re
import sys
from collections.abc import Hashable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

import yaml

from charm_megatron.errors import InvalidInput, quoted, shortened
from charm_megatron.limits import (
    MOST_JSON_BYTES,
    MOST_JSON_DEPTH,
    MOST_JSON_LISTS,
    MOST_JSON_VALUES,
    MOST_NUMBER_CHARACTERS,
    MOST_YAML_BYTES,
    MOST_YAML_DEPTH,
    MOST_YAML_VALUES,
)

Kind = type[InvalidInput]
"""The kind of error that a reader raises."""

MOST_PATH_CHARACTERS = 100
MOST_REASON_CHARACTERS = 140
STANDARD_INPUT = "-"
FEW_DIGITS = 9
"""Numbers of so few are read before they are compared."""

_TAG = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str", "seq", "map")
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
_JSON_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Up to the end of the text where it is not closed, so that no character is looked at twice."""


# ---------------------------------------------------------------------- numbers and files


def is_whole(value: object) -> bool:
    """Whether a value that a program passes is a whole number. True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value that a program passes is a real number. True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_number(text: str, most: int) -> int | None:
    """The number that decimal digits write, ASCII ones only; None for other text, and for more than `most`."""
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text if len(text) <= FEW_DIGITS else text.lstrip("0")
    if len(digits) > max(FEW_DIGITS, len(str(most))):
        return None
    number = int(digits or "0")
    return number if number <= most else None


def path_text(path: Path | str) -> str:
    """A path for messages, without its middle where it is very long."""
    return shortened(path, MOST_PATH_CHARACTERS)


def read_text(path: Path, what: str, most_bytes: int, kind: Kind) -> str:
    """The text of a file in UTF-8, of standard input for the path `-`; `what` names it in errors.

    Raises `kind` where it cannot be read, has more than `most_bytes`, or is not UTF-8.
    """
    try:
        if str(path) == STANDARD_INPUT:
            data = sys.stdin.buffer.read(most_bytes + 1)
        else:
            with path.open("rb") as file:
                data = file.read(most_bytes + 1)
    except OSError as error:
        raise kind(f"cannot read {what}: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise kind(f"cannot read {what}: {error}") from error
    if len(data) > most_bytes:
        raise kind(f"cannot read {what}: it has more than {most_bytes:,} bytes, the most that is read")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"{what} is not text in UTF-8: byte {error.start} is {data[error.start]:#04x}") from error


# ---------------------------------------------------------------------- YAML


def parse_yaml(text: str, what: str, kind: Kind) -> Any:
    """The value that YAML writes; `what` names the text in errors. Raises `kind` for all that is not read."""
    if len(text) > MOST_YAML_BYTES:
        raise kind(f"{what} has more than {MOST_YAML_BYTES:,} characters, the most that is read")
    try:
        return yaml.load(text, _Loader)  # a kind of SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", in line {mark.line + 1}"
        reason = shortened(error.problem or error.context or "cannot be read", MOST_REASON_CHARACTERS)
        raise kind(f"{what} is not YAML that is read: {reason}{where}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The last two come from PyYAML's scanner: "\UFFFFFFFF", and the version in a directive.
        raise kind(f"{what} is not YAML that is read: {shortened(error, MOST_REASON_CHARACTERS)}") from error


class _Loader(yaml.SafeLoader):
    """Refuses what is too much, or can be read in two ways, as errors of YAML."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._depth, self._num_values = self._depth + 1, self._num_values + 1
        if self.check_event(yaml.AliasEvent):
            _refuse("aliases are not read; write the value out", mark)
        if self._depth > MOST_YAML_DEPTH:
            _refuse(f"it is nested more than {MOST_YAML_DEPTH} deep", mark)
        if self._num_values > MOST_YAML_VALUES:
            _refuse(f"it has more than {MOST_YAML_VALUES:,} keys and values", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        name = node.tag.removeprefix(_TAG)
        if name not in _KINDS:
            _refuse(f"tag {quoted(node.tag)} is not read", node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _NUMBERS and len(node.value) > MOST_NUMBER_CHARACTERS:
                _refuse(f"a number has more than {MOST_NUMBER_CHARACTERS} characters", node.start_mark)
            if "\0" in node.value:
                _refuse("a text holds a NUL character", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, OverflowError):
            _refuse(f"{quoted(node.value)} is no {name}", node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    _refuse(f"key {quoted(key)} is there twice", key_node.start_mark)
                seen.add(key)
        return mapping


# Without dates, merges of mappings, and `=`, which are texts then.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_TAG) in _KINDS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _refuse(why: str, mark: Any) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, why, mark)


# ---------------------------------------------------------------------- JSON


def parse_json(text: str, what: str, kind: Kind) -> Any:
    """The value that JSON writes, whole numbers only; `what` names the text in errors. Raises `kind`."""
    if len(text) > MOST_JSON_BYTES:
        raise kind(f"{what} has more than {MOST_JSON_BYTES:,} characters, the most that is read")
    # Text within strings counts too, which only makes the limits stricter.
    if text.count("[") + text.count("{") > MOST_JSON_LISTS:
        raise kind(f"{what} has more than {MOST_JSON_LISTS:,} lists and objects, the most that is read")
    if text.count(",") > MOST_JSON_VALUES:
        raise kind(f"{what} has more than {MOST_JSON_VALUES:,} values, the most that is read")
    if _depth(text) > MOST_JSON_DEPTH:
        raise kind(f"{what} is nested more than {MOST_JSON_DEPTH} deep")
    try:
        return json.loads(
            text, object_pairs_hook=_without_twins, parse_int=_json_number, parse_constant=_no_constant
        )
    except _Refused as error:
        raise kind(f"{what}: {error}") from error
    except ValueError as error:
        raise kind(f"{what} is not JSON: {shortened(error, MOST_REASON_CHARACTERS)}") from error


class _Refused(Exception):
    """JSON, but not such as is read."""


def _depth(text: str) -> int:
    """How deep lists and objects are nested, at least: counts no further than to what is too deep."""
    depth = deepest = 0
    for bracket in re.findall(r"[][{}]", _JSON_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"key {quoted(key)} is there twice")
            seen.add(key)
    return made


def _json_number(text: str) -> int:
    if len(text) > MOST_NUMBER_CHARACTERS:
        raise _Refused(f"a number has more than {MOST_NUMBER_CHARACTERS} digits")
    return int(text)


def _no_constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is no number that is read")
