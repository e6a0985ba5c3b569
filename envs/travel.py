"""Open-ended travel planning over seven MCP tools, in an offline world of real cities.

## Description
The agent gets one request of five kinds (search, direction, compare, one-day, multi-day), calls tools of the travel
server, and answers in lines of the form ``label: name N usd``. The kinds and tools follow Open-Travel (ArenaRL,
arXiv 2601.06487, section on data); the world is our own (`travel_world`).

## Actions
The text of an assistant message: Hermes-style tool calls, or the final answer (any text without a call).

## Observations
The new chat messages: system and user at reset, tool results after each step.

## Rewards
0 until the end, then the share of the task's checklist that is met, in [0, 1]. Items are code predicates over the
whole trajectory (needed tools called, every claimed name and price found in a tool result, the wish fulfilled, the
budget kept, no call wasted) and over the answer.

## Starting state
A task of the split, picked by the seed. Cities of the held-out split never occur in training tasks.

## Episode end
Terminated by an answer; truncated after 8 assistant turns.

## Arguments
``split``: "train" or "heldout". ``max_turns``: see above.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from arenarl.envs.travel_world import CATEGORIES, DAYS, Split, World, query_words
from arenarl.errors import ConfigError
from arenarl.mcp.config import ServerSpec
from arenarl.rubric import Checklist, ChecklistItem
from arenarl.types import Task, ToolEvent, Trajectory

KINDS = ("search", "direction", "compare", "one_day", "multi_day")
SYSTEM_PROMPT = (
    "You plan trips. Call tools, then answer in lines such as 'cafe: Lotus 12 usd'. Quote only tool results."
)
WISHES = {"best": "best rated", "cheap": "cheapest", "fast": "fastest"}


@dataclass(frozen=True, kw_only=True)
class Need:
    """One line that the answer must have, and the call whose result must support it.

    Attributes:
        label: what the line starts with.
        tool, arguments: the call that finds it.
        wish: "best" (highest rating), "cheap" (lowest price), "fast" (fewest minutes) or "" (any row will do).
    """

    label: str
    tool: str
    arguments: dict[str, str]
    wish: str = ""

    def matches(self, tool: str, arguments: Mapping[str, Any]) -> bool:
        """Whether a call asks for this need; letter case is ignored, and a web search needs only to name the city."""
        if tool != self.tool:
            return False
        if tool == "web_search":
            return self.arguments["query"].lower() in query_words(str(arguments.get("query", "")))
        return _normal(arguments) == _normal(self.arguments)


def _normal(arguments: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, str(value).strip().lower()) for key, value in arguments.items()))


def parse_table(text: str) -> list[dict[str, str]]:
    """Rows of a tool's table as dictionaries; anything else gives no rows."""
    header, *lines = [line.split() for line in text.strip().split("\n")]
    return [dict(zip(header, line, strict=True)) for line in lines if len(line) == len(header)]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One line of an answer: ``label: name N usd`` (numbers by unit)."""

    name: str
    numbers: dict[str, int]


# Bounded everywhere: what a policy writes must not be able to make reading it slow.
_LINE = re.compile(r"^\W{0,9}(?:\d{1,3}[.)])?\W{0,9}([A-Za-z][\w ]{0,39}?)\W{0,9}:\W{0,9}([A-Za-z]{1,60}\d{0,9})(.*)$")
_NUMBER = re.compile(r"(?<!\d)(\d{1,9})\s{0,9}(usd|celsius)", re.IGNORECASE)


def parse_answer(answer: str | None) -> dict[str, Claim]:
    """Claims of an answer by label, lower case; the first line of a label counts."""
    claims: dict[str, Claim] = {}
    lines = (" ".join(line.split()) for line in (answer or "").split("\n"))
    for label, name, rest in (match.groups() for match in map(_LINE.match, lines) if match):
        numbers = {unit.lower(): int(n) for n, unit in reversed(_NUMBER.findall(rest))}
        claims.setdefault(label.strip().lower(), Claim(name=name, numbers=numbers))
    return claims


def _needs(task: Task) -> list[Need]:
    return [Need(**need) for need in task.data["needs"]]


def _rows(events: Sequence[ToolEvent], need: Need) -> list[dict[str, str]]:
    """Rows that the tools returned for a need during the episode."""
    return [
        row
        for e in events
        if e.result.ok and need.matches(e.call.name, e.call.arguments)
        for row in parse_table(e.result.text)
    ]


def _row_name(row: dict[str, str]) -> str:
    return next(iter(row.values())).lower()


def _supported(claim: Claim | None, rows: list[dict[str, str]]) -> dict[str, str] | None:
    """The row that proves a claim, name and every number; None if there is none."""
    if claim is None or (rows and "usd" in rows[0] and "usd" not in claim.numbers):
        return None
    for row in rows:
        numbers_hold = all(row.get(unit) == str(n) for unit, n in claim.numbers.items())
        if _row_name(row) == claim.name.lower() and numbers_hold:
            return row
    return None


def _optimal(row: dict[str, str], rows: list[dict[str, str]], wish: str) -> bool:
    column, sign = {"best": ("rating", -1), "cheap": ("usd", 1), "fast": ("minutes", 1)}[wish]
    return sign * int(row[column]) == min(sign * int(r[column]) for r in rows)


def checklist(task: Task) -> Checklist:
    """The typed checklist of a task: for each need three items at most, and the constraints of the whole.

    What the traveller will act on (a true claim, the wish fulfilled, the budget kept) weighs twice as much as the rest.
    """
    needs, items = _needs(task), []

    def add(name: str, about: str, check: Any, weight: float = 1.0) -> None:
        items.append(ChecklistItem(name=name, check=check, scope=about, weight=weight))

    for need in needs:
        add(f"called:{need.label}", "trajectory", lambda t, n=need: bool(_rows(t.events, n)))
        add(
            f"grounded:{need.label}", "trajectory",
            lambda t, n=need: _supported(parse_answer(t.answer).get(n.label), _rows(t.events, n)) is not None, 2.0,
        )  # fmt: skip
        if need.wish:
            add(f"{need.wish}:{need.label}", "answer", lambda t, n=need: _wish_met(t, n), 2.0)
    if "take" in task.data:
        add("choice", "answer", lambda t: _choice_right(t, needs), 2.0)
    if "budget" in task.data:
        add("budget", "answer", lambda t: _within_budget(t, needs, task.data["budget"]), 2.0)
    add("complete", "answer", lambda t: all(n.label in parse_answer(t.answer) for n in needs))
    add("no_waste", "trajectory", lambda t: _no_waste(t, needs))
    add("valid_calls", "trajectory", _all_valid)
    return Checklist(items)


def _wish_met(trajectory: Trajectory, need: Need) -> bool:
    rows = _rows(trajectory.events, need)
    row = _supported(parse_answer(trajectory.answer).get(need.label), rows)
    return row is not None and _optimal(row, rows, need.wish)


def _choice_right(trajectory: Trajectory, needs: list[Need]) -> bool:
    """The line ``take: LABEL`` names the cheaper of the two claims, and both are supported."""
    claims = parse_answer(trajectory.answer)
    rows = {n.label: _supported(claims.get(n.label), _rows(trajectory.events, n)) for n in needs}
    if "take" not in claims or None in rows.values():
        return False
    least = min(int(row["usd"]) for row in rows.values())
    taken = rows.get(claims["take"].name.lower())
    return taken is not None and int(taken["usd"]) == least


def _within_budget(trajectory: Trajectory, needs: list[Need], budget: int) -> bool:
    """Every priced need has a supported claim and the true prices add up to at most the budget."""
    claims = parse_answer(trajectory.answer)
    rows = [_supported(claims.get(n.label), _rows(trajectory.events, n)) for n in needs if n.tool != "weather"]
    return None not in rows and sum(int(row["usd"]) for row in rows) <= budget


def _no_waste(trajectory: Trajectory, needs: list[Need]) -> bool:
    """Some call was made, each call answers a need, and none was made twice."""
    calls = [(e.call.name, _normal(e.call.arguments)) for e in trajectory.events]
    wanted = all(any(n.matches(e.call.name, e.call.arguments) for n in needs) for e in trajectory.events)
    return bool(calls) and wanted and len(set(calls)) == len(calls)


def _all_valid(trajectory: Trajectory) -> bool:
    """Some call was made, and each reached its tool: none malformed, none to an unknown tool, none with bad arguments."""
    bad = ("parse_error", "unknown_tool", "invalid_args")
    return bool(trajectory.events) and not any(e.result.kind in bad for e in trajectory.events)


class TravelTasks:
    """The task set: what to ask, with which servers, and how it is checked.

    Args:
        seed: seed of the world; the server is started with the same one.
    """

    name = "travel"
    system_prompt = SYSTEM_PROMPT
    max_turns = 8

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @cached_property
    def world(self) -> World:
        return World(self.seed)

    def servers(self) -> Sequence[ServerSpec]:
        command = ("-m", "arenarl.envs.travel_server", "--seed", str(self.seed))
        return (ServerSpec(name="travel", command=sys.executable, args=command, scope="shared"),)

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """``count`` distinct tasks, the five kinds in turn; equal arguments give equal tasks.

        Raises:
            ConfigError: for an unknown split, or more tasks than the split has.
        """
        if split not in ("train", "heldout"):
            raise ConfigError(f"split {split!r} is unknown; use 'train' or 'heldout'")
        rng = random.Random(f"tasks/{split}/{seed}")
        tasks: dict[str, Task] = {}
        for _ in range(20 * count + 20):
            if len(tasks) == count:
                return list(tasks.values())
            task = self._task(KINDS[len(tasks) % len(KINDS)], split, rng)
            tasks.setdefault(task.prompt, task)
        raise ConfigError(f"{count} distinct tasks asked of split {split!r}, found only {len(tasks)}; ask for fewer")

    def checklist(self, task: Task) -> Checklist:
        return checklist(task)

    def quality(self, task: Task, trajectory: Trajectory) -> float:
        """The verifier of evaluations, which training never sees: `outcome_quality`."""
        return outcome_quality(task, trajectory, self.world)

    def _task(self, kind: str, split: Split, rng: random.Random) -> Task:
        prompt, needs, extra = getattr(self, f"_{kind}")(rng, self.world.split(split))
        data = {"needs": [need.__dict__ for need in needs], **extra}
        return Task(task_id=f"{kind}-{rng.getrandbits(32):08x}", kind=kind, prompt=prompt, data=data)

    def _search(self, rng: random.Random, cities: list[str]) -> tuple[str, list[Need], dict[str, Any]]:
        city, category, wish = rng.choice(cities), rng.choice(CATEGORIES), rng.choice(("best", "cheap"))
        if rng.random() < 0.5:
            need = Need(label=category, tool="poi_search", arguments={"city": city, "category": category}, wish=wish)
            return f"Find the {WISHES[wish]} {category} in {city}.", [need], {}
        near = rng.choice([p.name for p in self.world.places(city).values() if p.category != category])
        arguments = {"city": city, "place": near, "category": category}
        need = Need(label=category, tool="around_search", arguments=arguments, wish=wish)
        return f"Find the {WISHES[wish]} {category} near {near} in {city}.", [need], {}

    def _direction(self, rng: random.Random, cities: list[str]) -> tuple[str, list[Need], dict[str, Any]]:
        city, wish = rng.choice(cities), rng.choice(("fast", "cheap"))
        origin, destination = rng.sample(list(self.world.places(city)), 2)
        arguments = {"city": city, "origin": origin, "destination": destination}
        need = Need(label="go by", tool="direction", arguments=arguments, wish=wish)
        return f"What is the {WISHES[wish]} way from {origin} to {destination} in {city}?", [need], {}

    def _compare(self, rng: random.Random, cities: list[str]) -> tuple[str, list[Need], dict[str, Any]]:
        origin, destination, day = self._trip(rng, cities)
        arguments = {"origin": origin, "destination": destination, "day": day}
        needs = [
            Need(label="flight", tool="search_flights", arguments=arguments, wish="cheap"),
            Need(label="train", tool="search_train_tickets", arguments=arguments, wish="cheap"),
        ]
        return (
            f"Compare the cheapest flight and train from {origin} to {destination} on {day}.",
            needs,
            {"take": "cheapest"},
        )

    def _one_day(self, rng: random.Random, cities: list[str]) -> tuple[str, list[Need], dict[str, Any]]:
        city, day = rng.choice(cities), rng.choice(DAYS)
        first, second = rng.sample([c for c in CATEGORIES if c != "hotel"], 2)
        needs = [
            Need(label="weather", tool="weather", arguments={"city": city, "day": day}),
            Need(label=first, tool="poi_search", arguments={"city": city, "category": first}),
            Need(label=second, tool="poi_search", arguments={"city": city, "category": second}),
        ]
        budget = self._budget(rng, [[p.usd for p in self.world.search(city, c)] for c in (first, second)])
        return f"Plan {day} in {city}: weather, {first}, {second}. Budget {budget} usd.", needs, {"budget": budget}

    def _multi_day(self, rng: random.Random, cities: list[str]) -> tuple[str, list[Need], dict[str, Any]]:
        origin, city, day = self._trip(rng, cities)
        category = rng.choice([c for c in CATEGORIES if c != "hotel"])
        ride = {"origin": origin, "destination": city, "day": day}
        label, tool = rng.choice((("flight", "search_flights"), ("train", "search_train_tickets")))
        needs = [
            Need(label=label, tool=tool, arguments=ride),
            Need(label="hotel", tool="poi_search", arguments={"city": city, "category": "hotel"}),
            Need(label=category, tool="poi_search", arguments={"city": city, "category": category}),
            Need(label="event", tool="web_search", arguments={"query": city}),
        ]
        rides = self.world.flights(origin, city, day) if label == "flight" else self.world.trains(origin, city, day)
        stays = [[p.usd for p in self.world.search(city, c)] for c in ("hotel", category)]
        budget = self._budget(rng, [[r.usd for r in rides], *stays, [self.world.event(city).usd]])
        prompt = (
            f"Plan 2 days in {city} from {origin} on {day}: {label}, hotel, {category}, event. Budget {budget} usd."
        )
        return prompt, needs, {"budget": budget}

    def _trip(self, rng: random.Random, cities: list[str]) -> tuple[str, str, str]:
        origin = rng.choice(cities)
        return origin, rng.choice(self.world.neighbours(origin, cities)), rng.choice(DAYS)

    @staticmethod
    def _budget(rng: random.Random, prices: list[list[int]]) -> int:
        """Between the cheapest total and the middle of the range, so that it can be kept but not by chance."""
        low, high = sum(map(min, prices)), sum(map(max, prices))
        return rng.randint(low, max(low, (low + high) // 2))


def outcome_quality(task: Task, trajectory: Trajectory, world: World) -> float:
    """A verifier that never sees the checklist: marks the final answer against the world itself, in [0, 1].

    It reads no tool call and no tool result. Each need earns half a mark for a claim that is true in the world, and the
    other half for how good the choice is: 1 for the best row of its wish (the cheapest, if nothing was wished) falling
    linearly to 0 for the worst. An answer above the budget loses a quarter. Used for evaluation only.
    """
    claims, marks, spent = parse_answer(trajectory.answer), [], 0
    for need in _needs(task):
        rows = world_rows(world, need)
        row = _supported(claims.get(need.label), rows)
        marks.append(0.0 if row is None else 0.5 + 0.5 * _standing(row, rows, need.wish or "cheap"))
        spent += int(row.get("usd", 0)) if row else 0
    over = "budget" in task.data and spent > task.data["budget"]
    return sum(marks) / len(marks) * (0.75 if over else 1.0)


def _standing(row: dict[str, str], rows: list[dict[str, str]], wish: str) -> float:
    column, sign = {"best": ("rating", 1), "cheap": ("usd", -1), "fast": ("minutes", -1)}[wish]
    if column not in row:
        return 1.0
    values = [sign * int(r[column]) for r in rows]
    low, high = min(values), max(values)
    return (sign * int(row[column]) - low) / (high - low) if high > low else 1.0


def world_rows(world: World, need: Need) -> list[dict[str, str]]:
    """What is true in the world about a need, in the columns that the tools use."""
    a = need.arguments
    if need.tool in ("poi_search", "around_search"):
        near = a.get("place")
        return [
            {"name": p.name, "usd": str(p.usd), "rating": str(p.rating)}
            for p in world.search(a["city"], a["category"])
            if p.name != near
        ]
    if need.tool == "weather":
        sky, celsius = world.weather(a["city"], a["day"])
        return [{"sky": sky, "celsius": str(celsius)}]
    if need.tool == "web_search":
        event = world.event(a["query"])
        return [{"event": event.name, "usd": str(event.usd)}]
    rides = {
        "direction": lambda: world.routes(a["city"], a["origin"], a["destination"]),
        "search_flights": lambda: world.flights(a["origin"], a["destination"], a["day"]),
        "search_train_tickets": lambda: world.trains(a["origin"], a["destination"], a["day"]),
    }[need.tool]()
    return [{"code": r.code, "usd": str(r.usd), "minutes": str(r.minutes)} for r in rides]
