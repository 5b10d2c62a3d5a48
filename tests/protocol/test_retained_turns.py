"""Tests that retained turns are found by their turn id while they are retained, and that their
number and total length stay bounded.
"""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.leases import EndedTurns


def test_a_turn_is_found_by_its_word_while_it_is_kept() -> None:
    turns = EndedTurns()
    turns.add("w", "params", until=10)
    assert (turns.find("w", now=9), turns.find("w", now=10), turns.find("x", now=0)) == (
        "params",
        "",
        "",
    )
    turns.forget("w")
    turns.forget("w")
    assert (turns.find("w", now=0), len(turns)) == ("", 0)


def test_a_word_that_was_given_twice_means_the_later_turn() -> None:
    turns = EndedTurns()
    turns.add("w", "old", until=10)
    turns.add("w", "new", until=5)
    assert (turns.find("w", now=1), len(turns)) == ("new", 1)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9))))
def test_the_oldest_are_forgotten_first(added: list[tuple[str, int]]) -> None:
    turns, model = EndedTurns(max_turns=3, max_chars=20), dict[str, int]()
    for word, size in added:
        turns.add(word, "x" * size, until=1)
        model.pop(word, None)
        model[word] = size
        while len(model) > 3 or sum(model.values()) > 20:
            del model[next(iter(model))]
    assert len(turns) == len(model)
    assert {word: len(turns.find(word, now=0)) for word in "abcdef"} == {
        word: model.get(word, 0) for word in "abcdef"
    }
