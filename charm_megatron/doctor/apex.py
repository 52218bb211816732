"""Tells NVIDIA's apex from the unrelated package of that name on PyPI."""

from importlib.machinery import PathFinder
from importlib.util import find_spec


def is_nvidias_apex() -> bool:
    """Whether what is imported as `apex` is NVIDIA's, which Megatron knows. Imports neither."""
    found = find_spec("apex")
    places = None if found is None else found.submodule_search_locations
    return places is not None and any(
        PathFinder.find_spec(f"apex.{part}", list(places)) is not None
        for part in ("optimizers", "multi_tensor_apply")
    )
