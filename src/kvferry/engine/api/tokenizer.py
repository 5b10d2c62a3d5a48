"""Token ids to text, segment by segment, never half a character and never looking back further than
a few tokens.

Two ways. Byte-level vocabularies (GPT-2 style: Llama 3, Qwen) say exactly which bytes a token is,
so an incremental UTF-8 decoder is right by construction. For every other decoder a short window of
tokens is decoded again for each new one. Pure.
"""

import codecs
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders

from kvferry.errors import ConfigError

__all__ = ["ByteDetokeniser", "Detokeniser", "ModelTokenizer", "SpecialTokens", "WindowDetokeniser"]


_MAX_UNFINISHED_TOKENS = 4
"""A UTF-8 character has at most four bytes and a token at least one: longer unfinished text is
garbage, not a character.
"""

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

    `decode` sees the whole window, so that a space before a word is kept; only what goes beyond the
    context's text is new.
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
        if (not chunk or text.endswith(_REPLACEMENT)) and len(
            self._window
        ) - self._context < _MAX_UNFINISHED_TOKENS:
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


# -------------------- tokenizer --------------------
# A checkpoint's tokenizer.json: text to token ids and back.
#
# Read-only after loading, so any thread may use it.


class SpecialTokens(Enum):
    """Whether special tokens are added when encoding, or shown when decoding."""

    WITH = "with"
    WITHOUT = "without"


class ModelTokenizer:
    """Use `load`."""

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes_of: dict[int, bytes] = {}
        self._text_of: dict[int, str] = {}
        self.longest_token_chars = max(
            (len(token) for token in tokenizer.get_vocab(with_added_tokens=True)), default=1
        )

    @classmethod
    def load(cls, folder: Path) -> "ModelTokenizer":
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"there is no tokenizer.json in {folder}: give a Hugging Face model folder that "
                "has one"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception for every malformed file
            raise ConfigError(
                f"{path} cannot be read as a tokenizer ({error}): replace the file"
            ) from error
        return cls(tokenizer)

    def encode(self, text: str, special: SpecialTokens) -> list[int]:
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=special is SpecialTokens.WITH
        ).ids
        return ids

    def decode(self, token_ids: Sequence[int], special: SpecialTokens) -> str:
        """The text of all the ids at once, exactly what the incremental way gives segment by
        segment.
        """
        detokeniser = self.detokeniser(special)
        return "".join(
            [*(detokeniser.push(token_id) for token_id in token_ids), detokeniser.finish()]
        )

    def detokeniser(self, special: SpecialTokens) -> Detokeniser:
        whole = (
            ByteDetokeniser(self.bytes_of)
            if self._is_byte_level
            else WindowDetokeniser(self._decode_window)
        )
        return (
            whole if special is SpecialTokens.WITH else _WithoutSpecials(whole, self._special_ids)
        )

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that the vocabulary does not know."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._look_up_bytes(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        """One token on its own, as logprobs show it; a part of a character is a replacement
        character.
        """
        known = self._text_of.get(token_id)
        if known is None:
            decoded = (
                self.bytes_of(token_id).decode(errors="replace")
                if self._is_byte_level
                else self._decode_window([token_id])
            )
            known = self._text_of[token_id] = decoded
        return known

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if not self._is_byte_level:
            return self.text_of(token_id).encode()
        alphabet = _byte_alphabet()
        # A token with any character outside the alphabet (an added one with a space, say) stands
        # for itself.
        return (
            bytes(alphabet[char] for char in token)
            if all(char in alphabet for char in token)
            else token.encode()
        )

    def _decode_window(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


class _WithoutSpecials:
    """Drops special tokens before they reach the detokeniser."""

    def __init__(self, inner: Detokeniser, special_ids: frozenset[int]) -> None:
        self._inner = inner
        self._special_ids = special_ids

    def push(self, token_id: int) -> str:
        return "" if token_id in self._special_ids else self._inner.push(token_id)

    def finish(self) -> str:
        return self._inner.finish()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level vocabularies: itself if visible in
    Latin-1, else the next free one from 256.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + index): byte for index, byte in enumerate(hidden)
    }
