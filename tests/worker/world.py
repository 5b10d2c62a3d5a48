"""Transfer workers and side channels in one process, connected by memory transports, with a clock
that the tests advance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.events import Event, LeaseEnded, TransferFailed, TransferFinished
from kvferry.protocol import messages as codec
from kvferry.protocol.consumer.context import ConsumerSettings
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.handshake import ServedEngine, answer
from kvferry.protocol.messages import HandshakeRequest, RankLayout, TransportOffer
from kvferry.protocol.peers import PeerSettings
from kvferry.protocol.planning.axes import dense_axes
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.planning.heads import heads_of
from kvferry.protocol.producer.push_writer import ProducerSettings
from kvferry.protocol.tickets import Ticket, TicketKey, runs_from_blocks
from kvferry.testing.local import ManualClock
from kvferry.transports.base import ControlTransport, DataTransport, Received
from kvferry.transports.host_buffer.store import CpuHostBuffer, HostBlockStore
from kvferry.transports.memory import MemoryControlTransport, MemoryNetwork, MemoryTransport
from kvferry.types import Address, AxisKind, EngineId, Epoch, KVLayout, Region, RequestId
from kvferry.worker.commands import GrantLease, PrepareLoad, StartLoad, WorkerCommand
from kvferry.worker.worker import TransferWorker, TransferWorkerSettings

SECRET = b"the ferries' secret"
BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS, LAYERS = 4, 64, 32, 3
"""`BLOCK_BYTES` is the number of bytes of one head."""


@dataclass(frozen=True)
class Place:
    """The position of an engine's rank: its TP rank and size, the number of KV heads of the model,
    and the order of heads and tokens in a block.
    """

    tp_rank: int = 0
    tp_size: int = 1
    total_heads: int = 1
    layout: KVLayout = KVLayout.HND
    uses_host_buffer: bool = False
    """True if the transports use a host buffer instead of the cache itself."""

    @property
    def heads(self) -> range:
        return heads_of(self.tp_rank, self.tp_size, self.total_heads)


DEFAULT_PLACE = Place()


class Side:
    """One engine's memory, transports and transfer worker, and the scheduler's side channel."""

    def __init__(
        self,
        name: str,
        epoch: str,
        network: MemoryNetwork,
        clock: ManualClock,
        transport: DataTransport | None = None,
        place: Place = DEFAULT_PLACE,
        channels: tuple[ControlTransport, ControlTransport] | None = None,
        lends: bool = False,
    ) -> None:
        """`channels`: the worker's control channel and the side channel, for tests that need real
        ones or must know them beforehand. `lends`: whether producers that push get write grants.
        """
        self.name, self.epoch, self.place = name, epoch, place
        size = BLOCK_BYTES * len(place.heads)
        by_head, by_token = (AxisKind.HEAD, len(place.heads)), (AxisKind.TOKEN, BLOCK_SIZE)
        order = (by_head, by_token) if place.layout is KVLayout.HND else (by_token, by_head)
        axes = dense_axes(order, BLOCK_BYTES // BLOCK_SIZE)
        self.memory: npt.NDArray[np.uint8] = np.zeros((LAYERS, NUM_BLOCKS, size), dtype=np.uint8)
        self.mirror: npt.NDArray[np.uint8] = (
            np.zeros_like(self.memory) if place.uses_host_buffer else self.memory
        )
        """The memory that the transports use."""
        own, regions = (
            tuple(
                Region(f"layer.{i}", int(memory[i].ctypes.data), size, size, NUM_BLOCKS, axes=axes)
                for i in range(LAYERS)
            )
            for memory in (self.memory, self.mirror)
        )
        self.transport = transport or MemoryTransport(network)
        assert self.transport.register(regions)
        self.control, self.side_channel = channels or (
            MemoryControlTransport(network),
            MemoryControlTransport(network),
        )
        made = self.transport.offer()
        offers = (TransportOffer(made.transport, made.reach, made.blob),)
        geometry = Geometry(
            place.tp_rank,
            place.tp_size,
            BLOCK_SIZE,
            NUM_BLOCKS,
            place.layout,
            len(place.heads),
            8,
            regions,
            place.total_heads,
        )
        layout = RankLayout(
            place.tp_rank,
            place.tp_size,
            BLOCK_SIZE,
            NUM_BLOCKS,
            place.layout,
            len(place.heads),
            8,
            self.control.address,
            list(regions),
            list(offers),
            place.total_heads,
            place.uses_host_buffer,
        )
        factors = {"model": "tiny"}
        self.layouts = {place.tp_rank: codec.encode_layout(layout)}
        """The layouts that the side channel serves; a test adds those of the other ranks."""
        self.served = ServedEngine(EngineId(name), Epoch(epoch), factors, self.layouts)
        transports, none = frozenset({self.transport.name}), frozenset[str]()
        settings = TransferWorkerSettings(
            producer=ProducerSettings(
                engine=EngineId(name),
                epoch=Epoch(epoch),
                lease_ttl_s=30,
                lease_extension_s=20,
                grant_wait_s=5,
                uses_host_buffer=place.uses_host_buffer,
            ),
            consumer=ConsumerSettings(
                engine=EngineId(name),
                peers=PeerSettings(
                    factors=factors,
                    geometry=geometry,
                    offers=offers,
                    pinned_transports=(),
                    handshake_timeout_s=5,
                    engine_ttl_s=3600,
                ),
                read_timeout_s=30,
                confirm_timeout_s=5,
                receive_timeout_s=100,
                uses_host_buffer=place.uses_host_buffer,
                epoch=Epoch(epoch),
                writable_transports=transports if lends else none,
                fenced=transports if self.transport.supports_write_grants else none,
            ),
            secret=SECRET,
        )
        store = HostBlockStore(
            regions, CpuHostBuffer(own, regions) if place.uses_host_buffer else None
        )
        self.transfer_worker = TransferWorker(
            settings, [self.transport], self.control, store, clock
        )
        self.inbox: list[WorkerCommand] = []
        self.events: list[Event] = []
        self.serial = 0
        self.issued: dict[str, list[int]] = {}

    def step(self) -> None:
        for news in self.side_channel.poll(0):
            if isinstance(news, Received):
                request = codec.decode(news.frame)
                if isinstance(request, HandshakeRequest):
                    self.side_channel.reply(news.route, codec.encode(answer(self.served, request)))
        commands, self.inbox = self.inbox, []
        self.events += self.transfer_worker.step(commands, wait_s=0)

    def close(self) -> None:
        self.transfer_worker.close()
        self.side_channel.close()

    # -- as a producer

    def issue(self, request: str, blocks: list[int]) -> str:
        """Return a signed ticket; it is valid only after `grant`."""
        self.serial += 1
        self.issued[request] = blocks
        host, port = self.side_channel.address.removeprefix("tcp://").split(":")
        address = Address(host, int(port))
        tokens = fingerprint(range(len(blocks) * BLOCK_SIZE), BLOCK_SIZE, "")
        return TicketKey(SECRET).sign(
            Ticket(
                self.name,
                self.epoch,
                request,
                self.serial,
                address.host,
                address.port,
                self.place.tp_size,
                BLOCK_SIZE,
                [runs_from_blocks(blocks)],
                tokens,
                30.0,
            )
        )

    def grant(self, request: str) -> None:
        copied = (tuple(self.issued[request]),) if self.place.uses_host_buffer else ()
        self.inbox.append(GrantLease(RequestId(request), self.serial, copied))

    def freed(self) -> list[tuple[str, str]]:
        return [
            (event.request, str(event.end))
            for event in self.events
            if isinstance(event, LeaseEnded)
        ]

    # -- as a consumer

    def track(self, request: str, ticket: str) -> None:
        self.inbox.append(PrepareLoad(RequestId(request), ticket))

    def start(self, request: str, blocks: list[int], tokens: range) -> None:
        self.inbox.append(
            StartLoad(RequestId(request), (tuple(blocks),), tokens.start, tokens.stop)
        )

    def finished(self) -> list[str]:
        return [event.request for event in self.events if isinstance(event, TransferFinished)]

    def failed(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, TransferFailed)]

    # -- content

    def view(self) -> npt.NDArray[np.uint8]:
        """View the memory as [layers, blocks, our heads, tokens, content], for either layout."""
        heads = len(self.place.heads)
        if self.place.layout is KVLayout.HND:
            return self.memory.reshape(LAYERS, NUM_BLOCKS, heads, BLOCK_SIZE, -1)
        return self.memory.reshape(LAYERS, NUM_BLOCKS, BLOCK_SIZE, heads, -1).swapaxes(2, 3)


class RankedWorld:
    """P and D with several ranks each. A command to an engine goes to all of its ranks."""

    def __init__(
        self, p_size: int, d_size: int, total_heads: int = 4, layout: KVLayout = KVLayout.HND
    ) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork()
        self.p = [
            Side("p", "e1", self.network, self.clock, place=Place(r, p_size, total_heads, layout))
            for r in range(p_size)
        ]
        self.d = [
            Side("d", "f1", self.network, self.clock, place=Place(r, d_size, total_heads, layout))
            for r in range(d_size)
        ]
        self.content = np.random.default_rng(0).integers(
            1, 256, (LAYERS, NUM_BLOCKS, total_heads, BLOCK_SIZE, 16), dtype=np.uint8
        )
        """The cache of the whole model on P, with each head once."""
        for side in self.p:
            side.view()[:] = self.content[:, :, side.place.heads]
            self.p[0].layouts.update(side.layouts)

    @property
    def sides(self) -> list[Side]:
        return [*self.p, *self.d]

    def run(self, turns: int = 20, sides: Sequence[Side] | None = None) -> None:
        for _ in range(turns):
            for side in self.sides if sides is None else sides:
                side.step()

    def tell(self, sides: Sequence[Side], *commands: WorkerCommand) -> None:
        for side in sides:
            side.inbox += commands

    def issue(self, request: str, blocks: list[int]) -> str:
        """Return a ticket whose lease is granted on every rank."""
        ticket = self.p[0].issue(request, blocks)
        self.tell(self.p, GrantLease(RequestId(request), self.p[0].serial))
        return ticket

    def freed(self) -> list[list[tuple[str, str]]]:
        return [side.freed() for side in self.p]

    def holds(self, side: Side, ours: list[int], theirs: list[int]) -> bool:
        """Whether D's blocks have the content of P's blocks, and all other blocks are unwritten."""
        others = np.delete(side.memory, ours, axis=1)
        return bool(
            (side.view()[:, ours] == self.content[:, theirs][:, :, side.place.heads]).all()
            and not others.any()
        )

    def assert_quiescent(self) -> None:
        for side in self.sides:
            held = side.transfer_worker.snapshot()
            assert (held.leases, held.transfers, held.reads) == (0, 0, 0), (
                side.name,
                side.place,
                held,
            )

    def close(self) -> None:
        for side in self.sides:
            side.close()


class World:
    """P and D. `run` lets messages and bytes settle while the clock stands still."""

    def __init__(
        self,
        transport_of_d: DataTransport | None = None,
        network: MemoryNetwork | None = None,
        place_of_p: Place = DEFAULT_PLACE,
        place_of_d: Place = DEFAULT_PLACE,
    ) -> None:
        self.clock = ManualClock()
        self.network = network or MemoryNetwork()
        self.p = Side("p", "e1", self.network, self.clock, place=place_of_p)
        self.d = Side("d", "f1", self.network, self.clock, transport_of_d, place_of_d)
        rng = np.random.default_rng(0)
        self.p.memory[:] = rng.integers(1, 256, self.p.memory.shape, dtype=np.uint8)

    @property
    def sides(self) -> list[Side]:
        return [self.p, self.d]

    def run(self, turns: int = 20) -> None:
        for _ in range(turns):
            for side in self.sides:
                side.step()

    def assert_quiescent(self) -> None:
        for side in self.sides:
            held = side.transfer_worker.snapshot()
            assert (held.leases, held.transfers, held.reads) == (0, 0, 0), (side.name, held)
