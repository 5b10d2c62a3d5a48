"""The state machine of a transfer: one request's KV on its way into our blocks.

The state machine is the table `TRANSITIONS`, which maps a state and an event to the next state.
`IGNORED` lists the events that change nothing in a state. An event in neither is a bug of ours.
`ON_ENTER` in `receiving.py` says what the consumer does when a transfer enters a state.

    TRACKED ── peer ready ──> READY ── blocks ──> MOVING ── moved ──> CONFIRMING
       └────── blocks ──> WAITING ── peer ready ───^ │                 │    └─ failure ─> FAILED
                                                     │ failure         │ confirmed
                                                     v                 v
                              FAILED <── ended ── STOPPING          PLACING ── placed ──> DONE

    While the prefill computes:   MOVING ── caught up ──> CAUGHT_UP ── tokens ready ──> MOVING
    In push the producer may write instead:
    WAITING ── writes granted ──> FILLING ── moved ──> AWAITING_REVOKED ── revoked ──> PLACING

TRACKED     The consumer knows the request, and the engine has no blocks for it yet. A transfer
            whose offer was withdrawn starts here again, with or without blocks.
CAUGHT_UP   Every token that is ready has been read. The next offer continues the transfer.
FILLING     The producer may write into our blocks at any time, and reports the last write.
FAILING     A failure happened before the engine had blocks for the transfer. The transfer fails as
            soon as the engine allocates blocks.
PLACING     The bytes are confirmed, so the producer no longer matters. The blocks are rearranged
            into our order and copied out of the host buffer; if neither is needed, PLACING ends
            at once.
ENDED       The transfer is over and never had blocks, so there is nothing to report.

In five states something may still write into our blocks, so the blocks are neither used nor given
back to the engine until the writing has ended:

    still writing      then used          then the transfer starts again            then failed
    reads in flight    -                  RETURNING (offer withdrawn)               STOPPING
    the producer       AWAITING_REVOKED   RETURNING_BLOCKS (it cannot write all)    REVOKING
    the block store    (PLACING)          -                                         DISCARDING

Pure: the caller passes `now` (local monotonic seconds).
"""

from enum import StrEnum

from kvferry.errors import LocalProtocolError


class TransferState(StrEnum):
    TRACKED = "tracked"
    READY = "ready"
    WAITING = "waiting"
    MOVING = "moving"
    CAUGHT_UP = "caught up"
    RETURNING = "returning"
    STOPPING = "stopping"
    FILLING = "filling"
    AWAITING_REVOKED = "awaiting revoked"
    RETURNING_BLOCKS = "returning blocks"
    REVOKING = "revoking"
    CONFIRMING = "confirming"
    PLACING = "placing"
    DISCARDING = "discarding"
    FAILING = "failing"
    DONE = "done"
    FAILED = "failed"
    ENDED = "ended"


class TransferEvent(StrEnum):
    PEER_READY = "peer ready"
    BLOCKS_ALLOCATED = "blocks allocated"
    WRITES_GRANTED = "writes granted"
    CAUGHT_UP = "caught up"
    TOKENS_READY = "tokens ready"
    PART_MOVED = "part moved"
    """The reads in flight have ended; the transfer wants more tokens."""
    BYTES_MOVED = "bytes moved"
    """Every byte has arrived. In STOPPING and RETURNING, whose bytes are not used, the last read
    has ended.
    """
    READ_FAILED = "read failed"
    """One read has failed while others are in flight."""
    MOVE_FAILED = "move failed"
    """No read is in flight and the bytes have not arrived, or the producer cannot write them."""
    WRITES_REVOKED = "writes revoked"
    """No write under the write grant can land any more."""
    CONFIRMED = "confirmed"
    PLACED = "placed"
    PLACING_FAILED = "placing failed"
    WITHDRAWN = "withdrawn"
    REFUSED = "refused"
    PEER_LOST = "peer lost"
    DEADLINE_PASSED = "deadline passed"
    ABORTED = "aborted"
    SETTLED = "settled"
    """The engine needs no KV from the producer: it has all tokens already."""


_S, _E = TransferState, TransferEvent
BEFORE_READING = frozenset({_S.TRACKED, _S.WAITING})
REVOKING_STATES = frozenset({_S.AWAITING_REVOKED, _S.RETURNING_BLOCKS, _S.REVOKING})
"""States in which a write grant is being revoked."""
GRANTED = REVOKING_STATES | {_S.FILLING}
"""States in which a producer may be writing into our blocks."""
_LOSS = (_E.REFUSED, _E.PEER_LOST, _E.DEADLINE_PASSED)
_FAILURE = (*_LOSS, _E.ABORTED)
FAILURE_EVENTS = frozenset({*_FAILURE, _E.READ_FAILED, _E.MOVE_FAILED, _E.PLACING_FAILED})
"""Events whose reason becomes the reason of the failed transfer."""

TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (_S.TRACKED, _E.PEER_READY): _S.READY,
    (_S.TRACKED, _E.BLOCKS_ALLOCATED): _S.WAITING,
    (_S.READY, _E.BLOCKS_ALLOCATED): _S.MOVING,
    (_S.WAITING, _E.PEER_READY): _S.MOVING,
    **{(_S.TRACKED, event): _S.FAILING for event in _LOSS},
    **{(_S.READY, event): _S.FAILING for event in _LOSS},
    **{(_S.WAITING, event): _S.FAILED for event in _FAILURE},
    (_S.FAILING, _E.BLOCKS_ALLOCATED): _S.FAILED,
    **{
        (state, event): _S.ENDED
        for state in (_S.TRACKED, _S.READY, _S.FAILING)
        for event in (_E.ABORTED, _E.SETTLED)
    },
    # The consumer reads. Reads are in flight in MOVING, RETURNING and STOPPING only.
    (_S.MOVING, _E.CAUGHT_UP): _S.CAUGHT_UP,
    (_S.CAUGHT_UP, _E.TOKENS_READY): _S.MOVING,
    (_S.MOVING, _E.PART_MOVED): _S.MOVING,
    (_S.MOVING, _E.BYTES_MOVED): _S.CONFIRMING,
    (_S.MOVING, _E.MOVE_FAILED): _S.FAILED,
    **{(_S.MOVING, event): _S.STOPPING for event in (*_FAILURE, _E.READ_FAILED)},
    **{(_S.CAUGHT_UP, event): _S.FAILED for event in _FAILURE},
    (_S.STOPPING, _E.BYTES_MOVED): _S.FAILED,
    (_S.STOPPING, _E.MOVE_FAILED): _S.FAILED,
    (_S.CONFIRMING, _E.CONFIRMED): _S.PLACING,
    **{(_S.CONFIRMING, event): _S.FAILED for event in _FAILURE},
    # The producer withdraws its offer.
    **{
        (state, _E.WITHDRAWN): _S.TRACKED
        for state in (_S.TRACKED, _S.READY, _S.WAITING, _S.CAUGHT_UP, _S.CONFIRMING)
    },
    (_S.MOVING, _E.WITHDRAWN): _S.RETURNING,
    (_S.RETURNING, _E.BYTES_MOVED): _S.TRACKED,
    (_S.RETURNING, _E.MOVE_FAILED): _S.TRACKED,
    **{(_S.RETURNING, event): _S.STOPPING for event in _FAILURE},
    # The producer writes.
    (_S.WAITING, _E.WRITES_GRANTED): _S.FILLING,
    (_S.FILLING, _E.BYTES_MOVED): _S.AWAITING_REVOKED,
    (_S.FILLING, _E.MOVE_FAILED): _S.RETURNING_BLOCKS,
    **{(_S.FILLING, event): _S.REVOKING for event in _FAILURE},
    (_S.AWAITING_REVOKED, _E.WRITES_REVOKED): _S.PLACING,
    (_S.AWAITING_REVOKED, _E.ABORTED): _S.REVOKING,
    (_S.RETURNING_BLOCKS, _E.WRITES_REVOKED): _S.TRACKED,
    **{(_S.RETURNING_BLOCKS, event): _S.REVOKING for event in _FAILURE},
    (_S.REVOKING, _E.WRITES_REVOKED): _S.FAILED,
    # The block store puts the confirmed bytes into place.
    (_S.PLACING, _E.PLACED): _S.DONE,
    (_S.PLACING, _E.PLACING_FAILED): _S.FAILED,
    (_S.PLACING, _E.ABORTED): _S.DISCARDING,
    (_S.DISCARDING, _E.PLACED): _S.FAILED,
    (_S.DISCARDING, _E.PLACING_FAILED): _S.FAILED,
}

IGNORED: frozenset[tuple[TransferState, TransferEvent]] = frozenset(
    {
        *((_S.FAILING, event) for event in _LOSS),
        # Every byte has arrived, so the producer no longer matters.
        *((state, event) for state in (_S.AWAITING_REVOKED, _S.PLACING) for event in _LOSS),
        # The transfer has failed already. Only the end of the writing ends these states: bytes may
        # still land in the blocks.
        *(
            (state, event)
            for state in (_S.STOPPING, _S.REVOKING, _S.DISCARDING)
            for event in _FAILURE
        ),
    }
)
"""Events that change nothing: neither the state nor the reason of a failure."""


def next_state(state: TransferState, event: TransferEvent) -> TransferState:
    """Return the next state; raise LocalProtocolError if the table has no such transition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise LocalProtocolError(
            f"a transfer in state {state} cannot handle the event {event}"
        ) from None
