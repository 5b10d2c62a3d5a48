"""Tests the README's commands exactly as written, except that free ports replace the port
numbers.
"""

import asyncio
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.e2e.harness import (
    START_S,
    Engine,
    Prompt,
    ask,
    assert_quiescent,
    metrics,
    new_session,
    until,
)
from tests.ports import reserve_ports

from kvferry.cli.cluster.processes import ChildProcess, ProcessGroup
from kvferry.types import Address

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "README.md"


def by_hand() -> list[list[str]]:
    """Return the commands of the section "By hand", each as a list of words."""
    section = README.read_text(encoding="utf-8").split("## By hand")[1]
    block = section.split("```")[1].replace("\\\n", " ")
    return [shlex.split(line) for line in block.strip().splitlines()]


def test_the_four_commands_serve_a_request_through_both_engines(tmp_path: Path) -> None:
    commands = by_hand()
    assert [next(word for word in words if "=" not in word) for words in commands] == [
        "kvferry"
    ] * 4
    numbers = {
        number
        for words in commands
        for word in words
        for number in re.findall(r"\b[58]\d{3}\b", word)
    }
    numbers.add("5600")
    ports = dict(zip(numbers, map(str, reserve_ports(len(numbers))), strict=True))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": ports["5600"],
        "XDG_RUNTIME_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    children: list[ChildProcess] = []
    with ProcessGroup(tmp_path / "group", grace_s=3.0) as group:
        try:
            for words in commands:
                words = [
                    re.sub(r"\b[58]\d{3}\b", lambda found: ports[found.group()], word)
                    for word in words
                ]
                own = dict(word.split("=", 1) for word in words[: words.index("kvferry")])
                command = words[words.index("kvferry") :]
                if "make-model" in command:
                    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
                    continue
                command = [str(tmp_path / "tiny") if word == "tiny" else word for word in command]
                child = ChildProcess(command[1], command, environment | own)
                children.append(child)
                child.start(group.id)
            addresses = [wait_for(child) for child in children]
            asyncio.run(
                check(
                    [
                        Engine(child, address)
                        for child, address in zip(children, addresses, strict=True)
                    ],
                    tmp_path / "tiny",
                )
            )
        finally:
            for child in children:
                child.close(grace_s=5.0)


async def check(engines: list[Engine], model: Path) -> None:
    p, d, router = engines
    prompt = Prompt(tuple(range(20, 120)))
    async with new_session() as session:

        async def has_noticed() -> bool:
            """True once the router knows its engines: it looks every second for engines that were
            not up when it started.
            """
            async with session.get(f"{router.url}/readyz") as response:
                state = await response.json()
            return bool(state["prefill_usable"] and state["decode_usable"])

        await until("the router has noticed its engines", has_noticed)
        answer = await ask(session, router, prompt, model=str(model))
        assert answer == await ask(session, p, prompt, model=str(model))
        assert answer.is_ok
        assert (await metrics(session, d))["kvferry:transfer_bytes_total"] > 0
        await assert_quiescent(session, p, d)


def wait_for(child: ChildProcess) -> Address:
    deadline = time.monotonic() + START_S
    while (address := child.poll_address()) is None:
        assert time.monotonic() < deadline, child.tail(40)
        time.sleep(0.05)
    return address
