"""Tests a producer with a host buffer against a block-by-block model of both memories, with engine
steps, copies, readers and loads in random order.

A confirmed reader has read only its own prefill, a load finds its own bytes in the host buffer, and
no block is freed while it is being copied.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from tests.protocol.caches import (
    no_writers,
    producer_settings,
    take_copies,
    take_ended,
    take_replies,
)
from tests.protocol.test_producer_push import KEY, PUSH_KEY, push_ticket

from kvferry.protocol.actions import CopyToHostBuffer
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    PushOffer,
    PushRegistration,
    PushWithdrawal,
    Ready,
    Refused,
)
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.tickets import NO_BLOCK, Ticket, runs_from_blocks
from kvferry.types import RequestId, Route

NUM_BLOCKS, PROMPT_BLOCKS = 7, 3
TOKENS = fingerprint(range(4 * PROMPT_BLOCKS), 4, "")
Content = tuple[str, int, int]
"""The owner of a block's content, the serial of its lease or load, and the index of the block."""


@dataclass
class Prefill:
    name: str
    serial: int = 0
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    is_closed: bool = False


@dataclass
class Reader:
    """A reader of one prefill, which handles the producer's messages in order, but late."""

    name: str
    match_id: str
    told: deque[object] = field(default_factory=deque)
    ticket: Ticket | None = None
    ready: int = 0
    may_read: bool = False
    has_read: list[Content] = field(default_factory=list)
    is_confirming: bool = False
    outcome: str = ""


class Memory:
    def __init__(self, seed: int, *, waits_for_copies: bool = True) -> None:
        self.chance = random.Random(seed)
        self.producer = Producer(
            producer_settings(uses_host_buffer=True),
            KEY,
            PUSH_KEY,
            no_writers(),
        )
        self.waits_for_copies = waits_for_copies
        self.engine: list[Content] = [("", 0, 0)] * NUM_BLOCKS
        self.mirror: list[Content] = [("", 0, 0)] * NUM_BLOCKS
        self.free = list(range(NUM_BLOCKS))
        self.copies: dict[int, tuple[CopyToHostBuffer, list[int]]] = {}
        self.prefills: dict[str, Prefill] = {}
        self.readers: dict[str, Reader] = {}
        self.loads: list[tuple[int, Content, bool]] = []
        self.count = self.serial = self.num_confirmed = self.num_withdrawn = 0

    # -- the engine --

    def take_block(self) -> int:
        """Take the block that was freed last: a copy from that block may still be running."""
        return self.free.pop()

    def begin(self) -> None:
        if len(self.prefills) < 3:
            self.count += 1
            name = f"r{self.count}"
            self.prefills[name] = Prefill(name)
            for number in range(self.chance.choice([1, 1, 2])):
                reader = self.readers[f"d/{name}/{number}"] = Reader(f"d/{name}/{number}", name)
                self.register(reader)

    def compute(self) -> None:
        running = [prefill for prefill in self.prefills.values() if not prefill.is_closed]
        if not running or not self.free:
            return
        prefill = self.chance.choice(running)
        if prefill.num_published < len(prefill.blocks):
            self.publish(prefill)
        block = self.take_block()
        self.engine[block] = (prefill.name, prefill.serial, len(prefill.blocks))
        prefill.blocks.append(block)
        if len(prefill.blocks) == PROMPT_BLOCKS:
            self.finish(prefill)

    def publish(self, prefill: Prefill) -> None:
        if prefill.num_published == 0:
            self.serial += 1
            prefill.serial = self.serial
            self.producer.open(RequestId(prefill.name), self.serial, 0)
            for index, block in enumerate(prefill.blocks):
                self.engine[block] = (prefill.name, prefill.serial, index)
        new, prefill.num_published = prefill.blocks[prefill.num_published :], len(prefill.blocks)
        self.producer.publish(
            RequestId(prefill.name),
            prefill.name,
            self.ticket(prefill),
            4 * len(prefill.blocks),
            0,
            (tuple(new),),
        )

    def finish(self, prefill: Prefill) -> None:
        request = RequestId(prefill.name)
        if self.chance.random() < 0.15:
            self.producer.fail_prefill(request, prefill.name, "aborted", 0)
            self.release(prefill)
            del self.prefills[prefill.name]
            return
        prefill.is_closed = True
        self.producer.close(request, 0, (tuple(prefill.blocks[prefill.num_published :]),))
        self.producer.publish(request, prefill.name, self.ticket(prefill), 4 * PROMPT_BLOCKS, 0)

    def preempt(self) -> None:
        running = [
            prefill
            for prefill in self.prefills.values()
            if prefill.num_published and not prefill.is_closed
        ]
        if running:
            prefill = self.chance.choice(running)
            self.num_withdrawn += any(
                set(left) & set(prefill.blocks) for _, left in self.copies.values()
            )
            self.producer.withdraw(RequestId(prefill.name), prefill.serial, 0)
            self.release(prefill)
            prefill.blocks, prefill.num_published = [], 0

    def release(self, prefill: Prefill) -> None:
        self.free += prefill.blocks

    def load(self) -> None:
        """Write a peer's bytes to the host buffer unless a copy still writes there, and later load
        the block from the host buffer into the engine.
        """
        if self.loads and self.chance.random() < 0.5:
            block, content, has_come = self.loads.pop(0)
            if not has_come and (
                not self.waits_for_copies or not self.producer.is_copying([block])
            ):
                self.mirror[block], has_come = content, True
            elif has_come:
                assert self.mirror[block] == content, "what a load has brought was overwritten"
                self.free.append(block)
                return
            self.loads.append((block, content, has_come))
        elif len(self.loads) < 2 and self.free:
            self.count += 1
            self.loads.append((self.take_block(), ("load", self.count, 0), False))

    # -- copies --

    def copy(self) -> None:
        if not self.copies:
            return
        number = self.chance.choice(list(self.copies))
        _, left = self.copies[number]
        if left:
            block = left.pop()
            self.mirror[block] = self.engine[block]
        else:
            del self.copies[number]
            self.producer.copied_to_host_buffer(
                number, "broken" if self.chance.random() < 0.03 else None, 0
            )

    # -- readers --

    def register(self, reader: Reader) -> None:
        message = PushRegistration(
            "e1",
            reader.name,
            reader.name,
            "d",
            "h",
            1,
            1,
            30.0,
            reader.match_id,
            push_ticket(reader.match_id),
        )
        self.producer.receive(Route(b"d"), message, 0)

    def read(self) -> None:
        if not self.readers:
            return
        reader = self.chance.choice(list(self.readers.values()))
        if reader.told and self.chance.random() < 0.5:
            self.hear(reader, reader.told.popleft())
        elif (
            reader.ticket is not None
            and reader.may_read
            and len(reader.has_read) < reader.ready // 4
        ):
            reader.has_read.append(self.mirror[reader.ticket.block_ids()[0][len(reader.has_read)]])
        elif (
            reader.ticket is not None
            and len(reader.has_read) == PROMPT_BLOCKS
            and not reader.is_confirming
        ):
            reader.is_confirming = True
            self.producer.receive(
                Route(b"d"), Confirm("e1", reader.match_id, reader.name, reader.ticket.serial), 0
            )
        elif self.chance.random() < 0.02:
            self.leave(reader)

    def leave(self, reader: Reader) -> None:
        self.producer.receive(Route(b"d"), Detach("e1", reader.match_id, reader.name), 0)
        del self.readers[reader.name]

    def hear(self, reader: Reader, message: object) -> None:
        match message:
            case PushOffer(_, text, ready):
                is_first, reader.ticket, reader.ready = reader.ticket is None, KEY.open(text), ready
                if is_first:
                    self.producer.receive(Route(b"d"), Attach(text, reader.name), 0)
            case Ready():
                reader.may_read = True
            case PushWithdrawal(_, serial) if (
                reader.ticket is not None and reader.ticket.serial == serial
            ):
                (
                    reader.ticket,
                    reader.ready,
                    reader.may_read,
                    reader.has_read,
                    reader.is_confirming,
                ) = None, 0, False, [], False
                self.register(reader)
            case Confirmed():
                assert reader.ticket is not None
                wanted = [
                    (reader.match_id, reader.ticket.serial, index) for index in range(PROMPT_BLOCKS)
                ]
                assert reader.has_read == wanted, "confirmed, though it has read something else"
                self.num_confirmed += 1
                del self.readers[reader.name]
            case Refused(_, _, _, serial) if not serial or (
                reader.ticket is not None and reader.ticket.serial == serial
            ):
                self.leave(reader)

    # -- the whole system --

    def ticket(self, prefill: Prefill) -> str:
        table = [*prefill.blocks, *[NO_BLOCK] * (PROMPT_BLOCKS - len(prefill.blocks))]
        return KEY.sign(
            Ticket(
                "p",
                "e1",
                prefill.name,
                prefill.serial,
                "h",
                1,
                1,
                4,
                [runs_from_blocks(table)],
                TOKENS,
                30.0,
            )
        )

    def settle(self) -> None:
        for expose in take_copies(self.producer.outbox):
            self.copies[expose.copy] = (
                expose,
                [block for group in expose.blocks for block in group],
            )
        copying = [
            block
            for expose, _ in self.copies.values()
            for group in expose.blocks
            for block in group
        ]
        assert len(copying) == len(set(copying)), "no two copies write the same block"
        for reply in take_replies(self.producer.outbox):
            if reply.message.reader in self.readers:  # type: ignore[union-attr]
                self.readers[reply.message.reader].told.append(  # type: ignore[union-attr]
                    reply.message
                )
        for ended in take_ended(self.producer.outbox):
            prefill = self.prefills.pop(ended.request)
            assert prefill.is_closed
            assert not any(
                expose.request == prefill.name and set(left) & set(prefill.blocks)
                for expose, left in self.copies.values()
            )
            self.release(prefill)

    def live(self, num_steps: int) -> None:
        steps = [self.begin, self.compute, self.preempt, self.load, self.copy, self.read]
        for _ in range(num_steps):
            self.chance.choices(steps, [1, 2, 0.4, 2, 4, 8])[0]()
            self.settle()

    def end(self) -> None:
        for reader in list(self.readers.values()):
            self.leave(reader)
        for prefill in list(self.prefills.values()):
            if not prefill.is_closed:
                self.producer.fail_prefill(RequestId(prefill.name), prefill.name, "aborted", 0)
                self.release(prefill)
                del self.prefills[prefill.name]
            else:
                self.producer.abandon(RequestId(prefill.name), 0)
        self.settle()
        while self.copies:
            self.copy()
            self.settle()
        assert (self.producer.num_leases, self.prefills) == (0, {})
        assert not self.producer.is_copying(range(NUM_BLOCKS))
        assert sorted([*self.free, *(block for block, _, _ in self.loads)]) == list(
            range(NUM_BLOCKS)
        )


def live_and_end(*, waits_for_copies: bool) -> list[Memory]:
    lives = [Memory(seed, waits_for_copies=waits_for_copies) for seed in range(60)]
    for memory in lives:
        memory.live(600)
        memory.end()
    return lives


def test_whatever_comes_in_between_confirmed_bytes_are_right_and_every_block_comes_back() -> None:
    lives = live_and_end(waits_for_copies=True)
    assert sum(memory.num_confirmed for memory in lives) > 100, "many prefills are handed over"
    assert sum(memory.num_withdrawn for memory in lives) > 50, (
        "many are preempted while they are being copied"
    )


def test_loads_that_do_not_wait_for_copies_of_preempted_blocks_are_overwritten() -> None:
    """The negative control: the assertion in `load` detects the bytes that such a copy writes."""
    with pytest.raises(AssertionError, match="overwritten"):
        live_and_end(waits_for_copies=False)
