"""The loops of `_copy.c`, each with what stands in for it where kvferry was installed without a compiler, or before it was written."""

from importlib import import_module
from typing import Any, TypeVar

__all__ = ["NATIVE_FUNCTIONS", "missing_native_functions", "native_or"]

NATIVE_FUNCTIONS = "are_within", "poll_until", "copy_segments", "spin_wait", "put_all", "put_places", "start_kernel"

NativeFunction = TypeVar("NativeFunction")


def native_or(name: str, otherwise: NativeFunction) -> NativeFunction:
    """The native function of that name, if there is one here."""
    found: NativeFunction = getattr(_native_module(), name, otherwise)
    return found


def missing_native_functions() -> tuple[str, ...]:
    """What is not compiled here: all works, slower."""
    return tuple(name for name in NATIVE_FUNCTIONS if not hasattr(_native_module(), name))


def _native_module() -> Any:
    try:
        return import_module("kvferry.planes._copy")
    except ImportError:
        return None
