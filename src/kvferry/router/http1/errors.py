"""How an instance can fail the router, by what the router may still do about it.

UpstreamError
  ConnectFailed     no connection: the request was not sent
  UpstreamTimeout       connected, but silent for too long
  UpstreamDisconnected      it closed in the middle; `has_answered` says whether any byte of the answer had come
  InvalidResponse        what it sent is not an HTTP answer
"""

__all__ = ["ConnectFailed", "InvalidResponse", "UpstreamDisconnected", "UpstreamError", "UpstreamTimeout"]


class UpstreamError(Exception):
    """An instance did not answer as it should. The message is a sentence without the instance's name."""


class ConnectFailed(UpstreamError):
    """No connection could be made; nothing was sent."""


class UpstreamTimeout(UpstreamError):
    """It was silent for longer than it may be."""


class UpstreamDisconnected(UpstreamError):
    """It closed the connection before its answer was whole."""

    def __init__(self, message: str, has_answered: bool) -> None:  # a fact about the failure, not a switch
        self.has_answered = has_answered
        super().__init__(message)


class InvalidResponse(UpstreamError):
    """What it sent cannot be read as an answer."""
