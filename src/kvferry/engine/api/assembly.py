"""Finding stop strings in text that arrives in segments.

Text that might be the beginning of a stop string is held back until it cannot be one any more, so
nothing that has been emitted is ever part of a stop string. What comes out does not depend on how
the text was cut into segments. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.engine.api.tokenizer import Detokeniser
from kvferry.engine.messages import RequestOutput, SampledToken

__all__ = ["Delta", "StopMatcher", "StopScan", "TextAssembler"]


@dataclass(frozen=True, slots=True)
class StopScan:
    """What one segment of text led to: text that may be shown, and the stop string that was
    completed, if any.
    """

    text: str
    stop: str | None = None


@dataclass(slots=True)
class StopMatcher:
    """Looks for the stop string that is completed first; of two completed by the same character,
    the longer.
    """

    stops: Sequence[str]
    _held: str = field(default="", init=False)

    def push(self, chunk: str) -> StopScan:
        """Take the next segment. After a hit the matcher is spent: `text` ends where the stop
        string begins.
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
        """No more text follows: what was held back is no stop string after all."""
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
        _, start, stop = min(found)
        return start, stop

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = 0
        for stop in self.stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


# -------------------- assembly -------------------- From a sequence's tokens to what a client is
# shown of them: text, stop strings, finish reasons. Pure.
#
# The result does not depend on how the engine grouped the tokens into outputs.


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine output adds to one choice."""

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
    """One choice. After a delta with a finish reason it is spent."""

    index: int
    detokeniser: Detokeniser
    stops: StopMatcher
    min_tokens: int = 0
    """Stop strings count only after this many tokens."""
    includes_stop: bool = False
    silent_stop_ids: frozenset[int] = frozenset()
    """Stop tokens that are not worth a stop reason: the model's own end of sequence."""
    echo_text: str = ""
    """Text before the first token, for `echo`."""
    _seen: int = field(default=0, init=False)

    def push(self, output: RequestOutput) -> Delta:
        parts = [self.echo_text]
        self.echo_text = ""
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
        """Add what may be shown of a segment; the stop string that it completes, if any."""
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
