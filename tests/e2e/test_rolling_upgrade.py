"""Tests a fleet in which some processes run the code of the wire version before: every request gets
the tokens of a single engine, and the KV moves between both versions in both directions.
"""

import asyncio
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from itertools import product
from pathlib import Path

import pytest
from tests.e2e.conftest import PATIENT, random_prompts
from tests.e2e.harness import (
    Cluster,
    Engine,
    Host,
    ask,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
)

from kvferry.protocol.messages import WIRE_VERSION

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

LAST_COMMITS = {8: "3fce70ce8e25e0a240eeb6d7d9bf19b4870ad5d5"}
"""The last commit of each wire version that this version still supports."""
ROOT = Path(__file__).parents[2]
BUILD_S = 120.0
PROMPTS = random_prompts(24, seed=66, longest=600)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """The code of the version before, as a host on which processes can be started."""
    commit = LAST_COMMITS[WIRE_VERSION - 1]
    archive = subprocess.run(
        ["git", "archive", commit, "src", "setup.py", "pyproject.toml", "README.md"],
        cwd=ROOT,
        capture_output=True,
        timeout=BUILD_S,
        check=False,
    )
    if archive.returncode != 0:
        pytest.skip(f"commit {commit} is not in this checkout")
    directory = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="data")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=directory,
        timeout=BUILD_S,
        check=True,
    )
    path = os.pathsep.join([str(directory / "src"), os.environ.get("PYTHONPATH", "")])
    return Host(inside=("env", f"PYTHONPATH={path}"))


def start_both(cluster: Cluster, old: Host, role: str, connector: str) -> list[Engine]:
    starting = [
        cluster.serve(f"old {role}", extra=EXTRA, connector=connector, at=old),
        cluster.serve(f"new {role}", extra=EXTRA, connector=connector),
    ]
    return [process.ready() for process in starting]


EXTRA = {**PATIENT, "transports": ["tcp"]}
"""With this transport, a push is by writing: P asks D for a handshake too."""


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPushConnector"])
def test_engines_of_two_versions_exchange_kv_behind_routers_of_both(
    cluster: Cluster, plain: Engine, old: Host, connector: str
) -> None:
    prefill, decode = (start_both(cluster, old, role, connector) for role in ("P", "D"))
    pairs = list(product(prefill, decode))
    starting = [cluster.proxy([p], [d]) for p, d in pairs]
    starting += [cluster.proxy(prefill, decode), cluster.proxy(prefill, decode, at=old)]
    routers = [process.ready() for process in starting]

    async def check() -> None:
        expected = await ask_all(plain, PROMPTS)
        for router in routers:
            # A new prompt for each router, so that no prefix cache replaces a transfer.
            assert await ask_all(router, PROMPTS, cache_salt=router.process.name) == expected
        async with new_session() as session:
            for (_, d), router in zip(pairs, routers, strict=False):
                before = await metrics(session, d)
                answer = await ask(session, router, PROMPTS[1], cache_salt=router.url)
                after = await metrics(session, d)
                assert answer == expected[1]
                moved = "kvferry:finished_loads_total"
                assert after[moved] == before.get(moved, 0) + 1
            for engine in (*prefill, *decode):
                assert (await metrics(session, engine)).get("kvferry:failed_loads_total", 0) == 0
            await assert_quiescent(session, *prefill, *decode)

    asyncio.run(check())
