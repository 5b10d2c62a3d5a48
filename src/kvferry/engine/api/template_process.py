"""The process that compiles and renders the chat template of a checkpoint.

A template comes with a model that the operator has downloaded. jinja2's sandbox keeps it from the
process's objects, but not from looping for hours or filling the memory, so the kernel bounds the
time and memory of this process. Each frame on stdin and stdout has its length in front. The process
ends when stdin ends. It imports nothing else of kvferry, so that it starts quickly.
"""

import json
import resource
import signal
import struct
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CPU_S = 2.0
"""CPU time of one frame. The largest templates of models compile in a tenth of a second."""
MAX_MEMORY_BYTES = 512 * 1024 * 1024
TEXT, FAULT = b"T", b"F"
"""First byte of an answer: a text, or the reason why there is none."""

_MAX_FAULT_CHARS = 1000
_LENGTH = struct.Struct("!Q")


def send_frame(send: Callable[[bytes], object], payload: bytes) -> None:
    send(_LENGTH.pack(len(payload)))
    send(payload)


def read_frame(stream: BinaryIO) -> bytes:
    """Return the next frame; an empty one when the stream has ended."""
    head = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""


def main() -> None:
    """Answer one frame with templates by name, then one for each conversation."""
    _limit_memory()
    templates: dict[str, jinja2.Template] = {}

    def compile_all(sources: dict[str, str]) -> str:
        environment = _environment()
        templates.update({name: environment.from_string(text) for name, text in sources.items()})
        return ""

    _answer(compile_all)
    while _answer(lambda asked: _render(templates[asked["name"]], asked)):
        pass


def _answer(work: Callable[[Any], str]) -> bool:
    """Answer the next frame; False if there is none. The kernel ends the process if the work takes
    too long.
    """
    frame = read_frame(sys.stdin.buffer)
    if not frame:
        return False
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        answer = TEXT + work(json.loads(frame)).encode(errors="replace")
    except MemoryError:
        answer = FAULT + b"it needs more than %d MiB of memory" % (MAX_MEMORY_BYTES >> 20)
    except Exception as error:  # the top of a request: a template can raise anything
        reason = str(error)[:_MAX_FAULT_CHARS] or type(error).__name__
        answer = FAULT + reason.encode(errors="replace")
    signal.setitimer(signal.ITIMER_PROF, 0)
    send_frame(sys.stdout.buffer.write, answer)
    sys.stdout.buffer.flush()
    return True


def _render(template: jinja2.Template, asked: dict[str, Any]) -> str:
    """Return the text; of a text that is longer than `max_chars`, its start, which is too long."""
    max_chars, num_chars, pieces = asked["max_chars"], 0, []
    for piece in template.generate(asked["variables"]):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            break
    return "".join(pieces)[: max_chars + 1]


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + MAX_MEMORY_BYTES
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


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


if __name__ == "__main__":
    main()
