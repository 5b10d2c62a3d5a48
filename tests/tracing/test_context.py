"""Tests how the W3C trace headers of clients are read; a malformed header is ignored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tracing.context import TraceContext, read_trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def read(**headers: str) -> TraceContext | None:
    return read_trace_context(headers.get)


def test_a_context_is_passed_on_as_it_came() -> None:
    context = read(traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="a=1,b=2")
    assert context == TraceContext(TRACE, SPAN, True, "a=1,b=2")
    assert context.headers() == [
        ("traceparent", f"00-{TRACE}-{SPAN}-01"),
        ("tracestate", "a=1,b=2"),
    ]


def test_only_the_last_flag_says_whether_the_trace_is_sampled() -> None:
    assert read(traceparent=f"00-{TRACE}-{SPAN}-00") == TraceContext(TRACE, SPAN, False)
    assert read(traceparent=f"00-{TRACE}-{SPAN}-02") == TraceContext(TRACE, SPAN, False)
    assert read(traceparent=f"00-{TRACE}-{SPAN}-03") == TraceContext(TRACE, SPAN, True)


def test_a_later_version_may_have_more_fields() -> None:
    assert read(traceparent=f"cc-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "no context",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}a-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\nX-Injected: 1",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01,00-{TRACE}-{SPAN}-01",
    ],
)
def test_a_malformed_context_is_ignored(sent: str) -> None:
    assert read(traceparent=sent) is None


@pytest.mark.parametrize("state", ["x" * 513, "a=\x01", "a=1\r\nb: 2", "a=é"])
def test_a_malformed_state_is_dropped_and_the_context_is_kept(state: str) -> None:
    assert read(traceparent=f"00-{TRACE}-{SPAN}-01", tracestate=state) == TraceContext(
        TRACE, SPAN, True
    )


@given(st.text(), st.text())
def test_any_text_is_ignored_or_becomes_headers_that_are_read_again(
    parent: str, state: str
) -> None:
    context = read(traceparent=parent, tracestate=state)
    assert context is None or read(**dict(context.headers())) == context


@given(
    st.builds(
        TraceContext,
        st.from_regex(r"[0-9a-f]{31}[1-9a-f]", fullmatch=True),
        st.from_regex(r"[0-9a-f]{15}[1-9a-f]", fullmatch=True),
        st.booleans(),
        st.from_regex(r"([!-~]([ -~]{0,100}[!-~])?)?", fullmatch=True),
    )
)
def test_every_context_survives_its_headers(context: TraceContext) -> None:
    assert read(**dict(context.headers())) == context
