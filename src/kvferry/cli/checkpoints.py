"""Finds the checkpoint of a model: a folder, or a name that is fetched from the Hugging Face hub.

`huggingface_hub` downloads, shows the progress, tries again, and reads its own settings from the
environment: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the timeouts. This module decides
which files are fetched, and turns every failure into one sentence. The configuration is fetched
and checked before the weights.

The import of huggingface_hub takes half a second, so functions that fetch a name import it.
"""

import errno
import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry import engine
from kvferry.cli.extras import check_extra
from kvferry.config.fields import shown
from kvferry.engine.model.config import read_json_object, read_model_config
from kvferry.errors import ConfigError, KVFerryError, without_password

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

DEFAULT_MODEL = Path(engine.__file__).parent / "default_model"
"""The checkpoint that comes with kvferry; `scripts/train_model/` made it."""
DEFAULT_MODEL_NAME = "small"

HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
SMALL_FILES = (
    CONFIG,
    TOKENIZER,
    "generation_config.json",
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    INDEX,
)
_EXIT_INTERRUPTED = 130
_ABANDONED = re.compile(r".+\.[0-9a-f]{8}\.incomplete")
"""A partial file whose name is never used again. Older clients continue those of other names."""
_PASSWORD = re.compile(r"(?<=://)\S*@")
"""User and password of the URLs in a text of the client: HF_ENDPOINT may have them, and proxies."""
PATTERNS = (*SMALL_FILES, "model.safetensors", "model-*-of-*.safetensors")
"""All files that the embedded engine reads. Files with pickles are never fetched."""


def is_hub_name(model: str) -> bool:
    """Return whether `model` is `owner/name` and no path; a path is preferred to the hub."""
    with _explained_path(model):
        return HUB_NAME.fullmatch(model) is not None and not Path(model).exists()


def find_checkpoint(model: str, revision: str | None = None) -> Path:
    """Return the folder of a model; a model of the hub is fetched if the cache does not have it."""
    if not is_hub_name(model):
        with _explained_path(model):
            return _folder(model, revision)
    check_extra(f"the model {model}", "engine", ["huggingface_hub"])
    with _explained(model, revision), _ended_by_interrupt():
        return _fetch(model, revision)


def find_config(model: str, revision: str | None = None) -> Path:
    """Return the config.json of a model, of which nothing else is fetched."""
    if not is_hub_name(model):
        with _explained_path(model):
            path = _expanded(model)
            if path is not None and path.is_file() and revision is None:
                return path
            return _folder(model, revision) / CONFIG
    check_extra(f"the model {model}", "engine", ["huggingface_hub"])
    with _explained(model, revision), _ended_by_interrupt():
        return _fetch_config(model, revision)


def prefetch(model: str, revision: str | None) -> None:
    """Fetch the weights of a hub model into the cache, so that vLLM, which shows no progress, finds
    them there. Weights in other formats, and a hub that does not answer, are left to vLLM.

    Raises ConfigError if the hub refuses the model.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
    )

    with _explained(model, revision), _ended_by_interrupt():
        try:
            info = HfApi().model_info(
                model, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
            # Where a repository has both, vLLM loads these files, of Mistral's format.
            if any(file.rfilename.startswith("consolidated") for file in info.siblings or ()):
                return
            snapshot_download(model, revision=revision, allow_patterns=list(PATTERNS))
        # No answer of the hub, or HF_HUB_OFFLINE.
        except (LocalEntryNotFoundError, ConnectionError):
            return
        except HTTPError as error:
            has_answer = isinstance(error, HfHubHTTPError)
            if has_answer and not _local_file(Path(model), CONFIG, revision).exists():
                raise


def has_chat_template(model: Path, revision: str | None = None) -> bool:
    """Return whether a model has chats: a folder, or a name on the hub whose files are cached."""
    path = _local_file(model, TOKENIZER_CONFIG, revision)
    return _local_file(model, CHAT_TEMPLATE, revision).exists() or (
        path.exists() and read_json_object(path).get("chat_template") is not None
    )


def _local_file(model: Path, name: str, revision: str | None) -> Path:
    """Return where a file of a folder is, or of a name on the hub in the cache; a path that does
    not exist if there is none.
    """
    if not is_hub_name(str(model)):
        return model / name
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(str(model), name, revision=revision)
    return Path(found) if isinstance(found, str) else model / name


def _folder(model: str, revision: str | None) -> Path:
    folder = _expanded(model)
    if revision is not None and folder is not None and folder.exists():
        raise ConfigError("--revision is for models of the hub, but MODEL is a path; remove it")
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"MODEL is {shown(model)}, which is neither a folder nor owner/name on the Hugging "
            "Face hub; make a tiny model with `kvferry make-model DIR`"
        )
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"MODEL is {shown(model)}, a folder without config.json; name the folder of a "
            "Hugging Face checkpoint"
        )
    return folder


def _expanded(model: str) -> Path | None:
    try:
        return Path(model).expanduser() if model and "\0" not in model else None
    # `expanduser` found no home directory of the named user.
    except RuntimeError:
        return None


@contextmanager
def _explained_path(model: str) -> Iterator[None]:
    """Turn the errors of the file system, such as a name that is too long, into one sentence."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"MODEL is {shown(model)}, which cannot be read ({error.strerror}); name a folder, or "
            "owner/name on the Hugging Face hub"
        ) from None


# -- the hub --


def _fetch(model: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HTTPError,
        LocalEntryNotFoundError,
    )

    def snapshot(is_local: bool) -> Path:
        folder = Path(
            snapshot_download(
                model, revision=revision, allow_patterns=list(PATTERNS), local_files_only=is_local
            )
        )
        # The client knows what a snapshot should hold only if it has downloaded a whole one.
        if is_local and (missing := _missing(folder)):
            raise LocalEntryNotFoundError(f"the cache has no {missing[0]} of {model}")
        return folder

    if constants.HF_HUB_OFFLINE:
        return snapshot(is_local=True)
    try:
        _check_before_download(model, revision)
    except HTTPError as error:
        # The hub does not answer, or refuses; the cache may have the model.
        try:
            return snapshot(is_local=True)
        except LocalEntryNotFoundError:
            raise error from None
    return snapshot(is_local=False)


def _missing(folder: Path) -> list[str]:
    """Return the files that a folder lacks of those that every checkpoint has.

    Not every repository has the other files, and the engine names what is wrong with an index.
    """
    weights: list[object] = ["model.safetensors"]
    if (folder / INDEX).is_file():
        placed = read_json_object(folder / INDEX).get("weight_map")
        weights = list(placed.values()) if isinstance(placed, dict) else []
    names = {CONFIG, TOKENIZER, *(name for name in weights if isinstance(name, str))}
    return sorted(name for name in names if not (folder / name).is_file())


def _fetch_config(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, CONFIG, revision=revision))


def _check_before_download(model: str, revision: str | None) -> None:
    """Refuse a model that the engine cannot serve or the disk cannot hold, before its weights are
    fetched.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    # Without a timeout the client would wait for a silent hub for ever.
    info = HfApi().model_info(
        model, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    _check_files(model, sizes)
    read_model_config(_fetch_config(model, revision).parent)
    missing = sum(
        size
        for name, size in sizes.items()
        if WEIGHTS.fullmatch(name)
        and not isinstance(try_to_load_from_cache(model, name, revision=info.sha), str)
    )
    free = shutil.disk_usage(_existing(Path(constants.HF_HUB_CACHE))).free
    if missing > free:
        raise ConfigError(
            f"{model} needs {_gib(missing)} more on the disk of {constants.HF_HUB_CACHE}, which "
            f"has {_gib(free)} free; free some space, or set HF_HOME to another disk"
        )


def _check_files(model: str, names: dict[str, int]) -> None:
    for name in (CONFIG, TOKENIZER):
        if name not in names:
            raise ConfigError(f"{model} on the hub has no {name}; name a model that has one")
    if not any(WEIGHTS.fullmatch(name) for name in names):
        raise ConfigError(
            f"{model} on the hub has no weights named model*.safetensors; name a model in that "
            "format (other formats, such as pickles and GGUF, are not supported)"
        )


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once. The cache keeps the files that are complete.

    KeyboardInterrupt would wait for the threads of the client, each of which first completes its
    file.
    """
    # Another handler is kept: a process in the background ignores the signal.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    # Python runs a handler only after the call of the main thread has returned, and a lookup of the
    # hub's name may take half a minute. The wakeup pipe gets the signal at once.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    before = signal.set_wakeup_fd(writer)
    waiting = threading.Thread(target=_await_interrupt, args=(reader,), daemon=True)
    waiting.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(writer)  # ends the thread
        waiting.join()
        os.close(reader)


def _await_interrupt(reader: int) -> None:
    """End the process when SIGINT arrives, without the incomplete files that it writes: the client
    never uses them again.
    """
    while number := os.read(reader, 1):
        if number[0] == signal.SIGINT:
            break
    else:
        return
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            path = link.readlink()
            if _ABANDONED.fullmatch(path.name):
                path.unlink()
    os._exit(_EXIT_INTERRUPTED)


@contextmanager
def _explained(model: str, revision: str | None) -> Iterator[None]:
    """Turn the errors of huggingface_hub into one sentence each."""
    try:
        from huggingface_hub import constants
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RevisionNotFoundError,
        )
        from huggingface_hub.utils import logging as client_log
    # The client reads its variables when it is imported.
    except ValueError as error:
        raise ConfigError(
            f"a variable of the Hugging Face client cannot be used ({_reason(error)}); check "
            "HF_ENDPOINT and the variables that begin with HF_HUB_"
        ) from error

    hub = without_password(constants.ENDPOINT)
    for handler in client_log.get_logger("huggingface_hub").handlers:
        handler.addFilter(_redact)
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(
            f"MODEL is {shown(model)}, which is neither a folder nor a name that the Hugging Face "
            f"hub allows ({_reason(error)})"
        ) from None
    except GatedRepoError:
        raise ConfigError(
            f"{model} is gated: accept its terms at {hub}/{model}, then set HF_TOKEN to a token of "
            "that account"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"{model} on {hub} has no revision {shown(str(revision))}") from None
    except LocalEntryNotFoundError as error:
        why = (
            "HF_HUB_OFFLINE is set; unset it to download the model"
            if constants.HF_HUB_OFFLINE
            else f"{hub} cannot be reached ({_reason(error.__cause__ or error)})"
        )
        raise ConfigError(
            f"{model} is not complete in the cache {constants.HF_HUB_CACHE}, and {why}"
        ) from None
    except HfHubHTTPError as error:
        raise _refused(model, error) from None
    except KVFerryError:
        raise
    # The client raises errors that share no class: its own, those of httpx, of its Rust extension,
    # and of Python, for example if HF_TOKEN is not ASCII or a SOCKS proxy needs a missing package.
    except Exception as error:
        raise _failed(model, error) from error


def _refused(model: str, error: "HfHubHTTPError") -> ConfigError:
    """Explain an answer of the hub that is no success."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    hub, status = without_password(constants.ENDPOINT), error.response.status_code
    if isinstance(error, EntryNotFoundError):
        return ConfigError(f"{model} on {hub} has no {CONFIG}; name a model that has one")
    if isinstance(error, RepositoryNotFoundError) or status in (401, 403):
        token = (
            "that your token (HF_TOKEN, or of `hf auth login`) is valid and may read the model"
            if get_token()
            else "set HF_TOKEN if the model is private"
        )
        return ConfigError(
            f"{model} is neither a folder nor a model on {hub} that you may read; check the name, "
            f"and {token}"
        )
    return ConfigError(
        f"{model} cannot be fetched: {hub} answered with status {status}; try again later"
    )


def _failed(model: str, error: Exception) -> ConfigError:
    """Explain a download that failed on this machine or on the way to the hub."""
    from huggingface_hub import constants

    cache, reason = constants.HF_HUB_CACHE, _reason(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ConfigError(
            f"the disk of {cache} is full; free some space and start again: files that are "
            "complete are kept"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return ConfigError(
            f"{model} cannot be stored in the cache {cache} ({reason}); set HF_HOME to a folder "
            "that can be written"
        )
    return ConfigError(
        f"{model} cannot be fetched from {without_password(constants.ENDPOINT)} ({reason}); check "
        "the network, HF_TOKEN, HF_ENDPOINT and the variables of proxies, and start again: files "
        "that are complete are kept"
    )


def _reason(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0] or type(error).__name__
    return _PASSWORD.sub("***@", first)[:200]


def _redact(record: logging.LogRecord) -> bool:
    """Filter of the client's log, which quotes the URLs of its requests."""
    record.msg, record.args = _PASSWORD.sub("***@", record.getMessage()), ()
    return True


def _existing(path: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
