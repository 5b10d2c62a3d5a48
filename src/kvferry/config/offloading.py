"""Settings of `OffloadingConnector`: where KV is kept after its request has ended. Pure.

Keys that vLLM's OffloadingConnector has keep vLLM's names. The docstrings under the fields are
copied into docs/configuration.md.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, Self, TypeVar

from msgspec import Meta

from kvferry.config.extra import ExtraConfig, register_extra_config
from kvferry.config.fields import (
    Count,
    Flag,
    Natural,
    Seconds,
    Text,
    check_choice,
    check_fields,
    nearest,
    refuse_unknown_keys,
    shown,
    sized,
)
from kvferry.config.side_channel import checked_address
from kvferry.errors import ConfigError
from kvferry.types import Address

Size = Annotated[int, sized('a number of bytes or a text like "8GiB"', 1)]
SizeOrNone = Annotated[int, sized('a number of bytes or a text like "8GiB"', 0)]
Tiers = Annotated[tuple[Any, ...], Meta(description="a list of objects with one key each")]
"""A tuple of `TierConfig`, once read."""
MOONCAKE_PROTOCOLS = ("tcp", "rdma")
EVICTION_POLICIES = ("lru", "arc")
SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
ONLY_OFF: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "spec_module_path",
            "cache_policy_module_path",
            "secondary_tiers",
            "backpressure",
            "tier_poll_interval_s",
        ),
        "is for vLLM's own OffloadingConnector; remove it and use tiers, or remove "
        "kv_connector_module_path",
    ),
    "canonical_layout": "is not supported: a chunk is found only by engines of the same "
    "tensor-parallel size; remove it",
    "sync_load_budget_bytes": "is not supported: loads run between the engine's steps; remove it",
}
"""Keys of vLLM that are accepted only without effect, with the reason."""


# -- tiers --


@dataclass(frozen=True)
class TierConfig(ExtraConfig):
    """Settings of one tier. Those without a default are required."""

    name: ClassVar[str]
    short_form: ClassVar[str] = ""
    """The field that a bare value sets, as in `{"cpu": "8GiB"}`."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], connector: str) -> Self:
        refuse_unknown_keys(mapping, [f.name for f in fields(cls)], connector)
        for field in fields(cls):
            if field.default is MISSING and field.name not in mapping:
                raise ConfigError(f"{field.name} is missing; the tier {cls.name} needs it")
        return cls(**mapping)


@dataclass(frozen=True)
class CpuTierConfig(TierConfig):
    """Settings of the tier `cpu`: host memory that all engines of this user on this host share."""

    name = "cpu"
    short_form = "size"

    size: Size
    """How much host memory this engine adds, over all its ranks."""
    store_after: Count = 1
    """A chunk is stored when requests have needed it this often."""


@dataclass(frozen=True)
class DiskTierConfig(TierConfig):
    """Settings of the tier `disk`: files in a folder that several engines may share."""

    name = "disk"

    path: Text
    """The folder. It may be on a network file system."""
    size: Size
    """The most bytes that the folder may hold, over all engines that share it."""
    store_after: Count = 1
    """A chunk is stored when requests have needed it this often."""


@dataclass(frozen=True)
class MooncakeTierConfig(TierConfig):
    """Settings of the tier `mooncake`: memory that many hosts lend to one Mooncake Store."""

    name = "mooncake"

    master: Text
    """The address of the process mooncake_master, host:port."""
    size: SizeOrNone = 0
    """How much host memory this engine lends to the store, over all its ranks; 0: none, it uses the
    memory of other hosts.
    """
    host: Text | None = None
    """The address at which other hosts reach the lent memory; null: this host's address towards the
    master.
    """
    protocol: Text = "tcp"
    """How Mooncake moves bytes: tcp or rdma."""
    device_name: Text | None = None
    """The RDMA devices, separated by commas; null: Mooncake chooses."""
    metadata_server: Text = "P2PHANDSHAKE"
    """Mooncake's metadata service, if the store has one (http://host:port/metadata, etcd://…); the
    default is none.
    """
    store_after: Count = 1
    """A chunk is stored when requests have needed it this often."""

    def __post_init__(self) -> None:
        check_fields(self)
        # Raises if the address is none.
        _ = self.master_address
        check_choice("protocol", self.protocol, MOONCAKE_PROTOCOLS)

    @property
    def master_address(self) -> Address:
        return checked_address("master is", self.master, "10.0.0.7:50051")


@dataclass(frozen=True)
class ObjectTierConfig(TierConfig):
    """Settings of the tier `object`: a bucket of an S3-compatible object store. Credentials come
    from the environment or the usual files, never from here.
    """

    name = "object"

    bucket: Text
    """The name of the bucket, which must exist."""
    endpoint: Text | None = None
    """The URL of the store; null: Amazon's."""
    prefix: Text = "kvferry"
    """The start of every object's name in the bucket."""
    region: Text | None = None
    """The region; null: from the environment, else us-east-1."""
    profile: Text | None = None
    """The profile in ~/.aws whose credentials are used, which needs boto3; null: the environment's
    credentials.
    """
    store_after: Count = 2
    """A chunk is stored when requests have needed it this often."""


TIERS: Mapping[str, type[TierConfig]] = {
    tier.name: tier
    for tier in (CpuTierConfig, DiskTierConfig, MooncakeTierConfig, ObjectTierConfig)
}


TierT = TypeVar("TierT", bound=TierConfig)


# -- connector --


@dataclass(frozen=True)
class OffloadingExtraConfig(ExtraConfig):
    """Settings of OffloadingConnector.

    The class has more fields than the style allows because the JSON is one flat table, and because
    vLLM has keys that kvferry only accepts.
    """

    tiers: Tiers = ()
    """Where KV is kept, the fastest first: `[{"cpu": "8GiB"}, {"disk": {"path": …, "size": …}},
    {"mooncake": {"master": …, "size": …}}, {"object": {"bucket": …, "endpoint": …}}]`.
    """
    cpu_bytes_to_use: SizeOrNone = 0
    """vLLM's name for a tier `cpu` of this size; the same as `"tiers": [{"cpu": …}]`."""
    num_cpu_blocks: Natural = 0
    """An older name of vLLM's: the size of the tier `cpu` in blocks of this engine."""
    block_size: Natural = 0
    """Tokens per stored chunk, a multiple of the engine's block size; 0: see `blocks_per_chunk`."""
    blocks_per_chunk: Natural = 0
    """Blocks per stored chunk; 0: one. A prompt shares stored KV with another in whole chunks."""
    eviction_policy: Text = "lru"
    """Which chunks the tier `cpu` evicts: lru (least recently used) or arc (adapts to scans)."""
    store_threshold: Natural = 0
    """vLLM's name for `store_after` of all tiers; 0: each tier's own."""
    max_tracker_size: Count = 64_000
    """How many chunks are counted for `store_after`."""
    offload_prompt_only: Flag = True
    """Store the KV of prompts only; false: also of generated tokens."""
    break_even: Flag = True
    """Compute instead of loading where computing was measured to be faster."""
    lookup_timeout: Seconds = 1.0
    """How long a request waits for disks and remote stores to say what they hold."""
    load_timeout: Seconds = 10.0
    """How long a load may take; after that the engine computes the prompt."""
    io_threads: Count = 8
    """The number of threads of each rank that read and write disks and remote stores."""
    pool_path: Text | None = None
    """The folder of the tier `cpu`, in a memory file system; null: /dev/shm/kvferry-UID."""
    spec_name: Text = "CPUOffloadingSpec"
    """Accepted because vLLM has it: CPUOffloadingSpec or TieringOffloadingSpec; no effect here."""
    self_describing_kv_events: Flag = False
    """Accepted because vLLM has it; no effect here."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.block_size and self.blocks_per_chunk:
            raise ConfigError(
                "block_size and blocks_per_chunk both set the size of a chunk; keep one of them"
            )
        check_choice("eviction_policy", self.eviction_policy, EVICTION_POLICIES)
        if self.spec_name not in SPECS:
            raise ConfigError(
                f"spec_name is {shown(self.spec_name)}; only vLLM's own OffloadingConnector loads "
                "other classes: remove spec_name, or remove kv_connector_module_path"
            )
        self._check_tiers()

    def _check_tiers(self) -> None:
        names = [tier.name for tier in self.tiers]
        if not names and not self.cpu_bytes_to_use and not self.num_cpu_blocks:
            raise ConfigError(
                'tiers is missing; set where KV is kept, for example "tiers": [{"cpu": "8GiB"}], '
                "or cpu_bytes_to_use"
            )
        if "cpu" in names and (self.cpu_bytes_to_use or self.num_cpu_blocks):
            raise ConfigError(
                "tiers has a tier cpu, and cpu_bytes_to_use or num_cpu_blocks sets its size too; "
                "keep one of them"
            )
        if self.cpu_bytes_to_use and self.num_cpu_blocks:
            raise ConfigError(
                "cpu_bytes_to_use and num_cpu_blocks both set the size of the tier cpu; keep one "
                "of them"
            )
        if len(set(names)) < len(names) or names != sorted(names, key=list(TIERS).index):
            raise ConfigError(
                f"tiers lists {', '.join(names)}; list each tier once, in the order "
                f"{', '.join(TIERS)}"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], connector: str) -> Self:
        for key, reason in ONLY_OFF.items():
            if mapping.get(key) not in (None, False, "", "False", "false", [], {}):
                raise ConfigError(f"{key} {reason}")
        kept = {key: value for key, value in mapping.items() if key not in ONLY_OFF}
        refuse_unknown_keys(kept, [f.name for f in fields(cls)], connector)
        if "tiers" in kept:
            kept["tiers"] = _read_tiers(kept["tiers"])
        return cls(**kept)

    def tier(self, kind: type[TierT]) -> TierT | None:
        return next((tier for tier in self.tiers if isinstance(tier, kind)), None)

    def cpu_bytes(self, bytes_per_block: int) -> int:
        """The size of the tier `cpu` over all ranks, 0 for none. A block has `bytes_per_block` over
        all ranks.
        """
        cpu = self.tier(CpuTierConfig)
        return cpu.size if cpu else self.cpu_bytes_to_use or self.num_cpu_blocks * bytes_per_block

    def store_after(self) -> dict[str, int]:
        """How often requests must have needed a chunk before each tier stores it."""
        implied = {"cpu": 1} if self.cpu_bytes_to_use or self.num_cpu_blocks else {}
        own = implied | {tier.name: tier.store_after for tier in self.tiers}
        return {name: self.store_threshold or after for name, after in own.items()}

    def blocks_of_chunk(self, block_size: int) -> int:
        """How many blocks of `block_size` tokens a chunk has."""
        if self.block_size % block_size:
            raise ConfigError(
                f"kv_connector_extra_config.block_size is {self.block_size}, which is not a "
                f"multiple of this engine's block size of {block_size} tokens"
            )
        return self.blocks_per_chunk or self.block_size // block_size or 1


def _read_tiers(listed: object) -> tuple[TierConfig, ...]:
    if not isinstance(listed, (list, tuple)):
        raise ConfigError(f"tiers must be a list of objects, got {shown(listed)}")
    return tuple(_read_tier(index, entry) for index, entry in enumerate(listed))


def _read_tier(index: int, entry: object) -> TierConfig:
    if isinstance(entry, TierConfig):
        return entry
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise ConfigError(
            f'tiers[{index}] must be an object with one key, such as {{"cpu": "8GiB"}}, got '
            f"{shown(entry)}"
        )
    name, settings = next(iter(entry.items()))
    tier = TIERS.get(name)
    if tier is None:
        raise ConfigError(f"tiers[{index}] has {shown(name)}; {nearest(str(name), TIERS)}")
    if not isinstance(settings, Mapping):
        if not tier.short_form:
            raise ConfigError(f"tiers[{index}].{name} must be an object, got {shown(settings)}")
        settings = {tier.short_form: settings}
    try:
        return tier.from_mapping(settings, f"the tier {name}")
    except ConfigError as error:
        raise ConfigError(f"tiers[{index}].{name}.{error}") from None


register_extra_config("OffloadingConnector", OffloadingExtraConfig)
