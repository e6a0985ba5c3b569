"""What a written travel task can ask for: requests of the five kinds over a wide range of difficulty, in a few wordings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from demonstrations import Row

from arenarl.envs.travel import Need, parse_table
from arenarl.envs.travel_server import TravelTools
from arenarl.envs.travel_world import CATEGORIES, DAYS, World
from arenarl.types import Task

FIND = {"": "a", "best": "the best rated", "cheap": "the cheapest", "fast": "the fastest"}
PLAN = {"": "", "best": "best rated ", "cheap": "cheapest "}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a written task asks for, as the demonstrator of `demonstrations` reads it."""

    text: str
    needs: tuple[Need, ...]
    budget: int | None = None
    take: bool = False

    def task(self, kind: str) -> Task:
        data: dict[str, Any] = {"needs": [asdict(need) for need in self.needs]}
        if self.budget is not None:
            data["budget"] = self.budget
        if self.take:
            data["take"] = "cheapest"
        return Task(task_id=self.text, kind=kind, prompt=self.text, data=data)


class Requester:
    """Draws requests of any kind about given cities.

    Args:
        hardness: in [0, 1]; more needs, more wishes and tighter budgets.
    """

    def __init__(self, world: World, rng: random.Random, hardness: float) -> None:
        self.world, self.rng, self.hardness = world, rng, hardness

    def request(self, kind: str, cities: Sequence[str]) -> Request:
        return getattr(self, f"_{kind}")(*cities)

    def number(self, least: int, most: int) -> int:
        """More for a hard request."""
        wanted = least + (most - least) * (self.hardness + self.rng.uniform(-0.3, 0.3))
        return max(least, min(most, round(wanted)))

    def wish(self, *wishes: str) -> str:
        return self.rng.choice(wishes) if self.rng.random() < 0.3 + 0.6 * self.hardness else ""

    def poi(self, city: str, category: str) -> Need:
        arguments = {"city": city, "category": category}
        return Need(label=category, tool="poi_search", arguments=arguments, wish=self.wish("best", "cheap"))

    def _search(self, city: str) -> Request:
        if self.number(1, 2) == 2:
            needs = tuple(self.poi(city, category) for category in self.rng.sample(CATEGORIES, 2))
            things = " and ".join(f"{FIND[n.wish]} {n.label}" for n in needs)
            return Request(text=f"Find {things} in {city}.", needs=needs)
        need = self.poi(city, self.rng.choice(CATEGORIES))
        if self.rng.random() < 0.5:
            return Request(text=f"Find {FIND[need.wish]} {need.label} in {city}.", needs=(need,))
        near = self.rng.choice([p.name for p in self.world.places(city).values() if p.category != need.label])
        need = replace(need, tool="around_search", arguments={"city": city, "place": near, "category": need.label})
        return Request(text=f"Find {FIND[need.wish]} {need.label} near {near} in {city}.", needs=(need,))

    def _direction(self, city: str) -> Request:
        origin, destination = self.rng.sample(list(self.world.places(city)), 2)
        arguments = {"city": city, "origin": origin, "destination": destination}
        need = Need(label="go by", tool="direction", arguments=arguments, wish=self.wish("fast", "cheap"))
        text = f"What is {FIND[need.wish]} way from {origin} to {destination} in {city}?"
        if self.number(1, 2) == 1:
            return Request(text=text, needs=(need,))
        then = self.poi(city, self.rng.choice(CATEGORIES))
        return Request(text=f"{text} Find {FIND[then.wish]} {then.label} in {city}.", needs=(need, then))

    def _compare(self, origin: str, city: str) -> Request:
        day = self.rng.choice(DAYS)
        ride, wish = {"origin": origin, "destination": city, "day": day}, self.wish("cheap")
        needs = (
            Need(label="flight", tool="search_flights", arguments=ride, wish=wish),
            Need(label="train", tool="search_train_tickets", arguments=ride, wish=wish),
        )
        text = f"Compare {FIND[wish]} flight and train from {origin} to {city} on {day}."
        return Request(text=text, needs=needs, take=True)

    def _one_day(self, city: str) -> Request:
        day, count = self.rng.choice(DAYS), self.number(1, 3)
        sights = self.rng.sample([c for c in CATEGORIES if c != "hotel"], count)
        needs = [self.poi(city, category) for category in sights]
        if count > 1 and self.rng.random() < 0.6:
            needs = [Need(label="weather", tool="weather", arguments={"city": city, "day": day}), *needs[1:]]
        return self._plan(f"Plan {day} in {city}", needs)

    def _multi_day(self, city: str, origin: str) -> Request:
        day, count = self.rng.choice(DAYS), self.number(2, 4)
        label, tool = self.rng.choice((("flight", "search_flights"), ("train", "search_train_tickets")))
        ride = {"origin": origin, "destination": city, "day": day}
        more = [
            self.poi(city, "hotel"),
            self.poi(city, self.rng.choice([c for c in CATEGORIES if c != "hotel"])),
            Need(label="event", tool="web_search", arguments={"query": city}),
        ]
        kept = [more[i] for i in sorted(self.rng.sample(range(3 if count > 2 else 2), count - 1))]
        need = Need(label=label, tool=tool, arguments=ride, wish=self.wish("cheap"))
        return self._plan(f"Plan 2 days in {city} from {origin} on {day}", [need, *kept])

    def _plan(self, opening: str, needs: list[Need]) -> Request:
        things = ", ".join(PLAN[n.wish] + n.label for n in needs)
        if self.rng.random() > 0.2 + 0.6 * self.hardness:
            return Request(text=f"{opening}: {things}.", needs=tuple(needs))
        budget = self._budget(needs)
        return Request(text=f"{opening}: {things}. Budget {budget} usd.", needs=tuple(needs), budget=budget)

    def _budget(self, needs: list[Need]) -> int:
        """From the least that the wishes cost: near it for a hard request, up to the most for an easy one."""
        low = high = 0
        for need in needs:
            rows = parse_table(look_up(TravelTools(self.world.seed), need))
            if "usd" in rows[0]:
                prices = [int(row["usd"]) for row in ([right_row(rows, need.wish)] if need.wish else rows)]
                low, high = low + min(prices), high + max(prices)
        return round(low + (high - low) * self.rng.uniform(0, 1.2 - self.hardness)) + self.rng.randint(0, 3)


def call_arguments(need: Need) -> dict[str, str]:
    """The arguments as the demonstrators write them: a web search asks for the event."""
    return {"query": need.arguments["query"] + " event"} if need.tool == "web_search" else dict(need.arguments)


def look_up(tools: TravelTools, need: Need) -> str:
    return getattr(tools, need.tool)(**call_arguments(need))


def right_row(rows: list[Row], wish: str, *, worst: bool = False) -> Row:
    """The row that a wish asks for (the cheapest without a wish), or the one that is farthest from it."""
    column, sign = {"best": ("rating", -1), "fast": ("minutes", 1)}.get(wish, ("usd", 1))
    pick = max if worst else min
    return pick(rows, key=lambda row: sign * int(row[column])) if column in rows[0] else rows[0]
