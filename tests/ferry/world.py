"""Two ferries and a side channel in one process, joined by memory planes and a clock turned by hand."""

import numpy as np
import numpy.typing as npt

from kvferry.events import Event, LeaseEnded, PullFailed, PullFinished
from kvferry.ferry.commands import Command, Grant, Start, Track
from kvferry.ferry.ferry import Ferry, FerrySettings
from kvferry.planes.memory import MemoryControlPlane, MemoryDataPlane, MemoryNetwork
from kvferry.ports.control import Received
from kvferry.ports.data import DataPlane
from kvferry.protocol import codec
from kvferry.protocol.consumer import ConsumerSettings
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.handshake import ServedEngine, answer
from kvferry.protocol.messages import HandshakeRequest, OfferInfo, RankLayout, RegionInfo
from kvferry.protocol.peers import PeerSettings
from kvferry.protocol.planning import Geometry
from kvferry.protocol.producer import ProducerSettings
from kvferry.protocol.tickets import Ticket, TicketKey, runs_from_blocks
from kvferry.testing.clock import ManualClock
from kvferry.types import Address, EngineId, Epoch, KVLayout, Region, RequestId

SECRET = b"the ferries' secret"
BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS, LAYERS = 4, 64, 32, 3


class Side:
    """One engine's worker: memory, planes, ferry, and the scheduler's side channel."""

    def __init__(self, name: str, epoch: str, network: MemoryNetwork, clock: ManualClock, plane: DataPlane | None = None) -> None:
        self.name, self.epoch = name, epoch
        self.memory: npt.NDArray[np.uint8] = np.zeros((LAYERS, NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        regions = tuple(Region(f"layer.{i}", int(self.memory[i].ctypes.data), BLOCK_BYTES, BLOCK_BYTES, NUM_BLOCKS) for i in range(LAYERS))
        self.plane = plane or MemoryDataPlane(network)
        assert self.plane.register(regions)
        self.control = MemoryControlPlane(network)
        self.side_channel = MemoryControlPlane(network)
        made = self.plane.offer()
        offers = (OfferInfo(made.plane, made.reach, made.blob),)
        geometry = Geometry(0, 1, BLOCK_SIZE, NUM_BLOCKS, KVLayout.HND, 1, 8, regions)
        layout = RankLayout(
            0,
            1,
            BLOCK_SIZE,
            NUM_BLOCKS,
            "HND",
            1,
            8,
            self.control.address,
            [RegionInfo(r.name, r.address, r.block_bytes, r.stride_bytes, r.num_blocks, "DRAM", 0) for r in regions],
            list(offers),
        )
        factors = {"model": "tiny"}
        self.served = ServedEngine(EngineId(name), Epoch(epoch), factors, {0: codec.encode_layout(layout)})
        settings = FerrySettings(
            ProducerSettings(EngineId(name), Epoch(epoch), lease_ttl_s=30, lease_extension_s=20, grant_wait_s=5),
            ConsumerSettings(EngineId(name), PeerSettings(factors, geometry, offers, (), 5, 3600), 30, 5, 100),
            SECRET,
        )
        self.ferry = Ferry(settings, [self.plane], self.control, clock)
        self.inbox: list[Command] = []
        self.events: list[Event] = []
        self.serial = 0

    def step(self) -> None:
        for news in self.side_channel.poll(0):
            if isinstance(news, Received):
                request = codec.decode(news.frame)
                if isinstance(request, HandshakeRequest):
                    self.side_channel.reply(news.route, codec.encode(answer(self.served, request)))
        commands, self.inbox = self.inbox, []
        self.events += self.ferry.step(commands, wait_s=0)

    def close(self) -> None:
        self.ferry.close()
        self.side_channel.close()

    # -- as a producer

    def issue(self, request: str, blocks: list[int]) -> str:
        """A signed ticket; `grant` makes it good."""
        self.serial += 1
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
                1,
                BLOCK_SIZE,
                [runs_from_blocks(blocks)],
                tokens,
                30.0,
            )
        )

    def grant(self, request: str) -> None:
        self.inbox.append(Grant(RequestId(request), self.serial))

    def freed(self) -> list[tuple[str, str]]:
        return [(event.request, str(event.end)) for event in self.events if isinstance(event, LeaseEnded)]

    # -- as a consumer

    def track(self, request: str, ticket: str) -> None:
        self.inbox.append(Track(RequestId(request), ticket))

    def start(self, request: str, blocks: list[int], tokens: range) -> None:
        self.inbox.append(Start(RequestId(request), (tuple(blocks),), tokens.start, tokens.stop))

    def finished(self) -> list[str]:
        return [event.request for event in self.events if isinstance(event, PullFinished)]

    def failed(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, PullFailed)]


class World:
    """P and D. `run` lets messages and bytes settle without the clock moving."""

    def __init__(self, plane_of_d: DataPlane | None = None, network: MemoryNetwork | None = None) -> None:
        self.clock = ManualClock()
        self.network = network or MemoryNetwork()
        self.p = Side("p", "e1", self.network, self.clock)
        self.d = Side("d", "f1", self.network, self.clock, plane_of_d)
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
            held = side.ferry.snapshot()
            assert (held.leases, held.pulls, held.reads) == (0, 0, 0), (side.name, held)
