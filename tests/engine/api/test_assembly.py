from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvferry.engine.api.assembly import Delta, StopMatcher, TextAssembler
from kvferry.engine.api.tokenizer import ModelTokenizer, SpecialTokens
from kvferry.engine.make_model.tokenizer import make_tokenizer_json
from kvferry.engine.messages import RequestOutput, SampledToken

TOKENIZER = ModelTokenizer(Tokenizer.from_str(make_tokenizer_json()))
EOS = 508


def assembler(*stops: str, **options: object) -> TextAssembler:
    return TextAssembler(
        0,
        TOKENIZER.detokeniser(SpecialTokens.WITHOUT),
        StopMatcher(stops),
        **options,  # type: ignore[arg-type]
    )


def output(
    token_ids: list[int], finish_reason: str | None = None, stop_reason: int | None = None
) -> RequestOutput:
    return RequestOutput(
        "r", [SampledToken(token_id) for token_id in token_ids], finish_reason, stop_reason
    )


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, SpecialTokens.WITHOUT)


def test_the_token_that_stops_a_sequence_is_counted_but_not_shown() -> None:
    delta = assembler(silent_stop_ids=frozenset({EOS})).push(output([*ids("hi"), EOS], "stop", EOS))
    assert (delta.text, delta.token_ids[-1], delta.finish_reason, delta.stop_reason) == (
        "hi",
        EOS,
        "stop",
        None,
    )


def test_a_stop_token_of_the_client_is_named_and_shown_on_request() -> None:
    (x,) = ids("x")
    assert assembler().push(output([*ids("hi"), x], "stop", x)) == Delta(
        0, "hi", (*map(SampledToken, [*ids("hi"), x]),), "stop", x
    )
    assert assembler(includes_stop=True).push(output([*ids("hi"), x], "stop", x)).text == "hix"


def test_a_stop_string_cuts_text_and_tokens() -> None:
    delta = assembler("END").push(output(ids("one END two"), "length"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("one ", "stop", "END")
    assert TOKENIZER.decode(delta.token_ids, SpecialTokens.WITHOUT) == "one END"
    assert assembler("END", includes_stop=True).push(output(ids("one END two"))).text == "one END"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    token_ids = ids("END and END")
    delta = assembler("END", min_tokens=len(ids("END"))).push(output(token_ids, "length"))
    assert (delta.text, delta.finish_reason) == ("END and ", "stop")


def test_what_was_held_back_is_shown_at_the_end() -> None:
    held = assembler("STOP")
    assert held.push(output(ids("a ST"))).text == "a "
    assert held.push(output([], "length")).text == "ST"


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    euro = ids("€")
    unfinished = assembler()
    assert unfinished.push(output(euro[:2])).text == ""
    assert unfinished.push(output([], "length")).text == "\ufffd"


def test_an_opening_comes_once_and_is_not_searched_for_stop_strings() -> None:
    echoing = assembler("END", echo_text="END ")
    assert [echoing.push(output(ids("a"))).text, echoing.push(output(ids("b"), "length")).text] == [
        "END a",
        "b",
    ]


@given(
    st.lists(st.integers(0, 511), min_size=1, max_size=30),
    st.lists(st.text("ab ", min_size=1, max_size=3), max_size=2),
    st.data(),
)
def test_the_result_does_not_depend_on_how_the_engine_groups_tokens(
    token_ids: list[int], stops: list[str], data: st.DataObject
) -> None:
    whole = assembler(*stops).push(output(token_ids, "length"))
    cut = data.draw(st.integers(0, len(token_ids)))
    chunks = assembler(*stops)
    first = chunks.push(output(token_ids[:cut]))
    parts = (
        [first] if first.finish_reason else [first, chunks.push(output(token_ids[cut:], "length"))]
    )
    assert "".join(part.text for part in parts) == whole.text
    assert [token_id for part in parts for token_id in part.token_ids] == whole.token_ids
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == (
        whole.finish_reason,
        whole.stop_reason,
    )
