"""The tokenizer of a checkpoint: text to token ids and back, also one token at a time. Pure.

A detokeniser returns text as tokens arrive, never half a character, and looks back only a few
tokens. Byte-level vocabularies (GPT-2 style: Llama 3, Qwen) give the exact bytes of each token, so
an incremental UTF-8 decoder is correct by construction. For all other decoders, a short window of
tokens is decoded again for each new token.
"""

import codecs
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders

from kvferry.errors import ConfigError

_MAX_UNFINISHED_TOKENS = 4
"""The limit on tokens held back as an unfinished character.

A UTF-8 character has at most four bytes and a token at least one byte, so a longer unfinished text
is not a character.
"""

_REPLACEMENT = "\ufffd"


class Detokeniser(Protocol):
    """Turns the tokens of one choice into text, token by token."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; may be empty."""

    def finish(self) -> str:
        """Return the remaining text, with a replacement character for an unfinished character."""


class ByteDetokeniser:
    """A detokeniser for vocabularies whose tokens are byte strings."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokeniser:
    """A detokeniser for any decoder whose text for a token depends only on a few earlier tokens.

        window:  | context (already shown) | unfinished |

    `decode` gets the whole window, so that a space in front of a word is not lost. New text is the
    text beyond the text of the context.
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
        # Hold the text back while the last character may be unfinished.
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
        """Drop the old context and make the tokens that were just shown the new context."""
        del self._window[: self._context]
        self._context = len(self._window)
        self._shown = self._decode(self._window)


# -- tokenizer --
# The tokenizer.json of a checkpoint. Read-only after loading, so any thread may use a tokenizer.


class SpecialTokens(Enum):
    """Whether special tokens are added when encoding, or shown when decoding."""

    WITH = "with"
    WITHOUT = "without"


class ModelTokenizer:
    """The tokenizer of one checkpoint; make one with `load`."""

    def __init__(self, tokenizer: Any) -> None:
        # The file may ask for truncation or padding, which would change a prompt silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        """Whether the text of a token does not depend on the tokens before it."""
        self._bytes_of: dict[int, bytes] = {}
        self._text_of: dict[int, str] = {}
        self.longest_token_chars = max(
            (len(token) for token in tokenizer.get_vocab(with_added_tokens=True)), default=1
        )

    @classmethod
    def load(cls, folder: Path) -> "ModelTokenizer":
        """Read tokenizer.json from the model folder; raise ConfigError if the file is missing or
        malformed.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json: give a Hugging Face model folder that has one"
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
        """Return the text of all ids at once; the same text as decoding token by token."""
        detokeniser = self.detokeniser(special)
        return "".join(
            [*(detokeniser.push(token_id) for token_id in token_ids), detokeniser.finish()]
        )

    def detokeniser(self, special: SpecialTokens) -> Detokeniser:
        whole = (
            ByteDetokeniser(self.bytes_of)
            if self.is_byte_level
            else WindowDetokeniser(self._decode_window)
        )
        return (
            whole if special is SpecialTokens.WITH else _WithoutSpecials(whole, self._special_ids)
        )

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an id outside the vocabulary."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._look_up_bytes(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        """Return the text of one token for logprobs, with a replacement character for part of a
        character.
        """
        known = self._text_of.get(token_id)
        if known is None:
            decoded = (
                self.bytes_of(token_id).decode(errors="replace")
                if self.is_byte_level
                else self._decode_window([token_id])
            )
            known = self._text_of[token_id] = decoded
        return known

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if not self.is_byte_level:
            return self.text_of(token_id).encode()
        alphabet = _byte_alphabet()
        # A token with a character outside the alphabet (for example an added token with a space)
        # stands for its own text.
        return (
            bytes(alphabet[char] for char in token)
            if all(char in alphabet for char in token)
            else token.encode()
        )

    def _decode_window(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


class _WithoutSpecials:
    """Drops special tokens in front of another detokeniser."""

    def __init__(self, inner: Detokeniser, special_ids: frozenset[int]) -> None:
        self._inner = inner
        self._special_ids = special_ids

    def push(self, token_id: int) -> str:
        return "" if token_id in self._special_ids else self._inner.push(token_id)

    def finish(self) -> str:
        return self._inner.finish()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    A byte that is visible in Latin-1 is its own character; the other bytes are numbered from 256
    on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + index): byte for index, byte in enumerate(hidden)
    }
