"""`kv_connector_extra_config`, typed by connector. Pure; a registry by connector name that others
may add to.

Field names are the keys of the JSON, so they keep the spelling users know; every duration is in
seconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from kvferry.config.fields import (
    Count,
    Flag,
    LeaseSeconds,
    Natural,
    Number,
    Seconds,
    Settings,
    Text,
    Texts,
    check_fields,
    nearest,
    refuse_unknown_keys,
    shown,
)
from kvferry.config.side_channel import numeric_host
from kvferry.errors import ConfigError
from kvferry.types import Address

__all__ = [
    "KNOWN_TRANSPORTS",
    "ExampleExtraConfig",
    "ExtraConfig",
    "FreeExtraConfig",
    "NixlExtraConfig",
    "OffloadingExtraConfig",
    "extra_config_class",
    "register_extra_config",
]

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
    """Settings of a connector that checks them itself."""

    settings: Settings = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], connector: str) -> Self:
        return cls(settings=dict(mapping))


@dataclass(frozen=True)
class NixlExtraConfig(ExtraConfig):
    """Settings of NixlConnector and NixlPushConnector.

    More fields than a class of ours has otherwise: it is one flat table because the JSON is.
    """

    backends: Texts = ("UCX",)
    """NIXL plugins to start, for example UCX or LIBFABRIC; `kvferry doctor` says which there
    are.
    """
    num_threads: Count = 4
    """Threads of each NIXL plugin that takes a number of them; UCX alone needs none here and has
    none.
    """
    kv_lease_duration: LeaseSeconds = 30.0
    """How long P keeps blocks for D without hearing from it."""
    decoder_kv_blocks_ttl: Seconds = 480.0
    """How long D keeps blocks for the next turn of a conversation, unless it needs them before."""
    bidirectional_kv_xfer: Flag = False
    """D keeps what it has of a conversation when a turn ends, and P fetches it for the next one. On
    both sides, with kv_role kv_both.
    """
    kv_recompute_threshold: Natural = 64
    """Fewer tokens than this P computes again rather than fetching them from D; 0: it fetches
    whatever it lacks.
    """
    enable_cross_layers_blocks: Flag = False
    """All layers of a block lie side by side in memory and move as one segment."""
    enable_permute_local_kv: Flag = False
    """Accepted because vLLM has it; caches of different layout always meet, and what arrives is put
    into our order.
    """
    engine_ttl: Number = 3600.0
    """Peers unheard of for so long are forgotten; 0 or less: never."""
    enforce_handshake_compat: Flag = True
    """Refuse peers whose model, cache or versions differ in a way that could give wrong tokens."""
    push_registration_timeout: Seconds | None = None
    """In push: how long a request of D that has blocks waits for P to have something for it; null:
    as `decoder_kv_blocks_ttl`.
    """
    push_streaming: Flag = True
    """In push: P offers the full blocks of a prompt while it computes the rest; false: all of it at
    the end.
    """
    push_write: Text = "fenced"
    """In push: when P writes into D's blocks, instead of D reading P's: fenced (where D itself can
    end it: over tcp), always, never.
    """
    transports: Texts = ()
    """Pins the data transports, in order of preference: shm, cuda_ipc, nixl, tcp; empty: all that
    work here.
    """
    bounce_max_segment_bytes: Natural | None = None
    """Over NIXL, a transfer whose segments are smaller on average goes through a bounce buffer; 0:
    none does; null: 262144 for GPU memory, 0 for host memory.
    """
    bounce_buffer_bytes: Natural | None = None
    """Memory of the bounce buffer, of the kind and on the device that the cache is; null: 1 % of a
    GPU's memory, at most 1073741824, and 67108864 on a host.
    """
    peers: Texts = ()
    """In push behind a router that signs nothing: side channels (host:port) of engines that are
    believed without a ticket (on D of its P's, on P of its D's); the two legs then meet by their
    request id.
    """
    force_host_buffer: Flag = False
    """Stage KV in host memory as with `kv_buffer_device: cpu`, also where the cache is host memory
    itself; for tests.
    """
    handshake_timeout: Seconds = 5.0
    """How long D waits for a peer's answer to its greeting."""
    read_timeout: Seconds = 30.0
    """How long one read may take."""
    confirm_timeout: Seconds = 5.0
    """How long D waits for P to confirm that what it read was still leased."""
    receive_timeout: Seconds = 120.0
    """From the moment D has blocks for a request until its last byte is confirmed, whatever happens
    in between.
    """
    grant_wait: Seconds = 5.0
    """How long readers are believed whose valid ticket has overtaken its grant on the way to the
    worker.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.backends:
            raise ConfigError('backends must name at least one NIXL backend, for example ["UCX"]')
        for transport in self.transports:
            if transport not in KNOWN_TRANSPORTS:
                raise ConfigError(
                    f"transports names {shown(transport)}, which is no data transport; "
                    f"{nearest(transport, KNOWN_TRANSPORTS)}"
                )
        if self.push_write not in PUSH_WRITES:
            raise ConfigError(
                f"push_write is {shown(self.push_write)}; {nearest(self.push_write, PUSH_WRITES)}"
            )
        for peer in self.peers:
            _check_peer(peer)

    @property
    def lease_extension_s(self) -> float:
        """What one heartbeat adds: two thirds of the lease, in whole seconds where there are whole
        seconds to count.
        """
        return (
            self.kv_lease_duration * 2 // 3
            if self.kv_lease_duration >= 3
            else self.kv_lease_duration * 2 / 3
        )

    def lends_by(self, transports: Iterable[str], fenced: Iterable[str]) -> frozenset[str]:
        """In push: of these transports, those by which P may write into our blocks."""
        return frozenset({"always": transports, "fenced": fenced}.get(self.push_write, ()))

    @property
    def peer_addresses(self) -> frozenset[str]:
        """As engines advertise themselves, with one spelling of the loopback."""
        pairs = (peer.rpartition(":") for peer in self.peers)
        return frozenset(str(Address(numeric_host(host), int(port))) for host, _, port in pairs)

    @property
    def push_registration_timeout_s(self) -> float:
        return (
            self.decoder_kv_blocks_ttl
            if self.push_registration_timeout is None
            else self.push_registration_timeout
        )


@dataclass(frozen=True)
class OffloadingExtraConfig(ExtraConfig):
    """Settings of OffloadingConnector."""

    spec_name: Text = "CPUOffloadingSpec"
    spec_module_path: Text | None = None
    cpu_bytes_to_use: Natural = 0
    block_size: Natural = 0
    """Tokens per offloaded chunk; 0: the engine's block."""
    blocks_per_chunk: Natural = 0
    eviction_policy: Text = "lru"
    cache_policy_module_path: Text | None = None
    store_threshold: Natural = 0
    """From 2 on, only blocks seen so often are stored."""
    max_tracker_size: Count = 64_000
    offload_prompt_only: Flag = True
    canonical_layout: Flag = False
    self_describing_kv_events: Flag = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cpu_bytes_to_use == 0:
            raise ConfigError(
                "cpu_bytes_to_use is missing; set it to the bytes of host memory to use, for "
                "example 1073741824"
            )
        if self.block_size and self.blocks_per_chunk:
            raise ConfigError(
                "block_size and blocks_per_chunk both say how large a chunk is; keep one of them"
            )


@dataclass(frozen=True)
class ExampleExtraConfig(ExtraConfig):
    """Settings of ExampleConnector."""

    shared_storage_path: Text = "/tmp/kvferry-example"


_CLASSES: dict[str, type[ExtraConfig]] = {
    "ExampleConnector": ExampleExtraConfig,
    "NixlConnector": NixlExtraConfig,
    "NixlPullConnector": NixlExtraConfig,
    "NixlPushConnector": NixlExtraConfig,
    "OffloadingConnector": OffloadingExtraConfig,
}


def register_extra_config(connector: str, cls: type[ExtraConfig]) -> None:
    """Type the extra config of one more connector."""
    if connector in _CLASSES:
        raise ConfigError(
            f"{connector} already has a class of settings; choose another connector name"
        )
    _CLASSES[connector] = cls


def extra_config_class(connector: str) -> type[ExtraConfig]:
    return _CLASSES.get(connector, FreeExtraConfig)


def _check_peer(peer: str) -> None:
    host, separator, port = peer.rpartition(":")
    if not (host and separator and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ConfigError(
            f"peers has {shown(peer)}, which is no address; write host:port, for example "
            "10.0.0.7:5600"
        )
