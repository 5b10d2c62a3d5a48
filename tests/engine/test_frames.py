import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connectors.stats import KVConnectorStats, TransferStats
from kvferry.engine.ipc import MAX_FRAME_BYTES, FrameAssembler, FrameSocket, pack_frame
from kvferry.engine.transfer_log import ConnectorTotals
from kvferry.errors import TransportError
from kvferry.sleep import Wakeup


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 30), min_size=1))
def test_frames_survive_any_chopping_of_the_stream(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pack_frame(payload) for payload in payloads)
    assembler, arrived, turn = FrameAssembler(), [], 0
    while stream:
        size = cuts[turn % len(cuts)]
        arrived += assembler.feed(stream[:size])
        stream, turn = stream[size:], turn + 1
    assert arrived == payloads


def test_a_length_beyond_the_limit_is_an_error_not_an_allocation() -> None:
    with pytest.raises(TransportError, match="announces"):
        FrameAssembler().feed((MAX_FRAME_BYTES + 1).to_bytes(4))


def test_what_was_sent_before_the_end_still_arrives() -> None:
    left, right = socket.socketpair()
    sender, receiver = FrameSocket(left), FrameSocket(right)
    assert receiver.receive() == []
    assert receiver.is_open
    sender.send(b"one")
    sender.send(b"two")
    sender.close()
    assert receiver.receive() == [b"one", b"two"]
    assert not receiver.is_open
    with pytest.raises(TransportError):
        receiver.send(b"too late")
    receiver.close()


def test_a_reader_that_has_stopped_reading_is_an_error_after_the_deadline() -> None:
    left, right = socket.socketpair()
    sender = FrameSocket(left, send_timeout_s=0.01)
    with pytest.raises(TransportError, match="has not read"):
        sender.send(bytes(64 * 1024 * 1024))
    sender.close()
    right.close()


def test_rings_collapse_and_a_closed_bell_is_silent() -> None:
    bell = Wakeup()
    assert not bell.clear()
    for _ in range(100_000):
        bell.wake()
    assert bell.clear()
    assert not bell.clear()
    bell.close()
    bell.wake()


def test_totals_add_up_over_steps_and_by_transport() -> None:
    totals = ConnectorTotals()
    for transport in ("shm", "nixl", "shm"):
        stats = TransferStats()
        stats.record_transfer(
            transport, total_bytes=100, segments=2, planned=5, post_s=0.0, transfer_s=0.5
        )
        totals.add(stats)
    totals.add(None)
    totals.add(KVConnectorStats())
    _, summary = totals.summaries()
    assert (
        summary.transport,
        summary.transfers,
        summary.total_bytes,
        summary.segments,
        summary.seconds,
    ) == ("shm", 2, 200, 4, 1.0)
    assert summary.planned_segments == 10
    assert totals.to_dict()["transfers"] == 3
    assert totals.to_dict()["histograms"]["bytes_transferred"] == {"sum": 300, "buckets": {"0": 3}}
    assert "samples" not in totals.to_dict()
