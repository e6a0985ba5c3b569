"""The travel environment: a world that every process agrees on, tasks that can be solved, and marks that are deserved."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import gymnasium
import psutil
import pytest
from mcp.server.mcpserver.exceptions import ToolError

from arenarl.envs.travel import (
    KINDS,
    Claim,
    Need,
    TravelTasks,
    checklist,
    outcome_quality,
    parse_answer,
    parse_table,
)
from arenarl.envs.travel_server import TravelTools
from arenarl.envs.travel_world import World
from arenarl.errors import ConfigError
from arenarl.mcp import ServerHub
from arenarl.tool_calls import HERMES
from arenarl.types import Message, Task, ToolCall, ToolEvent, ToolResult, ToolResultKind, Trajectory

ROOT = Path(__file__).resolve().parent.parent
TASKS = TravelTasks()
TOOLS = TravelTools()
SEOUL_CAFES = [("Meadow", 30, 2), ("Breeze", 23, 6), ("Summit", 34, 4)]  # name, usd, rating in world 0
HELD_OUT = set(TASKS.world.split("heldout"))
TRAIN = set(TASKS.world.split("train"))


def event(tool: str, text: str, kind: ToolResultKind = "ok", **arguments: str) -> ToolEvent:
    call = ToolCall(id="call_0", name=tool, arguments=arguments)
    return ToolEvent(call=call, result=ToolResult(kind=kind, text=text, tool=tool), turn=0)


def trajectory(events: Sequence[ToolEvent], answer: str | None) -> Trajectory:
    return Trajectory(messages=(), events=tuple(events), answer=answer)


def score(task: Task, episode: Trajectory) -> float | None:
    marks = checklist(task)
    return marks.score(asyncio.run(marks.run(episode)))


def failed(task: Task, events: Sequence[ToolEvent], answer: str | None) -> set[str]:
    """Names of the checklist items that are not met."""
    return {
        name for name, met in asyncio.run(checklist(task).run(trajectory(events, answer))).items() if met is not True
    }


# --- the world ---------------------------------------------------------------------------------------------------


def world_digest() -> str:
    import hashlib

    from arenarl.envs.travel import TravelTasks
    from arenarl.envs.travel_world import CATEGORIES, DAYS

    tasks = TravelTasks()
    world = tasks.world
    said = [world.cities, world.split("train"), world.split("heldout"), tasks.tasks("train", 20, seed=5)]
    for city in list(world.cities)[:12]:
        names = list(world.places(city))
        near = world.neighbours(city, list(world.cities))
        said += [world.places(city), world.event(city), near, world.weather(city, DAYS[0])]
        said += [world.around(city, names[0], category) for category in CATEGORIES]
        said += [world.routes(city, names[0], names[1]), world.flights(city, near[0], DAYS[1])]
        said += [world.trains(city, near[0], DAYS[2])]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def test_another_process_lives_in_the_same_world():
    code = f"{inspect.getsource(world_digest)}\nprint(world_digest())"
    env = os.environ | {"PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == world_digest()


def test_the_world_of_the_tiny_agent_is_as_it_was():
    assert [(p.name, p.usd, p.rating) for p in TASKS.world.search("Seoul", "cafe")] == SEOUL_CAFES
    assert TASKS.world.weather("Seoul", "Monday") == ("rain", 13)
    assert TASKS.world.cities["Seoul"].airport == "GMP"


def test_another_seed_is_another_world():
    assert World(1).places("Seoul") == World(1).places("Seoul")
    assert World(1).places("Seoul") != World(2).places("Seoul")


def test_places_of_a_category_differ_in_price_and_rating():
    for city in TASKS.world.cities:
        by_category: dict[str, list[tuple[int, int]]] = {}
        for place in TASKS.world.places(city).values():
            by_category.setdefault(place.category, []).append((place.usd, place.rating))
        assert len(by_category) == 8
        for rows in by_category.values():
            prices, ratings = zip(*rows, strict=True)
            assert len(rows) == len(set(prices)) == len(set(ratings)) == 3


def test_distance_of_two_cities():
    assert TASKS.world.distance_km("Shanghai", "Beijing") == pytest.approx(1067, abs=5)
    assert TASKS.world.distance_km("Seoul", "Seoul") == 0


# --- tasks -------------------------------------------------------------------------------------------------------


def test_a_quarter_of_the_cities_is_held_out():
    assert (len(TRAIN), len(HELD_OUT), len(TRAIN & HELD_OUT)) == (72, 24, 0)


def test_no_training_task_names_a_held_out_city():
    for task in TASKS.tasks("train", 1000, seed=0):
        said = set(re.findall(r"\w+", task.prompt))
        said |= {value for need in task.data["needs"] for value in need["arguments"].values()}
        assert said & TRAIN
        assert not said & HELD_OUT


def test_held_out_tasks_are_distinct_and_of_every_kind():
    tasks = TASKS.tasks("heldout", 320, seed=0)
    assert len({task.prompt for task in tasks}) == len({task.task_id for task in tasks}) == len(tasks) == 320
    assert [task.kind for task in tasks] == [*KINDS] * 64
    assert all(set(re.findall(r"\w+", task.prompt)) & HELD_OUT for task in tasks)


def test_equal_arguments_give_equal_tasks():
    assert TASKS.tasks("train", 10, seed=4) == TASKS.tasks("train", 10, seed=4)
    assert TASKS.tasks("train", 10, seed=4) != TASKS.tasks("train", 10, seed=5)
    with pytest.raises(ConfigError, match="split 'test' is unknown"):
        TASKS.tasks("test", 1, seed=0)


# --- every task can be solved ------------------------------------------------------------------------------------


def oracle(task: Task) -> Trajectory:
    """Makes each needed call once and takes the best row for the wish, the cheapest without one."""
    events, lines, prices = [], [], {}
    for need in (Need(**need) for need in task.data["needs"]):
        text = getattr(TOOLS, need.tool)(**need.arguments)
        events.append(event(need.tool, text, **need.arguments))
        column, sign = {"best": ("rating", -1), "fast": ("minutes", 1)}.get(need.wish, ("usd", 1))
        row = min(parse_table(text), key=lambda row: sign * int(row.get(column, 0)))
        unit = "celsius" if need.tool == "weather" else "usd"
        lines.append(f"{need.label}: {next(iter(row.values()))} {row[unit]} {unit}")
        prices[need.label] = int(row.get("usd", 0))
    if "take" in task.data:
        lines.append(f"take: {min(prices, key=lambda label: prices[label])}")
    if "budget" in task.data:
        assert sum(prices.values()) <= task.data["budget"]
    return trajectory(events, "\n".join(lines))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_an_oracle_earns_full_marks(split: str):
    tasks = TASKS.tasks(split, 100, seed=1)
    assert {task.kind for task in tasks} == set(KINDS)
    for task in tasks:
        solved = oracle(task)
        assert asyncio.run(checklist(task).run(solved)) == dict.fromkeys(checklist(task).items, True), task.prompt
        assert (score(task, solved), outcome_quality(task, solved, TASKS.world)) == (1.0, 1.0), task.prompt


def test_silence_earns_nothing():
    for task in TASKS.tasks("train", 20, seed=2):
        silent = trajectory([], None)
        assert (score(task, silent), outcome_quality(task, silent, TASKS.world)) == (0.0, 0.0)


# --- the checklist, one fault at a time --------------------------------------------------------------------------


def need(label: str, tool: str, wish: str = "", **arguments: str) -> dict[str, object]:
    return {"label": label, "tool": tool, "arguments": arguments, "wish": wish}


DAY = Task(
    task_id="day",
    kind="one_day",
    prompt="Plan Monday in Oslo.",
    data={
        "needs": [
            need("weather", "weather", city="Oslo", day="Monday"),
            need("cafe", "poi_search", city="Oslo", category="cafe"),
            need("museum", "poi_search", city="Oslo", category="museum"),
        ],
        "budget": 27,
    },
)
SKY = event("weather", "sky celsius\nsun 21", city="Oslo", day="Monday")
CAFES = event("poi_search", "name usd rating\nLotus 12 3\nMint 9 8\nElm 20 5", city="Oslo", category="cafe")
MUSEUMS = event("poi_search", "name usd rating\nOak 15 2\nIvy 30 9", city="Oslo", category="museum")
CAFES_OF_ROME = event("poi_search", CAFES.result.text, city="Rome", category="cafe")
SHOUTED = event("poi_search", CAFES.result.text, city=" OSLO", category="Cafe")
REFUSED = event("poi_search", CAFES.result.text, "tool_error", city="Oslo", category="cafe")
SKY_LINE, CAFE_LINE, MUSEUM_LINE = DAY_LINES = ("weather: sun 21 celsius", "cafe: Lotus 12 usd", "museum: Oak 15 usd")
NO_CAFE = {"grounded:cafe", "budget"}


def test_names_of_the_items():
    assert list(checklist(DAY).items) == [
        "called:weather", "grounded:weather", "called:cafe", "grounded:cafe", "called:museum", "grounded:museum",
        "budget", "complete", "no_waste", "valid_calls",
    ]  # fmt: skip
    assert list(checklist(COMPARE).items) == [
        "called:flight", "grounded:flight", "cheap:flight", "called:train", "grounded:train", "cheap:train",
        "choice", "complete", "no_waste", "valid_calls",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "lines", "expected"),
    [
        ([SKY, CAFES, MUSEUMS], DAY_LINES, set()),
        ([MUSEUMS, SHOUTED, SKY], DAY_LINES[::-1], set()),
        ([SKY, CAFES, MUSEUMS], [SKY_LINE, "cafe: Lotus 11 usd", MUSEUM_LINE], NO_CAFE),  # wrong price
        ([SKY, CAFES, MUSEUMS], [SKY_LINE, "cafe: Lotus 9 usd", MUSEUM_LINE], NO_CAFE),  # another row's price
        ([SKY, CAFES, MUSEUMS], [SKY_LINE, "cafe: Lotus", MUSEUM_LINE], NO_CAFE),  # no price
        ([SKY, CAFES, MUSEUMS], [SKY_LINE, "cafe: Fern 12 usd", MUSEUM_LINE], NO_CAFE),  # invented
        ([SKY, CAFES, MUSEUMS], [SKY_LINE, "cafe: Elm 20 usd", MUSEUM_LINE], {"budget"}),  # 35 of 27 usd
        ([SKY, CAFES, MUSEUMS], [SKY_LINE, "cafe: Mint 9 usd", MUSEUM_LINE], set()),  # 24 of 27 usd
        ([SKY, CAFES, MUSEUMS], ["weather: sun 20 celsius", CAFE_LINE, MUSEUM_LINE], {"grounded:weather"}),
        ([SKY, CAFES, MUSEUMS], [SKY_LINE, MUSEUM_LINE], NO_CAFE | {"complete"}),
        ([SKY, CAFES, MUSEUMS], [CAFE_LINE, MUSEUM_LINE], {"grounded:weather", "complete"}),
        ([SKY, MUSEUMS], DAY_LINES, NO_CAFE | {"called:cafe"}),
        ([SKY, REFUSED, MUSEUMS], DAY_LINES, NO_CAFE | {"called:cafe"}),
        ([SKY, CAFES_OF_ROME, MUSEUMS], DAY_LINES, NO_CAFE | {"called:cafe", "no_waste"}),
        ([SKY, CAFES, CAFES, MUSEUMS], DAY_LINES, {"no_waste"}),
        ([SKY, CAFES, SHOUTED, MUSEUMS], DAY_LINES, {"no_waste"}),
        ([SKY, CAFES, MUSEUMS, event("web_search", "event usd\nElm 4", query="Oslo")], DAY_LINES, {"no_waste"}),
        ([], DAY_LINES, set(checklist(DAY).items) - {"complete"}),
        ([SKY, CAFES, MUSEUMS], [], NO_CAFE | {"grounded:weather", "grounded:museum", "complete"}),
    ],
)
def test_a_day_flips_exactly_the_items_it_breaks(events: list[ToolEvent], lines: Sequence[str], expected: set[str]):
    assert failed(DAY, events, "\n".join(lines)) == expected


def test_a_false_claim_and_a_broken_budget_weigh_two_each_of_fourteen():
    # called 3 x 1, grounded 3 x 2, budget 2, complete, no_waste and valid_calls 1 each
    answer = f"{SKY_LINE}\ncafe: Lotus 11 usd\n{MUSEUM_LINE}"
    assert score(DAY, trajectory([SKY, CAFES, MUSEUMS], answer)) == pytest.approx(10 / 14)


@pytest.mark.parametrize("kind", ["parse_error", "unknown_tool", "invalid_args"])
def test_a_call_that_reaches_no_tool_is_invalid_and_wasted(kind: ToolResultKind):
    stray = event("", "Error", kind)
    assert failed(DAY, [SKY, stray, CAFES, MUSEUMS], "\n".join(DAY_LINES)) == {"valid_calls", "no_waste"}


RIDE = {"origin": "Oslo", "destination": "Rome", "day": "Friday"}
COMPARE = Task(
    task_id="compare",
    kind="compare",
    prompt="Compare the cheapest flight and train from Oslo to Rome on Friday.",
    data={
        "needs": [
            need("flight", "search_flights", "cheap", **RIDE),
            need("train", "search_train_tickets", "cheap", **RIDE),
        ],
        "take": "cheapest",
    },
)
FLIGHTS = event("search_flights", "flight usd minutes\nVA23 60 95\nLH71 45 110", **RIDE)
TRAINS = event("search_train_tickets", "train usd minutes\nT12 50 300\nT30 80 280", **RIDE)
BACK = event("search_flights", FLIGHTS.result.text, origin="Rome", destination="Oslo", day="Friday")


@pytest.mark.parametrize(
    ("events", "answer", "expected"),
    [
        ([FLIGHTS, TRAINS], "flight: LH71 45 usd\ntrain: T12 50 usd\ntake: flight", set()),
        ([FLIGHTS, TRAINS], "flight: LH71 45 usd\ntrain: T12 50 usd\ntake: train", {"choice"}),
        ([FLIGHTS, TRAINS], "flight: LH71 45 usd\ntrain: T12 50 usd", {"choice"}),
        ([FLIGHTS, TRAINS], "flight: VA23 60 usd\ntrain: T12 50 usd\ntake: train", {"cheap:flight"}),
        ([FLIGHTS, TRAINS], "flight: LH71 45 usd\ntrain: T30 80 usd\ntake: flight", {"cheap:train"}),
        ([FLIGHTS, TRAINS], "flight: VA23 60 usd\ntrain: T12 50 usd\ntake: flight", {"cheap:flight", "choice"}),
        (
            [FLIGHTS, TRAINS],
            "flight: LH71 44 usd\ntrain: T12 50 usd\ntake: flight",
            {"grounded:flight", "cheap:flight", "choice"},
        ),
        (
            [FLIGHTS, TRAINS],
            "flight: LH71 45 usd\ntake: flight",
            {"grounded:train", "cheap:train", "choice", "complete"},
        ),
        (
            [BACK, TRAINS],
            "flight: LH71 45 usd\ntrain: T12 50 usd\ntake: flight",
            {"called:flight", "grounded:flight", "cheap:flight", "choice", "no_waste"},
        ),
    ],
)
def test_a_comparison_flips_exactly_the_items_it_breaks(events: list[ToolEvent], answer: str, expected: set[str]):
    assert failed(COMPARE, events, answer) == expected


@pytest.mark.parametrize(
    ("wish", "right", "wrong"),
    [
        ("best", "Mint 9 usd", "Lotus 8 usd"),
        ("cheap", "Lotus 8 usd", "Mint 9 usd"),
        ("fast", "Elm 20 usd", "Mint 9 usd"),
    ],
)
def test_a_wish_is_about_its_own_column(wish: str, right: str, wrong: str):
    wanted = {"needs": [need("go by", "direction", wish, city="Oslo", origin="A", destination="B")]}
    task = Task(task_id="wish", kind="search", prompt="", data=wanted)
    text = "name usd rating minutes\nLotus 8 3 30\nMint 9 8 20\nElm 20 5 10"
    found = event("direction", text, city="Oslo", origin="A", destination="B")
    assert failed(task, [found], f"go by: {right}") == set()
    assert failed(task, [found], f"go by: {wrong}") == {f"{wish}:go by"}


def test_a_web_search_only_has_to_name_the_city():
    wanted = Need(label="event", tool="web_search", arguments={"query": "Oslo"})
    assert wanted.matches("web_search", {"query": "what is on in oslo"})
    assert not wanted.matches("web_search", {"query": "what is on in Rome"})
    assert not wanted.matches("web_search", {"query": "Oslofjord"})
    assert not wanted.matches("poi_search", {"query": "Oslo"})


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("cafe: Lotus 12 usd", {"cafe": Claim(name="Lotus", numbers={"usd": 12})}),
        ("Cafe : Lotus, 12 usd.", {"cafe": Claim(name="Lotus", numbers={"usd": 12})}),
        ("- **cafe**: *Lotus* (12usd)", {"cafe": Claim(name="Lotus", numbers={"usd": 12})}),
        ("go by: metro 7 usd", {"go by": Claim(name="metro", numbers={"usd": 7})}),
        ("weather: sun 21 celsius", {"weather": Claim(name="sun", numbers={"celsius": 21})}),
        ("flight: VA23 60 usd, not 70 usd", {"flight": Claim(name="VA23", numbers={"usd": 60})}),
        ("Here is the plan:\ncafe: Lotus 12 usd", {"cafe": Claim(name="Lotus", numbers={"usd": 12})}),
        ("cafe:\nmuseum: Oak 3 usd", {"museum": Claim(name="Oak", numbers={"usd": 3})}),
        ("1. cafe: Lotus 12 USD", {"cafe": Claim(name="Lotus", numbers={"usd": 12})}),
        ("take: train", {"take": Claim(name="train", numbers={})}),
        (
            "I chose these.\ncafe: Lotus 12 usd\n\npark: Oak 0 usd\ncafe: Mint 9 usd\n",
            {"cafe": Claim(name="Lotus", numbers={"usd": 12}), "park": Claim(name="Oak", numbers={"usd": 0})},
        ),
        ("Lotus is a cafe for 12 usd", {}),
        ("", {}),
        (None, {}),
    ],
)
def test_claims_of_an_answer(answer: str | None, expected: dict[str, Claim]):
    assert parse_answer(answer) == expected


def test_only_a_table_has_rows():
    assert parse_table("name usd\nLotus 12\nMint 9\nbroken\n") == [
        {"name": "Lotus", "usd": "12"},
        {"name": "Mint", "usd": "9"},
    ]
    assert parse_table("unknown city 'Oslow'; did you mean Oslo?") == []
    assert parse_table("") == []


# --- the verifier of evaluations ---------------------------------------------------------------------------------


def seoul(wish: str = "", **more: object) -> Task:
    data = {"needs": [need("cafe", "poi_search", wish, city="Seoul", category="cafe")], **more}
    return Task(task_id="seoul", kind="search", prompt="", data=data)


@pytest.mark.parametrize(
    ("name", "usd", "cheap", "best"),
    [("Breeze", 23, 1.0, 1.0), ("Meadow", 30, 15 / 22, 0.5), ("Summit", 34, 0.5, 0.75)],  # 15/22 = (1 + 4/11) / 2
)
def test_quality_falls_from_the_best_row_to_the_worst(name: str, usd: int, cheap: float, best: float):
    def quality(task: Task, price: int = usd) -> float:
        return outcome_quality(task, trajectory([], f"cafe: {name} {price} usd"), TASKS.world)

    assert quality(seoul()) == quality(seoul("cheap")) == pytest.approx(cheap)
    assert quality(seoul("best")) == pytest.approx(best)
    assert quality(seoul(budget=usd)) == pytest.approx(cheap)
    assert quality(seoul(budget=usd - 1)) == pytest.approx(0.75 * cheap)
    assert quality(seoul(), price=usd + 1) == 0.0


# --- the tools ---------------------------------------------------------------------------------------------------


def test_tools_print_tables():
    assert TOOLS.poi_search("seoul", " CAFE ") == "\n".join(
        ["name usd rating", *(f"{name} {usd} {rating}" for name, usd, rating in SEOUL_CAFES)]
    )
    assert TOOLS.weather("Seoul", "monday") == "sky celsius\nrain 13"
    assert TOOLS.web_search("What is on in Seoul?") == TOOLS.web_search("seoul")


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("poi_search", ("Soul", "cafe"), r"unknown city 'Soul'; did you mean .*Seoul.*\?"),
        ("poi_search", ("Seoul", "caffe"), r"unknown category 'caffe'; did you mean cafe\?"),
        ("weather", ("Seoul", "Funday"), r"unknown day 'Funday'; did you mean .*Sunday.*\?"),
        ("around_search", ("Seoul", "Xyzzy", "cafe"), r"unknown place in Seoul 'Xyzzy'; did you mean \w+, \w+"),
        ("direction", ("Seoul", "{0}", "{0}"), "origin and destination are both '{0}'; name two different ones"),
        ("search_flights", ("Seoul", "seoul", "Monday"), "origin and destination are both 'Seoul'"),
        ("search_train_tickets", ("Seoul", "Wuxi", ""), "unknown day ''; did you mean Friday, Monday"),
        ("web_search", ("what is on",), "no cities in 'what is on'; name one city"),
        ("web_search", ("Seoul or Wuxi",), "2 cities in 'Seoul or Wuxi'; name one city"),
    ],
)
def test_an_unknown_name_is_answered_with_near_ones(tool: str, arguments: tuple[str, ...], message: str):
    place = SEOUL_CAFES[0][0]
    with pytest.raises(ToolError, match=message.format(place)):
        getattr(TOOLS, tool)(*(a.format(place) for a in arguments))


async def test_the_server_process_lists_seven_tools_and_answers():
    hub = ServerHub()
    (spec,) = TASKS.servers()
    session = await hub.acquire(spec)
    listed = {tool.name: list(tool.parameters["properties"]) for tool in await session.list_tools()}
    good = await session.call("weather", {"city": "Seoul", "day": "Monday"}, timeout=60)
    bad = await session.call("weather", {"city": "Soul", "day": "Monday"}, timeout=60)
    hub.release(session)
    await hub.aclose()
    assert listed == {
        "poi_search": ["city", "category"],
        "around_search": ["city", "place", "category"],
        "direction": ["city", "origin", "destination"],
        "weather": ["city", "day"],
        "search_flights": ["origin", "destination", "day"],
        "search_train_tickets": ["origin", "destination", "day"],
        "web_search": ["query"],
    }
    assert (good.kind, good.text) == ("ok", TOOLS.weather("Seoul", "Monday"))
    assert bad.kind == "tool_error"
    assert "did you mean" in bad.text


def test_gymnasium_plays_an_episode_with_the_server_process():
    before = set(psutil.Process().children(recursive=True))
    env = gymnasium.make("arenarl/Travel-v0")
    observation, info = env.reset(seed=3)
    (task,) = TASKS.tasks("train", 1, seed=3)
    assert (info["task_id"], task.prompt in observation, len(info["tools"])) == (task.task_id, True, 7)
    solved = oracle(task)
    for wanted in solved.events:
        call = f'{{"name": "{wanted.call.name}", "arguments": {dict(wanted.call.arguments)}}}'.replace("'", '"')
        observation, reward, terminated, truncated, _ = env.step(f"<tool_call>{call}</tool_call>")
        assert (observation, reward, terminated, truncated) == (wanted.result.text, 0.0, False, False)
    *_, reward, terminated, truncated, info = env.step(solved.answer)
    assert (reward, terminated, truncated, info["outcome"]) == (1.0, True, False, "scored")
    env.close()
    assert set(psutil.Process().children(recursive=True)) <= before


# --- the demonstrator of the tiny agent --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demonstrating() -> ModuleType:
    sys.path.append(str(ROOT / "experiments" / "tiny_agent"))
    return importlib.import_module("demonstrations")


def played(messages: list[Message]) -> Trajectory:
    """The trajectory of a written conversation; each call is answered by the message after it."""
    events, answer = [], None
    for said, reply in zip(messages, [*messages[1:], None], strict=True):
        if said["role"] == "assistant":
            answer, calls = HERMES.parse(said["content"], first_id=len(events))
            for call in calls:
                assert reply is not None and reply["role"] == "tool"
                result = ToolResult(kind="parse_error" if call.error else "ok", text=reply["content"])
                events.append(ToolEvent(call=call, result=result, turn=len(events)))
    return trajectory(events, answer)


def marks_of(demonstrating: ModuleType, skill: float) -> list[float]:
    rng = random.Random(0)
    tasks = TASKS.tasks("train", 50, seed=7)
    scores = [score(t, played(demonstrating.Demonstrator(TOOLS, rng, skill).play(t))) for t in tasks]
    return [value for value in scores if value is not None]


def test_a_skilled_demonstrator_makes_no_mistake(demonstrating: ModuleType):
    assert marks_of(demonstrating, skill=1.0) == [1.0] * 50


def test_a_demonstrator_earns_by_its_skill(demonstrating: ModuleType):
    none, half = marks_of(demonstrating, skill=0.0), marks_of(demonstrating, skill=0.5)
    assert len(none) == len(half) == 50
    assert sum(none) / 50 < 0.5 < sum(half) / 50 < 0.8  # measured: 0.37 and 0.63


def test_demonstrations_keep_to_the_training_cities(demonstrating: ModuleType):
    conversations = demonstrating.demonstrations(30, seed=2)
    words = set(re.findall(r"\w+", " ".join(m["content"] for conversation in conversations for m in conversation)))
    assert (len(conversations), len(words & TRAIN) > 10, words & HELD_OUT) == (30, True, set())


def test_a_web_search_is_known_by_its_city_whatever_stands_around_it():
    event = need("event", "web_search", "", query="Tangshan")
    wanted = Need(**event)
    assert wanted.matches("web_search", {"query": "What is on in Tangshan?"})
    assert not wanted.matches("web_search", {"query": "events in Shenzhen"})


def test_a_long_answer_is_read_in_no_time_to_speak_of():
    """The old pattern took time with the cube of the blanks: minutes for these."""
    for text in (" " * 20_000, "- " * 20_000 + "b", "a" * 40_000, "see\n" + " " * 9000 + "a" + " " * 9000 + "b"):
        assert parse_answer(text) == {}
    assert (
        parse_answer("cafe: Lotus " + "9" * 200_000 + " usd")["cafe"].numbers == {}
    )  # no price has more than nine digits
    assert parse_answer("x\n" + "  -  cafe " + " " * 500 + ":  Lotus   12 usd")["cafe"].numbers == {"usd": 12}
