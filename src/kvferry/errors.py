"""All exceptions of kvferry, grouped by the side at fault, with what the caller does about them.

KVFerryError
  ConfigError            the operator's fault: stop at start-up, exit code 2
    MissingDependency    an optional package is not installed; the message names the extra
  LocalProtocolError     our fault, a bug: let the exception crash the step
  RemoteProtocolError    the peer's fault: drop the message or the peer, keep serving
    IncompatiblePeer     carries the fields that differ, with both values
    InvalidTicket        a ticket is missing, malformed, forged or not for this engine
  TransportError         a transport's fault: fail or retry this transfer
  RequestRefused         the client's fault: answer with this HTTP status, keep serving
"""

from itertools import islice


class KVFerryError(Exception):
    """Base of all errors that kvferry raises on purpose."""


class ConfigError(KVFerryError):
    """A setting is wrong. The message is one sentence that names the key and the fix."""


class MissingDependency(ConfigError):
    """An optional package is not installed."""


class LocalProtocolError(KVFerryError):
    """Our own code violated the protocol, which is a bug."""


class RemoteProtocolError(KVFerryError):
    """A peer violated the protocol."""


MAX_LISTED_FIELDS = 8


class IncompatiblePeer(RemoteProtocolError):
    """The peer's KV cache does not fit ours; `differences` maps each field to (ours, theirs).

    The message lists the first fields: two models that have nothing in common differ in hundreds.
    """

    def __init__(self, peer: str, differences: dict[str, tuple[object, object]]) -> None:
        self.peer = peer
        self.differences = differences
        listed = "; ".join(
            f"{name}: ours {ours!r}, theirs {theirs!r}"
            for name, (ours, theirs) in islice(differences.items(), MAX_LISTED_FIELDS)
        )
        unlisted = len(differences) - MAX_LISTED_FIELDS
        more = f"; and {unlisted} more fields" if unlisted > 0 else ""
        super().__init__(f"peer {peer} is not compatible: {listed}{more}")


class InvalidTicket(RemoteProtocolError):
    """A ticket cannot be accepted; the message says why."""


class TransportError(KVFerryError):
    """Bytes or messages could not be moved."""


class RequestRefused(KVFerryError):
    """An HTTP request is not served.

    `status` is the HTTP status of the answer, and `param` names the faulty field, if there is one.
    `retry_after_s` is set if a retry may succeed, and says after how many seconds.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.message = message
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(message)


def without_password(url: str) -> str:
    """The URL as messages show it: without user and password, which no log may contain."""
    _, at, rest = url.rpartition("@")
    return f"***@{rest}" if at else url
