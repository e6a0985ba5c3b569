"""Expected tool calls: when a call is the expected one, and that each call fulfils one expectation at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.errors import ConfigError
from arenarl.expected_tools import (
    ExpectedTool,
    Tolerance,
    ToolMatch,
    match_tools,
    matches,
    tool_to_data,
    tools_from_data,
)
from arenarl.types import ToolCall, ToolEvent, ToolResult


def same(wanted: Mapping[str, Any], given: Mapping[str, Any], tool: str = "poi_search", **tolerance: Any) -> bool:
    call = ToolCall(id="c", name=tool, arguments=given)
    return matches(ExpectedTool(name=tool, arguments=wanted), call, Tolerance(**tolerance))


def event(name: str, arguments: Mapping[str, Any], *, kind: str = "ok", own_name: str = "") -> ToolEvent:
    result = ToolResult(kind=kind, text="found", tool=own_name)
    return ToolEvent(call=ToolCall(id="c", name=name, arguments=arguments), result=result, turn=0)


# --- one call ------------------------------------------------------------------------------------------------------

EQUAL = [
    ({"city": "Ha Noi"}, {"city": " hanoi\n"}),
    ({"city": "Ｈanoi"}, {"city": "Hanoi"}),
    ({"n": 5}, {"n": 5.0}),
    ({"n": 5}, {"n": " 5 "}),
    ({"n": "5.50"}, {"n": 5.5}),
    ({"open": True}, {"open": True}),
    ({"city": "Hanoi"}, {"city": "Hanoi", "category": "cafe"}),
    ({"day": None}, {}),
    ({}, {"city": "Hanoi"}),
    ({"tags": ["Cafe", 1]}, {"tags": ["cafe", 1.0]}),
    ({"filter": {"stars": 4}}, {"filter": {"stars": "4", "open": True}}),
]
DIFFERENT = [
    ({"city": "Hanoi"}, {"city": "Hue"}),
    ({"city": "Hanoi"}, {}),
    ({"city": "Hanoi"}, {"town": "Hanoi"}),
    ({"n": 5}, {"n": 6}),
    ({"n": 5}, {"n": "five"}),
    ({"n": 1}, {"n": True}),
    ({"n": 1_000}, {"n": "1_000"}),
    ({"n": 10**400}, {"n": float("inf")}),
    ({"n": float("nan")}, {"n": float("nan")}),
    ({"open": True}, {"open": "true"}),
    ({"open": False}, {}),
    ({"tags": ["cafe"]}, {"tags": ["cafe", "bar"]}),
    ({"tags": ["cafe", "bar"]}, {"tags": ["bar", "cafe"]}),
    ({"filter": {"stars": 4}}, {"filter": {"stars": 5}}),
    ({"filter": {"stars": 4}}, {"filter": "stars 4"}),
]


@pytest.mark.parametrize(("wanted", "given"), EQUAL)
def test_what_says_the_same_is_the_same(wanted, given):
    assert same(wanted, given)


@pytest.mark.parametrize(("wanted", "given"), DIFFERENT)
def test_what_says_something_else_is_not(wanted, given):
    assert not same(wanted, given)


def test_the_name_of_the_tool_counts():
    assert not matches(ExpectedTool(name="poi_search"), ToolCall(id="c", name="around_search"))
    assert matches(ExpectedTool(name="POI_search"), ToolCall(id="c", name="poi_search"))


@pytest.mark.parametrize(
    ("key", "wanted", "given", "expected"),
    [
        ("lat", 21.0, 21.1, True),
        ("lat", 21.0, 21.11, False),
        ("latitude", "21.0", 20.9, True),
        ("lon", 105.85, "105.94", True),
        ("from_lng", 105.85, 105.7, False),
        ("longitude", 179.97, -179.98, True),
        ("location", "105.85,21.02", "105.94, 20.93", True),
        ("location", "105.85,21.02", "105.85,21.13", False),
        ("location", "105.85,21.02", "21.02,105.85", False),
        ("location", "105.85,21.02", [105.9, 21.0], True),
        ("origin", "(105.85，21.02)", "105.85,21.02", True),
        ("location", "Old Quarter", "old quarter", True),
        ("location", "105.85,21.02", "Old Quarter", False),
        ("location", "105.85,21.02", "105.85", False),
        ("price", 21.0, 21.05, False),
        ("pair", "105.85,21.02", "105.86,21.02", False),
        ("lat", 500.0, 500.05, False),
        ("lat", 10**400, 10**400, True),
    ],
)
def test_coordinates_may_be_a_tenth_of_a_degree_apart(key, wanted, given, expected):
    assert same({key: wanted}, {key: given}, tool="around_search") is expected


def test_the_distance_is_a_setting():
    assert same({"lat": 21.0}, {"lat": 21.4}, degrees=0.5)
    assert not same({"lat": 21.0}, {"lat": 21.01}, degrees=0.0)
    with pytest.raises(ConfigError, match="degrees=-1 is no distance"):
        Tolerance(degrees=-1)
    with pytest.raises(ConfigError, match="degrees=nan"):
        Tolerance(degrees=float("nan"))


TICKET = {"origin": "Hanoi", "destination": "Hue", "day": "monday"}


def test_of_a_ticket_only_the_two_cities_count():
    tuesday = TICKET | {"day": "tuesday"}
    assert same(TICKET, tuesday, tool="search_flights") and same(TICKET, tuesday, tool="search_train_tickets")
    assert same(
        {"from_city": "Hanoi", "to_city": "Hue", "date": "x"},
        {"from_city": "Hanoi", "to_city": "Hue"},
        "search_flights",
    )
    assert not same(TICKET, TICKET | {"destination": "Oslo"}, tool="search_flights")
    assert not same(TICKET, tuesday, tool="direction")


def test_a_ticket_that_names_no_city_is_compared_whole():
    assert not same({"number": "VN 1"}, {"number": "VN 2"}, tool="search_flights")
    assert same({"number": "VN 1"}, {"number": "VN1"}, tool="search_flights")


def test_which_tools_sell_tickets_is_a_setting():
    assert same(TICKET, TICKET | {"day": "tuesday"}, tool="ferry", tickets=("ferry",))
    assert not same(TICKET, TICKET | {"day": "tuesday"}, tool="search_flights", tickets=())


def test_arguments_nested_beyond_all_reason_match_nothing():
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    assert not same({"a": deep}, {"a": deep})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["lat", "location", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["lat", "location", "origin", "city", "n"]), JSON, max_size=4)


@given(ARGUMENTS, ARGUMENTS, st.sampled_from(["poi_search", "search_flights"]))
def test_any_json_is_compared_and_a_call_matches_itself(wanted, given, tool):
    assert same(wanted, wanted, tool)
    assert same(wanted, given, tool) in (True, False)


# --- one to one ----------------------------------------------------------------------------------------------------

CITY = ExpectedTool(name="poi_search", arguments={"city": "Hanoi"})
CAFE = ExpectedTool(name="poi_search", arguments={"city": "Hanoi", "category": "cafe"})
FIND_CAFE = event("poi_search", {"city": "Hanoi", "category": "cafe"})
FIND_BAR = event("poi_search", {"city": "Hanoi", "category": "bar"})


def test_a_call_that_two_could_use_goes_where_it_is_needed():
    assert match_tools([CITY, CAFE], [FIND_CAFE, FIND_BAR]) == ToolMatch(matched=(1, 0), superfluous=0)


def test_one_call_fulfils_one_expectation():
    matched = match_tools([CAFE, CAFE], [FIND_CAFE]).matched
    assert sorted(matched, key=str) == [0, None]


def test_calls_that_fulfil_nothing_are_counted():
    assert match_tools([CAFE], [FIND_BAR, FIND_CAFE, FIND_CAFE]) == ToolMatch(matched=(1,), superfluous=2)
    assert match_tools([], [FIND_BAR]) == ToolMatch(matched=(), superfluous=1)
    assert match_tools([CAFE], []) == ToolMatch(matched=(None,), superfluous=0)


@pytest.mark.parametrize("kind", ["tool_error", "invalid_args", "unknown_tool", "timeout"])
def test_a_failed_call_counts_for_nothing(kind):
    failed = event("poi_search", {"city": "Hanoi", "category": "cafe"}, kind=kind)
    assert match_tools([CAFE], [failed]) == ToolMatch(matched=(None,), superfluous=0)
    assert match_tools([CAFE], [failed, FIND_CAFE]) == ToolMatch(matched=(1,), superfluous=0)


def test_of_equal_calls_the_first_is_taken():
    assert match_tools([CAFE], [FIND_BAR, FIND_CAFE, FIND_CAFE]).matched == (1,)
    assert match_tools([CITY, CITY], [FIND_CAFE, FIND_BAR, FIND_BAR]).superfluous == 1


def test_a_tool_goes_by_the_name_of_its_server_too():
    renamed = event("travel_poi_search", CAFE.arguments, own_name="poi_search")
    assert match_tools([CAFE], [renamed]).matched == (0,)
    assert match_tools([ExpectedTool(name="travel_poi_search")], [renamed]).matched == (0,)


def test_the_tolerance_reaches_the_match():
    near, there = ExpectedTool(name="near", arguments={"lat": 21.0}), event("near", {"lat": 21.3})
    assert match_tools([near], [there]).matched == (None,)
    assert match_tools([near], [there], Tolerance(degrees=0.5)).matched == (0,)


SETS = st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 1), max_size=3), max_size=5)


def largest(expected: Sequence[ExpectedTool], events: Sequence[ToolEvent]) -> int:
    """Most expectations that any assignment fulfils, by trying all."""
    slots = [*range(len(events)), *[None] * len(expected)]
    fits = lambda tool, slot: slot is not None and matches(tool, events[slot].call)  # noqa: E731
    return max(sum(map(fits, expected, order)) for order in set(permutations(slots, len(expected))))


@given(SETS.filter(lambda sets: len(sets) < 5), SETS, st.data())
def test_the_match_is_one_to_one_right_and_as_large_as_can_be(wanted, made, data):
    expected = [ExpectedTool(name="t", arguments=arguments) for arguments in wanted]
    kinds = data.draw(st.lists(st.sampled_from(["ok", "ok", "tool_error"]), min_size=len(made), max_size=len(made)))
    events = [event("t", arguments, kind=kind) for arguments, kind in zip(made, kinds, strict=True)]
    result = match_tools(expected, events)
    used = [index for index in result.matched if index is not None]
    assert len(used) == len(set(used)) == largest(expected, [e for e in events if e.result.ok])
    pairs = [(tool, events[index]) for tool, index in zip(expected, result.matched, strict=True) if index is not None]
    assert all(made.result.ok and matches(tool, made.call) for tool, made in pairs)
    assert result.superfluous == kinds.count("ok") - len(used)


def test_many_calls_do_not_cost_a_match():
    events = [FIND_BAR] * 3000 + [FIND_CAFE]
    assert match_tools([CAFE, CITY], events) == ToolMatch(matched=(3000, 0), superfluous=2999)


# --- data ----------------------------------------------------------------------------------------------------------


def test_expected_tools_are_read_and_written_as_data():
    data = {"expected_tools": [{"name": " weather ", "arguments": {"city": "Hue"}}, {"name": "web_search"}]}
    tools = tools_from_data(data)
    assert tools == [ExpectedTool(name="weather", arguments={"city": "Hue"}), ExpectedTool(name="web_search")]
    written = [tool_to_data(tool) for tool in tools]
    assert written == [{"name": "weather", "arguments": {"city": "Hue"}}, {"name": "web_search", "arguments": {}}]
    assert tools_from_data({"expected_tools": written}) == tools and tools_from_data({}) == []


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"name": "weather"}, "is a dict; give a list"),
        (["weather"], "entry 1, is 'weather'; give an object"),
        ([{"name": "weather"}, {"tool": "weather"}], "entry 2, is .*; give an object"),
        ([{"arguments": {}}], "entry 1, has name=None; give the name of a tool"),
        ([{"name": " "}], "name=' '"),
        ([{"name": "weather", "arguments": "Hue"}], "arguments='Hue'; give an object"),
    ],
)
def test_data_that_is_no_expected_tool_names_task_entry_and_remedy(entries, match):
    with pytest.raises(ConfigError, match="^expected_tools of task 'x9'.*" + match):
        tools_from_data({"expected_tools": entries}, task_id="x9")
