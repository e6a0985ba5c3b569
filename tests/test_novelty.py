"""Which requests are new, and what sort of task one is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.errors import ConfigError
from arenarl.novelty import Novelty, signature
from arenarl.types import Task

CAFE = "Find the cheapest cafe near the old bridge in Hanoi, for 2 people."


def seen(*queries: str, **settings: float) -> Novelty:
    novelty = Novelty(**settings)
    for query in queries:
        novelty.add(query)
    return novelty


def test_nothing_is_near_before_the_first():
    assert Novelty().nearest(CAFE) is None
    assert not Novelty().is_duplicate(CAFE)


@pytest.mark.parametrize(
    "same", [CAFE, CAFE.upper(), "find the cheapest  cafe near the old bridge\nin hanoi for 2 people"]
)
def test_case_spaces_and_punctuation_make_nothing_new(same: str):
    assert seen(CAFE).nearest(same) == (1.0, CAFE)
    assert seen(CAFE).is_duplicate(same)


def test_a_word_more_at_the_end_is_a_near_duplicate():
    # 13 words have 12 pairs, the longer request has 13: 12 of 13 are shared, and all facts.
    assert seen(CAFE).nearest(CAFE + " Please.") == (12 / 13, CAFE)
    assert seen(CAFE).is_duplicate(CAFE + " Please.")
    assert not seen(CAFE, threshold=0.95).is_duplicate(CAFE + " Please.")


def test_writing_the_names_small_makes_nothing_new():
    assert seen(CAFE).nearest(CAFE.lower() + " please") == (12 / 13, CAFE)
    assert seen(CAFE).is_duplicate(CAFE.lower() + " please")


@pytest.mark.parametrize(
    ("other", "similarity"),
    [
        (CAFE.replace("Hanoi", "Oslo"), 1 / 3),  # of Hanoi, Oslo and 2; pairs 10/14
        (CAFE.replace("2", "5"), 1 / 3),
        (CAFE.replace("cafe", "museum"), 10 / 14),
        ("In Hanoi 2 people look for a museum", 2 / 17),  # of the pairs, "in hanoi" and "2 people"
    ],
)
def test_another_fact_or_another_wish_is_new(other: str, similarity: float):
    nearest = seen(CAFE).nearest(other)
    assert nearest == (pytest.approx(similarity), CAFE)
    assert not seen(CAFE).is_duplicate(other)


def test_the_way_there_is_not_the_way_back():
    there, back = "What is the fastest train from Hanoi to Oslo?", "What is the fastest train from Oslo to Hanoi?"
    assert seen(there).nearest(back) == (5 / 11, there)


def test_a_capital_at_the_start_of_a_sentence_is_no_fact():
    one, other = "Plan my day there. Budget is small.", "plan my day there. Start is small."
    assert seen(one).nearest(other) == (4 / 8, one)
    assert seen("we saw Budget is small").nearest("we saw Start is small") is None


def test_characters_are_words_in_chinese():
    assert seen("找到河内最便宜的咖啡馆").nearest("找到河内最便宜的博物馆") == (7 / 13, "找到河内最便宜的咖啡馆")
    assert seen("找到河内最便宜的咖啡馆").is_duplicate("找到河内最便宜的咖啡馆。")


def test_the_nearest_of_several_is_given():
    near = "Find the cheapest museum near the old bridge in Hanoi, for 2 people."
    assert seen("Go home now.", near, CAFE).nearest(CAFE + " Now")[1] == CAFE


def test_the_oldest_is_forgotten_and_what_comes_again_is_young():
    novelty = seen("first one", "second one", "First one!", "third one", keep=2)
    assert len(novelty) == 2
    assert [novelty.is_duplicate(q) for q in ("first one", "second one", "third one")] == [True, False, True]


def test_a_copy_learns_apart():
    novelty = seen(CAFE)
    twin = novelty.copy()
    twin.add("Go home now.")
    assert (len(novelty), len(twin), twin.is_duplicate(CAFE)) == (1, 2, True)


@pytest.mark.parametrize("settings", [{"threshold": 0.0}, {"threshold": 1.5}, {"keep": 0}])
def test_settings_without_sense_are_refused(settings: dict[str, float]):
    with pytest.raises(ConfigError, match="must be above 0 and at most 1, and keep="):
        Novelty(**settings)


texts = st.text() | st.lists(st.sampled_from("find the Cafe in Hanoi 12 . for Two".split()), max_size=9).map(" ".join)


@given(texts, texts)
def test_similarity_is_symmetric_in_the_unit_interval_and_one_for_the_same(a: str, b: str):
    there, back = seen(a).nearest(b), seen(b).nearest(a)
    assert (there and there[0]) == (back and back[0])
    assert there is None or 0 < there[0] <= 1
    assert seen(a).nearest(a) == (1.0, a)


def task(kind: str, *tools: tuple[str, dict[str, str]]) -> Task:
    data = {"expected_tools": [{"name": name, "arguments": arguments} for name, arguments in tools]}
    return Task(task_id="t", kind=kind, prompt="p", data=data)


def test_a_signature_has_the_kind_the_tools_and_what_is_structural_in_their_arguments():
    weather = ("weather", {"city": "Hanoi", "day": "Monday"})
    one = task("one_day", weather, ("poi_search", {"city": "Hanoi", "category": "Cafe"}))
    other = task(
        "one_day", ("poi_search", {"category": "cafe", "city": "Oslo"}), ("weather", weather[1] | {"city": "Oslo"})
    )
    assert signature(one) == signature(other) == "one_day: poi_search(category=cafe, city) weather(city, day)"
    assert signature(task("search", weather)) == "search: weather(city, day)"
    assert signature(task("search", weather, weather)) == "search: weather(city, day) weather(city, day)"
    assert signature(Task(task_id="t", kind="search", prompt="p")) == "search:"


def test_a_signature_of_malformed_data_names_the_task():
    with pytest.raises(ConfigError, match="expected_tools of task 't9'"):
        signature(Task(task_id="t9", kind="search", prompt="p", data={"expected_tools": "all"}))
