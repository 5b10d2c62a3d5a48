"""Every exception of kvferry, sorted by whose fault it is and what the caller does.

KVFerryError
  ConfigError            the operator's: stop at start-up, exit code 2
    MissingDependency    an optional package is not installed; names the extra
  LocalProtocolError     ours, a bug: let it crash the step, loudly
  RemoteProtocolError    the peer's: drop the message or the peer, keep serving
    IncompatiblePeer     names the fields that differ, with both values
    InvalidTicket        a ticket that is missing, malformed, forged or not for this engine
  TransportError         the wire's: fail or retry this transfer
  RequestRefused         the client's: answer with this HTTP status, keep serving
"""

__all__ = [
    "ConfigError",
    "IncompatiblePeer",
    "InvalidTicket",
    "KVFerryError",
    "LocalProtocolError",
    "MissingDependency",
    "RemoteProtocolError",
    "RequestRefused",
    "TransportError",
]


class KVFerryError(Exception):
    """Base of all errors that kvferry raises on purpose."""


class ConfigError(KVFerryError):
    """A setting is wrong. The message is one sentence that names the key and the fix."""


class MissingDependency(ConfigError):
    """An optional package is not installed."""


class LocalProtocolError(KVFerryError):
    """Our own code broke the protocol; a bug."""


class RemoteProtocolError(KVFerryError):
    """A peer sent something it must not send."""


class IncompatiblePeer(RemoteProtocolError):
    """The peer's cache cannot be used here. `differences` names each field with (ours, theirs)."""

    def __init__(self, peer: str, differences: dict[str, tuple[object, object]]) -> None:
        self.peer = peer
        self.differences = differences
        listed = "; ".join(
            f"{name}: ours {ours!r}, theirs {theirs!r}"
            for name, (ours, theirs) in differences.items()
        )
        super().__init__(f"peer {peer} is not compatible: {listed}")


class InvalidTicket(RemoteProtocolError):
    """The ticket cannot be honoured; the message says why."""


class TransportError(KVFerryError):
    """Bytes or messages could not be moved."""


class RequestRefused(KVFerryError):
    """An HTTP request that is not served. `status` is the answer's; `param` names the field at
    fault, if one is; `retry_after_s` says that it is worth another try, and when.
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
