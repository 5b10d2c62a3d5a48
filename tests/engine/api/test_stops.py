from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.api.assembly import StopMatcher, StopScan


def feed(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for chunk in chunks:
        scan = matcher.push(chunk)
        shown += scan.text
        if scan.stop is not None:
            return shown, scan.stop
    return shown + matcher.finish(), None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The reference result: check ever longer prefixes of the text until one ends with a stop
    string.
    """
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_string_is_found_across_segments() -> None:
    assert feed(["STOP"], ["before S", "T", "OP after"]) == ("before ", "STOP")


def test_text_that_only_begins_like_a_stop_string_is_shown_in_the_end() -> None:
    assert feed(["STOP"], ["a STO", "RE", " ST"]) == ("a STORE ST", None)


def test_nothing_is_shown_that_may_become_a_stop_string() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aaa") == StopScan("a")
    assert matcher.push("b") == StopScan("", "aab")


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopMatcher([]).push("text") == StopScan("text")


short = st.text(alphabet="ab", max_size=4)


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4),
    st.lists(short, max_size=12),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    stops: list[str], chunks: list[str]
) -> None:
    assert feed(stops, chunks) == expected(stops, "".join(chunks))
