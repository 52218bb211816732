"""Finds who holds a class: modules by a name of theirs, and layer specs that were made at import."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple


class Holder(NamedTuple):
    """A place that holds the class; `replace` puts another there, and is None where that is not possible."""

    where: str
    replace: Callable[[type[Any]], None] | None


def find_holders(cls: type[Any]) -> list[Holder]:
    """All modules, and specs in modules, that hold `cls` itself, not a subclass."""
    found: list[Holder] = []
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        # vars(): a lazy module would import what it is asked for.
        for name, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
            where = f"{module.__name__}.{name}"
            if value is cls:
                found.append(Holder(where, partial(setattr, module, name)))
            elif _is_spec(value):
                found += holders_in_spec(value, where, cls, seen)
    return found


def _is_spec(value: Any) -> bool:
    """Megatron's `ModuleSpec`, and its dataclasses of submodules, of whichever version.

    By `type` alone: `isinstance` asks the object too, and some that modules hold warn then, or import.
    """
    cls = type(value)
    return (cls.__name__ == "ModuleSpec" or cls.__name__.endswith("Submodules")) and dataclasses.is_dataclass(
        cls
    )


def holders_in_spec(value: Any, where: str, cls: type[Any], seen: set[int]) -> Iterator[Holder]:
    """The places inside a spec, its submodules, parameters and lists, at any depth."""
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, item, replace in _items(value):
        inner = f"{where}{name}"
        if item is cls:
            yield Holder(inner, replace)
        else:
            yield from holders_in_spec(item, inner, cls, seen)


def _items(value: Any) -> Iterator[tuple[str, Any, Callable[[Any], None] | None]]:
    if _is_spec(value):
        frozen = type(value).__dataclass_params__.frozen
        for name, item in list(vars(value).items()):
            yield f".{name}", item, None if frozen else partial(setattr, value, name)
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(pairs):
            yield f"[{key!r}]", item, partial(value.__setitem__, key)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield f"[{index}]", item, None
