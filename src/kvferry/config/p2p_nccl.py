"""Settings of `P2pNcclConnector`, under the names that vLLM's former connector used. Pure.

The docstrings under the fields are copied into docs/configuration.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from kvferry.config.extra import NixlExtraConfig, register_extra_config
from kvferry.config.fields import (
    Bytes,
    Natural,
    Port,
    Text,
    check_choice,
    read_number,
    refuse_unknown_keys,
)
from kvferry.errors import ConfigError
from kvferry.types import Address

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
        refuse_unknown_keys(mapping, [f.name for f in fields(cls)], connector)
        texts = {key: mapping[key] for key in NUMBERS if isinstance(mapping.get(key), str)}
        return cls(**{**mapping, **{key: read_number(text) for key, text in texts.items()}})

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


register_extra_config("P2pNcclConnector", P2pNcclExtraConfig)
