"""The handlers and answer formats of POST /v1/completions and POST /v1/chat/completions.

A handler decodes the body, tokenises the prompt and passes both to a `GenerationResponder`; a
formatter turns the engine's deltas into OpenAI bodies. Runs on the event loop of the API process.
"""

from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from kvferry.engine.api.admission import RequestAdmission
from kvferry.engine.api.assembly import Delta
from kvferry.engine.api.context import context_of, read_body
from kvferry.engine.api.generation import GenerationResponder, Submission
from kvferry.engine.api.responses import (
    ChatLogprobs,
    CollectedChoice,
    CompletionLogprobs,
    ResponseBody,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
)
from kvferry.engine.api.schema import ChatRequest, CompletionRequest
from kvferry.engine.api.tokenizer import SpecialTokens
from kvferry.engine.messages import SampledToken
from kvferry.errors import RequestRefused

# The default of the OpenAI API for completions; chat has no default limit.
_DEFAULT_MAX_TOKENS = 16


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice of a completion, in a whole answer and in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionFormatter:
    """Formats completions; whole answers and chunks of a stream have the same fields."""

    def __init__(
        self, request: CompletionRequest, submission: Submission, names: TokenNames
    ) -> None:
        self._request = request
        self._asked = submission
        self._names = names
        self._name_offsets: dict[int, int] = {}

    def whole(self, answers: Sequence[CollectedChoice]) -> ResponseBody:
        return self._reply([self._choice(answer, answer.tokens) for answer in answers])

    def chunks(self, delta: Delta) -> Sequence[ResponseBody]:
        return [self._reply([self._choice(delta, delta.tokens)])]

    def closing(self) -> ResponseBody:
        return self._reply([])

    def _reply(self, choices: list[CompletionChoice]) -> ResponseBody:
        submission = self._asked
        return ResponseBody(
            id=submission.request_id,
            object="text_completion",
            created=submission.created,
            model=submission.model,
            choices=choices,
        )

    def _choice(
        self, part: CollectedChoice | Delta, tokens: Sequence[SampledToken]
    ) -> CompletionChoice:
        is_first = part.index not in self._name_offsets
        offset = self._name_offsets.setdefault(part.index, 0)
        choice = CompletionChoice(
            index=part.index,
            text=part.text,
            logprobs=None,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )
        if self._request.logprobs is not None:
            choice.logprobs = completion_logprobs(
                tokens, self._names, self._request.logprobs, offset
            )
            # The text offsets of the next chunk continue after the token names of this chunk.
            self._name_offsets[part.index] += sum(len(name) for name in choice.logprobs.tokens)
        if self._request.return_token_ids:
            choice.token_ids = part.token_ids
            if is_first:
                choice.prompt_token_ids = self._asked.prompts[part.index]
        return choice


async def handle_completion(http: web.Request) -> web.StreamResponse:
    """Answer POST /v1/completions."""
    context = context_of(http)
    raw = await read_body(http)
    request = await context.decode(raw, CompletionRequest)
    context.check_model(request.model)
    if request.echo and request.logprobs is not None:
        raise RequestRefused(
            "this engine does not support echo together with logprobs: leave one of them out",
            param="echo",
        )
    prompts = await context.prompts.completion(request, len(raw))
    responder = GenerationResponder(http, "cmpl", request)
    admission = RequestAdmission(
        request,
        responder.request_id,
        prompts,
        max_tokens=request.max_tokens,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=request.logprobs,
    )
    submission = responder.submission(admission)  # refuses prompts that are too long to decode
    echo_texts = (
        [_prompt_text(http, request, which, prompt) for which, prompt in enumerate(prompts)]
        if request.echo
        else []
    )
    return await responder.answer(
        submission, CompletionFormatter(request, submission, responder.names), echo_texts
    )


def _prompt_text(
    http: web.Request, request: CompletionRequest, which: int, token_ids: list[int]
) -> str:
    """Return the prompt text for `echo`: the text that the client sent, or the decoded token
    ids.
    """
    sent = [request.prompt] if isinstance(request.prompt, str) else request.prompt or []
    if which < len(sent) and isinstance(sent[which], str):
        return str(sent[which])
    return context_of(http).tokenizer.decode(token_ids, SpecialTokens.WITHOUT)


# -- chat --
# POST /v1/chat/completions.


class AssistantMessage(msgspec.Struct, frozen=True):
    """The message of a choice in a whole chat answer."""

    content: str
    role: str = "assistant"


class MessageDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of the message that one chunk of a stream adds."""

    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of a chat answer: `message` is set in a whole answer, `delta` in a chunk."""

    index: int
    message: AssistantMessage | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatFormatter:
    """Formats chat answers; in a stream, a chunk with the role precedes the first text of each
    choice.
    """

    def __init__(self, request: ChatRequest, submission: Submission, names: TokenNames) -> None:
        self._request = request
        self._asked = submission
        self._names = names
        self._opened: set[int] = set()

    def whole(self, answers: Sequence[CollectedChoice]) -> ResponseBody:
        choices = [
            self._filled(
                ChatChoice(index=answer.index, message=AssistantMessage(answer.text)), answer
            )
            for answer in answers
        ]
        return self._with_prompt(self._reply("chat.completion", choices))

    def chunks(self, delta: Delta) -> Sequence[ResponseBody]:
        choice = self._filled(
            ChatChoice(index=delta.index, delta=MessageDelta(content=delta.text)), delta
        )
        chunk = self._reply("chat.completion.chunk", [choice])
        if delta.index in self._opened:
            return [chunk]
        role = self._reply(
            "chat.completion.chunk",
            [ChatChoice(index=delta.index, delta=MessageDelta("assistant", ""))],
        )
        if not self._opened:
            self._with_prompt(role)
        self._opened.add(delta.index)
        return [role, chunk]

    def closing(self) -> ResponseBody:
        return self._reply("chat.completion.chunk", [])

    def _reply(self, kind: str, choices: list[ChatChoice]) -> ResponseBody:
        submission = self._asked
        return ResponseBody(
            id=submission.request_id,
            object=kind,
            created=submission.created,
            model=submission.model,
            choices=choices,
        )

    def _with_prompt(self, reply: ResponseBody) -> ResponseBody:
        if self._request.return_token_ids:
            reply.prompt_token_ids = self._asked.prompts[0]
        return reply

    def _filled(self, choice: ChatChoice, part: CollectedChoice | Delta) -> ChatChoice:
        choice.finish_reason = part.finish_reason
        choice.stop_reason = part.stop_reason
        choice.logprobs = self._logprobs(part.tokens)
        if self._request.return_token_ids:
            choice.token_ids = part.token_ids
        return choice

    def _logprobs(self, tokens: Sequence[SampledToken]) -> ChatLogprobs | None:
        return (
            chat_logprobs(tokens, self._names, self._request.top_logprobs or 0)
            if self._request.logprobs
            else None
        )


async def handle_chat(http: web.Request) -> web.StreamResponse:
    """Answer POST /v1/chat/completions."""
    context = context_of(http)
    raw = await read_body(http)
    request = await context.decode(raw, ChatRequest)
    context.check_model(request.model)
    if request.top_logprobs and not request.logprobs:
        raise RequestRefused("top_logprobs needs logprobs to be true", param="top_logprobs")
    prompt = await context.prompts.chat(request, len(raw))
    responder = GenerationResponder(http, "chatcmpl", request)
    admission = RequestAdmission(
        request,
        responder.request_id,
        [prompt],
        max_tokens=request.max_tokens
        if request.max_completion_tokens is None
        else request.max_completion_tokens,
        default_max_tokens=None,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    submission = responder.submission(admission)
    return await responder.answer(
        submission, ChatFormatter(request, submission, responder.names), echo_texts=[]
    )
