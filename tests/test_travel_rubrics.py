"""The language of travel assertions: what its sentences say, when they hold, and what is true of the world."""

from __future__ import annotations

import string
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.envs import travel_server
from arenarl.envs.travel import Claim, Need, TravelTasks, parse_answer, world_rows
from arenarl.envs.travel_rubrics import (
    LABELS_BY_TOOL,
    Assertion,
    TravelGrader,
    grounded_claims,
    holds,
    read_assertion,
    world_truth,
)
from arenarl.envs.travel_world import AIRLINES, CATEGORIES, MODES, PLACE_NAMES, SKIES
from arenarl.rubric import ChecklistItem
from arenarl.types import Task, ToolCall, ToolEvent, ToolResult, ToolResultKind, Trajectory

TASKS = TravelTasks()
WORLD = TASKS.world
TASK = Task(task_id="t", kind="one_day", prompt="Plan Monday in Oslo.")


def event(tool: str, text: str, kind: ToolResultKind = "ok", named: str = "", **arguments: str) -> ToolEvent:
    call = ToolCall(id="call_0", name=named or tool, arguments=arguments)
    return ToolEvent(call=call, result=ToolResult(kind=kind, text=text, tool=tool), turn=0)


SKY = event("weather", "sky celsius\nsun 21", city="Oslo", day="Monday")
CAFES = event("poi_search", "name usd rating\nLotus 12 3\nMint 9 8", city="Oslo", category="Cafe")
WAYS = event("direction", "mode usd minutes\nmetro 7 12\nbus 3 30", city="Oslo", origin="Lotus", destination="Elm")
FLIGHTS = event("search_flights", "flight usd minutes\nVA23 60 95", origin="Oslo", destination="Rome", day="Friday")
EVENTS = event("web_search", "event usd\nElm 5", query="Oslo")
ALL = (SKY, CAFES, WAYS, FLIGHTS, EVENTS)
ANSWER = "\n".join(
    [
        "weather: sun 21 celsius", "cafe: Lotus 12 usd", "go by: metro 7 usd", "flight: VA23 60 usd", "event: Elm 5 usd",
        "take: flight",
    ]
)  # fmt: skip


async def grade(
    text: str, answer: str | None = ANSWER, events: Sequence[ToolEvent] = ALL, grounded: bool = True
) -> bool | None:
    trajectory = Trajectory(messages=(), events=tuple(events), answer=answer)
    (met,) = await TravelGrader(grounded=grounded).grade([ChecklistItem(name="r1", text=text)], trajectory, TASK)
    return met


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cafe is Lotus.", Assertion(kind="is", label="cafe", name="Lotus")),
        ("The cafe is not Elm.", Assertion(kind="is_not", label="cafe", name="Elm")),
        ("The way is metro.", Assertion(kind="is", label="go by", name="metro")),
        ("The flight is VA23", Assertion(kind="is", label="flight", name="VA23")),
        ("The weather is not fog.", Assertion(kind="is_not", label="weather", name="fog")),
        ("The train costs 40 usd.", Assertion(kind="costs", label="train", number=40)),
        ("The weather is 21 celsius.", Assertion(kind="celsius", label="weather", number=21)),
        ("The answer names an event.", Assertion(kind="names", label="event")),
        ("The  answer\tnames a way.", Assertion(kind="names", label="go by")),
        ("The total is at most 90 usd.", Assertion(kind="total", number=90)),
        ("The answer takes the train.", Assertion(kind="takes", label="train")),
        ("poi_search was called.", Assertion(kind="called", name="poi_search")),
    ],
)
def test_a_sentence_of_the_language(text: str, expected: Assertion):
    assert read_assertion(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "The cafe is nice.", "The cafe is cheap.", "The bar is Lotus.", "The cafe costs 12 dollars.",
        "The cafe is 21 celsius.",
        "The total is at least 9 usd.", "poi_find was called.", "The cafe is Lotus. The park is Elm.", "cafe is Lotus.",
        "The cafe is Lotus.\nThe cafe is Elm.", "The cafe costs 9999999999 usd.",
        "The answer names the cafe.", "The cafe is Lotus..",
    ],
)  # fmt: skip
async def test_another_sentence_cannot_be_told(text: str):
    assert read_assertion(text) is None
    assert await grade(f"x {text}") is None


@given(st.text(max_size=80) | st.from_regex(r"The [a-z]{3,8} (is|costs) [A-Za-z0-9]{1,9}( usd)?\.?", fullmatch=True))
def test_any_text_is_read_or_refused(text: str):
    assertion = read_assertion(text)
    assert assertion is None or holds(assertion, {}, set()) is False


def test_every_name_of_the_world_can_be_asserted():
    names = [*PLACE_NAMES, *MODES, *SKIES, *(f"{code}10" for code in (*AIRLINES, "T"))]
    expected = [Assertion(kind="is", label="cafe", name=name) for name in names]
    assert [read_assertion(f"The cafe is {name}.") for name in names] == expected


def test_the_tools_are_those_of_the_server():
    assert set(LABELS_BY_TOOL) == set(travel_server.TOOLS)
    assert [read_assertion(f"The answer names a {category}.") for category in CATEGORIES] == [
        Assertion(kind="names", label=category) for category in CATEGORIES
    ]


# --- grading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("The cafe is Lotus.", True),
        ("The cafe is Mint.", False),
        ("The cafe is not Mint.", True),
        ("The cafe is not Lotus.", False),
        ("The park is not Lotus.", False),  # there is no park
        ("The cafe costs 12 usd.", True),
        ("The cafe costs 9 usd.", False),
        ("The park costs 12 usd.", False),
        ("The weather costs 21 usd.", False),
        ("The weather is sun.", True),
        ("The weather is 21 celsius.", True),
        ("The weather is 20 celsius.", False),
        ("The way is metro.", True),
        ("The way is bus.", False),
        ("The flight is VA23.", True),
        ("The answer names an event.", True),
        ("The answer names a park.", False),
        ("The total is at most 84 usd.", True),  # 12 + 7 + 60 + 5
        ("The total is at most 83 usd.", False),
        ("The answer takes the flight.", True),
        ("The answer takes the train.", False),
        ("direction was called.", True),
        ("around_search was called.", False),
    ],
)
async def test_an_assertion_about_a_whole_answer(text: str, met: bool):
    assert await grade(text) is met
    assert await grade(text, grounded=False) is met


@pytest.mark.parametrize("answer", [None, "", "I do not know."])
async def test_no_answer_meets_nothing(answer: str | None):
    sentences = [
        "The cafe is not Elm.", "The answer names a cafe.", "The total is at most 99 usd.", "The answer takes the train.",
        "The cafe costs 12 usd.", "The weather is 21 celsius.",
    ]  # fmt: skip
    assert [await grade(sentence, answer) for sentence in sentences] == [False] * len(sentences)
    assert await grade("weather was called.", answer) is True


@pytest.mark.parametrize(
    ("line", "events"),
    [
        ("cafe: Fern 12 usd", [CAFES]),  # invented
        ("cafe: Lotus 9 usd", [CAFES]),  # another row's price
        ("cafe: Lotus 12 usd", []),
        ("cafe: Lotus 12 usd", [event("poi_search", CAFES.result.text, "tool_error", city="Oslo", category="cafe")]),
        ("cafe: Lotus 12 usd", [event("poi_search", CAFES.result.text, city="Oslo", category="park")]),
        ("cafe: sun 21 celsius", [SKY]),
    ],
)
async def test_a_line_without_support_does_not_count(line: str, events: list[ToolEvent]):
    for text in ("The answer names a cafe.", "The cafe is not Elm.", "The total is at most 99 usd."):
        assert await grade(text, line, events) is False
    assert await grade("The answer names a cafe.", line, events, grounded=False) is True


async def test_an_unsupported_price_cannot_lower_the_total():
    answer = "cafe: Lotus 1 usd\nflight: VA23 60 usd"
    assert await grade("The total is at most 70 usd.", answer) is False
    assert await grade("The total is at most 70 usd.", answer, grounded=False) is True
    assert (
        await grade("The total is at most 99 usd.", "cafe: Lotus\nflight: VA23 60 usd") is False
    )  # a price is left out
    assert (
        await grade("The total is at most 60 usd.", "weather: sun 21 celsius\nnote: Lotus 99 usd\nflight: VA23 60 usd")
        is True
    )


async def test_a_call_counts_by_its_own_name_if_it_was_answered():
    renamed = event("poi_search", CAFES.result.text, named="travel__poi_search", city="Oslo", category="cafe")
    assert await grade("poi_search was called.", None, [renamed]) is True
    assert await grade("The cafe is Lotus.", "cafe: Lotus 12 usd", [renamed]) is True
    failed = event("poi_search", "Error", "invalid_args")
    assert await grade("poi_search was called.", None, [failed]) is False


async def test_items_are_graded_in_their_order():
    texts = ["The cafe is Lotus.", "The cafe is nice.", "The cafe is Mint."]
    items = [ChecklistItem(name=str(n), text=text, scope="turn") for n, text in enumerate(texts)]
    trajectory = Trajectory(messages=(), events=ALL, answer=ANSWER)
    assert await TravelGrader().grade(items, trajectory, TASK) == [True, None, False]


@given(st.text(alphabet=string.printable, max_size=200))
def test_grounded_lines_are_lines_of_the_answer(text: str):
    claims = grounded_claims(f"{text}\ncafe: Lotus 12 usd", ALL)
    written = parse_answer(f"{text}\ncafe: Lotus 12 usd")
    assert claims.keys() == written.keys()
    assert all(claim in (None, written[label]) for label, claim in claims.items())
    assert claims["cafe"] == Claim(name="Lotus", numbers={"usd": 12}) or written["cafe"].name != "Lotus"


# --- the world ---------------------------------------------------------------------------------------------------

# Cafes of Seoul in world 0: Meadow 30 usd rating 2, Breeze 23 rating 6, Summit 34 rating 4.
SEARCH = {"name": "poi_search", "arguments": {"city": "Seoul", "category": "cafe"}}
RIDE = {
    "origin": "Luanda",
    "destination": "Ankara",
    "day": "Tuesday",
}  # flights from 25 usd (QR22), trains from 52 (T54)
RIDES = [{"name": "search_flights", "arguments": RIDE}, {"name": "search_train_tickets", "arguments": RIDE}]


def truth(prompt: str, texts: Sequence[str], tools: Sequence[dict], weight: float = 1.0) -> bool:
    rubrics = [{"text": text, "weight": weight} for text in texts]
    return world_truth(
        Task(task_id="t", kind="k", prompt=prompt, data={"rubrics": rubrics, "expected_tools": [*tools]}), WORLD
    )


@pytest.mark.parametrize(
    ("prompt", "texts", "true"),
    [
        ("Find the cheapest cafe in Seoul.", ["The cafe is Breeze.", "The cafe costs 23 usd."], True),
        ("Find the best rated cafe in Seoul.", ["The cafe is Breeze.", "The cafe is not Meadow."], True),
        ("Find the cheapest cafe in Seoul.", ["The cafe is Summit."], False),  # not the cheapest
        ("Find the cheapest cafe in Seoul.", ["The cafe is Breeze.", "The cafe costs 30 usd."], False),
        ("Find the cheapest cafe in Seoul.", ["The cafe is nice."], False),
        ("Find the cheapest cafe in Seoul.", ["The park is not Elm."], False),  # nothing expected finds a park
        ("Find a cafe in seoul!", ["The cafe is Summit.", "The cafe costs 34 usd."], True),  # any will do
        ("Find a cafe in Seoul.", ["The cafe is Summit.", "The cafe is not Summit."], False),
        ("Find a cafe in Seoul.", ["The total is at most 23 usd.", "poi_search was called."], True),
        ("Find a cafe in Seoul.", ["The total is at most 22 usd."], False),
        ("Find a cafe in Seoul. Budget 25 usd.", ["The cafe is not Breeze."], False),  # the others are too dear
        ("Find a cafe in Seoul. Budget 30 usd.", ["The cafe is not Breeze."], True),
        ("Find the cheapest cafe in Oslo.", ["The cafe is Breeze."], False),  # the call is about another city
    ],
)
def test_truth_of_a_task_about_one_call(prompt: str, texts: list[str], true: bool):
    assert truth(prompt, texts, [SEARCH]) is true


def test_the_honest_answer_takes_the_cheaper_ride():
    prompt = "Compare the cheapest flight and train from Luanda to Ankara on Tuesday."
    rides = ["The flight is QR22.", "The train is T54."]
    assert truth(prompt, [*rides, "The answer takes the flight."], RIDES) is True
    assert truth(prompt, [*rides, "The answer takes the train."], RIDES) is False
    assert truth(prompt, ["The answer takes the flight."], RIDES[:1]) is False  # nothing to compare it with
    assert (
        truth("Compare flight and train from Luanda to Ankara on Friday.", ["The answer names a flight."], RIDES)
        is False
    )


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "poi_find", "arguments": {"city": "Seoul", "category": "cafe"}},
        {"name": "poi_search", "arguments": {"city": "Seoul"}},
        {"name": "poi_search", "arguments": {"city": "Seoul", "category": 5}},
        {"name": "poi_search", "arguments": {"city": "Seoul", "category": "bar"}},
        {"name": "direction", "arguments": {"city": "Seoul", "origin": "cafe", "destination": "cafe"}},
    ],
)
def test_a_call_that_its_tool_refuses_makes_a_task_untrue(tool: dict):
    assert truth("Find a cafe in Seoul.", ["The answer names a cafe."], [SEARCH]) is True
    assert truth("Find a cafe in Seoul.", ["The answer names a cafe."], [SEARCH, tool]) is False


def test_many_calls_are_no_search_of_all_answers():
    # 16 lists of 3 places are 6**8 answers of one place for each of 8 categories.
    cities = ("Seoul", "Ankara")
    calls = [
        {"name": "poi_search", "arguments": {"city": city, "category": category}}
        for city in cities
        for category in CATEGORIES
    ]
    places = [[place.usd for city in cities for place in WORLD.search(city, category)] for category in CATEGORIES]
    least, most = sum(map(min, places)), sum(map(max, places))
    ask = "Plan a week in Seoul and Ankara."
    assert truth(ask, [f"The total is at most {least} usd."], calls) is True
    assert truth(ask, [f"The total is at most {least - 1} usd."], calls) is False
    assert truth(ask, [f"The total is at most {most - 1} usd."], calls, weight=-1.0) is True
    assert truth(ask, [f"The total is at most {most} usd."], calls, weight=-1.0) is False


def test_a_fault_must_be_avoidable():
    assert truth("Find a cafe in Seoul.", ["The cafe is Summit."], [SEARCH], weight=-1.0) is True
    assert truth("Find a cafe in Seoul.", ["The answer names a cafe."], [SEARCH], weight=-1.0) is False


def test_a_search_of_the_web_has_to_name_the_city_that_the_query_names():
    event_of_seoul = next(iter(world_rows(WORLD, Need(label="event", tool="web_search", arguments={"query": "Seoul"}))))
    texts = [f"The event is {event_of_seoul['event']}.", f"The event costs {event_of_seoul['usd']} usd."]
    asked = {"name": "web_search", "arguments": {"query": "what is on in Seoul this week"}}
    assert truth("Find an event in Seoul.", texts, [asked]) is True
    assert truth("Find an event in Rome.", texts, [asked]) is False


def test_an_event_needs_no_expected_call():
    event_of_seoul = WORLD.event("Seoul")
    texts = [f"The event is {event_of_seoul.name}.", f"The total is at most {event_of_seoul.usd} usd."]
    assert truth("Find an event in Seoul.", texts, []) is True
    assert truth("Find an event in Lahore.", texts, []) is False
    assert truth("Find an event.", texts, []) is False
    # No event is asserted, so the honest answer pays for none.
    assert truth("Find a cafe and an event in Seoul.", ["The total is at most 23 usd."], [SEARCH]) is True
