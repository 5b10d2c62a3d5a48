"""Two engines that push, as their transfer workers see them: blocks are computed, published,
preempted, granted for writing, freed and used again.

Each engine reuses a block at the earliest allowed moment. P's blocks are overwritten as soon as P
has commanded a withdrawal or the end of a lease has been reported. D's blocks go to their next
owner as soon as the end of a transfer has been reported. Each rank of D records the content of all
blocks without a write grant, and every tick compares the blocks with that record.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from tests.worker.world import BLOCK_SIZE, LAYERS, NUM_BLOCKS, SECRET, Place, Side

from kvferry.events import BytesMoved, Event, LeaseEnded, TransferFailed, TransferFinished
from kvferry.protocol.consumer.transfer import PushInfo
from kvferry.protocol.fingerprints import Fingerprint, fingerprint
from kvferry.protocol.tickets import (
    NO_BLOCK,
    PushTicket,
    PushTicketKey,
    Ticket,
    TicketKey,
    runs_from_blocks,
)
from kvferry.testing.local import ManualClock
from kvferry.transports.base import Completion, Handle
from kvferry.transports.memory import MemoryControlTransport, MemoryNetwork, MemoryTransport
from kvferry.types import Address, PeerId, RequestId
from kvferry.worker.commands import (
    AbortLoad,
    CloseStream,
    FailPush,
    GrantLease,
    OpenStream,
    PublishTicket,
    RegisterForPush,
    SkipLoad,
    StartLoad,
    WithdrawStream,
    WorkerCommand,
)

MAX_TOKENS = 16
HEADS = 2
MAX_SILENCE_S = 200.0
"""The longest time for which a test stops a producer. Without a fence, D frees the blocks of a
producer that is silent for eleven leases, 330 s.
"""
Content = npt.NDArray[np.uint8]


@lru_cache(maxsize=64)
def kv_of(prompt: int) -> Content:
    """Return [layers, tokens, heads, content]: the KV that any engine computes for this prompt."""
    return np.random.default_rng(prompt).integers(
        1, 256, (LAYERS, MAX_TOKENS, HEADS, 16), dtype=np.uint8
    )


def tokens_of(prompt: int, num_tokens: int) -> Fingerprint:
    return fingerprint([1000 * prompt + position for position in range(num_tokens)], BLOCK_SIZE, "")


class StormTransport(MemoryTransport):
    """A memory transport with adjustable speed, which can run an engine action during a poll. Its
    fence closes some polls after the revocation; the transport reports the fence when it is closed,
    or, if `lies` is set, immediately.
    """

    def __init__(self, network: MemoryNetwork, fence_polls: int | None, lies: bool = False) -> None:
        super().__init__(network, supports_write_grants=fence_polls is not None)
        self.slices_per_poll = 1
        """0: the bytes stay in flight as long as this value is set."""
        self.meanwhile: Callable[[], None] | None = None
        """Called once, in the middle of the next tick: a real engine runs in another thread."""
        self._delay, self._lies = fence_polls or 0, lies
        self._closing: list[tuple[int, int, Handle]] = []
        self._told: set[Handle] = set()
        self._inner: set[Handle] = set()
        self._polls = 0

    def revoke_writes(self, grant_id: int) -> Handle:
        handle = Handle(-1 - grant_id)
        self._closing.append((self._polls + 1 + self._delay, grant_id, handle))
        return handle

    def poll(self) -> list[Completion]:
        self._polls += 1
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        due = [each for each in self._closing if each[0] <= self._polls]
        told = [
            handle
            for _, _, handle in (self._closing if self._lies else due)
            if handle not in self._told
        ]
        self._closing = [each for each in self._closing if each not in due]
        self._told |= set(told)
        self._inner |= {MemoryTransport.revoke_writes(self, grant_id) for _, grant_id, _ in due}
        ended = [
            completion
            for _ in range(self.slices_per_poll)
            for completion in super(StormTransport, self).poll()
        ]
        ended = [completion for completion in ended if completion.handle not in self._inner]
        return [*ended, *(Completion(handle, None, 0, 0, 0.0, 0.0) for handle in told)]


@dataclass
class Prefill:
    """A request on P."""

    request: str
    match_id: str
    prompt: int
    num_tokens: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    serial: int = 0
    held_by: set[int] = field(default_factory=set)
    """Ranks that have not reported the end of the lease; empty during the computation."""


@dataclass
class Load:
    """A request on D."""

    request: str
    match_id: str
    prompt: int
    num_tokens: int
    blocks: list[int] = field(default_factory=list)
    first: int = 0
    ended_on: dict[int, bool] = field(default_factory=dict)
    """Maps each rank on which the transfer has ended to whether it succeeded."""

    @property
    def filled(self) -> list[int]:
        return self.blocks[self.first // BLOCK_SIZE : -(-self.num_tokens // BLOCK_SIZE)]


@dataclass(frozen=True)
class Mode:
    """How D grants writes to P."""

    lends: bool = True
    fence_polls: int | None = 0
    """The number of polls until the fence closes; None if there is no fence."""
    lies: bool = False


class PushWorld:
    def __init__(self, mode: Mode, p_size: int = 1, d_size: int = 1) -> None:
        self.mode, self.p_size = mode, p_size
        self.clock, self.network = ManualClock(), MemoryNetwork()
        self.rng = np.random.default_rng(7)
        self.lives = 0
        self.p: list[Side] = []
        self.transports: dict[int, StormTransport] = {}
        """Keyed by `id(side)`."""
        self.d = [self._side("d", "f1", rank, d_size, 1001) for rank in range(d_size)]
        for side in self.d:
            self.d[0].layouts.update(side.layouts)
            side.memory[:] = self.rng.integers(1, 256, side.memory.shape, dtype=np.uint8)
        self.is_lent = [np.zeros(NUM_BLOCKS, bool) for _ in self.d]
        self.shadow = [side.memory.copy() for side in self.d]
        """The required content of the blocks that have no write grant, per rank of D."""
        self.free = {"p": list(range(NUM_BLOCKS)), "d": list(range(NUM_BLOCKS))}
        self.prefills: dict[str, Prefill] = {}
        self.loads: dict[str, Load] = {}
        self.finished: list[str] = []
        self.failed: list[str] = []
        self.written_bytes = self.read_bytes = 0
        self.stepped_at: dict[int, float] = {}
        self.replace_p()

    def _side(self, name: str, epoch: str, rank: int, size: int, port: int) -> Side:
        transport = StormTransport(self.network, self.mode.fence_polls, self.mode.lies)
        channels = (
            MemoryControlTransport(self.network),
            MemoryControlTransport(self.network, port if rank == 0 else 0),
        )
        side = Side(
            name,
            epoch,
            self.network,
            self.clock,
            transport,
            Place(rank, size, HEADS),
            channels,
            self.mode.lends,
        )
        self.transports[id(side)] = transport
        return side

    @property
    def sides(self) -> list[Side]:
        return [*self.p, *self.d]

    def close(self) -> None:
        for side in self.sides:
            side.close()

    # -- time --

    def run(self, turns: int = 30) -> "PushWorld":
        for _ in range(turns):
            for side in self.sides:
                self.step(side)
        return self

    def step(self, side: Side) -> None:
        self.stepped_at[id(side)] = self.clock()
        side.step()
        events, side.events = side.events, []
        for event in events:
            self._take(side, event)
        for rank, mine in enumerate(self.d):
            guarded = ~self.is_lent[rank]
            assert np.array_equal(mine.memory[:, guarded], self.shadow[rank][:, guarded]), (
                f"something was written into blocks of rank {rank}"
            )

    def wait(self, seconds: float) -> None:
        if self.mode.fence_polls is None:
            for side in self.p:
                if self.clock() + seconds > self.stepped_at.get(id(side), 0.0) + MAX_SILENCE_S:
                    self.step(side)
        self.clock.advance(seconds)

    def _take(self, side: Side, event: Event) -> None:
        match event:
            case TransferFinished(request) | TransferFailed(request):
                self._load_ended(side, self.loads[request], isinstance(event, TransferFinished))
            case LeaseEnded(request):
                self._lease_ended(side, self.prefills[request])
            case BytesMoved(total_bytes=moved):
                self.written_bytes += moved if side.name == "p" else 0
                self.read_bytes += moved if side.name == "d" else 0

    # -- P --

    def tell(self, sides: list[Side], *commands: WorkerCommand) -> None:
        for side in sides:
            side.inbox += commands

    def replace_p(self) -> None:
        """Start another incarnation of P at the same address, without the state of the old one."""
        for side in self.p:
            side.close()
        self.lives += 1
        self.serial = 0
        self.p = [
            self._side("p", f"e{self.lives}", rank, self.p_size, 1000)
            for rank in range(self.p_size)
        ]
        for side in self.p:
            self.p[0].layouts.update(side.layouts)
        self.prefills.clear()
        self.free["p"] = list(range(NUM_BLOCKS))

    def begin(self, match_id: str, prompt: int, num_tokens: int) -> Prefill:
        prefill = Prefill(f"p{len(self.prefills)}-{match_id}", match_id, prompt, num_tokens)
        self.prefills[prefill.request] = prefill
        return prefill

    def compute(self, prefill: Prefill, num_blocks: int) -> None:
        """Compute some more blocks and publish them."""
        needed = -(-prefill.num_tokens // BLOCK_SIZE)
        if not prefill.blocks:
            if len(self.free["p"]) < needed:
                return
            prefill.blocks = [self.free["p"].pop(0) for _ in range(needed)]
        end = min(prefill.num_tokens, prefill.computed + num_blocks * BLOCK_SIZE)
        for side in self.p:
            self._fill(side, prefill.blocks, prefill.prompt, range(prefill.computed, end))
        prefill.computed = end
        self._publish(prefill)

    def _publish(self, prefill: Prefill) -> None:
        request, is_over = RequestId(prefill.request), prefill.computed == prefill.num_tokens
        if not prefill.serial:
            self.serial += 1
            prefill.serial = self.serial
            self.tell(
                self.p,
                GrantLease(request, prefill.serial)
                if is_over
                else OpenStream(request, prefill.serial),
            )
        elif is_over:
            self.tell(self.p, CloseStream(request))
        self.tell(
            self.p,
            PublishTicket(request, prefill.match_id, self._ticket(prefill), prefill.computed),
        )
        if is_over:
            prefill.held_by = set(range(self.p_size))

    def _ticket(self, prefill: Prefill) -> str:
        ready = -(-prefill.computed // BLOCK_SIZE)
        table = [*prefill.blocks[:ready], *[NO_BLOCK] * (len(prefill.blocks) - ready)]
        tokens = tokens_of(prefill.prompt, prefill.num_tokens)
        runs = [runs_from_blocks(table)]
        return TicketKey(SECRET).sign(
            Ticket(
                "p",
                self.p[0].epoch,
                prefill.request,
                prefill.serial,
                "memory",
                1000,
                self.p_size,
                BLOCK_SIZE,
                runs,
                tokens,
                30.0,
            )
        )

    def preempt(self, prefill: Prefill) -> None:
        """Give the blocks to another owner immediately; the prompt must be computed again."""
        if prefill.serial:
            self.tell(self.p, WithdrawStream(RequestId(prefill.request), prefill.serial))
        prefill.computed = prefill.serial = 0
        self._free_of_p(prefill)

    def fail_prefill(self, prefill: Prefill) -> None:
        self.tell(self.p, FailPush(RequestId(prefill.request), prefill.match_id, "aborted"))
        self._free_of_p(prefill)
        prefill.computed = prefill.num_tokens

    def _lease_ended(self, side: Side, prefill: Prefill) -> None:
        assert side.place.tp_rank in prefill.held_by
        prefill.held_by.discard(side.place.tp_rank)
        if not prefill.held_by:
            self._free_of_p(prefill)

    def _free_of_p(self, prefill: Prefill) -> None:
        for side in self.p:
            for block in prefill.blocks:
                side.memory[:, block] = self.rng.integers(
                    1, 256, side.memory[:, block].shape, dtype=np.uint8
                )
        self.free["p"] += prefill.blocks
        prefill.blocks = []

    # -- D --

    def expect(self, match_id: str, prompt: int, num_tokens: int) -> Load:
        load = Load(f"d{len(self.loads)}-{match_id}", match_id, prompt, num_tokens)
        self.loads[load.request] = load
        ticket = PushTicket(match_id, "p", self.p[0].epoch, "memory", 1000, self.p_size)
        tokens, own = tokens_of(prompt, num_tokens), Address("memory", 1001)
        self.tell(
            self.d,
            RegisterForPush(
                RequestId(load.request),
                ticket.incarnation,
                ticket.address,
                ticket.tp_size,
                PushInfo(match_id, tokens, own, PushTicketKey(SECRET).sign(ticket)),
            ),
        )
        return load

    def start(self, load: Load, prefix_blocks: int = 0) -> None:
        """Give the request its blocks; the first `prefix_blocks` already hold their KV."""
        needed = -(-load.num_tokens // BLOCK_SIZE)
        if len(self.free["d"]) < needed:
            return
        load.blocks = [self.free["d"].pop(0) for _ in range(needed)]
        load.first = min(prefix_blocks, needed - 1) * BLOCK_SIZE
        for rank, side in enumerate(self.d):
            self._fill(side, load.blocks, load.prompt, range(load.first))
            self.shadow[rank][:] = np.where(
                self.is_lent[rank][None, :, None], self.shadow[rank], side.memory
            )
            self.is_lent[rank][load.filled] = True
        self.tell(
            self.d,
            StartLoad(RequestId(load.request), (tuple(load.blocks),), load.first, load.num_tokens),
        )

    def abort(self, load: Load) -> None:
        self.tell(self.d, AbortLoad(RequestId(load.request)))

    def settle(self, load: Load) -> None:
        self.tell(self.d, SkipLoad(RequestId(load.request)))

    def _load_ended(self, side: Side, load: Load, is_good: bool) -> None:
        rank = side.place.tp_rank
        assert rank not in load.ended_on, f"{load.request} ended twice on rank {rank}"
        load.ended_on[rank] = is_good
        if is_good:
            self._check(side, load)
        else:
            # The next owner of the blocks writes into them immediately.
            for block in load.filled:
                side.memory[:, block] = self.rng.integers(
                    1, 256, side.memory[:, block].shape, dtype=np.uint8
                )
        self.shadow[rank][:, load.filled] = side.memory[:, load.filled]
        self.is_lent[rank][load.filled] = False
        if len(load.ended_on) == len(self.d):
            (self.finished if all(load.ended_on.values()) else self.failed).append(load.request)

    def _check(self, side: Side, load: Load) -> None:
        for position in range(load.num_tokens):
            there = side.view()[:, load.blocks[position // BLOCK_SIZE], :, position % BLOCK_SIZE]
            right = kv_of(load.prompt)[:, position, side.place.heads]
            assert np.array_equal(there, right), (
                f"token {position} of {load.request} is wrong on rank {side.place.tp_rank}"
            )

    def release(self, load: Load) -> None:
        """Free the blocks of a request that has finished decoding, or has failed on every rank."""
        self.free["d"] += load.blocks
        load.blocks = []

    @staticmethod
    def _fill(side: Side, blocks: list[int], prompt: int, positions: range) -> None:
        for position in positions:
            side.view()[:, blocks[position // BLOCK_SIZE], :, position % BLOCK_SIZE] = kv_of(
                prompt
            )[:, position, side.place.heads]

    def transport(self, side: Side) -> StormTransport:
        return self.transports[id(side)]

    # -- faults --

    def drop_connections(self, side: Side) -> None:
        """Drop all connections that this side has dialled; only this side learns of it."""
        assert isinstance(side.control, MemoryControlTransport)
        with self.network.lock:
            for dialler, address in list(self.network.connections):
                if dialler == side.control.address and address in self.network.control:
                    side.control.lose(address)

    def cut(self, side: Side) -> None:
        """Cut the data connections from one of P's ranks to D."""
        for other in self.d:
            side.transport.disconnect(
                PeerId(other.served.engine, other.served.epoch, other.place.tp_rank)
            )

    def unended(self) -> Iterator[Load]:
        return (
            load for load in self.loads.values() if load.blocks and len(load.ended_on) < len(self.d)
        )
