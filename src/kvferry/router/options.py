"""What a router is started with. Plain data, checked on construction; the tables of a configuration
file and the flags of `kvferry proxy` come from these fields.
"""

from dataclasses import dataclass, field, fields

from kvferry.errors import ConfigError
from kvferry.router.fleet.health import HealthOptions
from kvferry.router.fleet.instances import Instance
from kvferry.router.serving.admission import AdmissionOptions
from kvferry.types import FailurePolicy

__all__ = [
    "AccessOptions",
    "ConversationOptions",
    "RouterLimits",
    "RouterOptions",
    "RoutingOptions",
    "Timeouts",
]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """All in seconds."""

    connect: float = 5.0
    """For a connection to an instance."""
    answer: float = 600.0
    """How long an instance may take over an answer that is not streamed: every prefill leg, and
    decode legs without `stream`.
    """
    idle: float = 300.0
    """How long a stream, an upload or a client that reads may stand still."""
    queue: float = 30.0
    """How long a request may wait for its turn here."""
    request: float = 3600.0
    """How long one request may take in all, retries and stream included."""
    probe: float = 5.0
    """For one look at an instance's `/health` and `/metrics`."""
    shutdown: float = 30.0
    """How long streams may go on once the router has been told to stop."""

    def __post_init__(self) -> None:
        _check_positive(self, "timeouts")


@dataclass(frozen=True, slots=True)
class RouterLimits:
    max_body_bytes: int = 64 * 1024 * 1024
    """Of a request (beyond it: 413), and of an answer that is read whole."""
    max_connections: int = 10_000
    """Of clients."""

    def __post_init__(self) -> None:
        _check_positive(self, "limits")


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    prefill_policy: str = "prefix_affinity"
    """How P is chosen."""
    decode_policy: str = "conversation_affinity"
    """How D is chosen."""
    without_prefill: FailurePolicy = FailurePolicy.RECOMPUTE
    """When no prefill instance is available: `recompute` lets a decode instance compute the prompt,
    `fail` answers with 503.
    """
    max_retries: int = 2
    """How often one request may be tried again elsewhere, while its client has got nothing."""

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ConfigError(f"routing.max_retries must be 0 or more, got {self.max_retries}")


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    max_count: int = 10_000
    """Kept at once; the least recently written go first."""
    max_bytes: int = 256 * 1024 * 1024
    """Likewise."""
    ttl: float = 480.0
    """Seconds, at most: what the decode instance says of its own blocks counts if it is less."""

    def __post_init__(self) -> None:
        _check_positive(self, "conversations")


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Who may do what. Empty: not asked for."""

    api_keys: tuple[tuple[str, str], ...] = ()
    """Pairs of tenant and key."""
    admin_key: str = field(default="", repr=False)
    """For /admin and /dashboard. Without one, they answer only to this machine."""
    instance_key: str = field(default="", repr=False)
    """Sent to instances in the place of the client's own credentials."""
    instance_ca_file: str = ""
    """Who vouches for instances that speak TLS, if not a public authority."""
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: str = ""
    ssl_keyfile: str = ""

    def __post_init__(self) -> None:
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError(
                "ssl_keyfile was given without ssl_certfile; give both, or the certificate alone "
                "with its key in it"
            )


@dataclass(frozen=True, slots=True)
class RouterOptions:
    prefillers: tuple[Instance, ...] = ()
    decoders: tuple[Instance, ...] = ()
    host: str = "localhost"
    port: int = 8000
    """0: any free one."""
    access_log: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: RouterLimits = field(default_factory=RouterLimits)
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    health: HealthOptions = field(default_factory=HealthOptions)
    conversations: ConversationOptions = field(default_factory=ConversationOptions)
    access: AccessOptions = field(default_factory=AccessOptions)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be from 0 to 65535, got {self.port}")


def _check_positive(options: object, table: str) -> None:
    for entry in fields(options):  # type: ignore[arg-type]
        value = getattr(options, entry.name)
        if not value > 0:
            raise ConfigError(f"{table}.{entry.name} must be more than 0, got {value}")
