import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.api.schema import (
    ChatRequest,
    CompletionRequest,
    decode_body,
    has_more_values,
    max_values,
)
from kvferry.errors import RequestRefused

LIMIT = max_values(max_model_len=200)


def completion(**body: Any) -> CompletionRequest:
    return decode_body(json.dumps(body).encode(), CompletionRequest, LIMIT)


def refusal(**body: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        completion(**body)
    assert refused.value.status == 400
    return refused.value


TEXTS = st.text(st.sampled_from('\\",[{:}]x\n'), max_size=12)


def num_values(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + (sum(map(num_values, inner)) if isinstance(inner, list) else 0)


@given(
    st.recursive(
        TEXTS | st.integers() | st.none(),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    ),
    st.sampled_from([(",", ":"), (" , ", " : ")]),
)
def test_values_are_counted_without_decoding_them_and_text_in_strings_does_not_count(
    value: Any, separators: tuple[str, str]
) -> None:
    text = json.dumps(value, separators=separators).encode()
    assert has_more_values(text, num_values(value) - 1)
    assert not has_more_values(text, 2 * num_values(value))  # an empty container may count twice


@pytest.mark.parametrize("shift", range(12))
def test_a_string_that_is_longer_than_a_slice_is_still_one_value(shift: int) -> None:
    text = json.dumps(["x" * (256 * 1024 - shift) + '\\\\",[{' * 10, 1]).encode()
    assert has_more_values(text, 2)
    assert not has_more_values(text, 3)


def test_a_body_with_more_values_than_the_model_can_use_is_refused() -> None:
    with pytest.raises(RequestRefused, match="more than 68736 JSON values") as refused:
        completion(prompt=[5] * LIMIT)
    assert refused.value.status == 413
    assert completion(prompt="," * LIMIT).prompt == "," * LIMIT


def test_null_means_left_out() -> None:
    names = [name for name in CompletionRequest.__struct_fields__ if name != "prompt"]
    assert completion(prompt="x", **dict.fromkeys(names)) == completion(prompt="x")


def test_fields_that_nobody_knows_are_ignored() -> None:
    assert completion(prompt="x", priority=3, zebra={"a": [1]}) == completion(prompt="x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", 10**30),
        ("max_tokens", "16"),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 33),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("logprobs", 21),
        ("logprobs", True),
        ("stream", "yes"),
        ("stream_options", {"include_usage": 1}),
        ("kv_transfer_params", []),
        ("kv_transfer_params", "x"),
        ("kv_transfer_params", {"remote_block_ids": [2**64]}),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("prompt", 5),
        ("prompt", {"text": "x"}),
        ("model", 5),
    ],
)
def test_a_wrong_value_is_refused_and_named(name: str, value: Any) -> None:
    assert refusal(**{"prompt": "x", name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}.fromkeys("a")),
        ("prompt_logprobs", 1),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("best_of", 2),
    ],
)
def test_known_fields_that_are_not_served_are_refused(name: str, value: Any) -> None:
    refused = refusal(prompt="x", **{name: value})
    assert refused.param == name
    assert "support" in refused.message


def test_harmless_values_of_unserved_fields_pass() -> None:
    completion(
        prompt="x",
        logit_bias={},
        presence_penalty=0,
        repetition_penalty=1.0,
        response_format={"type": "text"},
        best_of=1,
        suffix="",
    )
    completion(prompt="x", n=3, best_of=3)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nul",
        b"\xff",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b"[]",
        b"5",
        b'"x"',
    ]
    + [
        prefix + b"[" * 100_000
        for prefix in (b"", b'{"prompt": ', b'{"zebra": ', b'{"kv_transfer_params": {"a": ')
    ],
)
def test_what_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestRefused):
        decode_body(raw, CompletionRequest, LIMIT)


def test_kv_transfer_params_are_kept_as_they_came_but_not_deeper_than_the_core_can_walk() -> None:
    params = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2]],
        "remote_port": None,
        "x": {"y": 1.5},
    }
    assert completion(prompt="x", kv_transfer_params=params).kv_transfer_params == params
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    assert refusal(prompt="x", kv_transfer_params={"a": deep}).param == "kv_transfer_params"


def test_a_prefill_for_a_peer_is_run_once_whatever_n_is() -> None:
    assert completion(prompt="x", n=4, kv_transfer_params={"do_remote_decode": True}).samples == 1
    assert completion(prompt="x", n=4, kv_transfer_params={"do_remote_decode": "true"}).samples == 4
    assert completion(prompt="x", n=4, kv_transfer_params={"do_remote_prefill": True}).samples == 4


def test_a_chat_needs_messages() -> None:
    for body in (
        b"{}",
        b'{"messages": []}',
        b'{"messages": [{"content": "x"}]}',
        b'{"messages": [5]}',
    ):
        with pytest.raises(RequestRefused):
            decode_body(body, ChatRequest, LIMIT)
