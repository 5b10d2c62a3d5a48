"""The life of requests in vLLM's own scheduler, with real tickets, reads and leases. After each story nothing may be left on either side."""

from tests.vllm.inside.engines import BLOCK, Engine, next_token, run_until


def prompt(length: int, start: int = 10) -> list[int]:
    return [start + (index * 7) % 300 for index in range(length)]


def settle(*engines: Engine) -> None:
    run_until(lambda: not any(engine.remains() for engine in engines), *engines)
    for engine in engines:
        assert engine.wrong_slots == []


def test_a_prompt_is_handed_over(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    params = p.prefill("a", prompt(100))
    d.add("b", prompt(100), params)
    run_until(lambda: d.answers["b"].finish is not None, p, d)
    settle(p, d)
    assert d.answers["b"].tokens[0] == next_token(prompt(100)) == p.answers["a"].tokens[0]
