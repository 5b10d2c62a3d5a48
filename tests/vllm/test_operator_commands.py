"""Tests the command lines that operators of vLLM know in real vLLM with kvferry's connector: the
model is a generated one, ports are free ones, and the module path is added.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import Engine, metrics, new_session
from tests.e2e.operator_commands import ALONE, PAIRS, OperatorCommand
from tests.ports import reserve_ports
from tests.vllm.fleet import LOOPBACK, Fleet, ready
from tests.vllm.right import PROMPTS
from tests.vllm.vllm_asking import stream

from kvferry.types import Address

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.exhaustive]

PROMPT = next(prompt for prompt in PROMPTS if len(prompt.token_ids) > 300)


class Operator(Fleet):
    def run(self, command: OperatorCommand, model: Path, cores: str = "0") -> Engine:
        port, side_channel = reserve_ports(2)
        # vLLM's CPU build has no command `vllm` that works: it looks for a package of that name.
        words = [
            str(self.python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
        ]
        words += [*command.with_kvferry().without_port(), "--port", str(port)]
        here = {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
        }
        return self._start(
            f"engine {cores}", words, {**command.variables, **here}, Address(LOOPBACK, port)
        )


@pytest.fixture
def operator(tmp_path: Path, model: Path) -> Iterator[Operator]:
    with Operator(tmp_path, model) as operator:
        yield operator


def tokens(engine: Engine, model: Path, **changes: str) -> tuple[int, ...]:
    async def check() -> tuple[int, ...]:
        async with new_session(120) as session:
            return await stream(session, engine, PROMPT, model=str(model), **changes)

    return asyncio.run(check())


@pytest.mark.parametrize("command", ALONE, ids=range(len(ALONE)))
def test_a_command_alone_serves(operator: Operator, model: Path, command: OperatorCommand) -> None:
    engine = operator.run(command, model)
    try:
        ready(engine)
    except AssertionError:
        said = "\n".join(engine.process.tail(400))
        assert command.names_libfabric, said
        assert "LIBFABRIC, named in `backends`" in said, said
        return
    assert tokens(engine, model) == tokens(engine, model, cache_salt="computed")


@pytest.mark.parametrize("pair", [PAIRS[:2], PAIRS[2:]], ids=["guide", "article"])
def test_the_commands_of_p_and_d_move_kv(
    operator: Operator, model: Path, pair: list[OperatorCommand]
) -> None:
    p, d = operator.run(pair[0], model), operator.run(pair[1], model, cores="1")
    router = operator.kvferry_router([p], [d])
    ready(p, d, router)
    assert tokens(router, model) == tokens(p, model, cache_salt="computed")

    async def check() -> None:
        async with new_session() as session:
            assert (await metrics(session, d))["kvferry:finished_loads_total"] > 0

    asyncio.run(check())
