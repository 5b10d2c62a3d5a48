"""Tests the messages of vLLM's own NixlConnector against bytes recorded from vLLM 0.32, and that
anything else raises an error with a reason.
"""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.stock_dialect import (
    QUESTION,
    ReadsCompleted,
    RenewalRequested,
    StockIdentity,
    StockMetadata,
    block_segments,
    completion_note,
    decode_payload,
    decode_question,
    describe_rank,
    encode_payload,
    heartbeat_notes,
    read_note,
    read_source,
    remote_regions,
    trusted_until,
)
from kvferry.types import Address, EngineId, Region, RequestId

RECORDED = Path(__file__).parent / "recorded"
REPLY = (RECORDED / "stock_vllm_0_32_handshake.msgpack").read_bytes()
PARAMS: dict[str, Any] = json.loads((RECORDED / "stock_vllm_0_32_params.json").read_text())
ENGINE = EngineId("ad6ad525-8e56-43e9-9a94-c4386b528ae6")
IDENTITY = StockIdentity(
    "8d9116d5de99a2241c83819d342d899d0f7094cb4bbdcb3a92f93c73c6f7a26c", "CPU_ATTN", "LBHNC", 1, 32
)
REGIONS = tuple(
    Region(f"model.layers.{layer}.self_attn.attn", 4096 * layer, 32768, 32768, 8)
    for layer in range(4)
)


def recorded() -> StockMetadata:
    return decode_payload(REPLY, IDENTITY, ENGINE)


def payload_with(**changes: Any) -> bytes:
    outer = msgspec.msgpack.decode(REPLY)
    inner = msgspec.msgpack.decode(outer["agent_metadata_bytes"])
    kept = {name: value for name, value in (inner | changes).items() if value is not ...}
    return msgspec.msgpack.encode(outer | {"agent_metadata_bytes": msgspec.msgpack.encode(kept)})


# -- handshake --


def test_the_question_is_the_one_that_vllm_sends() -> None:
    assert QUESTION == b"\x93\xc4\x0cget_meta_msg\x00\x00"
    decode_question(b"\x93\xc4\x0cget_meta_msg\x00\x00")


@pytest.mark.parametrize(
    "frame", [b"", b"\x93\xc4\x0cget_meta_msg\x00\x01", QUESTION + b"\x00", QUESTION[:-1]]
)
def test_other_questions_are_refused(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a stock handshake"):
        decode_question(frame)


def test_a_recorded_reply_gives_the_regions_of_the_stock_engine() -> None:
    metadata = recorded()
    assert len(metadata.agent_metadata) == 486
    theirs = remote_regions(metadata, IDENTITY, REGIONS)
    assert [region.address for region in theirs] == metadata.kv_caches_base_addr
    assert {(r.block_bytes, r.stride_bytes, r.num_blocks) for r in theirs} == {(32768, 32768, 8192)}


def test_our_own_reply_has_every_key_and_type_of_a_recorded_one() -> None:
    ours = describe_rank(ENGINE, recorded().agent_metadata, IDENTITY, REGIONS)
    outer = msgspec.msgpack.decode(encode_payload(IDENTITY, ours))
    theirs = msgspec.msgpack.decode(REPLY)
    assert outer.keys() == theirs.keys()
    inner, theirs = (
        msgspec.msgpack.decode(each["agent_metadata_bytes"]) for each in (outer, theirs)
    )
    assert (
        inner
        | {
            "kv_caches_base_addr": theirs["kv_caches_base_addr"],
            "num_blocks": 8192,
            "region_num_blocks": [8192] * 4,
        }
        == theirs
    )


def test_kernel_blocks_are_joined_to_blocks_of_the_scheduler() -> None:
    identity = replace(IDENTITY, kernel_blocks=2, block_size=64)
    regions = [replace(region, block_bytes=65536, stride_bytes=65536) for region in REGIONS]
    ours = describe_rank(ENGINE, b"agent", identity, regions)
    assert (ours.block_size, ours.num_blocks, ours.block_lens[0]) == (32, 16, 32768)
    theirs = remote_regions(ours, identity, regions)
    assert [replace(region, axes=None) for region in regions] == list(theirs)


def test_another_hash_is_refused_before_the_metadata_is_decoded() -> None:
    payload = {"compatibility_hash": "0" * 64, "agent_metadata_bytes": b"\xc1"}
    with pytest.raises(IncompatiblePeer, match="compatibility_hash"):
        decode_payload(msgspec.msgpack.encode(payload), IDENTITY, ENGINE)


def test_another_engine_at_the_address_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="but the request names other"):
        decode_payload(REPLY, IDENTITY, EngineId("other"))


@pytest.mark.parametrize(
    "changes",
    [
        {"block_lens": [32768, 32768, 32768, 16384]},
        {"block_lens": [32768] * 3},
        {"kv_cache_layout": "LBNHC"},
        {"block_size": 16},
        {"ssm_sizes": [1, 0]},
        {"attn_backend_name": "FLASH_ATTN"},
        {"physical_blocks_per_logical_kv_block": 2},
        {"region_names": ["model.layers.0.self_attn.attn"] * 4},
        {"region_names": None},
        {"region_group_ids": [0, 0, 1, 0]},
        {"dcp_size": 2},
        {"pcp_size": 2},
        {"ple_block_len": 64},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_peer_of_another_form_is_refused_by_name(changes: dict[str, Any]) -> None:
    metadata = decode_payload(payload_with(**changes), IDENTITY, ENGINE)
    with pytest.raises(IncompatiblePeer, match=next(iter(changes))):
        remote_regions(metadata, IDENTITY, REGIONS)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_caches_base_addr": [4096] * 3},
        {"block_strides": [32768] * 5},
        {"block_strides": [32768, 32768, 32768, 32767]},
        {"region_num_blocks": [8192, 8192, 8192, 4096]},
        {"region_num_blocks": None},
        {"region_mem_types": ["DRAM", "DRAM", "DRAM", "VRAM"]},
        {"region_mem_types": ["FILE"] * 4},
        {"region_mem_types": ["DRAM"] * 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_regions_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    metadata = decode_payload(payload_with(**changes), IDENTITY, ENGINE)
    with pytest.raises(RemoteProtocolError, match="contradict"):
        remote_regions(metadata, IDENTITY, REGIONS)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 0},
        {"num_blocks": 1 << 40},
        {"kv_caches_base_addr": [-1] * 4},
        {"kv_caches_base_addr": [1 << 63] * 4},
        {"device_id": -1},
        {"engine_id": ""},
        {"agent_metadata": ...},
        {"block_lens": [0] * 10_001},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be decoded"):
        decode_payload(payload_with(**changes), IDENTITY, ENGINE)


def test_a_reply_that_is_too_long_is_not_decoded() -> None:
    with pytest.raises(RemoteProtocolError, match="too long"):
        decode_payload(b"\x00" * (4 * 1024 * 1024 + 1), IDENTITY, ENGINE)


@given(st.binary(max_size=200), st.integers(0, len(REPLY)))
def test_any_other_reply_is_a_remote_protocol_error(noise: bytes, cut: int) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode_payload(REPLY[:cut] + noise, IDENTITY, ENGINE)


# -- notifications --


def test_notifications_are_those_of_vllm() -> None:
    assert completion_note(RequestId("cmpl-1-0-8e54b155")) == b"cmpl-1-0-8e54b155:1"
    assert heartbeat_notes([RequestId("a"), RequestId("b")]) == [b"HB:a,b"]
    assert read_note(b"cmpl-1-0-8e54b155:2") == ReadsCompleted(RequestId("cmpl-1-0-8e54b155"), 2)
    assert read_note(b"a:b:1") == ReadsCompleted(RequestId("a:b"), 1)


def test_a_heartbeat_names_each_id_and_an_id_with_a_comma() -> None:
    message = read_note(b"HB:a,b")
    assert isinstance(message, RenewalRequested)
    assert set(message.requests) == {"a", "b", "a,b"}


def test_many_ids_are_sent_in_several_heartbeats() -> None:
    ids = [RequestId(f"request-{number}") for number in range(150)]
    renewals = [read_note(note) for note in heartbeat_notes(ids)]
    assert len(renewals) == 3
    named = {
        name for each in renewals if isinstance(each, RenewalRequested) for name in each.requests
    }
    assert named >= set(ids)


def test_ids_that_are_too_long_are_not_renewed() -> None:
    message = read_note(b"HB:" + b"x" * 512 + b"," + b"y" * 513)
    assert message == RenewalRequested((RequestId("x" * 512),))


@pytest.mark.parametrize(
    "note", [b"HB:" + b"a" * 262144, b"HB:" + b",".join(map(b"%d".__mod__, range(8193)))]
)
def test_heartbeats_that_are_too_long_are_refused(note: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"too long|more than 8192"):
        read_note(note)


@pytest.mark.parametrize(
    "note", [b"", b":1", b"a", b"a:", b"a:0", b"a:x", b"a:99999", b"\xff:1", b"x" * 513 + b":1"]
)
def test_other_notifications_are_refused(note: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a notification"):
        read_note(note)


# -- parameters --


def test_recorded_parameters_name_the_source() -> None:
    source = read_source(PARAMS, block_size=32)
    assert (source.engine, source.request) == (ENGINE, "cmpl-8115c11c71bddba4-0-8e54b155")
    assert (source.address, source.num_tokens) == (Address("localhost", 30222), 70)
    assert source.block_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp_size": 2}, "tp_size 2"),
        ({"dcp_size": 2}, "dcp_size 2"),
        ({"pp_size": 2}, "pp_size 2"),
        ({"transfer_mode": "push"}, "transfer mode push"),
        ({"remote_block_ids": [[1, 2]]}, "2 blocks for 70 tokens"),
        ({"remote_block_ids": [[1, 2, -1]]}, "remote_block_ids"),
        ({"remote_block_ids": [[1, 2, 1 << 31]]}, "remote_block_ids"),
        ({"remote_block_ids": [[1, 2, 3], [1, 2, 3]]}, "remote_block_ids"),
        ({"remote_block_ids": [[]]}, "remote_block_ids"),
        ({"remote_block_ids": None}, "remote_block_ids"),
        ({"remote_num_tokens": 0}, "remote_num_tokens"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_port": 65536}, "remote_port"),
        ({"remote_port": True}, "remote_port"),
        ({"remote_engine_id": 5}, "remote_engine_id"),
        ({"remote_request_id": "x" * 513}, "remote_request_id"),
    ],
)
def test_other_parameters_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        read_source(PARAMS | changes, block_size=32)


def test_blocks_that_the_peer_does_not_have_are_refused() -> None:
    theirs = [replace(region, num_blocks=4) for region in REGIONS]
    segments = block_segments(REGIONS, theirs, [5, 6], [3, 0])
    assert [list(each.local_offsets) for each in segments] == [[5 * 32768, 6 * 32768]] * 4
    assert [list(each.remote_offsets) for each in segments] == [[3 * 32768, 0]] * 4
    with pytest.raises(RemoteProtocolError, match="block 4, but the prefill side has 4"):
        block_segments(REGIONS, theirs, [5, 6], [3, 4])


# -- leases --


def test_a_lease_is_trusted_for_two_thirds_of_its_time_from_the_requests_arrival() -> None:
    assert trusted_until(30, arrived_at=100) == 120
