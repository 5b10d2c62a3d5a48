"""The loops of `_copy.c`, each with what stands in for it where kvferry was installed without a compiler, or before it was written."""

from importlib import import_module
from typing import Any, TypeVar

__all__ = ["COMPILED", "compiled_or", "missing_loops"]

COMPILED = "are_within", "ask_until", "copy_runs", "linger", "put_all", "put_places", "start_kernel"

Loop = TypeVar("Loop")


def compiled_or(name: str, otherwise: Loop) -> Loop:
    """The compiled loop of that name, if there is one here."""
    found: Loop = getattr(_compiled(), name, otherwise)
    return found


def missing_loops() -> tuple[str, ...]:
    """What is not compiled here: all works, slower."""
    return tuple(name for name in COMPILED if not hasattr(_compiled(), name))


def _compiled() -> Any:
    try:
        return import_module("kvferry.planes._copy")
    except ImportError:
        return None
