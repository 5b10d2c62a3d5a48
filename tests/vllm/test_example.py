"""Tests kvferry's ExampleConnector and DecodeBenchConnector in real vLLM servers, configured as
documented.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.e2e.harness import Answer, Engine, Prompt, ask_all, metrics, new_session
from tests.tiers.forged_prefixes import forge
from tests.vllm.documented import documented
from tests.vllm.fleet import BY_MODULE_PATH, Fleet, ready
from tests.vllm.right import PROMPTS, Right
from tests.vllm.vllm_asking import assert_free

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NO_PREFIX_CACHE = "--no-enable-prefix-caching"
LONG = max(PROMPTS, key=lambda prompt: len(prompt.token_ids))
BLOCK = 32


@dataclass
class Servers:
    """P and D that share a folder."""

    fleet: Fleet
    folder: Path
    p: Engine
    d: Engine

    def replace(self, name: str) -> None:
        """Kill all processes of P or D with SIGKILL, and start another."""
        engine = self.p if name == "p" else self.d
        engine.kill(is_stopped=True)
        self.fleet.dismiss(engine.process)
        engine = start(self.fleet, self.folder, name)
        ready(engine)
        setattr(self, name, engine)

    def files(self) -> list[Path]:
        found = sorted(self.folder.rglob("*.safetensors"))
        assert found
        return found


def start(fleet: Fleet, folder: Path, name: str) -> Engine:
    (for_p,) = documented("A shared folder, and decoding alone")
    transfer = {**for_p.transfer, "kv_role": "kv_producer" if name == "p" else "kv_consumer"}
    extra = {"shared_storage_path": str(folder)}
    cores = "1" if name == "d" else "0"
    return fleet.vllm(name, NO_PREFIX_CACHE, transfer=transfer, extra=extra, cores=cores)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("shared")
    with Fleet(tmp_path_factory.mktemp("fleet"), model) as fleet:
        p, d = (start(fleet, folder, name) for name in "pd")
        ready(p, d)
        yield Servers(fleet, folder, p, d)


def ask(engine: Engine, prompts: list[Prompt]) -> list[Answer]:
    return asyncio.run(ask_all(engine, prompts, concurrency=8, timeout_s=240))


def prefill(engine: Engine, prompts: list[Prompt]) -> None:
    answers = ask(engine, [replace(prompt, max_tokens=1) for prompt in prompts])
    assert all(answer.is_ok for answer in answers)


def stored(prompts: list[Prompt]) -> list[Prompt]:
    """Prompts of more than one block, which P saves and D loads."""
    return [prompt for prompt in prompts if len(prompt.token_ids) > BLOCK]


async def count(engine: Engine, counter: str) -> float:
    async with new_session(60) as session:
        await assert_free(session, engine)
        return (await metrics(session, engine)).get(f"kvferry:tier_{counter}_total/example", 0)


def test_tokens_of_100_prompts_equal_a_vllms_without_a_connector(
    servers: Servers, right: Right
) -> None:
    prefill(servers.p, PROMPTS)
    assert ask(servers.d, PROMPTS) == right.vllm
    assert asyncio.run(count(servers.d, "loads")) == len(stored(PROMPTS))
    assert asyncio.run(count(servers.p, "stores")) == len(stored(PROMPTS))
    assert asyncio.run(count(servers.d, "refused")) == 0


def test_damage_costs_only_time_and_forged_kv_gives_other_tokens(
    servers: Servers, right: Right
) -> None:
    """The control: files that were changed and sealed again give other tokens."""
    answer = [right.vllm[PROMPTS.index(LONG)]]
    prefill(servers.p, [LONG])
    for path in servers.files():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    loads = asyncio.run(count(servers.d, "loads"))
    assert ask(servers.d, [LONG]) == answer
    assert asyncio.run(count(servers.d, "refused")) == 1
    assert asyncio.run(count(servers.d, "loads")) == loads
    prefill(servers.p, [LONG])
    key = max(servers.files(), key=lambda path: path.stat().st_mtime).parent
    for path in key.glob("*.safetensors"):
        forge(path, servers.fleet.secret)
    assert ask(servers.d, [LONG]) != answer


@pytest.mark.parametrize("name", ["p", "d"])
def test_a_killed_server_costs_only_its_own_requests(
    servers: Servers, right: Right, name: str
) -> None:
    prompts, answers = PROMPTS[:12], right.vllm[:12]

    async def kill_while_asking() -> None:
        engine = servers.p if name == "p" else servers.d
        asking = asyncio.ensure_future(ask_all(engine, PROMPTS[:40], concurrency=8))
        await asyncio.sleep(0)
        async with new_session(60) as session:
            while (await metrics(session, engine))["vllm:num_requests_running"] == 0:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(servers.replace, name)
        await asyncio.gather(asking, return_exceptions=True)

    for path in servers.files():
        path.unlink()
    if name == "d":
        # D is killed while it answers prompts that it can load.
        prefill(servers.p, PROMPTS[:40])
    asyncio.run(kill_while_asking())
    assert ask(servers.d, prompts) == answers
    prefill(servers.p, prompts)
    loads = asyncio.run(count(servers.d, "loads"))
    assert ask(servers.d, prompts) == answers
    assert asyncio.run(count(servers.d, "loads")) - loads == len(stored(prompts))


def test_made_up_kv_decodes_at_any_context_length(tmp_path: Path, model: Path) -> None:
    transfer = {**BY_MODULE_PATH, "kv_connector": "DecodeBenchConnector"}
    with Fleet(tmp_path, model) as fleet:
        engine = fleet.vllm("engine", NO_PREFIX_CACHE, transfer=transfer)
        ready(engine)
        (answer,) = ask(engine, [LONG])
        assert answer.is_ok
        assert len(answer.token_ids[0]) == LONG.max_tokens

        async def loaded() -> float:
            async with new_session(60) as session:
                await assert_free(session, engine)
                return (await metrics(session, engine))["vllm:external_prefix_cache_hits_total"]

        assert asyncio.run(loaded()) == len(LONG.token_ids) - 1
