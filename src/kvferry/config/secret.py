"""The cluster secret: every process that has the secret belongs to the cluster.

The operator provides the secret, or kvferry makes one per user on a single host.
`ClusterSecret.load` reads the environment it is given, and the file system.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from kvferry.config.private_files import (
    read_or_make_private_file,
    read_private_file,
    runtime_directory,
)
from kvferry.config.side_channel import SideChannelConfig
from kvferry.errors import ConfigError

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
FILE_NAME = "secret"
FILE_VARIABLE, TEXT_VARIABLE = "KVFERRY_SECRET_FILE", "KVFERRY_SECRET"


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
