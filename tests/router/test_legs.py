import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import RemoteProtocolError, RequestRefused
from kvferry.router.routes.error_shapes import error_event
from kvferry.router.serving.client_request import (
    ClientRequest,
    Handover,
    InvalidRequest,
    read_client_request,
    read_prefill_answer,
)
from kvferry.router.serving.context import choose_request_id
from kvferry.types import Address
from kvferry.web.errors import error_body

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
PARAMS = {
    "do_remote_prefill": True,
    "ticket": "t",
    "remote_host": "h",
    "remote_port": 5,
    "remote_block_ids": [[1]],
}


def accepted(body: Any) -> ClientRequest:
    request = read_client_request(json.dumps(body).encode())
    assert isinstance(request, ClientRequest)
    return request


def refused(body: bytes) -> InvalidRequest:
    request = read_client_request(body)
    assert isinstance(request, InvalidRequest)
    return request


def handover(params: Any = PARAMS) -> Handover:
    found = read_prefill_answer(json.dumps({"id": "x", "kv_transfer_params": params}).encode())
    assert found is not None
    return found


def test_the_prefill_leg_asks_for_one_token_and_a_short_answer_and_keeps_the_blocks() -> None:
    body = {
        "prompt": "hi",
        "max_tokens": 100,
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 5,
        "n": 3,
        "temperature": 0.5,
        "echo": True,
        "logprobs": 20,
        "top_logprobs": 20,
        "logprob_token_ids": [1],
        "prompt_logprobs": 20,
        "return_token_ids": True,
        "return_prompt_text": True,
    }
    assert json.loads(b"".join(accepted(body).prefill_body())) == {
        "prompt": "hi",
        "max_tokens": 1,
        "stream": False,
        "temperature": 0.5,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_max_completion_tokens_is_one_where_the_client_named_it_and_absent_where_not() -> None:
    assert (
        json.loads(b"".join(accepted({"messages": [], "max_completion_tokens": 9}).prefill_body()))[
            "max_completion_tokens"
        ]
        == 1
    )
    assert "max_completion_tokens" not in json.loads(
        b"".join(accepted({"messages": []}).prefill_body())
    )


def test_the_decode_leg_is_the_clients_request_with_the_blocks_of_p() -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 100, "stream": True, "n": 3}
    assert json.loads(b"".join(accepted(body).decode_body(handover()))) == body | {
        "kv_transfer_params": PARAMS | {"conversation": None}
    }


def test_without_blocks_the_decode_leg_is_the_clients_request() -> None:
    assert json.loads(b"".join(accepted({"prompt": "a", "n": 2}).decode_body(None))) == {
        "prompt": "a",
        "n": 2,
    }


def test_transfer_params_typed_by_a_client_reach_nobody() -> None:
    request = accepted(
        {"prompt": "a", "kv_transfer_params": {"ticket": "stolen"}, "conversation_id": "c"}
    )
    assert json.loads(b"".join(request.decode_body(None))) == {"prompt": "a"}
    assert b"stolen" not in b"".join(request.prefill_body())
    assert b"stolen" not in b"".join(request.decode_body(handover()))


@pytest.mark.parametrize("spelt", ["kv_transfer_params", "kv_\\u0074ransfer_params"])
@pytest.mark.parametrize("claimed", ['"stolen"', '{"ticket":"stolen"}', '["stolen"]', "null"])
def test_transfer_params_among_vllms_own_extra_arguments_reach_nobody(
    spelt: str, claimed: str
) -> None:
    """vLLM puts both into one dictionary. If P offered no blocks, vLLM would use the client's
    parameters and fail with a 500.
    """
    body = f'{{"prompt":"a","vllm_xargs":{{"mine":1,"{spelt}":{claimed}}}}}'
    request = read_client_request(body.encode())
    assert isinstance(request, ClientRequest)
    for leg in (
        b"".join(request.decode_body(None)),
        b"".join(request.decode_body(handover())),
        b"".join(request.prefill_body()),
    ):
        assert json.loads(leg)["vllm_xargs"] == {"mine": 1}


@pytest.mark.parametrize("extra", [b"{}", b'{"a" : 1.0}', b"[]", b'"x"', b"null", b"7"])
def test_other_extra_arguments_are_passed_on_as_the_client_wrote_them(extra: bytes) -> None:
    request = read_client_request(b'{"prompt":"a","vllm_xargs":' + extra + b"}")
    assert isinstance(request, ClientRequest)
    assert b'"vllm_xargs":' + extra in b"".join(request.decode_body(None))


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"\xff"}',
        b'{"prompt":"a","x":{"\xc3":1}}',
        b'{"messages":[{"content":"caf\xe9"}]}',
    ],
)
def test_text_in_another_encoding_is_refused_here(body: bytes) -> None:
    """An engine may fail on such a body with a 500, which the router would retry elsewhere and
    count as a failure of every instance.
    """
    assert (refused(body).status, "UTF-8" in refused(body).message) == (400, True)


@pytest.mark.parametrize("text", ["café", "\u6f22\u5b57", "\U0001f600"])
def test_text_of_any_language_is_passed_on_as_it_is(text: str) -> None:
    request = read_client_request(f'{{"prompt":"{text}"}}'.encode())
    assert isinstance(request, ClientRequest)
    assert text.encode() in b"".join(request.decode_body(None))


def test_a_million_prompts_cost_no_more_memory_than_two() -> None:
    """Each prompt would be a Python object, and all of them together would pause every other
    client's stream.
    """
    body = b'{"prompt":[%b""]}' % (b'"",' * 2**20)
    tracemalloc.start()
    try:
        assert "several prompts" in refused(body).message
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_request_of_countless_fields_is_refused_before_they_are_read() -> None:
    body = b'{"prompt":"a",%b}' % b",".join(b'"%x":0' % number for number in range(2**18))
    tracemalloc.start()
    try:
        assert refused(body).status == 413
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name", ["prompt", "messages", "tools", "response_format", "prompt_embeds"]
)
def test_what_is_large_by_nature_may_be_large(name: str) -> None:
    body = {name: "x" * 2**21, "temperature": 0, "kv_transfer_params": "y" * 2**21}
    assert accepted(body).fields.keys() == {name, "temperature"}


def test_values_are_passed_on_as_the_client_wrote_them() -> None:
    prompt = b'"\\u00e9 \\/ 1e5 \xc3\xa9"'
    request = read_client_request(b'{"prompt":' + prompt + b', "top_p" : 1.000 }')
    assert isinstance(request, ClientRequest)
    assert prompt in b"".join(request.prefill_body())
    assert prompt in b"".join(request.decode_body(None))
    assert b"1.000" in b"".join(request.decode_body(None))


@given(st.dictionaries(st.text(), json_values, max_size=6))
def test_whatever_else_a_request_holds_the_decode_leg_holds_too(body: dict[str, Any]) -> None:
    request = read_client_request(json.dumps(body).encode())
    if isinstance(request, ClientRequest):
        expected = {
            key: value
            for key, value in body.items()
            if key not in ("kv_transfer_params", "conversation_id")
        }
        assert json.loads(b"".join(request.decode_body(None))) == expected
        assert json.loads(b"".join(request.prefill_body()))["max_tokens"] == 1


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_request_or_a_refusal(body: bytes) -> None:
    request = read_client_request(body)
    if isinstance(request, ClientRequest):
        b"".join(request.prefill_body())
        b"".join(request.decode_body(None))
    else:
        assert request.status == 400


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "is empty"),
        (b" ", "is empty"),
        (b"{", "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b"{}x", "not valid JSON"),
        (b'{"\xff": 1}', "not valid JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_with_the_reason(
    body: bytes, sentence: str
) -> None:
    assert sentence in refused(body).message


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]], [[], []]])
def test_several_prompts_in_one_request_are_told_apart(prompt: list[object]) -> None:
    request = accepted({"prompt": prompt, "n": 2})
    assert [
        json.loads(b"".join(request.with_prompt(one).decode_body(None))) for one in request.prompts
    ] == [{"prompt": one, "n": 2} for one in prompt]
    spaced = read_client_request(b'{"prompt" : [ %b ]}' % b" , ".join(map(bytes, request.prompts)))
    assert isinstance(spaced, ClientRequest)
    assert spaced.prompts == request.prompts


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"prompt": ["a", 1]}, "different kinds"),
        ({"prompt": ["a", [1]]}, "different kinds"),
        ({"prompt": ["a", "b"], "conversation_id": "c"}, "leave out conversation_id"),
        ({"prompt": ["a", "b"], "prompt_embeds": "x"}, "prompt_embeds"),
    ],
)
def test_several_prompts_that_no_engine_would_answer_are_refused(
    body: dict[str, Any], sentence: str
) -> None:
    assert sentence in refused(json.dumps(body).encode()).message


def test_a_prompt_list_beside_messages_is_left_to_the_engines() -> None:
    assert accepted({"messages": [], "prompt": ["a", "b"]}).prompts == ()


@pytest.mark.parametrize(
    ("spelling", "num_choices"),
    [
        *((text, 2) for text in ("2", "2.0", "2e0", "20e-1", "0.2E1", '"2"', '"+2"', '" 2 "')),
        *((text, 2) for text in ('"2.00"', '"02"', '"0_2"', '"\\t+02.0\\n"', r'"\u0032"')),
        *((text, 20) for text in ("20", '"2_0"', '"20.0"', "2e1")),
        ("true", 1),
    ],
)
def test_the_number_of_choices_of_several_prompts_reaches_engines_as_the_router_reads_it(
    spelling: str, num_choices: int
) -> None:
    """Choice j of prompt i has the index i * n + j: router and engine must agree about n."""
    request = read_client_request(b'{"prompt": ["a", "b"], "n": %b}' % spelling.encode())
    assert isinstance(request, ClientRequest)
    assert request.num_choices == num_choices
    for prompt in request.prompts:
        body = b"".join(request.with_prompt(prompt).decode_body(None))
        assert json.loads(body)["n"] == num_choices
        assert b'"n":%d' % num_choices in body


@pytest.mark.parametrize("fields", [{}, {"n": None}])
def test_without_a_number_of_choices_each_prompt_has_one(fields: dict[str, Any]) -> None:
    assert accepted({"prompt": ["a", "b"], **fields}).num_choices == 1


@pytest.mark.parametrize(
    "n",
    [
        *(0, -2, 2.5, 10**30, 1e300, False, [2], {}, "", " ", "x", "0", "-2", "2.", "2.5", "2e0"),
        *("2__0", "_2", "2_", "+ 2", "++2", "0x2", "\u0662", "true", "0" * 10_000),
    ],
)
def test_several_prompts_with_a_number_of_choices_that_is_no_count_are_refused(n: object) -> None:
    assert (
        "n must be a count" in refused(json.dumps({"prompt": ["a", "b"], "n": n}).encode()).message
    )


@pytest.mark.parametrize("n", ["2e0", '"2_0"', "0", '"x"'])
def test_the_number_of_choices_of_one_prompt_is_left_to_the_engine(n: str) -> None:
    request = read_client_request(b'{"prompt": "a", "n": %b}' % n.encode())
    assert isinstance(request, ClientRequest)
    assert b"".join(request.decode_body(None)) == b'{"prompt":"a","n":%b}' % n.encode()


@pytest.mark.parametrize(
    "prompt", ["a", ["a"], [[1, 2]], [1, 2], [], None, 5, {"a": 1}, [None, "a"]]
)
def test_one_prompt_in_any_spelling_is_left_to_the_engines(prompt: object) -> None:
    assert json.loads(b"".join(accepted({"prompt": prompt}).decode_body(None))) == {
        "prompt": prompt
    }


@pytest.mark.parametrize(
    ("spelling", "is_streamed"),
    [
        *((text, True) for text in ("true", " true ", "1", "1.0", "1e0", '"1"', '"TRUE"')),
        *((text, True) for text in ('"t"', '"y"', '"Yes"', '"on"', r'"\u0074rue"')),
        *(
            (text, False)
            for text in ("false", "0", "0.0", '"False"', '"f"', '"n"', '"no"', '"off"')
        ),
    ],
)
def test_stream_is_read_as_vllm_reads_it_and_sent_as_a_boolean(
    spelling: str, is_streamed: bool
) -> None:
    request = read_client_request(f'{{"prompt":"a","stream":{spelling}}}'.encode())
    assert isinstance(request, ClientRequest)
    assert request.is_streamed is is_streamed
    assert json.loads(b"".join(request.decode_body(None)))["stream"] is is_streamed


@pytest.mark.parametrize("value", [None, 2, -1, 10**40, "", "maybe", "1.0", " true", [True], {}])
def test_a_stream_that_is_no_boolean_is_left_to_the_engines(value: object) -> None:
    request = accepted({"prompt": "a", "stream": value})
    assert not request.is_streamed
    assert json.loads(b"".join(request.decode_body(None)))["stream"] == value


def test_the_answer_of_p_names_its_ticket_and_side_channel() -> None:
    found = handover()
    assert (found.ticket, found.side_channel) == ("t", Address("h", 5))
    assert json.loads(bytes(found.params)) == PARAMS


@pytest.mark.parametrize(
    "params", [{}, {"remote_host": "h"}, {"remote_host": "", "remote_port": 5}, {"remote_port": 0}]
)
def test_params_of_an_engine_without_tickets_are_still_passed_on(params: dict[str, Any]) -> None:
    found = handover(params)
    assert (found.ticket, found.side_channel) == (None, None)
    assert json.loads(bytes(found.params)) == params


@pytest.mark.parametrize("body", [b'{"id":"x"}', b'{"kv_transfer_params":null}'])
def test_an_answer_without_params_offers_no_blocks(body: bytes) -> None:
    assert read_prefill_answer(body) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b'{"kv_transfer_params":7}',
        b'{"kv_transfer_params":{"ticket":7}}',
        *(b'{"kv_transfer_params":{"tp_size":%s}}' % n for n in (b"0", b"true", b"9" * 30, b"NaN")),
    ],
)
def test_an_answer_that_cannot_be_read_is_the_peers_fault(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be decoded"):
        read_prefill_answer(body)


@given(st.binary(max_size=200))
def test_no_answer_of_p_raises_anything_else(body: bytes) -> None:
    try:
        read_prefill_answer(body)
    except RemoteProtocolError:
        return


@pytest.mark.parametrize("sent", ["abc", "A.b-c_d:1", "x" * 128])
def test_a_fit_request_id_is_kept(sent: str) -> None:
    assert choose_request_id(sent) == sent


@pytest.mark.parametrize("sent", [None, "", "a b", "a\n", "é", "x" * 129, "a/b", '"'])
def test_an_unfit_request_id_is_replaced_by_a_fresh_one(sent: str | None) -> None:
    first, second = choose_request_id(sent), choose_request_id(sent)
    assert first != sent
    assert first != second
    assert choose_request_id(first) == first


def test_an_error_has_the_shape_of_openais() -> None:
    error = json.loads(error_body(RequestRefused("why", status=502)))["error"]
    assert error == {"message": "why", "type": "BadGatewayError", "param": None, "code": 502}


def test_an_error_event_never_continues_a_half_sent_event() -> None:
    event = error_event(502, "why")
    assert event.startswith(b"\n\ndata: ")
    assert event.endswith(b"}\n\n")
