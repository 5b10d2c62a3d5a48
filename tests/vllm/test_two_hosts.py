"""Tests the documented commands for two hosts. The second host is a network namespace, and NIXL
uses TCP: the hosts share no memory.
"""

import asyncio
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import ask_all, metrics, new_session
from tests.vllm.documented import documented
from tests.vllm.fleet import Fleet, ready
from tests.vllm.vllm_asking import assert_free, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PREFIX = f"10.231.{secrets.randbelow(256)}"
"""The prefix is random: a killed run leaves its cable with its addresses behind."""
NAMES = {"10.0.0.1": f"{PREFIX}.1", "10.0.0.2": f"{PREFIX}.2"}
"""The documented addresses and those used here: the first inside the namespace, the second
outside.
"""


@pytest.fixture
def other_host() -> Iterator[list[str]]:
    """Return the command prefix that runs a command in a namespace, which one cable connects to
    us.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip (Debian: iproute2)")
    name, cable = f"kvferry-{secrets.token_hex(4)}", f"kvf{secrets.token_hex(3)}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", cable, "type", "veth", "peer", "name", "cable", "netns", name)
        ip("addr", "add", f"{PREFIX}.2/24", "dev", cable)
        ip("link", "set", cable, "up")
        ip("-n", name, "addr", "add", f"{PREFIX}.1/24", "dev", "cable")
        ip("-n", name, "link", "set", "cable", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", name]
    finally:
        ip("netns", "del", name)


def test_the_documented_commands_for_two_hosts(
    tmp_path: Path, model: Path, other_host: list[str]
) -> None:
    for_p, for_d, for_router = documented("On two hosts")
    (tmp_path / "secret").write_text(secrets.token_hex(32))
    (tmp_path / "secret").chmod(0o600)

    def here(variables: dict[str, str]) -> dict[str, str]:
        moved = {name: NAMES.get(value, value) for name, value in variables.items()}
        return {
            **moved,
            "KVFERRY_SECRET_FILE": str(tmp_path / moved["KVFERRY_SECRET_FILE"]),
            "UCX_TLS": "tcp",
        }

    with Fleet(tmp_path / "fleet", model, secret=b"") as fleet:
        p = fleet.vllm(
            "prefill",
            transfer=for_p.transfer,
            environment=here(dict(for_p.environment)),
            host=NAMES["10.0.0.1"],
            inside=other_host,
        )
        d = fleet.vllm(
            "decode",
            transfer=for_d.transfer,
            environment=here(dict(for_d.environment)),
            host=NAMES["10.0.0.2"],
            cores="1",
        )
        router = fleet.kvferry_router([p], [d], here(dict(for_router.environment)))
        ready(p, d, router)
        prompts = random_prompts(12, seed=31, longest=500)

        async def check() -> None:
            assert await ask_all(router, prompts, concurrency=4, timeout_s=120) == await ask_all(
                p, prompts, timeout_s=120
            )
            async with new_session() as session:
                assert (await metrics(session, d))["kvferry:finished_loads_total"] == len(prompts)
                await assert_free(session, p, d)

        asyncio.run(check())
