"""Assembly turns the tokens of one choice into the text that the client sees. Pure.

A `TextAssembler` detokenises the tokens, cuts the text at stop strings and sets the finish reason.
The result does not depend on how the engine grouped the tokens into outputs, nor on how the text
was cut into chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.engine.api.tokenizer import Detokeniser
from kvferry.engine.messages import RequestOutput, SampledToken


@dataclass(frozen=True, slots=True)
class StopScan:
    """The result of one chunk of text: text that may be shown, and the stop string that was
    completed, if any.
    """

    text: str
    stop: str | None = None


@dataclass(slots=True)
class StopMatcher:
    """Finds stop strings in text that arrives in chunks.

    Text that may be the beginning of a stop string is held back until later text rules a match out,
    so emitted text is never part of a stop string. The stop string that is completed first wins; if
    two stop strings are completed by the same character, the longer stop string wins.
    """

    stops: Sequence[str]
    _held: str = field(default="", init=False)

    def push(self, chunk: str) -> StopScan:
        """Take the next chunk and return the text that may be shown.

        After a hit the matcher is used up: `text` ends where the stop string begins.
        """
        if not self.stops:
            return StopScan(chunk)
        text = self._held + chunk
        hit = self._first_hit(text)
        if hit is not None:
            start, stop = hit
            self._held = ""
            return StopScan(text[:start], stop)
        keep = self._longest_beginning(text)
        cut = len(text) - keep
        self._held = text[cut:]
        return StopScan(text[:cut])

    def finish(self) -> str:
        """Return the text that was held back: no more text follows, so no stop string can be
        completed.
        """
        held, self._held = self._held, ""
        return held

    def _first_hit(self, text: str) -> tuple[int, str] | None:
        found = [
            (start + len(stop), start, stop)
            for stop in self.stops
            if (start := text.find(stop)) >= 0
        ]
        if not found:
            return None
        # `min` compares the end of the match first, then the start: the smaller start is the longer
        # stop.
        _, start, stop = min(found)
        return start, stop

    def _longest_beginning(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a proper prefix of a stop
        string.
        """
        longest = 0
        for stop in self.stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


# -- assembly --
# The text of one choice, built from the engine's outputs.


@dataclass(frozen=True, slots=True)
class Delta:
    """The tokens and text that one engine output adds to one choice."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    num_cached_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(slots=True)
class TextAssembler:
    """Builds the text of one choice; after a delta with a finish reason the assembler is used
    up.
    """

    index: int
    detokeniser: Detokeniser
    stops: StopMatcher
    min_tokens: int = 0
    """Stop strings have an effect only after this many tokens."""
    includes_stop: bool = False
    """Whether the text ends with the stop string or stop token that ended the choice."""
    silent_stop_ids: frozenset[int] = frozenset()
    """Stop tokens without a stop reason in the answer: the model's own end-of-sequence tokens."""
    echo_text: str = ""
    """Text in front of the first token, for the `echo` option."""
    _seen: int = field(default=0, init=False)

    def push(self, output: RequestOutput) -> Delta:
        """Take one engine output and return the delta for the client."""
        parts = [self.echo_text]
        self.echo_text = ""
        # A stop token is the last token of the last output; its text is shown only on request.
        hidden = (
            len(output.tokens) - 1
            if output.finish_reason == "stop" and not self.includes_stop
            else len(output.tokens)
        )
        for position, token in enumerate(output.tokens):
            self._seen += 1
            if (
                position < hidden
                and (stop := self._show(self.detokeniser.push(token.token_id), parts)) is not None
            ):
                return self._delta(
                    output, parts, taken=position + 1, finish_reason="stop", stop_reason=stop
                )
        if output.finish_reason is None:
            return self._delta(output, parts, len(output.tokens), None, None)
        stop = self._show(self.detokeniser.finish(), parts)
        if stop is not None:
            return self._delta(output, parts, len(output.tokens), "stop", stop)
        parts.append(self.stops.finish())
        named = None if output.stop_reason in self.silent_stop_ids else output.stop_reason
        return self._delta(output, parts, len(output.tokens), output.finish_reason, named)

    def _show(self, chunk: str, parts: list[str]) -> str | None:
        """Append the part of the chunk that may be shown; return the stop string that the chunk
        completes.
        """
        if self._seen <= self.min_tokens:
            parts.append(chunk)
            return None
        scan = self.stops.push(chunk)
        parts.append(scan.text)
        if scan.stop is not None and self.includes_stop:
            parts.append(scan.stop)
        return scan.stop

    def _delta(
        self,
        output: RequestOutput,
        parts: list[str],
        taken: int,
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> Delta:
        return Delta(
            index=self.index,
            text="".join(parts),
            tokens=tuple(output.tokens[:taken]),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            kv_transfer_params=output.kv_transfer_params,
            num_cached_tokens=output.num_cached_tokens,
        )
