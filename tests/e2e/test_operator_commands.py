"""Tests the command lines that operators of vLLM know in the embedded engine: `vllm` becomes
`kvferry`, the model a generated one, and ports become free ones.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, Engine, Prompt, Starting, ask, metrics, new_session
from tests.e2e.operator_commands import ALONE, HOSTS, PAIRS, OperatorCommand
from tests.ports import reserve_ports

from kvferry.engine.make_model.writer import make_model
from kvferry.errors import KVFerryError

pytestmark = pytest.mark.slow

PROMPT = Prompt(tuple(range(20, 120)))


class Operator(Cluster):
    def run(self, command: OperatorCommand, model: Path, host: str = "127.0.0.1") -> Starting:
        port, side_channel = reserve_ports(2)
        words = [sys.executable, "-m", "kvferry", "serve", str(model), *command.without_port()]
        words += ["--port", str(port)]
        here = {
            "KVFERRY_SECRET": self.secret.decode(),
            "OMP_NUM_THREADS": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        }
        return Starting(self.add("engine", words, {**command.variables, **here}))


@pytest.fixture
def operator(tmp_path: Path, model: Path) -> Iterator[Operator]:
    with Operator(tmp_path, model) as operator:
        yield operator


def tokens(engine: Engine, model: Path, router: Engine | None = None) -> tuple[int, ...]:
    """The tokens of the engine's answer, or of the router's if there is one. They are checked
    against the engine's own answer without a cache.
    """

    async def check() -> tuple[int, ...]:
        async with new_session() as session:
            answer = await ask(session, router or engine, PROMPT, model=str(model))
            assert answer.is_ok, answer.body
            right = await ask(session, engine, PROMPT, model=str(model), cache_salt="computed")
            assert answer.token_ids == right.token_ids
            return answer.token_ids[0]

    return asyncio.run(check())


@pytest.mark.parametrize("command", ALONE, ids=range(len(ALONE)))
def test_a_command_alone_serves(operator: Operator, model: Path, command: OperatorCommand) -> None:
    starting = operator.run(command, model)
    try:
        engine = starting.ready()
    except KVFerryError:
        assert command.names_libfabric
        said = "\n".join(starting.child.tail(20))
        assert "LIBFABRIC, named in `backends`" in said, said
    else:
        assert tokens(engine, model)


@pytest.mark.parametrize("pair", [PAIRS[:2], PAIRS[2:]], ids=["guide", "article"])
def test_the_commands_of_p_and_d_move_kv(
    operator: Operator, model: Path, pair: list[OperatorCommand]
) -> None:
    p, d = (starting.ready() for starting in [operator.run(command, model) for command in pair])
    assert_moved(operator, model, p, d)


@pytest.mark.exhaustive
def test_the_commands_of_several_hosts_move_kv(operator: Operator, tmp_path: Path) -> None:
    """One P and one D of the four: each has eight ranks."""
    model = tmp_path / "wide"
    make_model(model, heads=16)
    p = operator.run(HOSTS[0], model, "127.0.0.2").ready()
    d = operator.run(HOSTS[2], model, "127.0.0.3").ready()
    assert_moved(operator, model, p, d)


def assert_moved(operator: Operator, model: Path, p: Engine, d: Engine) -> None:
    router = operator.proxy([p], [d]).ready()
    tokens(p, model, router)

    async def check() -> None:
        async with new_session() as session:
            assert (await metrics(session, d))["kvferry:transfer_bytes_total"] > 0

    asyncio.run(check())
