"""What the operating system allows a server of ours. Children inherit it."""

import contextlib
import resource

__all__ = ["raise_file_limit"]


def raise_file_limit() -> None:
    """As many files as we may have: each connection is one, and the usual soft limit of 1,024 is too few for a busy server."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
