"""The dialect of vLLM 0.32's own NixlConnector, called stock here: its handshake, notifications and
transfer parameters, and how long its leases can be trusted.

Used only if `interop` is set. A stock peer signs nothing and confirms nothing, so this module
checks everything that can be checked without its help: the compatibility hash, the geometry, the
range of every number, and the age of what was read (docs/interop.md). Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.planning import Segments
from kvferry.protocol.tickets import MAX_BLOCK_ID, MAX_BLOCKS, MAX_TICKET_NAME_CHARS, MAX_TP_SIZE
from kvferry.types import Address, EngineId, MemoryKind, Region, RequestId

MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
MAX_REGIONS = 10_000
MAX_NOTE_BYTES = 256 * 1024
MAX_IDS_ACCEPTED_PER_NOTE = 8192
"""A stock consumer names all requests that wait for one producer in one heartbeat."""
MAX_IDS_PER_NOTE = 64

Name = Annotated[str, Meta(min_length=1, max_length=MAX_TICKET_NAME_CHARS)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=1, le=MAX_BLOCK_ID)]
ParallelSize = Annotated[int, Meta(ge=1, le=MAX_TP_SIZE)]
Numbers = Annotated[list[Number], Meta(max_length=MAX_REGIONS)]
BlockIds = Annotated[
    list[Annotated[int, Meta(ge=0, lt=MAX_BLOCK_ID)]], Meta(min_length=1, max_length=MAX_BLOCKS)
]


# -- handshake --
# A consumer asks the producer's side channel for the metadata of one rank. The reply is a payload
# and, in a second frame, the producer's clock, which only transfers from D to P need.


@dataclass(frozen=True, slots=True)
class StockIdentity:
    """What an engine has in common with every stock peer that it may exchange KV with."""

    compatibility_hash: str
    """vLLM's own hash of the model, its cache, the release and the connector's version."""
    attention_backend: str
    layout: str
    """vLLM's name of the cache's layout, for example LBHNC."""
    kernel_blocks: int
    """The number of kernel blocks, which stock peers count, in one block of the scheduler."""
    block_size: int
    """The number of tokens in one block of the scheduler."""


class StockPayload(msgspec.Struct, frozen=True):
    """The outer message of the handshake. The keys are vLLM's."""

    compatibility_hash: Name
    agent_metadata_bytes: bytes


class StockMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The inner message of the handshake: one rank's memory. The keys are vLLM's."""

    engine_id: Name
    agent_metadata: bytes
    kv_caches_base_addr: Numbers
    device_id: Annotated[int, Meta(ge=0, lt=1024)]
    num_blocks: Count
    block_lens: Numbers
    block_strides: Numbers
    kv_cache_layout: Name
    block_size: Count
    ssm_sizes: tuple[int, int]
    attn_backend_name: Name
    physical_blocks_per_logical_kv_block: Count
    region_num_blocks: Numbers | None = None
    region_group_ids: Annotated[list[int], Meta(max_length=MAX_REGIONS)] | None = None
    region_names: Annotated[list[Name], Meta(max_length=MAX_REGIONS)] | None = None
    region_mem_types: Annotated[list[Name], Meta(max_length=MAX_REGIONS)] | None = None
    dcp_size: ParallelSize = 1
    pcp_size: ParallelSize = 1
    ple_block_len: int | None = None
    region_members: list[list[str]] = msgspec.field(default_factory=list)
    packed_member_layouts: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


QUESTION = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))
"""Asks for pipeline rank 0 and tensor-parallel rank 0, the only rank that interop supports."""


def decode_question(frame: bytes) -> None:
    """Raise RemoteProtocolError unless the frame asks for rank 0 in stock's words."""
    if frame != QUESTION:
        raise RemoteProtocolError(
            "the message is not a stock handshake for rank 0; both sides need tensor parallelism 1"
        )


def encode_payload(identity: StockIdentity, metadata: StockMetadata) -> bytes:
    payload = StockPayload(identity.compatibility_hash, msgspec.msgpack.encode(metadata))
    return msgspec.msgpack.encode(payload)


def decode_payload(frame: bytes, identity: StockIdentity, engine: EngineId) -> StockMetadata:
    """Return the metadata in a handshake reply. IncompatiblePeer if the hashes differ,
    RemoteProtocolError if the reply is malformed or of another engine.
    """
    if len(frame) > MAX_PAYLOAD_BYTES:
        raise RemoteProtocolError(f"a handshake reply of {len(frame)} bytes is too long")
    try:
        payload = msgspec.msgpack.decode(frame, type=StockPayload)
        if payload.compatibility_hash != identity.compatibility_hash:
            hashes = (identity.compatibility_hash, payload.compatibility_hash)
            raise IncompatiblePeer(engine, {"compatibility_hash": hashes})
        metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=StockMetadata)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"the handshake reply cannot be decoded: {error}") from None
    if metadata.engine_id != engine:
        raise RemoteProtocolError(
            f"engine {metadata.engine_id} answers at this address, but the request names {engine}"
        )
    return metadata


def describe_rank(
    engine: EngineId, agent_metadata: bytes, identity: StockIdentity, regions: Sequence[Region]
) -> StockMetadata:
    """Return what a stock consumer needs in order to read these regions."""
    parts = identity.kernel_blocks
    return StockMetadata(
        engine_id=engine,
        agent_metadata=agent_metadata,
        kv_caches_base_addr=[region.address for region in regions],
        device_id=regions[0].device,
        num_blocks=regions[0].num_blocks * parts,
        block_lens=[region.block_bytes // parts for region in regions],
        block_strides=[region.stride_bytes // parts for region in regions],
        kv_cache_layout=identity.layout,
        block_size=identity.block_size // parts,
        ssm_sizes=(0, 0),
        attn_backend_name=identity.attention_backend,
        physical_blocks_per_logical_kv_block=parts,
        region_num_blocks=[region.num_blocks * parts for region in regions],
        region_group_ids=[region.group for region in regions],
        region_names=[region.name for region in regions],
        region_mem_types=[region.memory.value for region in regions],
    )


def remote_regions(
    metadata: StockMetadata, identity: StockIdentity, regions: Sequence[Region]
) -> tuple[Region, ...]:
    """Return a stock producer's regions, one for each of ours, in blocks of the scheduler.

    IncompatiblePeer names what differs: interop reads whole blocks of equal form only.
    """
    ours = describe_rank(EngineId(metadata.engine_id), b"", identity, regions)
    checked = (
        "block_lens",
        "kv_cache_layout",
        "block_size",
        "ssm_sizes",
        "attn_backend_name",
        "physical_blocks_per_logical_kv_block",
        "region_names",
        "region_group_ids",
        "dcp_size",
        "pcp_size",
        "ple_block_len",
        "packed_member_layouts",
    )
    differences = {
        name: (getattr(ours, name), getattr(metadata, name))
        for name in checked
        if getattr(ours, name) != getattr(metadata, name)
    }
    if differences:
        raise IncompatiblePeer(EngineId(metadata.engine_id), differences)
    parts, counts = identity.kernel_blocks, metadata.region_num_blocks
    kinds = set(metadata.region_mem_types or ())
    is_good = (
        len(metadata.kv_caches_base_addr) == len(metadata.block_strides) == len(regions)
        and all(
            stride == length if parts > 1 else stride >= length
            for stride, length in zip(metadata.block_strides, metadata.block_lens, strict=True)
        )
        and metadata.num_blocks % parts == 0
        and counts == [metadata.num_blocks] * len(regions)
        and len(metadata.region_mem_types or ()) == len(regions)
        and len(kinds) == 1
        and kinds <= {kind.value for kind in MemoryKind}
    )
    if not is_good:
        raise RemoteProtocolError("the regions of the handshake reply contradict each other")
    return tuple(
        Region(
            region.name,
            address,
            region.block_bytes,
            stride * parts,
            metadata.num_blocks // parts,
            MemoryKind(next(iter(kinds))),
            metadata.device_id,
            region.group,
        )
        for region, address, stride in zip(
            regions, metadata.kv_caches_base_addr, metadata.block_strides, strict=True
        )
    )


# -- notifications --
# Text that a consumer sends to a producer over NIXL. Both kinds name requests of the producer.


@dataclass(frozen=True, slots=True)
class ReadsCompleted:
    """A consumer rank needs the blocks of a request no more."""

    request: RequestId
    num_ranks: int
    """How many ranks of the consumer send this notification to one rank of the producer."""


@dataclass(frozen=True, slots=True)
class RenewalRequested:
    """A consumer still needs the blocks of these requests."""

    requests: tuple[RequestId, ...]


def completion_note(request: RequestId) -> bytes:
    return f"{request}:1".encode()


def heartbeat_notes(requests: Sequence[RequestId]) -> list[bytes]:
    return [
        b"HB:" + ",".join(requests[first : first + MAX_IDS_PER_NOTE]).encode()
        for first in range(0, len(requests), MAX_IDS_PER_NOTE)
    ]


def read_note(note: bytes) -> ReadsCompleted | RenewalRequested:
    """Decode a notification of a stock consumer, or raise RemoteProtocolError.

    A heartbeat's ids that are longer than any of ours are left out.
    """
    if len(note) > MAX_NOTE_BYTES:
        raise RemoteProtocolError(f"a notification of {len(note)} bytes is too long")
    try:
        text = note.decode()
    except UnicodeDecodeError:
        text = ""
    if text.startswith("HB:"):
        ids = text.removeprefix("HB:")
        # An id may contain a comma, so the whole text may be one id as well.
        names = {ids, *ids.split(",", MAX_IDS_ACCEPTED_PER_NOTE)}
        if len(names) > MAX_IDS_ACCEPTED_PER_NOTE + 1:
            raise RemoteProtocolError(
                f"a heartbeat names more than {MAX_IDS_ACCEPTED_PER_NOTE} requests"
            )
        return RenewalRequested(
            tuple(RequestId(name) for name in names if 0 < len(name) <= MAX_TICKET_NAME_CHARS)
        )
    request, _, count = text.rpartition(":")
    is_count = count.isascii() and count.isdecimal() and len(count) <= 4
    is_name = 0 < len(request) <= MAX_TICKET_NAME_CHARS
    if not is_name or not is_count or not 0 < int(count) <= MAX_TP_SIZE:
        raise RemoteProtocolError(f"{note[:80]!r} is not a notification of vLLM 0.32")
    return ReadsCompleted(RequestId(request), int(count))


# -- transfer parameters --


class _StockParams(msgspec.Struct, frozen=True, kw_only=True):
    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Name
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_block_ids: Annotated[list[BlockIds], Meta(min_length=1, max_length=1)]
    remote_num_tokens: Count
    tp_size: ParallelSize = 1
    dcp_size: ParallelSize = 1
    pp_size: ParallelSize = 1
    transfer_mode: str = "pull"


@dataclass(frozen=True, slots=True)
class StockSource:
    """The blocks that a stock producer holds for one request, as the router's parameters say."""

    engine: EngineId
    request: RequestId
    address: Address
    block_ids: tuple[int, ...]
    num_tokens: int


def read_source(params: Mapping[str, Any], block_size: int) -> StockSource:
    """Return the source that a stock producer's parameters name, or raise RemoteProtocolError."""
    try:
        read = msgspec.convert(dict(params), _StockParams)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RemoteProtocolError(
            f"kv_transfer_params are not those of a vLLM 0.32 prefill: {error}"
        ) from None
    for name, size in (
        ("tp_size", read.tp_size),
        ("dcp_size", read.dcp_size),
        ("pp_size", read.pp_size),
    ):
        if size != 1:
            raise RemoteProtocolError(f"the prefill side has {name} {size}; interop supports 1")
    if read.transfer_mode != "pull":
        raise RemoteProtocolError(
            f"the prefill side uses transfer mode {read.transfer_mode:.20}; interop supports pull"
        )
    [block_ids] = read.remote_block_ids
    if len(block_ids) != -(-read.remote_num_tokens // block_size):
        raise RemoteProtocolError(
            f"the parameters name {len(block_ids)} blocks for {read.remote_num_tokens} tokens; "
            f"this engine's blocks have {block_size} tokens"
        )
    return StockSource(
        EngineId(read.remote_engine_id),
        RequestId(read.remote_request_id),
        Address(read.remote_host, read.remote_port),
        tuple(block_ids),
        read.remote_num_tokens,
    )


def block_segments(
    local: Sequence[Region],
    remote: Sequence[Region],
    local_blocks: Sequence[int],
    remote_blocks: Sequence[int],
) -> list[Segments]:
    """Pair whole blocks of equal regions. RemoteProtocolError if the peer has no such block."""
    if any(block >= remote[0].num_blocks for block in remote_blocks):
        raise RemoteProtocolError(
            f"the parameters name block {max(remote_blocks)}, but the prefill side has "
            f"{remote[0].num_blocks}"
        )
    ours, theirs = np.array(local_blocks, np.int64), np.array(remote_blocks, np.int64)
    return [
        Segments(
            index,
            index,
            region.block_bytes,
            ours * region.stride_bytes,
            theirs * remote[index].stride_bytes,
        )
        for index, region in enumerate(local)
    ]


# -- leases --


def trusted_until(lease_s: float, arrived_at: float) -> float:
    """Return until when a stock producer must still hold the blocks of a request, as far as a
    consumer can know. The producer cannot confirm it.

    The producer's lease lasts `lease_s` from the end of its prefill, a moment the consumer does not
    learn. The consumer assumes that the router took at most a third of the lease to bring the
    request:

        prefill ends      request arrives                     assumed end      lease ends
        |---- lease_s / 3 at most ---|------- 2/3 lease_s --------|---------------|

    Heartbeats do not extend the trust: NIXL accepts a heartbeat that never reaches the producer.
    """
    return arrived_at + lease_s * 2 / 3
