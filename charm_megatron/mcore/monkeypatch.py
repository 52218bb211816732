"""Replaces an attribute of a module or class for the length of a `with` block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from charm_megatron.errors import CharmError


class MissingTarget(CharmError, LookupError):
    """Something that must be replaced does not exist: a library renamed or removed it."""


def resolve(target: str) -> tuple[Any, str]:
    """`"package.module:attribute"`, or `"package.module:Class.attribute"`, as (owner, attribute name).

    Raises `MissingTarget` where any part does not exist, so that a rename in a library is an error here
    instead of a replacement that nobody calls.
    """
    module_name, _, path = target.partition(":")
    *parents, name = path.split(".")
    try:
        owner: Any = import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise MissingTarget(f"{target} does not exist in the installed version: {error}") from error
    return owner, name


@contextmanager
def wrapped(target: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Puts `wrap(what is there)` in the place of `target` inside the block."""
    owner, name = resolve(target)
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def swapped(target: str, replacement: Any) -> AbstractContextManager[None]:
    """Puts `replacement` in the place of `target` inside the block."""
    return wrapped(target, lambda original: replacement)
