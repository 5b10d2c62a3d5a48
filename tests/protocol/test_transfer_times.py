from kvferry.events import TransferTimes
from kvferry.protocol.consumer.states import TransferEvent as E
from kvferry.protocol.consumer.states import next_state
from kvferry.protocol.consumer.transfer import Origin, Transfer
from kvferry.types import Address, EngineId, EngineIncarnation, Epoch, RequestId


def timed(*story: tuple[E, float]) -> TransferTimes:
    origin = Origin(EngineIncarnation(EngineId("p"), Epoch("e1")), Address("p-host", 5600), 1)
    transfer = Transfer(RequestId("r"), "d/r/0", origin, TransferTimes(1.0))
    for event, now in story:
        transfer.state = next_state(transfer.state, event)
        transfer.note_time(event, now)
    return transfer.times


def test_a_pull_whose_peer_was_ready_before_its_blocks() -> None:
    story = (
        (E.PEER_READY, 2.0),
        (E.BLOCKS_ALLOCATED, 3.0),
        (E.BYTES_MOVED, 4.0),
        (E.CONFIRMED, 5.0),
        (E.PLACED, 6.0),
    )
    assert timed(*story) == TransferTimes(1.0, 2.0, 3.0, 3.0, 4.0, 5.0)


def test_a_pull_whose_blocks_were_there_before_its_peer() -> None:
    story = (
        (E.BLOCKS_ALLOCATED, 2.0),
        (E.PEER_READY, 3.0),
        (E.BYTES_MOVED, 4.0),
        (E.CONFIRMED, 5.0),
        (E.PLACED, 6.0),
    )
    assert timed(*story) == TransferTimes(1.0, 3.0, 2.0, 3.0, 4.0, 5.0)


def test_blocks_that_a_producer_writes_into() -> None:
    story = (
        (E.BLOCKS_ALLOCATED, 2.0),
        (E.WRITES_GRANTED, 3.0),
        (E.BYTES_MOVED, 4.0),
        (E.WRITES_REVOKED, 5.0),
        (E.PLACED, 6.0),
    )
    assert timed(*story) == TransferTimes(1.0, None, 2.0, 3.0, 4.0, 5.0)


def test_what_was_withdrawn_and_came_again_has_the_last_times_but_began_when_it_began() -> None:
    story = (
        (E.PEER_READY, 2.0),
        (E.BLOCKS_ALLOCATED, 3.0),
        (E.WITHDRAWN, 4.0),
        (E.BYTES_MOVED, 5.0),
        (E.BLOCKS_ALLOCATED, 5.0),
        (E.PEER_READY, 6.0),
        (E.BYTES_MOVED, 7.0),
    )
    assert timed(*story, (E.CONFIRMED, 8.0)) == TransferTimes(1.0, 6.0, 3.0, 3.0, 7.0, 8.0)


def test_trouble_leaves_what_had_been_reached() -> None:
    assert timed(
        (E.PEER_READY, 2.0), (E.PEER_LOST, 3.0), (E.BLOCKS_ALLOCATED, 4.0)
    ) == TransferTimes(1.0, 2.0, 4.0)
