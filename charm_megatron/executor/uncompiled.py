"""Keeps torch.compile out of functions that talk to other ranks: plans, locks and transfers are no graph."""

import sys
from collections.abc import Callable
from functools import wraps

import torch


def uncompiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """As `torch.compiler.disable`, whose import of the compiler takes seconds, but only once the compiler is loaded."""
    disabled: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # callers' graphs end before it
    return call
