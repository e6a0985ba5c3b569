"""Reading answers and comparing states, for the environments over public servers."""

from __future__ import annotations

from arenarl.envs.shared import codes_right, share, stated


def test_the_answer_is_its_line():
    assert stated("I looked.\n**Answer**: 42\nbye") == " 42"
    assert stated("42") == "42" and stated(None) == ""
    assert stated("\n" * 100_000 + "answer: 7") == " 7"  # in no time to speak of


def test_codes_named_wrongly_take_away():
    assert codes_right("answer: AB123, CD456", ["AB123", "CD456"]) == 1.0
    assert codes_right("answer: AB123, EF789", ["AB123", "CD456"]) == 0.0
    assert codes_right("answer: ab123", ["AB123", "CD456"]) == 0.5
    assert codes_right("AB123", ["AB123"]) == 0.0


def test_share_counts_what_was_asked_and_halves_for_each_harm():
    start, goal = {("a",): 1, ("b",): 1, ("c",): 1}, {("a",): 2, ("c",): 1, ("d",): 1}
    assert share(start, goal, start) == 0.0
    assert share(start, goal, goal) == 1.0
    assert share(start, goal, {("a",): 2, ("b",): 1, ("c",): 1}) == 1 / 3
    assert share(start, goal, {("a",): 2, ("c",): 5, ("d",): 1}) == 0.5
    assert share(start, goal, {("a",): 2, ("c",): 1, ("d",): 1, ("e", 1, 1, "x"): 0, ("e", 1, 1, "y"): 0}) == 0.5
    assert share(start, start, start) == 1.0 and share(start, start, goal) == 0.5**3
