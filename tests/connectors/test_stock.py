"""Tests the connector with `interop`: P's parameters without their ticket are those of a stock P,
and a D that reads them is a stock D to P. Between two real NIXL agents; and without `interop`
nothing of this is accepted.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.connectors.pair import Blocks, EngineRequest, EngineSide, step_until
from tests.ports import reserve_port

from kvferry.connectors.stock import StockInterop
from kvferry.errors import ConfigError
from kvferry.protocol import messages as codec
from kvferry.protocol.handshake import ServedEngine
from kvferry.protocol.messages import HandshakeReply, HandshakeRequest
from kvferry.protocol.stock_dialect import QUESTION, StockIdentity
from kvferry.protocol.tickets import PushTicketKey, TicketKey
from kvferry.transports.base import Received
from kvferry.transports.memory import MemoryNetwork
from kvferry.transports.registry import ConfiguredStockKit
from kvferry.transports.stock_channel import StockDialer
from kvferry.transports.zmq import CurveKeys, ZmqTransport
from kvferry.types import Address, EngineId, Epoch
from kvferry.worker.side_channel import SideChannel

TOKENS = list(range(100, 110))
DEADLINE_S = 20.0
IDENTITY = StockIdentity("0123", "CPU_ATTN", "LBHNC", 1, 4)
OWN_KEYS = ("ticket", "side_channel_port")
NO_STOCK = StockInterop(ConfiguredStockKit("", "", 0, (), 0))


def stock_side(
    name: str, port: int, network: MemoryNetwork | None = None, **extra: Any
) -> EngineSide:
    kit = ConfiguredStockKit("127.0.0.1", "127.0.0.1", port, ("UCX",), 0)
    return EngineSide(
        name,
        network or MemoryNetwork(),
        "fail",
        stock=StockInterop(kit, IDENTITY),
        interop="vllm-0.32",
        **extra,
    )


@pytest.fixture
def pair() -> Iterator[tuple[EngineSide, EngineSide]]:
    """P and D, which share nothing but what a stock peer knows."""
    port = reserve_port()
    p = stock_side("p", port, kv_lease_duration=600)
    d = stock_side("d", 0, peers=[f"localhost:{port}"], kv_lease_duration=600)
    yield p, d
    for side in (p, d):
        side.shutdown()


def prefill(p: EngineSide, name: str = "r") -> dict[str, Any]:
    """P's parameters as a stock P would have given them."""
    p.fill([3, 5, 7], seed=1)
    params = p.prefill(EngineRequest(name, TOKENS), [3, 5, 7])
    return {key: value for key, value in params.items() if key not in OWN_KEYS}


def arrive(d: EngineSide, params: Any, name: str = "r") -> EngineRequest:
    request = EngineRequest(name, TOKENS, params)
    d.scheduler.on_new_request(request)
    return request


def start(d: EngineSide, request: EngineRequest) -> None:
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (len(TOKENS), True)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 4],)), len(TOKENS))


def refusal(d: EngineSide, params: Any) -> str:
    request = arrive(d, params)
    start(d, request)
    step_until(lambda: "r" in d.seen.failed_recving, d)
    return d.seen.failure_reasons["r"]


def test_d_loads_what_p_holds_and_p_frees_it(pair: tuple[EngineSide, EngineSide]) -> None:
    p, d = pair
    start(d, arrive(d, prefill(p)))
    step_until(lambda: "r" in p.seen.finished_sending, p, d)
    assert d.seen.finished_recving == {"r"}
    assert not d.seen.failed_recving
    for layer, array in d.memory.items():
        assert (array[[1, 2, 4]] == p.memory[layer][[3, 5, 7]]).all()


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_a_full_local_hit_and_an_aborted_request_free_p(
    pair: tuple[EngineSide, EngineSide], is_scheduled: bool
) -> None:
    p, d = pair
    request = arrive(d, prefill(p))
    if is_scheduled:
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 4],)), 0)
    else:
        d.scheduler.request_finished(request, [])
    step_until(lambda: "r" in p.seen.finished_sending, p, d)
    assert not d.seen.finished_recving


def test_choices_that_share_the_blocks_read_them_once(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, d = pair
    params = prefill(p)
    first, second = (arrive(d, params, name) for name in ("0_r", "1_r"))
    start(d, first)
    assert d.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    step_until(lambda: "0_r" in d.seen.finished_recving, p, d)
    assert d.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)
    d.scheduler.update_state_after_alloc(second, Blocks(([1, 2, 4],)), 0)
    step_until(lambda: "r" in p.seen.finished_sending, p, d)


def test_a_reset_of_p_holds_the_blocks_that_a_stock_decode_side_may_be_reading(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, d = pair
    request = arrive(d, prefill(p))
    p.scheduler.reset_cache()
    # A later lease is released after the reset has reached the transfer worker.
    other = prefill(p, "other")
    d.scheduler.request_finished(arrive(d, other, "other"), [])
    step_until(lambda: "other" in p.seen.finished_sending, p, d)
    assert "r" not in p.seen.finished_sending
    start(d, request)
    step_until(lambda: "r" in p.seen.finished_sending, p, d)
    assert d.seen.finished_recving == {"r"}


def test_a_lease_that_no_stock_peer_asks_for_expires() -> None:
    p = stock_side("p", 0, kv_lease_duration=0.5)
    prefill(p)
    step_until(lambda: "r" in p.seen.finished_sending, p)
    p.shutdown()


def test_only_listed_addresses_are_loaded_from(pair: tuple[EngineSide, EngineSide]) -> None:
    p, d = pair
    assert "is not among the `peers`" in refusal(d, prefill(p) | {"remote_port": 1})


def test_parameters_of_an_unequal_peer_are_refused_by_name(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, d = pair
    assert "tp_size 2" in refusal(d, prefill(p) | {"tp_size": 2})


def test_kv_of_replaced_weights_is_neither_loaded_nor_offered(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, d = pair
    earlier = prefill(p)
    stock_port = earlier["remote_port"]
    p.scheduler.set_weights_version("2")
    later = prefill(p, "later")
    assert later["remote_port"] != stock_port
    # A stock D that is connected to an engine id reads from it, whatever the port is.
    assert later["remote_engine_id"] != earlier["remote_engine_id"]
    d.scheduler.set_weights_version("2")
    assert "weights were replaced" in refusal(d, prefill(p, "r3") | {
        "remote_host": "localhost", "remote_port": stock_port,
    })  # fmt: skip


def test_tickets_of_replaced_weights_serve_our_own_decode_sides() -> None:
    network = MemoryNetwork()
    p, d = stock_side("p", 0, network=network), EngineSide("d", network)
    for side in (p, d):
        side.scheduler.set_weights_version("2")
    p.fill([3, 5, 7], seed=1)
    params = p.prefill(EngineRequest("r", TOKENS), [3, 5, 7])
    start(d, arrive(d, params))
    step_until(lambda: bool(p.seen.finished_sending and d.seen.finished_recving), p, d)
    assert d.seen.finished_recving == {"r"}
    for side in (p, d):
        side.shutdown()


# -- without interop --


def test_without_interop_parameters_without_a_ticket_are_refused(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, _ = pair
    params = prefill(p)
    d = EngineSide("plain", MemoryNetwork(), peers=[f"localhost:{params['remote_port']}"])
    assert "no ticket" in refusal(d, params)
    d.shutdown()


def test_without_interop_a_stock_handshake_gets_no_answer() -> None:
    secret = b"a secret of the cluster"
    control = ZmqTransport("127.0.0.1", "127.0.0.1", 0, CurveKeys.from_secret(secret))
    url = control.address
    served = ServedEngine(EngineId("p"), Epoch("e"), {}, {0: b"\xc0"})
    keys = (TicketKey(secret), PushTicketKey(secret))
    channel = SideChannel(control, served, keys, lambda: None)
    channel.start()
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    dialer = StockDialer()
    dialer.ask(Address(host, int(port)), QUESTION)
    # A member of the cluster asks later and is answered.
    member = ZmqTransport("127.0.0.1", "127.0.0.1", 0, CurveKeys.from_secret(secret))
    member.send(url, codec.encode(HandshakeRequest(1, codec.WIRE_VERSION, 0)))
    deadline = time.monotonic() + DEADLINE_S
    answers: list[Received] = []
    while not answers:
        assert time.monotonic() < deadline
        answers = [event for event in member.poll(0.1) if isinstance(event, Received)]
    assert isinstance(codec.decode(answers[0].frame), HandshakeReply)
    assert dialer.poll() == []
    for each in (dialer, member, channel):
        each.close()


@pytest.mark.parametrize(
    ("connector", "stock", "reason"),
    [
        ("NixlConnector", None, "only engines inside vLLM"),
        ("NixlPushConnector", NO_STOCK, "not with NixlPushConnector"),
        ("MooncakeConnector", NO_STOCK, "not with MooncakeConnector"),
        ("P2pNcclConnector", NO_STOCK, "not with P2pNcclConnector"),
    ],
)
def test_interop_where_it_cannot_work_stops_the_engine(
    connector: str, stock: StockInterop | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineSide("p", MemoryNetwork(), connector=connector, stock=stock, interop="vllm-0.32")


def test_interop_with_a_host_buffer_stops_the_engine() -> None:
    with pytest.raises(ConfigError, match="force_host_buffer"):
        stock_side("p", 0, force_host_buffer=True)
