"""Token ids to text, segment by segment, never half a character and never looking back further than a few tokens.

Two ways. Byte-level vocabularies (GPT-2 style: Llama 3, Qwen) say exactly which bytes a token is, so an incremental UTF-8 decoder
is right by construction. For every other decoder a short window of tokens is decoded again for each new one. Pure.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["ByteDetokeniser", "Detokeniser", "WindowDetokeniser"]

_MAX_UNFINISHED_TOKENS = 4
"""A UTF-8 character has at most four bytes and a token at least one: longer unfinished text is garbage, not a character."""

_REPLACEMENT = "\ufffd"


class Detokeniser(Protocol):
    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""

    def finish(self) -> str:
        """The rest: a replacement character for what was left unfinished."""


class ByteDetokeniser:
    """For vocabularies whose tokens are byte strings."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokeniser:
    """For any decoder, as long as a token's text depends on a few tokens before it only.

        window:  | context (already shown) | unfinished |

    `decode` sees the whole window, so that a space before a word is kept; only what goes beyond the context's text is new.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context = 0
        self._shown = ""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        chunk = text[len(self._shown) :]
        if (not chunk or text.endswith(_REPLACEMENT)) and len(self._window) - self._context < _MAX_UNFINISHED_TOKENS:
            return ""
        self._slide()
        return chunk

    def finish(self) -> str:
        chunk = self._decode(self._window)[len(self._shown) :]
        self._slide()
        return chunk

    def _slide(self) -> None:
        del self._window[: self._context]
        self._context = len(self._window)
        self._shown = self._decode(self._window)
