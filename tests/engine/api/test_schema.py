import json
from typing import Any

import pytest

from kvferry.engine.api.schema import ChatRequest, CompletionRequest, decode_body
from kvferry.errors import RequestRefused


def completion(**body: Any) -> CompletionRequest:
    return decode_body(json.dumps(body).encode(), CompletionRequest)


def refusal(**body: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        completion(**body)
    assert refused.value.status == 400
    return refused.value


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
        decode_body(raw, CompletionRequest)


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
            decode_body(body, ChatRequest)
