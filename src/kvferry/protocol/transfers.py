"""One pull's life as a table: state and event to next state. A missing entry is our own bug. Pure.

TRACKED ── peer ready ──> READY ── blocks ──> MOVING ── moved ──> CONFIRMING ── confirmed ──> PLACING ── placed ──> DONE
   └────── blocks ──> WAITING ── peer ready ──^  │                    └─ trouble ─> FAILED        │ aborted
                                                 └──── trouble ────> STOPPING ─ ended ─> FAILED   └─> STOPPING
In push the producer may write instead:  WAITING ── writes granted ──> FILLING ── moved ──> RECLAIMING ── confirmed ──> PLACING

FILLING: the producer may write into our blocks at any time, and says when it has written all.
RECLAIMING: it has; once it certainly cannot write any more, the bytes may be used.
DOOMED: trouble came before the engine had blocks for it; it fails as soon as they are there.
RETURNING: the producer has taken back what it offered (it preempted the prefill), or cannot write; once nothing moves, we wait for the
next offer.
STOPPING: given up, but something may still write into our blocks, so they are not handed back yet.
PLACING: the bytes are good, whatever becomes of the producer now; they are put into our own order. Over at once where there is no need.
ENDED: over without ever having had blocks, so there is nothing to report.
"""

from enum import StrEnum

from kvferry.errors import LocalProtocolError

__all__ = ["FAILURE_EVENTS", "FINAL", "TRANSITIONS", "TransferEvent", "TransferState", "next_state"]


class TransferState(StrEnum):
    TRACKED = "tracked"
    READY = "ready"
    WAITING = "waiting"
    MOVING = "moving"
    FILLING = "filling"
    RECLAIMING = "reclaiming"
    RETURNING = "returning"
    STOPPING = "stopping"
    CONFIRMING = "confirming"
    PLACING = "placing"
    DOOMED = "doomed"
    DONE = "done"
    FAILED = "failed"
    ENDED = "ended"


class TransferEvent(StrEnum):
    PEER_READY = "peer ready"
    BLOCKS_ALLOCATED = "blocks allocated"
    WRITES_GRANTED = "writes granted"
    BYTES_MOVED = "bytes moved"
    MOVE_FAILED = "move failed"
    CONFIRMED = "confirmed"
    PLACED = "placed"
    PLACING_FAILED = "placing failed"
    WITHDRAWN = "withdrawn"
    REFUSED = "refused"
    PEER_LOST = "peer lost"
    DEADLINE_PASSED = "deadline passed"
    ABORTED = "aborted"
    SETTLED = "settled"
    """The engine has everything already; nothing to load."""


_S, _E = TransferState, TransferEvent
FINAL = frozenset({_S.DONE, _S.FAILED, _S.ENDED})
_LOSS = (_E.REFUSED, _E.PEER_LOST, _E.DEADLINE_PASSED)
FAILURE_EVENTS = frozenset({*_LOSS, _E.ABORTED, _E.MOVE_FAILED, _E.PLACING_FAILED})
"""Events that are the reason why a transfer is not done."""

TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (_S.TRACKED, _E.PEER_READY): _S.READY,
    (_S.TRACKED, _E.BLOCKS_ALLOCATED): _S.WAITING,
    (_S.READY, _E.BLOCKS_ALLOCATED): _S.MOVING,
    (_S.WAITING, _E.PEER_READY): _S.MOVING,
    (_S.MOVING, _E.BYTES_MOVED): _S.CONFIRMING,
    (_S.MOVING, _E.MOVE_FAILED): _S.FAILED,
    (_S.STOPPING, _E.BYTES_MOVED): _S.FAILED,
    (_S.STOPPING, _E.MOVE_FAILED): _S.FAILED,
    (_S.STOPPING, _E.PLACED): _S.FAILED,
    (_S.STOPPING, _E.PLACING_FAILED): _S.FAILED,
    (_S.CONFIRMING, _E.CONFIRMED): _S.PLACING,
    (_S.PLACING, _E.PLACED): _S.DONE,
    (_S.PLACING, _E.PLACING_FAILED): _S.FAILED,
    (_S.PLACING, _E.ABORTED): _S.STOPPING,
    (_S.DOOMED, _E.BLOCKS_ALLOCATED): _S.FAILED,
    (_S.WAITING, _E.WRITES_GRANTED): _S.FILLING,
    (_S.FILLING, _E.BYTES_MOVED): _S.RECLAIMING,
    (_S.FILLING, _E.MOVE_FAILED): _S.RETURNING,
    (_S.RECLAIMING, _E.CONFIRMED): _S.PLACING,
    (_S.RECLAIMING, _E.ABORTED): _S.STOPPING,
    **{(_S.RECLAIMING, event): _S.RECLAIMING for event in _LOSS},
    **{(_S.FILLING, event): _S.STOPPING for event in (*_LOSS, _E.ABORTED)},
    (_S.READY, _E.WITHDRAWN): _S.TRACKED,
    (_S.TRACKED, _E.WITHDRAWN): _S.TRACKED,
    (_S.WAITING, _E.WITHDRAWN): _S.WAITING,
    (_S.MOVING, _E.WITHDRAWN): _S.RETURNING,
    (_S.CONFIRMING, _E.WITHDRAWN): _S.RETURNING,
    (_S.RETURNING, _E.BYTES_MOVED): _S.WAITING,
    (_S.RETURNING, _E.MOVE_FAILED): _S.WAITING,
    **{(_S.RETURNING, event): _S.STOPPING for event in (*_LOSS, _E.ABORTED)},
    **{(_S.TRACKED, event): _S.DOOMED for event in _LOSS},
    **{(_S.READY, event): _S.DOOMED for event in _LOSS},
    **{(_S.DOOMED, event): _S.DOOMED for event in _LOSS},
    **{(_S.WAITING, event): _S.FAILED for event in (*_LOSS, _E.ABORTED)},
    **{(_S.MOVING, event): _S.STOPPING for event in (*_LOSS, _E.ABORTED)},
    **{(_S.STOPPING, event): _S.STOPPING for event in (*_LOSS, _E.ABORTED)},
    **{(_S.PLACING, event): _S.PLACING for event in _LOSS},
    **{(_S.CONFIRMING, event): _S.FAILED for event in (*_LOSS, _E.ABORTED)},
    **{(state, event): _S.ENDED for state in (_S.TRACKED, _S.READY, _S.DOOMED) for event in (_E.ABORTED, _E.SETTLED)},
}


def next_state(state: TransferState, event: TransferEvent) -> TransferState:
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise LocalProtocolError(f"a transfer that is {state} cannot meet: {event}") from None
