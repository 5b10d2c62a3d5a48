"""The chat template of a checkpoint, rendered in a process of its own (`template_process`).

The template comes from the checkpoint's author and the messages from clients; neither is trusted.
One thread at a time may render, and another may close.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.engine.api import template_process
from kvferry.engine.api.template_process import FAULT, read_frame, send_frame
from kvferry.engine.model.config import read_json_object
from kvferry.errors import ConfigError, RequestRefused

_MAX_TEMPLATE_BYTES = 1024 * 1024
"""The largest templates of models have 50 KiB."""
_SILENCE_S = 60.0
"""How long the process may neither read nor answer, on a machine that is very busy; it ends itself
after a few seconds of CPU time.
"""
_VARIABLES = ("PYTHON", "LD_LIBRARY_PATH", "TZ")
"""The environment of the process. The rest, with secrets, is not for templates."""

_log = logging.getLogger(__name__)


class TemplateFault(Exception):
    """A template that cannot be compiled, or that does not render a conversation."""


class ChatTemplate:
    """The chat templates of a checkpoint; make one with `load`, end its process with `close`."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._process: _TemplateProcess | None = None

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """Read chat_template.jinja, else tokenizer_config.json, and start the process; without
        either, refuse chat requests.
        """
        path = folder / "tokenizer_config.json"
        config = read_json_object(path) if path.is_file() else {}
        specials = {
            name: _token_text(config[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if config.get(name)
        }
        own_file = folder / "chat_template.jinja"
        if own_file.is_file():
            path, templates = own_file, {"default": _read_template(own_file)}
        else:
            templates = _named_templates(config.get("chat_template"), path)
        if sum(map(len, templates.values())) > _MAX_TEMPLATE_BYTES:
            raise _too_large(path)
        template = cls(templates, specials)
        try:
            if templates:
                template._process = _TemplateProcess.start(templates)
        except TemplateFault as fault:
            raise ConfigError(
                f"the checkpoint's chat template in {path} is not valid ({fault}): correct it"
            ) from None
        return template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        max_chars: int,
    ) -> str:
        """Return the prompt text, which ends where the assistant's answer begins; of a text
        that is longer than `max_chars`, only its start, which is longer too.

        `variables` are the template's own switches.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestRefused(
                "this model has no chat template: use /v1/completions, or add chat_template.jinja "
                "to the model folder"
            )
        names: dict[str, Any] = {"add_generation_prompt": True, **self._special_tokens, **variables}
        names |= {"messages": messages, "tools": tools, "documents": None}
        try:
            if self._process is None or self._process.is_ended:
                self._process = _TemplateProcess.start(self._templates)
            return self._process.ask({"name": name, "variables": names, "max_chars": max_chars})
        except TemplateFault as fault:
            raise RequestRefused(
                f"the model's chat template rejects these messages: {fault}", param="messages"
            ) from None

    def close(self) -> None:
        """End the process. Idempotent; a thread that renders gets an error."""
        if self._process is not None:
            self._process.close()


class _TemplateProcess:
    """One process that renders; it answers one question at a time."""

    def __init__(self, process: "subprocess.Popen[bytes]", link: socket.socket) -> None:
        self._process = process
        self._link = link
        self._answers = link.makefile("rb")
        self.is_ended = False

    @classmethod
    def start(cls, templates: Mapping[str, str]) -> "_TemplateProcess":
        """Start a process and compile the templates in it."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_SILENCE_S)
        try:
            process = subprocess.Popen(
                # -P: modules in the working directory must not be imported.
                [sys.executable, "-P", "-m", template_process.__name__],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env={key: os.environ[key] for key in os.environ if key.startswith(_VARIABLES)},
                # Ctrl-C in a terminal is for the engine, which then closes the template.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise RequestRefused(
                f"no process for the chat template can be started ({error.strerror}); try again "
                "later",
                status=503,
            ) from error
        finally:
            theirs.close()
        started = cls(process, ours)
        try:
            started.ask(templates)
        except TemplateFault:
            started.close()
            raise
        return started

    def ask(self, question: Mapping[str, Any]) -> str:
        """Return the text of the answer; raise TemplateFault if it is a fault, or if none comes."""
        try:
            asked = json.dumps(question, ensure_ascii=False).encode(errors="surrogatepass")
        except RecursionError:
            raise TemplateFault("they are nested too deeply") from None
        try:
            send_frame(self._link.sendall, asked)
            answer = read_frame(self._answers)
        except (OSError, ValueError):  # it is silent, or has ended, or was closed
            answer = b""
        if not answer:
            raise TemplateFault(self._end())
        text = answer[1:].decode()
        if answer[:1] == FAULT:
            raise TemplateFault(text)
        return text

    def _end(self) -> str:
        """End the process, and return why it gave no answer."""
        self.close()
        code = self._process.returncode
        why = (
            "it computes for too long"
            if code == -signal.SIGPROF
            else f"its process has ended with code {code}"
        )
        _log.warning("the chat template gave no answer: %s", why)
        return why

    def close(self) -> None:
        self.is_ended = True
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._link.close()


def _read_template(path: Path) -> str:
    try:
        with path.open("rb") as file:
            source = file.read(_MAX_TEMPLATE_BYTES + 1)
        if len(source) > _MAX_TEMPLATE_BYTES:
            raise _too_large(path)
        return source.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}): correct the file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _too_large(path: Path) -> ConfigError:
    return ConfigError(
        f"the chat template in {path} has more than {_MAX_TEMPLATE_BYTES} bytes: replace it"
    )


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) and "content" in token else str(token)


def _named_templates(value: Any, path: Path) -> dict[str, str]:
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
        f"chat_template in {path} must be a string or a list of named templates: correct it"
    )
