"""From a sequence's tokens to what a client is shown of them: text, stop strings, finish reasons. Pure.

The result does not depend on how the engine grouped the tokens into outputs.
"""

from dataclasses import dataclass, field
from typing import Any

from kvferry.engine.api.detokeniser import Detokeniser
from kvferry.engine.api.stops import StopMatcher
from kvferry.engine.messages import RequestOutput
from kvferry.engine.step import SampledToken

__all__ = ["Delta", "TextAssembler"]


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
        hidden = len(output.tokens) - 1 if output.finish_reason == "stop" and not self.includes_stop else len(output.tokens)
        for position, token in enumerate(output.tokens):
            self._seen += 1
            if position < hidden and (stop := self._show(self.detokeniser.push(token.token_id), parts)) is not None:
                return self._delta(output, parts, taken=position + 1, finish_reason="stop", stop_reason=stop)
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
        self, output: RequestOutput, parts: list[str], taken: int, finish_reason: str | None, stop_reason: int | str | None
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
