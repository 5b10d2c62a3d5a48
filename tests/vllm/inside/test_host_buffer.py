"""Tests vLLM's own cache tensors with a host buffer. The tensors are already in host memory here,
so `force_host_buffer` is set; the host buffer, the copies and the waits are those of a cache on a
device.
"""

from typing import Any

import pytest
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import BLOCK, Engine
from tests.vllm.inside.test_life_cycle import LENGTHS, finish, greedy, prompt, settle, wait_for_load

STAGED = {"kv_connector_extra_config": {"force_host_buffer": True}}
SIDES = {"prefill": (STAGED, {}), "decode": ({}, STAGED), "both": (STAGED, STAGED)}


@pytest.fixture(params=SIDES)
def pair(request: pytest.FixtureRequest, start_engine: StartEngine) -> tuple[Engine, Engine]:
    of_p, of_d = SIDES[request.param]
    return start_engine("p", kv=of_p), start_engine("d", kv=of_d)


def test_prompts_are_handed_over_whole(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    for number, length in enumerate(LENGTHS):
        tokens = prompt(length, start=10 + number)
        d.add(f"b{number}", tokens, p.prefill(f"a{number}", tokens))
        assert finish(d, f"b{number}", p) == greedy(tokens, 4)
    assert d.loaded_tokens == sum(LENGTHS)
    settle(p, d)


def test_a_local_prefix_is_not_overwritten_by_what_the_mirror_holds(
    pair: tuple[Engine, Engine],
) -> None:
    p, d = pair
    d.add("first", prompt(2 * BLOCK))
    finish(d, "first")
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 100 - 2 * BLOCK
    settle(p, d)


def test_a_request_that_is_aborted_while_it_loads_leaves_nothing(
    pair: tuple[Engine, Engine],
) -> None:
    p, d = pair
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    wait_for_load(d, "b")
    d.abort("b")
    settle(p, d)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_setting_of_vllm_alone_stages_nothing_where_the_cache_is_host_memory(
    start_engine: StartEngine, device: str
) -> None:
    settings: dict[str, Any] = {"kv": {"kv_buffer_device": device}}
    p, d = start_engine("p", **settings), start_engine("d", **settings)
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    settle(p, d)
