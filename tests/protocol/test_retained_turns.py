"""Tests that ended turns are found by their turn id while they are retained, that questions about
turns that have not ended stay open, and that the number of both stays bounded.
"""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.producer.leases import OpenQuestions, TextsById


def test_a_turn_is_found_by_its_word_while_it_is_kept() -> None:
    turns = TextsById()
    turns.add("w", "params", until=10)
    assert (turns.find("w", now=9), turns.find("w", now=10), turns.find("x", now=0)) == (
        "params",
        "",
        None,
    )
    turns.add("w", "", until=0)
    assert (turns.find("w", now=0), len(turns)) == ("", 1), "it has ended, and nothing is kept"


def test_a_word_that_was_given_twice_means_the_later_turn() -> None:
    turns = TextsById()
    turns.add("w", "old", until=10)
    turns.add("w", "new", until=5)
    assert (turns.find("w", now=1), len(turns)) == ("new", 1)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9))))
def test_the_oldest_are_forgotten_first(added: list[tuple[str, int]]) -> None:
    turns, model = TextsById(max_texts=3, max_chars=20), dict[str, int]()
    for word, size in added:
        turns.add(word, "x" * size, until=1)
        model.pop(word, None)
        model[word] = size
        while len(model) > 3 or sum(model.values()) > 20:
            del model[next(iter(model))]
    assert len(turns) == len(model)
    found = {word: turns.find(word, now=0) for word in "abcdef"}
    assert {word: len(params) for word, params in found.items() if params is not None} == model


def test_a_question_stays_open_until_its_turn_ends() -> None:
    questions: OpenQuestions[str] = OpenQuestions()
    assert questions.ask("w", "one", until=10)
    assert questions.ask("w", "two", until=20)
    assert questions.ask("x", "three", until=30)
    assert questions.take("w") == ["one", "two"]
    assert (questions.take("w"), len(questions)) == ([], 1)


def test_a_question_ends_by_its_deadline() -> None:
    questions: OpenQuestions[str] = OpenQuestions()
    for number, (word, until) in enumerate([("w", 10), ("w", 20), ("x", 10), ("x", 5)]):
        questions.ask(word, f"asker {number}", until)
    assert questions.expire(now=4) == []
    assert questions.expire(now=10) == [("w", "asker 0"), ("x", "asker 2"), ("x", "asker 3")]
    assert (questions.take("w"), questions.take("x"), len(questions)) == (["asker 1"], [], 0)


def test_only_so_many_questions_stay_open() -> None:
    questions: OpenQuestions[str] = OpenQuestions(max_questions=1)
    assert questions.ask("w", "one", until=10)
    assert not questions.ask("x", "two", until=10)
    questions.take("w")
    assert questions.ask("x", "two", until=10)
