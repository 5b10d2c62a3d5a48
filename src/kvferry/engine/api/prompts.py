"""Prompts in all forms of the API (text, texts, token ids, chats) become token ids.

A `ChatTemplate` renders messages as text, a `PromptReader` tokenises. Long texts are tokenised on
one worker thread, so that one long prompt does not delay the streams of other clients. Handlers
decode large bodies on the same thread.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeGuard, TypeVar

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.engine.api.admission import MAX_SEQUENCES
from kvferry.engine.api.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    has_more_values,
    max_values,
)
from kvferry.engine.api.tokenizer import ModelTokenizer, SpecialTokens
from kvferry.errors import ConfigError, RequestRefused

__all__ = ["INLINE_BYTES", "ChatTemplate", "PromptReader", "template_message"]


# -- chat template --
# The chat template of a checkpoint, rendered in a jinja2 sandbox: the template comes from the
# checkpoint's author and the messages from clients, and neither is trusted. A template is read-only
# after loading, so any thread may render.


_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""The exceptions that a template raises when messages have an unexpected shape."""


class ChatTemplate:
    """The chat templates of a checkpoint; make one with `load`."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in templates.items()
            }
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the checkpoint's chat template is not valid ({error}): correct it"
            ) from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """Read chat_template.jinja, else tokenizer_config.json; without either, refuse chat
        requests.
        """
        config = _read_json(folder / "tokenizer_config.json")
        specials = {
            name: _token_text(config[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if config.get(name)
        }
        own_file = folder / "chat_template.jinja"
        if own_file.is_file():
            return cls({"default": own_file.read_text(encoding="utf-8")}, specials)
        return cls(_named_templates(config.get("chat_template"), folder), specials)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt text, which ends where the assistant's answer begins.

        `variables` are the template's own switches.
        """
        template = (self._templates.get("tool_use") if tools else None) or self._templates.get(
            "default"
        )
        if template is None:
            raise RequestRefused(
                "this model has no chat template: use /v1/completions, or add chat_template.jinja "
                "to the model folder"
            )
        names: dict[str, Any] = {"add_generation_prompt": True, **self._special_tokens, **variables}
        names |= {"messages": messages, "tools": tools, "documents": None}
        try:
            return template.render(names)
        except _TEMPLATE_FAULTS as error:
            raise RequestRefused(
                f"the model's chat template rejects these messages: {error}", param="messages"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """Replace jinja2's filter, which escapes HTML: models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    """The `raise_exception` function of templates: refuse messages that the template does not
    support.
    """
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): replace the file") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object: replace the file")
    return config


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) and "content" in token else str(token)


def _named_templates(value: Any, folder: Path) -> dict[str, str]:
    """Return the templates by name; tokenizer_config.json has one string or a list of named
    templates.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(
        isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in value
    ):
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    raise ConfigError(
        f"chat_template in {folder / 'tokenizer_config.json'} must be a string or a list of named "
        "templates: correct it"
    )


# -- prompt reader --
# The owner of a PromptReader calls `close`, which ends the worker thread.


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
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvferry-tokenizer")

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

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
        text = await self.off_loop(num_bytes, lambda: self._render(request))
        return await self.text(
            text, SpecialTokens.WITH if request.add_special_tokens else SpecialTokens.WITHOUT
        )

    def _render(self, request: ChatRequest | TokenizeRequest) -> str:
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
        messages = [template_message(message, position) for position, message in enumerate(sent)]
        variables = dict(request.chat_template_kwargs or {})
        if request.add_generation_prompt is not None:
            variables["add_generation_prompt"] = request.add_generation_prompt
        return self._template.render(messages, request.tools, variables)

    async def text(self, text: str, special: SpecialTokens) -> list[int]:
        """Tokenise one text; raise RequestRefused for a text that cannot fit the model, however it
        is split.
        """
        if len(text) > self._max_model_len * self._tokenizer.longest_token_chars:
            raise RequestRefused(
                f"the prompt has {len(text)} characters, which cannot fit into this model's "
                f"{self._max_model_len} tokens: shorten it",
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
