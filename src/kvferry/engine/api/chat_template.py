"""A checkpoint's chat template: messages to prompt text, in a jinja2 sandbox.

The template comes with the checkpoint, the messages from strangers. Read-only after loading, so any thread may use it.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.errors import ConfigError, RequestRefused

__all__ = ["ChatTemplate"]

_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises when messages have a shape it does not expect."""


class ChatTemplate:
    """Use `load`."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in templates.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(f"the checkpoint's chat template is not valid ({error}): correct it") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """From chat_template.jinja, else from tokenizer_config.json; without either, chat requests are refused."""
        config = _read_json(folder / "tokenizer_config.json")
        specials = {name: _token_text(config[name]) for name in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(name)}
        own_file = folder / "chat_template.jinja"
        if own_file.is_file():
            return cls({"default": own_file.read_text(encoding="utf-8")}, specials)
        return cls(_named_templates(config.get("chat_template"), folder), specials)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]) -> str:
        """The prompt, ending where the assistant is to speak. `variables` are the template's own switches."""
        template = (self._templates.get("tool_use") if tools else None) or self._templates.get("default")
        if template is None:
            raise RequestRefused("this model has no chat template: use /v1/completions, or add chat_template.jinja to the model folder")
        names: dict[str, Any] = {"add_generation_prompt": True, **self._special_tokens, **variables}
        names |= {"messages": messages, "tools": tools, "documents": None}
        try:
            return template.render(names)
        except _TEMPLATE_FAULTS as error:
            raise RequestRefused(f"the model's chat template does not take these messages: {error}", param="messages") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """Unlike jinja2's own, without HTML escapes: models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _read_json(path: Path) -> dict[str, Any]:
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
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in value):
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    raise ConfigError(f"chat_template in {folder / 'tokenizer_config.json'} must be a string or a list of named templates: correct it")
