"""Tests push in vLLM's own scheduler behind a router that signs no tickets: the router names P to
D, and P and D match the legs by their request ids.
"""

from typing import Any

import pytest
from tests.ports import reserve_ports
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import Engine, run_until
from tests.vllm.inside.legs import PUSH
from tests.vllm.inside.test_life_cycle import check_outcome, finish, greedy, prompt, settle


def start_both(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> tuple[Engine, Engine, dict[str, Any]]:
    of_p, of_d = reserve_ports(2)

    def start(name: str, own: int, other: int) -> Engine:
        monkeypatch.setenv("KVFERRY_SIDE_CHANNEL_PORT", str(own))
        return start_engine(
            name, kv={**PUSH, "kv_connector_extra_config": {"peers": [f"localhost:{other}"]}}
        )

    p, d = start("p", of_p, of_d), start("d", of_d, of_p)
    return (
        p,
        d,
        {
            "do_remote_prefill": True,
            "remote_engine_id": "p",
            "remote_host": "localhost",
            "remote_port": of_p,
            "tp_size": 1,
        },
    )


@pytest.mark.parametrize("first", ["p", "d"])
def test_legs_meet_whichever_is_first(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    p, d, named = start_both(start_engine, monkeypatch)
    for number, length in enumerate((100, 200)):
        to_d = (f"cmpl-{number}-0-dddddddd", prompt(length), named)
        if first == "p":
            p.prefill(f"cmpl-{number}-0-aaaaaaaa", prompt(length))
            d.add(*to_d)
        else:
            d.add(*to_d)
            run_until(lambda: p.transfer_worker.registrations == 1, d)
            p.add(
                f"cmpl-{number}-0-aaaaaaaa",
                prompt(length),
                {"do_remote_decode": True},
                max_tokens=1,
            )
        assert finish(d, to_d[0], p) == greedy(prompt(length), 4)
    assert d.loaded_tokens > 0
    settle(p, d)


def test_a_p_that_is_not_believed_gets_the_failure_policy(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, d, named = start_both(start_engine, monkeypatch)
    d.add("b", prompt(100), {**named, "remote_port": named["remote_port"] + 1})
    check_outcome(d, "fail", "b", prompt(100))
