"""Tests fuzzed requests through a real router to real engines: every response is 2xx or 4xx, no
process dies, all blocks are freed, and no log has a traceback.
"""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.e2e.conftest import Pair
from tests.e2e.harness import assert_quiescent, new_session
from tests.router.fuzzing import GENERATING, Fuzzed, any_request, bodies, check, framed, send, soups

pytestmark = pytest.mark.slow

GOOD = json.dumps(
    {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}
).encode()
MANY = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def served(pair: Pair) -> str:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(
        GOOD
    )
    seen = send(pair.router.address.port, head + GOOD)
    assert seen is not None
    assert seen.status == 200, seen
    return str(json.loads(seen.body)["choices"][0]["text"])


def assert_unharmed(pair: Pair, right: str) -> None:
    assert served(pair) == right
    for engine in (pair.router, pair.p, pair.d):
        engine.process.check_alive()
        assert not [line for line in engine.process.tail(10_000) if "Traceback" in line], (
            engine.process.tail(60)
        )

    async def settle() -> None:
        async with new_session() as session:
            await assert_quiescent(session, pair.p, pair.d)

    asyncio.run(settle())


def test_generations_of_any_body_before_real_engines(patient: Pair) -> None:
    right = served(patient)

    @MANY
    @given(framed(st.just("POST"), st.sampled_from(GENERATING), bodies))
    def run(fuzzed: Fuzzed) -> None:
        seen = send(patient.router.address.port, fuzzed.data, fuzzed.method)
        assert seen is not None
        check(seen, fuzzed.method)

    run()
    assert_unharmed(patient, right)


def test_anything_else_before_real_engines(patient: Pair) -> None:
    right = served(patient)

    @MANY
    @given(any_request, soups)
    def run(fuzzed: Fuzzed, soup: bytes) -> None:
        seen = send(patient.router.address.port, fuzzed.data, fuzzed.method)
        assert seen is not None
        check(seen, fuzzed.method)
        other = send(patient.router.address.port, soup, is_whole=False)
        if other is not None:
            check(other)

    run()
    assert_unharmed(patient, right)
