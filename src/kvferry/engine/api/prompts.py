"""Prompts in all forms of the API (text, texts, token ids, chats) become token ids.

Long texts are tokenised on one worker thread, so that one long prompt does not delay the streams of
other clients. Handlers decode large bodies on the same thread. Chats are rendered on another one: a
template that takes long delays only other chats.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard, TypeVar

from kvferry.engine.api.admission import MAX_SEQUENCES
from kvferry.engine.api.chat_template import ChatTemplate
from kvferry.engine.api.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    has_more_values,
    max_values,
)
from kvferry.engine.api.tokenizer import ModelTokenizer, SpecialTokens
from kvferry.errors import RequestRefused

_INLINE_CHARS = 4096
"""Shorter texts are tokenised on the event loop: handing work to a thread would cost more."""

INLINE_BYTES = 64 * 1024
"""Shorter bodies are decoded on the event loop. Decoding takes less time than tokenising."""

Result = TypeVar("Result")


class PromptReader:
    """Reads prompts for one model."""

    def __init__(
        self, tokenizer: ModelTokenizer, template: ChatTemplate, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_model_len = max_model_len
        self._max_chars = max_model_len * tokenizer.longest_token_chars
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvferry-tokenizer")
        self._renderer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvferry-template")

    def close(self) -> None:
        """End the threads, and the template's process."""
        self._renderer.shutdown(wait=False, cancel_futures=True)
        self._template.close()
        for pool in (self._worker, self._renderer):
            pool.shutdown(wait=True, cancel_futures=True)

    async def completion(self, request: CompletionRequest, num_bytes: int) -> list[list[int]]:
        """Return the token ids of each prompt in the body, which had `num_bytes`."""
        special = (
            SpecialTokens.WITHOUT if request.add_special_tokens is False else SpecialTokens.WITH
        )
        prompts = await self.off_loop(
            num_bytes, lambda: _split_prompts(request.prompt), INLINE_BYTES
        )
        return [
            prompt if isinstance(prompt, list) else await self.text(prompt, special)
            for prompt in prompts
        ]

    async def chat(self, request: ChatRequest | TokenizeRequest, num_bytes: int) -> list[int]:
        """Return the token ids of the rendered conversation, whose body had `num_bytes`.

        The template has already inserted the special tokens, so the tokenizer adds none by default.
        """
        messages = await self.off_loop(num_bytes, lambda: self._messages(request))
        text = await asyncio.get_running_loop().run_in_executor(
            self._renderer, self._render, request, messages
        )
        return await self.text(
            text, SpecialTokens.WITH if request.add_special_tokens else SpecialTokens.WITHOUT
        )

    def _messages(self, request: ChatRequest | TokenizeRequest) -> list[dict[str, Any]]:
        sent = request.messages or []
        # The arguments of tool calls are JSON inside of strings, so the limit on the values of the
        # body has not counted their values.
        arguments = ",".join(text for message in sent for text in _argument_texts(message))
        limit = max_values(self._max_model_len)
        if has_more_values(arguments.encode(), limit):
            raise RequestRefused(
                f"the arguments of tool calls have more than {limit} JSON values, which is more "
                "than this model can use: send fewer",
                status=413,
                param="messages",
            )
        return [template_message(message, position) for position, message in enumerate(sent)]

    def _render(
        self, request: ChatRequest | TokenizeRequest, messages: list[dict[str, Any]]
    ) -> str:
        variables = dict(request.chat_template_kwargs or {})
        if request.add_generation_prompt is not None:
            variables["add_generation_prompt"] = request.add_generation_prompt
        return self._template.render(messages, request.tools, variables, self._max_chars)

    async def text(self, text: str, special: SpecialTokens) -> list[int]:
        """Tokenise one text; raise RequestRefused for a text that cannot fit the model, however it
        is split.
        """
        if len(text) > self._max_chars:
            raise RequestRefused(
                f"the prompt has more than {self._max_chars} characters, which cannot fit into "
                f"this model's {self._max_model_len} tokens: shorten it",
                param="prompt",
            )
        return await self.off_loop(len(text), lambda: self._tokenizer.encode(text, special))

    async def off_loop(
        self, size: int, work: Callable[[], Result], max_inline: int = _INLINE_CHARS
    ) -> Result:
        """Run `work` on the event loop if its input is small, else on the worker thread."""
        if size < max_inline:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


def template_message(message: ChatMessage, position: int) -> dict[str, Any]:
    """Return a message in the form that templates expect: content as text, tool arguments as
    objects.

    Clients send tool arguments as JSON in a string.
    """
    shown: dict[str, Any] = {
        "role": message.role,
        "content": _text_content(message.content, position),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            shown[name] = value
    if message.tool_calls is not None:
        shown["tool_calls"] = [_parsed_call(call, position) for call in message.tool_calls]
    return shown


def _text_content(content: str | list[Any] | None, position: int) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in content
    ]
    if not all(isinstance(text, str) for text in texts):
        raise RequestRefused(
            f"messages[{position}].content may hold only parts of type text: this model reads "
            "text only",
            param="messages",
        )
    return "\n".join(str(text) for text in texts)


def _argument_text(call: Any) -> str | None:
    """Return the arguments of a tool call if they are JSON in a string, else None."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return arguments if isinstance(arguments, str) else None


def _argument_texts(message: ChatMessage) -> list[str]:
    texts = (_argument_text(call) for call in message.tool_calls or ())
    return [text for text in texts if text is not None]


def _parsed_call(call: Any, position: int) -> Any:
    text = _argument_text(call)
    if text is None:
        return call
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestRefused(
            f"messages[{position}].tool_calls has arguments that are not valid JSON",
            param="messages",
        ) from error
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _split_prompts(prompt: str | Sequence[Any] | None) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestRefused(
            "the prompt is missing or empty: send text or token ids", param="prompt"
        )
    if len(prompt) > MAX_SEQUENCES and not _is_token_list(prompt):
        raise RequestRefused(
            f"{len(prompt)} prompts are more than {MAX_SEQUENCES}: send fewer", param="prompt"
        )
    if _is_token_list(prompt):
        return [list(prompt)]
    if all(isinstance(entry, str) for entry in prompt) or all(
        _is_token_list(entry) for entry in prompt
    ):
        return list(prompt)
    raise RequestRefused(
        "prompt must be a string, a list of strings, a list of token ids, or a list of lists of "
        "token ids",
        param="prompt",
    )


def _is_token_list(value: Any) -> TypeGuard[list[int]]:
    # `type(...) is int` and not isinstance, because True is an int too.
    return isinstance(value, list) and all(type(entry) is int for entry in value)
