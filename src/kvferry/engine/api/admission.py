"""Admission turns a checked HTTP request and its token ids into requests for the engine core.

Admission checks prompt lengths and token ids against the model, fills in the sampling parameters
and makes the engine request ids. The caller passes the random part of each id (`nonces`), because
an X-Request-Id that a client sent is not unique. Pure: the caller passes `now` where time matters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.engine.api.schema import GenerationRequest
from kvferry.engine.messages import AddRequest, CoreReady, SamplingParams
from kvferry.errors import RequestRefused
from kvferry.tracing.context import TraceContext

MAX_SEQUENCES = 1024
"""The limit on prompts times `n` in one HTTP request."""

_MIN_TEMPERATURE = 0.01
"""The lowest temperature above 0: lower values overflow the softmax. vLLM has the same limit."""

# A seed plus a sample index must still fit a signed 64-bit integer.
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RequestAdmission:
    """One HTTP request, checked and tokenised, on its way into the engine."""

    request: GenerationRequest
    request_id: str
    """The id that the client sees: `cmpl-…` or `chatcmpl-…`."""
    prompts: Sequence[list[int]]
    max_tokens: int | None
    """The limit that the client asked for; None if the client sent no limit."""
    default_max_tokens: int | None
    """The limit when the client sent none, clipped to the room in the model; None means all the
    room.

    A limit from the client is not clipped: a client limit that does not fit is refused.
    """
    logprobs: int | None

    def add_requests(
        self, ready: CoreReady, nonces: Sequence[str], trace: TraceContext | None = None
    ) -> list[AddRequest]:
        """Return one engine request per choice, with choices of the same prompt next to each other.
        `trace`: the caller's span.

        Raise RequestRefused when a prompt or a limit does not fit the model.
        """
        samples = self.request.samples
        if len(self.prompts) * samples > MAX_SEQUENCES:
            raise RequestRefused(
                f"{len(self.prompts)} prompts times n = {samples} is more than {MAX_SEQUENCES} "
                "sequences: send fewer"
            )
        sampling = [self._sampling(prompt, ready) for prompt in self.prompts]
        choices = [
            (which, sample) for which in range(len(self.prompts)) for sample in range(samples)
        ]
        return [
            AddRequest(
                request_id=f"{self.request_id}-{index}-{nonces[index]}",
                prompt_token_ids=self.prompts[which],
                sampling=sampling[which],
                # The transfer parameters describe the KV of one prompt. The engine computes the
                # other prompts of the same body without a transfer.
                kv_transfer_params=self.request.kv_transfer_params if which == 0 else None,
                cache_salt=self.request.cache_salt or "",
                family=f"{self.request_id}-{nonces[0]}" if which == 0 and samples > 1 else None,
                draw_seed=None
                if self.request.seed is None
                else (self.request.seed + sample) & _SEED_MASK,
                trace=trace,
            )
            for index, (which, sample) in enumerate(choices)
        ]

    def _sampling(self, prompt: list[int], ready: CoreReady) -> SamplingParams:
        request = self.request
        check_token_ids(prompt, ready.vocab_size, "prompt")
        check_token_ids(request.stop_token_ids or [], ready.vocab_size, "stop_token_ids")
        max_tokens = self._max_tokens(len(prompt), ready.max_model_len)
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise RequestRefused(
                f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens})",
                param="min_tokens",
            )
        default = ready.sampling
        temperature = default.temperature if request.temperature is None else request.temperature
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=max(temperature, _MIN_TEMPERATURE) if temperature else 0.0,
            top_p=default.top_p if request.top_p is None else request.top_p,
            top_k=max(default.top_k if request.top_k is None else request.top_k, 0),
            seed=request.seed,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            logprobs=self.logprobs,
        )

    def _max_tokens(self, prompt_tokens: int, max_model_len: int) -> int:
        if not prompt_tokens:
            raise RequestRefused("the prompt is empty: send at least one token", param="prompt")
        room = max_model_len - prompt_tokens
        if room < 1:
            raise RequestRefused(
                f"the prompt has {prompt_tokens} tokens, but this model allows {max_model_len} in "
                "all, one of them output: shorten it",
                param="prompt",
            )
        if self.max_tokens is None:
            return room if self.default_max_tokens is None else min(room, self.default_max_tokens)
        if self.max_tokens > room:
            raise RequestRefused(
                f"the prompt has {prompt_tokens} tokens and max_tokens asks for {self.max_tokens} "
                f"more, but this model allows {max_model_len} in all: lower max_tokens to {room} "
                "or shorten the prompt",
                param="max_tokens",
            )
        return self.max_tokens


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise RequestRefused if a token id is outside the vocabulary; `param` names the request
    field.
    """
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestRefused(
            f"{param} holds the token id {wrong}, but this model's ids are 0 to {vocab_size - 1}",
            param=param,
        )


# -- ignored transfers --
# An engine without a connector computes the prompt itself when a request asks for a KV transfer,
# and logs a warning at most once per interval.


# The request parameters with which a client asks for a transfer.
_ASKING = ("do_remote_prefill", "do_remote_decode")


@dataclass(slots=True)
class IgnoredTransfers:
    """Rate limit for the warning: at most one note per interval, however many requests arrive."""

    interval_s: float = 60.0
    _next_at: float = field(default=float("-inf"), init=False)

    def note(self, params: Mapping[str, Any] | None, now: float) -> str | None:
        """Return a sentence for the log when a transfer was asked for and a note is due, else
        None.
        """
        asked = [name for name in _ASKING if params and params.get(name) is True]
        if not asked or now < self._next_at:
            return None
        self._next_at = now + self.interval_s
        return (
            f"{asked[0]} is ignored: this engine was started without --kv-transfer-config, so the "
            "prompt is computed here"
        )
