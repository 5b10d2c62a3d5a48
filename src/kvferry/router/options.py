"""Options of a router. Plain data, checked on construction.

The tables of the configuration file and the flags of `kvferry proxy` are made from these fields.
"""

from dataclasses import dataclass, field

from kvferry.config.fields import Count, Natural, Port, Seconds, Text, check_fields
from kvferry.errors import ConfigError
from kvferry.router.fleet.health import HealthOptions
from kvferry.router.fleet.instances import Instance
from kvferry.router.fleet.services import DiscoveryOptions, ServiceName
from kvferry.router.routes.table import check_pattern
from kvferry.router.serving.admission import AdmissionOptions
from kvferry.types import FailurePolicy


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits in seconds."""

    connect: Seconds = 5.0
    """Time to connect to an instance."""
    answer: Seconds = 600.0
    """Time for an answer that is not streamed: every prefill leg, and decode legs without
    `stream`.
    """
    idle: Seconds = 300.0
    """Longest pause of a stream, of an upload, or of a client that reads."""
    queue: Seconds = 30.0
    """Time that a request may wait for admission."""
    request: Seconds = 3600.0
    """Total time of one request, retries and stream included."""
    probe: Seconds = 5.0
    """Time for one probe of an instance's `/health` and `/metrics`."""
    shutdown: Seconds = 30.0
    """Time for streams to finish when the router is stopped."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Limits on memory and connections."""

    max_body_bytes: Count = 64 * 1024 * 1024
    """Largest request (else 413), and largest answer that is read as a whole."""
    max_unfinished_bytes: Count = 512 * 1024 * 1024
    """Memory for the bodies of all requests together that arrive, wait or run; 64 KiB of each do
    not count. Beyond it, the largest of those that arrive gets 503.
    """
    max_connections: Count = 10_000
    """Largest number of client connections."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_unfinished_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_unfinished_bytes ({self.max_unfinished_bytes}) is less than "
                f"max_body_bytes ({self.max_body_bytes}), so the largest request could "
                "never arrive: raise the former or lower the latter"
            )


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How instances are chosen, and how failures are handled."""

    prefill_policy: str = "prefix_affinity"
    """Policy that chooses the prefill instance."""
    decode_policy: str = "conversation_affinity"
    """Policy that chooses the decode instance."""
    without_prefill: FailurePolicy = FailurePolicy.RECOMPUTE
    """What to do if no prefill instance is available: `recompute` lets a decode instance compute
    the prompt, `fail` answers 503.
    """
    max_retries: Natural = 2
    """Retries of one request on other instances, until the client has received a byte."""
    forwarded_routes: tuple[str, ...] = ()
    """Paths of further routes that one instance serves; `*` stands for any text. Other unknown
    paths get 404. Routes that administer an engine are never forwarded.
    """
    first_token_from_prefill: bool = False
    """Send the client the token that the prefill instance has sampled, and let a decode instance
    continue after it, wherever the answer stays exactly that of one engine.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        for pattern in self.forwarded_routes:
            check_pattern(pattern)


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    """Limits of the store of conversations."""

    max_count: Count = 10_000
    """Conversations stored at once; the least recently written are evicted first."""
    max_bytes: Count = 256 * 1024 * 1024
    """Memory for stored conversations; the least recently written are evicted first."""
    ttl: Seconds = 480.0
    """Longest time in seconds that a conversation is stored; a shorter time from the decode
    instance takes precedence.
    """

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Keys, certificates and allowed origins. An empty value means that the option is not set."""

    api_keys: tuple[tuple[str, str], ...] = ()
    """API keys as pairs of tenant and key."""
    admin_key: str = field(default="", repr=False)
    """Key for /admin and the data of /dashboard. Without a key, both refuse every request."""
    instance_key: str = field(default="", repr=False)
    """Key sent to instances instead of the client's credentials."""
    instance_ca_file: str = ""
    """Certificate authority of instances that use TLS; empty: the public authorities."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may read answers; `*` allows every origin."""
    ssl_certfile: str = ""
    """Certificate of the router's own server; empty: no TLS."""
    ssl_keyfile: str = ""
    """Key of the certificate; empty: the key is in `ssl_certfile`."""

    def __post_init__(self) -> None:
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError(
                "ssl_keyfile is set without ssl_certfile; set both, or only ssl_certfile if the "
                "file also holds the key"
            )


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """All options of one router."""

    prefillers: tuple[Instance, ...] = ()
    decoders: tuple[Instance, ...] = ()
    services: tuple[ServiceName, ...] = ()
    """DNS names whose addresses are further instances."""
    host: Text = "localhost"
    port: Port = 8000
    """Port to listen on; 0 chooses a free port."""
    access_log: bool = False
    """Write one log line per request."""
    otlp_traces_endpoint: str = ""
    """The collector's URL for spans; empty: what the OTEL_* variables say."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: RouterLimits = field(default_factory=RouterLimits)
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    health: HealthOptions = field(default_factory=HealthOptions)
    conversations: ConversationOptions = field(default_factory=ConversationOptions)
    discovery: DiscoveryOptions = field(default_factory=DiscoveryOptions)
    access: AccessOptions = field(default_factory=AccessOptions)

    def __post_init__(self) -> None:
        check_fields(self)
