"""Tests connectors of engines with a host buffer: the shape of the host buffer, and the same
transfers as without it.
"""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.connectors.pair import Blocks, EngineRequest, EngineSide, Step, step_until

from kvferry.connectors.contract import KVCacheGroup, RequestStatus
from kvferry.connectors.geometry import host_buffer_bytes, host_buffer_regions
from kvferry.connectors.nixl.metadata import NixlHandshakeMetadata
from kvferry.protocol import messages as codec
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.transports.memory import MemoryNetwork
from kvferry.types import MemoryKind, Region

TOKENS = list(range(100, 110))


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(0, 100), st.integers(1, 9)),
        min_size=1,
        max_size=6,
    )
)
def test_mirrored_regions_hold_every_block_and_lie_apart(
    shapes: list[tuple[int, int, int]],
) -> None:
    regions = [
        Region(f"l{i}", (i + 1) << 40, size, size + gap, blocks, MemoryKind.VRAM, 3, group=i)
        for i, (size, gap, blocks) in enumerate(shapes)
    ]
    found = host_buffer_regions(regions, 1 << 20)
    ends = [
        1 << 20,
        *(region.address + region.num_blocks * region.stride_bytes for region in found),
    ]
    assert all(end <= region.address for end, region in zip(ends, found, strict=False))
    assert ends[-1] <= (1 << 20) + host_buffer_bytes(regions)
    for region, own in zip(found, regions, strict=True):
        assert (region.name, region.group, region.block_bytes, region.num_blocks) == (
            own.name,
            own.group,
            own.block_bytes,
            own.num_blocks,
        )
        assert (region.memory, region.device, region.stride_bytes) == (
            MemoryKind.DRAM,
            0,
            region.block_bytes,
        )


def test_regions_that_share_memory_share_their_mirror() -> None:
    """Several groups share the blocks of one tensor; the last group may have fewer layers."""
    regions = [
        Region("a", 1 << 40, 64, 128, 10, group=0),
        Region("b", 1 << 40, 32, 128, 10, group=1),
        Region("c", 2 << 40, 64, 64, 10),
    ]
    found = host_buffer_regions(regions, 4096)
    assert [(region.address, region.block_bytes, region.stride_bytes) for region in found] == [
        (4096, 64, 64),
        (4096, 32, 64),
        (8192, 64, 64),
    ]
    assert host_buffer_bytes(regions) == 8192


@pytest.fixture
def network() -> Iterator[MemoryNetwork]:
    yield MemoryNetwork()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")
    ]


def uses_host_buffer(side: EngineSide) -> bool:
    metadata = side.worker.get_handshake_metadata()
    assert isinstance(metadata, NixlHandshakeMetadata)
    assert codec.decode_layout(metadata.layout).uses_host_buffer == metadata.uses_host_buffer
    return metadata.uses_host_buffer


@pytest.mark.parametrize(("of_p", "of_d"), [(True, False), (False, True), (True, True)])
def test_a_prompt_is_handed_over_through_host_buffers(
    network: MemoryNetwork, of_p: bool, of_d: bool
) -> None:
    p, d = (
        EngineSide("p", network, force_host_buffer=of_p),
        EngineSide("d", network, force_host_buffer=of_d),
    )
    assert (uses_host_buffer(p), uses_host_buffer(d)) == (of_p, of_d)
    try:
        p.fill([5, 6, 7], seed=1)
        request = EngineRequest("r", TOKENS, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]))
        d.scheduler.on_new_request(request)
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (10, True)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
        step_until(lambda: "r" in d.seen.finished_recving and "a" in p.seen.finished_sending, p, d)
        assert d.seen.failed_recving == set()
        for layer, array in d.memory.items():
            assert (array[[1, 2, 3]] == p.memory[layer][[5, 6, 7]]).all()
            assert not array[4:].any()
    finally:
        p.shutdown()
        d.shutdown()


def test_holes_of_a_window_are_not_copied(network: MemoryNetwork) -> None:
    groups = (KVCacheGroup(("layer.0",)), KVCacheGroup(("layer.1",), sliding_window=4))
    p, d = (EngineSide(name, network, groups=groups, force_host_buffer=True) for name in "pd")
    try:
        p.fill([5, 6, 7], seed=1)
        tokens = list(range(100, 112))
        request = EngineRequest(
            "r",
            [*tokens, 1],
            p.prefill(EngineRequest("a", tokens), [5, 6, 7], [NO_BLOCK, NO_BLOCK, 7]),
        )
        d.scheduler.on_new_request(request)
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (12, True)
        d.scheduler.update_state_after_alloc(
            request, Blocks(([1, 2, 3], [NO_BLOCK, NO_BLOCK, 4])), 12
        )
        step_until(lambda: "r" in d.seen.finished_recving and "a" in p.seen.finished_sending, p, d)
        assert d.seen.failure_reasons == {}
        assert (d.memory["layer.0"][[1, 2, 3]] == p.memory["layer.0"][[5, 6, 7]]).all()
        assert (d.memory["layer.1"][4] == p.memory["layer.1"][7]).all()
    finally:
        p.shutdown()
        d.shutdown()


def test_the_memory_of_an_engine_on_the_cpu_is_its_own_host_buffer(network: MemoryNetwork) -> None:
    side = EngineSide("p", network, buffer_device="cpu")
    try:
        assert not uses_host_buffer(side)
    finally:
        side.shutdown()


def test_blocks_are_named_in_a_grant_only_where_they_are_copied(network: MemoryNetwork) -> None:
    for is_forced in (False, True):
        side = EngineSide(f"p{is_forced}", network, force_host_buffer=is_forced)
        try:
            side.prefill(EngineRequest("a", TOKENS, status=RequestStatus.RUNNING), [5, 6, 7])
            [grant] = side.scheduler.build_connector_meta(  # type: ignore[attr-defined]
                Step()
            ).commands
            assert grant.blocks == (((5, 6, 7),) if is_forced else ())
        finally:
            side.shutdown()
