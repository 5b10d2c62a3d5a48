"""`kv_connector_extra_config`, typed by connector. Pure, except for a registry by connector name,
to which other modules may add classes.

Field names are the keys of the JSON, so the names keep vLLM's spelling; every duration is in
seconds. The docstrings under the fields are copied into docs/configuration.md and into help texts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from kvferry.config.fields import (
    Amount,
    Bytes,
    Count,
    Flag,
    LeaseSeconds,
    Natural,
    Number,
    Port,
    Seconds,
    Settings,
    Text,
    Texts,
    check_choice,
    check_fields,
    nearest,
    read_number,
    refuse_unknown_keys,
    shown,
    span,
)
from kvferry.config.side_channel import checked_address, numeric_host
from kvferry.errors import ConfigError
from kvferry.types import Address

MOONCAKE_PROTOCOLS = ("tcp", "rdma")
PUSH_WRITES = ("fenced", "always", "never")
KNOWN_TRANSPORTS = ("memory", "shm", "cuda_ipc", "nixl", "tcp", "mooncake", "dist")


@dataclass(frozen=True)
class ExtraConfig:
    """Settings of one connector. Subclasses are frozen dataclasses whose fields are the keys."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], connector: str) -> Self:
        refuse_unknown_keys(mapping, [f.name for f in fields(cls)], connector)
        return cls(**mapping)


@dataclass(frozen=True)
class FreeExtraConfig(ExtraConfig):
    """Settings of a connector that checks the settings itself."""

    settings: Settings = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], connector: str) -> Self:
        return cls(settings=dict(mapping))


@dataclass(frozen=True)
class NixlExtraConfig(ExtraConfig):
    """Settings of NixlConnector and NixlPushConnector.

    The class has more fields than the style allows because the JSON is one flat table.
    """

    needs_shared_cache: ClassVar[bool] = False
    """Whether peers read KV only in memory that kvferry has allocated."""

    backends: Texts = ("UCX",)
    """The NIXL plugins to start, for example UCX or LIBFABRIC; `kvferry doctor` lists the available
    plugins.
    """
    num_threads: Count = 4
    """The number of threads of each NIXL plugin that takes a thread count; UCX alone needs no
    threads and gets none.
    """
    kv_lease_duration: LeaseSeconds = 30.0
    """How long P keeps blocks for D without a heartbeat from D."""
    decoder_kv_blocks_ttl: Seconds = 480.0
    """How long D retains the blocks of a finished turn for the next turn, unless D needs the blocks
    earlier.
    """
    bidirectional_kv_xfer: Flag = False
    """D retains the blocks of a finished turn, and P fetches the blocks for the next turn. Set it
    on both sides, with kv_role kv_both.
    """
    kv_recompute_threshold: Natural = 64
    """If fewer tokens than this can be fetched from D, P computes the tokens; 0: P always fetches.
    """
    enable_cross_layers_blocks: Flag = False
    """All layers of a block lie side by side in memory and move as one segment."""
    enable_permute_local_kv: Flag = False
    """Accepted because vLLM has it; KV from a cache of another layout is always converted to this
    engine's layout.
    """
    engine_ttl: Number = 3600.0
    """Peers that are silent for this long are forgotten; 0 or less: never."""
    enforce_handshake_compat: Flag = True
    """Refuse peers whose model, cache or versions differ in a way that could give wrong tokens."""
    push_registration_timeout: Seconds | None = None
    """In push: how long a request of D that holds blocks waits for P to offer KV; null: the value
    of `decoder_kv_blocks_ttl`.
    """
    leg_wait: Seconds = 30.0
    """In push: how long P waits for the prefill leg of a request that D has registered. Then P
    refuses D, because the leg was not sent or was rejected.
    """
    push_streaming: Flag = True
    """In push: P offers the full blocks of a prompt while P computes the rest; false: P offers all
    blocks at the end.
    """
    push_write: Text = "fenced"
    """In push: when P writes into D's blocks instead of D reading from P: fenced (only where D
    itself can revoke the write grant: over tcp and dist), always, never.
    """
    transports: Texts = ()
    """The data transports to use, in order of preference: shm, cuda_ipc, nixl, tcp, dist; empty:
    all that work here, except dist.
    """
    bounce_max_segment_bytes: Natural | None = None
    """Over NIXL, a transfer whose segments are smaller than this on average uses a bounce buffer;
    0: never; null: 262144 for GPU memory, 0 for host memory.
    """
    bounce_buffer_bytes: Natural | None = None
    """The size of the bounce buffer, which lies in the same memory as the cache and is allocated
    when the first transfer uses it; 0: no bounce buffer; null: 1 % of a GPU's memory, at most
    1073741824, and 67108864 on a host.
    """
    peers: Texts = ()
    """In push behind a router that does not sign: the side channels (host:port) of engines that are
    trusted without a ticket (on D its P's, on P its D's). The two legs are then matched by their
    request id.
    """
    force_host_buffer: Flag = False
    """Use a host buffer as with `kv_buffer_device: cpu`, even if the cache is in host memory; for
    tests.
    """
    handshake_timeout: Seconds = 5.0
    """How long D waits for a peer's handshake reply."""
    queue_timeout: Seconds = 480.0
    """How long a request may wait in D's queue while P holds its blocks; then P gets the blocks
    back, and `kv_load_failure_policy` decides.
    """
    step_timeout: Seconds = 60.0
    """How long D's engine may take for one step. An engine that takes longer counts as hung: D
    renews no lease until the engine steps again.
    """
    read_timeout: Seconds = 30.0
    """How long one read may take."""
    confirm_timeout: Seconds = 5.0
    """How long D waits for P to confirm that the blocks were still leased when D read them."""
    receive_timeout: Seconds = 120.0
    """The longest time from the moment D has blocks for a request until P has confirmed the last
    byte.
    """
    grant_wait: Seconds = 5.0
    """How long P waits for the grant of a lease when a reader with a valid ticket arrives before
    the grant does.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.backends:
            raise ConfigError('backends must name at least one NIXL backend, for example ["UCX"]')
        self._check_transports()
        check_choice("push_write", self.push_write, PUSH_WRITES)
        for peer in self.peers:
            checked_address("peers has", peer, "10.0.0.7:5600")

    def _check_transports(self) -> None:
        for transport in self.transports:
            if transport == "mooncake":
                raise ConfigError(
                    "transports has mooncake, which belongs to kv_connector MooncakeConnector; "
                    "use that connector"
                )
            if transport not in KNOWN_TRANSPORTS:
                raise ConfigError(
                    f"transports has {shown(transport)}, which is not a data transport; "
                    f"{nearest(transport, KNOWN_TRANSPORTS)}"
                )

    @property
    def lease_extension_s(self) -> float:
        """How much one heartbeat extends a lease: two thirds of the lease, in whole seconds if the
        lease has at least 3 s.
        """
        return (
            self.kv_lease_duration * 2 // 3
            if self.kv_lease_duration >= 3
            else self.kv_lease_duration * 2 / 3
        )

    def writable_transports(
        self, transports: Iterable[str], fenced: Iterable[str]
    ) -> frozenset[str]:
        """In push: which of these transports P may use to write into this engine's blocks."""
        return frozenset({"always": transports, "fenced": fenced}.get(self.push_write, ()))

    @property
    def peer_addresses(self) -> frozenset[str]:
        """The addresses as engines advertise them, with one spelling of the loopback address."""
        found = filter(None, map(Address.parse, self.peers))
        return frozenset(str(Address(numeric_host(peer.host), peer.port)) for peer in found)

    @property
    def push_registration_timeout_s(self) -> float:
        return (
            self.decoder_kv_blocks_ttl
            if self.push_registration_timeout is None
            else self.push_registration_timeout
        )


@dataclass(frozen=True)
class MooncakeExtraConfig(NixlExtraConfig):
    """Settings of MooncakeConnector: those below, and those of NixlConnector."""

    needs_shared_cache: ClassVar[bool] = True

    mooncake_protocol: Text = "tcp"
    """How Mooncake moves bytes: tcp or rdma."""
    num_workers: Annotated[int, span("a whole number", 1, 256)] = 10
    """How many reads Mooncake makes at once, each of up to 8 MiB: one from each peer over tcp, half
    of them over rdma.
    """
    device_name: Text | None = None
    """The RDMA devices, separated by commas; null: Mooncake chooses."""
    transports: Texts = ("mooncake",)
    """The data transport, which is mooncake."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mooncake_protocol", self.mooncake_protocol, MOONCAKE_PROTOCOLS)

    def _check_transports(self) -> None:
        if self.transports != ("mooncake",):
            raise ConfigError(
                "transports is always mooncake with kv_connector MooncakeConnector; remove it, or "
                "use NixlConnector"
            )


# -- P2pNcclConnector --
# Its settings have the names that vLLM's former connector used.


SEND_TYPES = ("PUT", "GET", "PUT_ASYNC")
BACKENDS = ("gloo", "nccl")
NUMBERS = (
    "proxy_port",
    "http_port",
    "nccl_num_channels",
    "mem_pool_size_gb",
    "kv_buffer_size",
)
"""Settings that vLLM's examples write as text."""
GiB = 1 << 30

Gibibytes = Annotated[float, Meta(gt=0, le=1 << 20, description="a number of GiB above 0")]


@dataclass(frozen=True)
class P2pNcclExtraConfig(NixlExtraConfig):
    """Settings of P2pNcclConnector, in addition to those of NixlConnector."""

    send_type: Text = "PUT_ASYNC"
    """PUT or PUT_ASYNC: P sends the blocks while it computes the prompt, as NixlPushConnector does;
    both never make P wait. GET: D fetches the blocks after P has computed the prompt, as
    NixlConnector does.
    """
    backend: Text | None = None
    """null: the bytes move as with NixlConnector. gloo, or nccl between different GPUs: they move
    in process groups of torch.distributed (the transport dist), only in a network that you trust:
    see docs/p2p-nccl.md.
    """
    mem_pool_size_gb: Gibibytes = 32.0
    """With a backend: the most memory for staging buffers of a cache in host memory, in GiB;
    allocated when needed, 16 MiB at a time.
    """
    kv_buffer_size: Bytes = 1e9
    """With a backend: the most memory for staging buffers of a cache on a GPU, in bytes; allocated
    when needed, 16 MiB at a time.
    """
    nccl_num_channels: Natural = 0
    """With backend nccl: the number of channels of each group; 0: NCCL decides."""
    proxy_ip: Text | None = None
    """The host of the kvferry router with which this engine registers; null: the engine does not
    register. Needs proxy_port, and kv_role kv_producer (prefill) or kv_consumer (decode).
    """
    proxy_port: Port = 0
    """The HTTP port of that router."""
    http_port: Port = 0
    """The port of this engine's HTTP server, at which the router reaches it. Needed in vLLM; the
    embedded engine knows its port.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, known in (("send_type", SEND_TYPES), ("backend", BACKENDS)):
            value = getattr(self, key)
            if value is not None:
                check_choice(key, value, known)
        if self.backend is not None and not self.transports:
            object.__setattr__(self, "transports", ("dist",))
        if self.proxy_ip is not None and not self.proxy_port:
            raise ConfigError("proxy_port is missing; proxy_ip needs it: the router's HTTP port")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], connector: str) -> Self:
        texts = {key: mapping[key] for key in NUMBERS if isinstance(mapping.get(key), str)}
        numbers = {key: read_number(text) for key, text in texts.items()}
        return super().from_mapping({**mapping, **numbers}, connector)

    @property
    def transfer_mode(self) -> Literal["pull", "push"]:
        return "pull" if self.send_type == "GET" else "push"

    @property
    def router_url(self) -> str | None:
        """The router with which the engine registers."""
        if self.proxy_ip is None:
            return None
        return f"http://{Address(self.proxy_ip.strip('[]'), self.proxy_port)}"

    @property
    def mem_pool_bytes(self) -> int:
        return int(self.mem_pool_size_gb * GiB)


# -- small connectors --


@dataclass(frozen=True)
class ExampleExtraConfig(ExtraConfig):
    """Settings of ExampleConnector."""

    shared_storage_path: Text = "/tmp/kvferry-example"
    """The folder of the stored prefixes, the same on all engines that share them. It grows without
    bound, and may be emptied at any time.
    """


@dataclass(frozen=True)
class DecodeBenchExtraConfig(ExtraConfig):
    """Settings of DecodeBenchConnector."""

    fill_mean: Number = 0.015
    """The mean of the made-up values."""
    fill_std: Amount = 0.0
    """Their standard deviation; 0: all values are `fill_mean`."""
    startup_fill: Flag = False
    """Fill the whole cache once at the start, instead of each request's blocks when it starts."""


_CLASSES: dict[str, type[ExtraConfig]] = {
    "DecodeBenchConnector": DecodeBenchExtraConfig,
    "ExampleConnector": ExampleExtraConfig,
    "MooncakeConnector": MooncakeExtraConfig,
    "NixlConnector": NixlExtraConfig,
    "NixlPullConnector": NixlExtraConfig,
    "NixlPushConnector": NixlExtraConfig,
    "P2pNcclConnector": P2pNcclExtraConfig,
}


def register_extra_config(connector: str, cls: type[ExtraConfig]) -> None:
    """Register the settings class of one more connector."""
    if connector in _CLASSES:
        raise ConfigError(
            f"{connector} already has a class of settings; choose another connector name"
        )
    _CLASSES[connector] = cls


def extra_config_class(connector: str) -> type[ExtraConfig]:
    return _CLASSES.get(connector, FreeExtraConfig)
