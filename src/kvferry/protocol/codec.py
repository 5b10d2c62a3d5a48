"""Bytes to messages and back. Anything malformed becomes RemoteProtocolError; nothing from a peer is ever unpickled. Pure."""

from typing import TypeVar

import msgspec

from kvferry.errors import LocalProtocolError, RemoteProtocolError
from kvferry.protocol.messages import Message, RankLayout

__all__ = ["MAX_MESSAGE_BYTES", "decode", "decode_layout", "encode", "encode_layout"]

MAX_MESSAGE_BYTES = 4 * 1024 * 1024

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_layout_decoder: msgspec.msgpack.Decoder[RankLayout] = msgspec.msgpack.Decoder(RankLayout)


def encode(message: Message) -> bytes:
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"a {type(message).__name__} of {len(frame)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return frame


def decode(frame: bytes) -> Message:
    return _decode(frame, _message_decoder, "message")


def encode_layout(layout: RankLayout) -> bytes:
    return _encoder.encode(layout)


def decode_layout(data: bytes | memoryview) -> RankLayout:
    return _decode(data, _layout_decoder, "layout")


def _decode(data: bytes | memoryview, decoder: msgspec.msgpack.Decoder[_T], what: str) -> _T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a {what} of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"a {what} that cannot be read: {error}") from None
