"""The cluster secret, and other files that hold a secret or a key.

Every process that has the secret belongs to the cluster. The operator provides the secret, or
kvferry makes one per user on a single host, in the runtime directory. Only the owner of such a
file, or a group chosen by the owner, may read it. Reads and writes the file system.
"""

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvferry.config.fields import shown
from kvferry.config.side_channel import SideChannelConfig
from kvferry.errors import ConfigError

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
FILE_NAME = "secret"
FILE_VARIABLE, TEXT_VARIABLE = "KVFERRY_SECRET_FILE", "KVFERRY_SECRET"
MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """The bytes of the secret and their origin. The bytes are never shown."""

    key: bytes = field(repr=False)
    source: str
    """The variable or file that the secret was read from, for error messages."""
    is_explicit: bool
    """Whether the operator provided the secret. A secret that kvferry made is valid on this host
    only.
    """

    def __post_init__(self) -> None:
        if len(self.key) < MIN_SECRET_BYTES:
            fix = (
                "use `openssl rand -hex 32`"
                if self.is_explicit
                else "delete it and kvferry makes a new one"
            )
            raise ConfigError(
                f"{self.source} holds a secret of {len(self.key)} bytes, but it needs at least "
                f"{MIN_SECRET_BYTES}; {fix}"
            )
        if len(self.key) > MAX_SECRET_BYTES:
            raise ConfigError(
                f"{self.source} holds a secret of more than {MAX_SECRET_BYTES} bytes; use "
                "`openssl rand -hex 32`"
            )

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Self:
        """The secret in KVFERRY_SECRET_FILE or KVFERRY_SECRET; otherwise this user's own secret,
        made on first use. Safe when two processes start at once.
        """
        path, text = environ.get(FILE_VARIABLE), environ.get(TEXT_VARIABLE)
        for name, value in ((FILE_VARIABLE, path), (TEXT_VARIABLE, text)):
            # An operator who sets the variable does not want the secret that kvferry makes instead.
            if value is not None and not value.strip():
                raise ConfigError(f"{name} is empty; give it a value or unset it")
        if path is not None and text is not None:
            raise ConfigError(f"{FILE_VARIABLE} and {TEXT_VARIABLE} are both set; keep one of them")
        if path is not None:
            key = read_private_file(path, f"{FILE_VARIABLE} names")
            return cls(key, f"{FILE_VARIABLE} {path}", is_explicit=True)
        if text is not None:
            return cls(
                text.strip().encode("utf-8", "surrogateescape"), TEXT_VARIABLE, is_explicit=True
            )
        directory = runtime_directory(environ)
        key = read_or_make_private_file(directory, FILE_NAME, f"set {FILE_VARIABLE}")
        return cls(key, str(directory / FILE_NAME), is_explicit=False)

    def check_reach(self, side_channel: SideChannelConfig) -> None:
        """Raise `ConfigError` if other hosts could reach the side channel and the operator provided
        no secret.
        """
        if self.is_explicit or side_channel.is_local:
            return
        reach = (
            f"bound to {side_channel.bind_host} and advertised as {side_channel.advertised_host}"
        )
        raise ConfigError(
            f"{FILE_VARIABLE} must be set to the file with the cluster's secret when the side "
            f"channel is {reach}; without a secret use localhost"
        )


# -- files --


def runtime_directory(environ: Mapping[str, str]) -> Path:
    """This user's private directory for files that live as long as a login session: in
    XDG_RUNTIME_DIR, else in the temporary directory.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and _is_ours(Path(runtime)):
        return Path(runtime) / "kvferry"
    return Path(environ.get("TMPDIR") or "/tmp") / f"kvferry-{os.geteuid()}"


def _is_ours(directory: Path) -> bool:
    try:
        found = directory.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def read_private_file(path: str, naming: str) -> bytes:
    """Read the operator's file, without white space around its text. `naming` begins the error
    message: `KVFERRY_SECRET_FILE names`. Symbolic links are followed, because mounted secrets are
    links.
    """
    try:
        with Path(path).open("rb") as file:
            _check_not_public(os.fstat(file.fileno()), path, naming)
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{naming} {shown(path)}, which cannot be read ({reason}); correct the path or its mode"
        ) from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{naming} {path}, which has more than {MAX_FILE_BYTES} bytes")
    return text.strip()


def check_private_file(path: str, naming: str) -> None:
    """Raise `ConfigError` if other users may read a file that another library will read. A file
    that does not exist is left to that library's error.
    """
    with suppress(OSError, ValueError):
        _check_not_public(os.stat(path), path, naming)


def _check_not_public(found: os.stat_result, path: str, naming: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{naming} {path}, which is not a file; correct the path")
    # The group may read the file but not write it; other users have no access.
    if found.st_mode & 0o027:
        raise ConfigError(
            f"{naming} {path}, which other users may read or write; run `chmod 600 {path}`"
        )


def read_or_make_private_file(directory: Path, name: str, advice: str) -> bytes:
    """The text of this user's own file; a file that is missing is made, with 64 random digits.
    Safe when two processes start at once. `advice` ends the error message: `set NAME`.
    """
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        # All later calls use this descriptor, so replacing the directory meanwhile has no effect.
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be used for the {name} ({error.strerror}); remove it or {advice}"
        ) from error
    path = directory / name
    try:
        _check_own(os.fstat(opened), directory, advice)
        if (found := _read_own(opened, path, advice)) is None:
            _make(opened, name)
            found = _read_own(opened, path, advice)
        if found is None:
            raise ConfigError(f"{path} disappeared while kvferry made it; {advice}")
        return found
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made or read ({error.strerror}); remove it or {advice}"
        ) from error
    finally:
        os.close(opened)


def _read_own(directory_fd: int, path: Path, advice: str) -> bytes | None:
    try:
        opened = os.open(
            path.name,
            # O_NONBLOCK: opening a FIFO in place of the file must not block.
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            dir_fd=directory_fd,
        )
    except FileNotFoundError:
        return None
    with open(opened, "rb") as file:
        found = os.fstat(file.fileno())
        _check_own(found, path, advice)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is not a file; remove it")
        return file.read(MAX_FILE_BYTES).strip()


def _make(directory_fd: int, name: str) -> None:
    """Create the file atomically: write it under another name, then link it. The first process to
    link has made the file; all others read that file.
    """
    draft = f".{name}.{secrets.token_hex(8)}"
    opened = os.open(
        draft,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o600,
        dir_fd=directory_fd,
    )
    try:
        with open(opened, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        with suppress(FileExistsError):
            os.link(
                draft,
                name,
                src_dir_fd=directory_fd,
                dst_dir_fd=directory_fd,
                follow_symlinks=False,
            )
    finally:
        os.unlink(draft, dir_fd=directory_fd)


def _check_own(found: os.stat_result, path: Path, advice: str) -> None:
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to another user; remove it or {advice}")
    if found.st_mode & 0o077:
        raise ConfigError(
            f"{path} can be opened by other users; run `chmod go= {path}`, or remove it if you "
            "did not make it"
        )
