"""Two pairs of real vLLM servers with kvferry inside for the abuse tests, and the checks that
follow each abuse.
"""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil
from tests.e2e.harness import SETTLE_S, Answer, Engine, Prompt, ask, metrics, new_session, prefill
from tests.ports import reserve_ports
from tests.vllm.conftest import Trio
from tests.vllm.fleet import BY_MODULE_PATH, ready
from tests.vllm.vllm_asking import assert_free

from kvferry.cli.cluster.http_client import is_healthy

DEADLINE_S = 45.0
"""Above every deadline of the connector that can apply to a request here."""
SOON_S = 20.0
"""Below the trio's lease of 30 s: blocks that are free this soon were released."""
FINISHED, FAILED = "kvferry:finished_loads_total", "kvferry:failed_loads_total"
BRIEF = {"kv_lease_duration": 4}
FORGETFUL = {"engine_ttl": 1, "handshake_timeout": 10}
"""D soon forgets every peer, and waits for a dead peer long enough for the test to see what other
requests do meanwhile.
"""

_rng = random.Random(20)


@dataclass
class VllmCluster:
    """The trio, a second D that recomputes what it cannot fetch, and a second P with short leases
    and a small cache, which a test kills.
    """

    trio: Trio
    lenient: Engine
    brief: Engine
    brief_ports: tuple[int, int]

    @property
    def everybody(self) -> list[Engine]:
        return [self.trio.p, self.trio.d, self.lenient, self.brief]

    @classmethod
    def start(cls, trio: Trio) -> "VllmCluster":
        lenient = trio.fleet.vllm(
            "lenient decode", "--max-num-seqs", "4", policy="recompute", extra=FORGETFUL, cores="0"
        )
        http, side_channel = reserve_ports(2)
        vllm_cluster = cls(trio, lenient, lenient, (http, side_channel))
        vllm_cluster.brief = vllm_cluster.start_brief()
        ready(vllm_cluster.lenient, vllm_cluster.brief)
        return vllm_cluster

    def stop(self) -> None:
        for engine in (self.lenient, self.brief):
            self.trio.fleet.stop(engine)

    def replace_brief(self) -> None:
        """Start a new incarnation of `brief` at the same address with the same engine id."""
        self.trio.fleet.stop(self.brief)
        self.brief = self.start_brief()
        ready(self.brief)

    def start_brief(self) -> Engine:
        flags = ("--num-gpu-blocks-override", "256")
        transfer = {**BY_MODULE_PATH, "engine_id": "brief"}
        return self.trio.fleet.vllm(
            "brief prefill",
            *flags,
            transfer=transfer,
            extra=BRIEF,
            cores="1",
            ports=self.brief_ports,
        )


@dataclass(frozen=True)
class Decoder:
    engine: Engine
    policy: str

    @property
    def computes(self) -> bool:
        return self.policy == "recompute"


def fresh(length: int = 100, max_tokens: int = 8) -> Prompt:
    """Return a prompt that no engine has seen."""
    return Prompt(tuple(_rng.randrange(10, 500) for _ in range(length)), max_tokens)


@asynccontextmanager
async def unharmed(
    vllm_cluster: VllmCluster, *decoders: Engine, timeout_s: float = 60
) -> AsyncIterator[aiohttp.ClientSession]:
    """Check after the body that all engines have the same processes, are healthy and free, and
    still transfer KV. `timeout_s`: how long blocks may take to become free.
    """
    before = [pids(engine) for engine in vllm_cluster.everybody]
    try:
        async with new_session(DEADLINE_S) as session:
            yield session
            assert [pids(engine) for engine in vllm_cluster.everybody] == before
            assert all(is_healthy(engine.address) for engine in vllm_cluster.everybody)
            await assert_free(session, *vllm_cluster.everybody, timeout_s=timeout_s)
            for decoder in decoders or (vllm_cluster.trio.d, vllm_cluster.lenient):
                await assert_hands_over(session, vllm_cluster, decoder)
    except BaseException:
        for engine in vllm_cluster.everybody:
            print(f"--- last lines of {engine.process.name}", *engine.process.tail(40), sep="\n")
        raise


def pids(engine: Engine) -> set[int]:
    return {process.pid for process in engine.family()}


async def assert_hands_over(
    session: aiohttp.ClientSession,
    vllm_cluster: VllmCluster,
    decoder: Engine,
    p: Engine | None = None,
) -> None:
    prompt = fresh()
    finished = (await metrics(session, decoder))[FINISHED]
    answer = await ask(
        session,
        decoder,
        prompt,
        kv_transfer_params=await prefill(session, p or vllm_cluster.trio.p, prompt),
    )
    assert answer == await ask(session, vllm_cluster.trio.p, prompt), answer.body
    assert (await metrics(session, decoder))[FINISHED] == finished + 1


async def ask_wrongly(
    session: aiohttp.ClientSession,
    vllm_cluster: VllmCluster,
    decoder: Decoder,
    prompt: Prompt,
    params: Any,
    **changes: Any,
) -> Answer:
    """Send a request with these parameters. If D answers, the tokens must be right; D's prefix
    cache must hold no wrong block afterwards.
    """
    answer = await ask(session, decoder.engine, prompt, kv_transfer_params=params, **changes)
    right = await ask(session, vllm_cluster.trio.p, prompt)
    assert right.is_ok
    if answer.is_ok:
        assert answer.token_ids == tuple(
            choice[: len(answer.token_ids[0])] for choice in right.token_ids
        ), params
    assert await ask(session, decoder.engine, prompt) == right, params
    return answer


def kill(engine: Engine) -> None:
    """Kill all processes of an engine at once, as when a machine dies."""
    family = engine.family()
    for member in family:
        member.kill()
    _, alive = psutil.wait_procs(family, timeout=SETTLE_S)
    assert not alive
