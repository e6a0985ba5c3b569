"""Scripted demonstrations of mixed quality for the tiny travel agent, and copy drills.

A demonstrator has a skill between 0 and 1, drawn anew for each episode. An unskilled one skips needed calls and
invents what they would have said, takes any row where the best was asked for, misquotes prices, repeats calls, and
now and then writes a call that does not parse. Skill shows only in what it does, so the agent that imitates the mix
can do everything, and does the right thing with the frequency of the mix: reinforcement learning has modes to choose
from. The worlds are other than the one the quickstart plays in (world seed 0), the cities are those of the training split.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

from arenarl.envs.travel import SYSTEM_PROMPT, Need, TravelTasks, parse_table
from arenarl.envs.travel_server import TOOLS, TravelTools
from arenarl.envs.travel_world import AIRLINES, CATEGORIES, DAYS, MODES, PLACE_NAMES, SKIES
from arenarl.types import Message, Task

Row = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Slips:
    """Probabilities of one slip each, before they are scaled by (1 - skill)."""

    skip: float = 0.3
    careless: float = 0.9
    misquote: float = 0.3
    invent: float = 0.1
    repeat: float = 0.25
    malformed: float = 0.08
    forget: float = 0.2


class Demonstrator:
    """Plays one task with a given skill and writes down the conversation."""

    def __init__(self, tools: TravelTools, rng: random.Random, skill: float, slips: Slips | None = None) -> None:
        self.tools, self.rng, self.skill, self.slips = tools, rng, skill, slips or Slips()

    def slips_up(self, kind: str) -> bool:
        return self.rng.random() < getattr(self.slips, kind) * (1 - self.skill)

    def play(self, task: Task) -> list[Message]:
        """The whole conversation, system message first, answer last."""
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task.prompt},
        ]
        needs = [Need(**need) for need in task.data["needs"]]
        chosen = {}
        for need in needs:
            chosen[need.label] = self._work_on(need, messages)
        lines = [self._line(n.label, chosen[n.label]) for n in needs if not self.slips_up("forget")]
        if "take" in task.data:
            lines.append(f"take: {self._cheaper(chosen)}")
        messages.append({"role": "assistant", "content": "\n".join(lines) or "I do not know."})
        return messages

    def _work_on(self, need: Need, messages: list[Message]) -> Row:
        if self.slips_up("skip"):
            return self._invented(need)
        arguments = dict(need.arguments)
        if need.tool == "web_search":
            arguments["query"] += " event"
        if self.slips_up("malformed"):
            self._call(need.tool, arguments, messages, broken=True)
        text = self._call(need.tool, arguments, messages)
        if self.slips_up("repeat"):
            self._call(need.tool, arguments, messages)
        rows = parse_table(text)
        row = dict(self._choose(rows, need.wish))
        if self.slips_up("misquote") and "usd" in row:
            row["usd"] = str(self.rng.randint(2, 98))
        return self._invented(need) if self.slips_up("invent") else row

    def _call(self, tool: str, arguments: dict[str, Any], messages: list[Message], *, broken: bool = False) -> str:
        raw = json.dumps({"name": tool, "arguments": arguments})
        if broken:
            raw = raw[:-1]
        messages.append({"role": "assistant", "content": f"<tool_call>\n{raw}\n</tool_call>"})
        text = "Error: the call is not valid JSON" if broken else getattr(self.tools, tool)(**arguments)
        messages.append({"role": "tool", "content": text})
        return text

    def _choose(self, rows: list[Row], wish: str) -> Row:
        """The best row of the wish. Without a wish the cheap one is wise, since a budget waits at the end."""
        if self.slips_up("careless"):
            return self.rng.choice(rows)
        column, sign = {"best": ("rating", -1), "fast": ("minutes", 1)}.get(wish, ("usd", 1))
        return min(rows, key=lambda row: sign * int(row[column])) if column in rows[0] else rows[0]

    def _invented(self, need: Need) -> Row:
        r = self.rng
        usd = str(r.randint(4, 60))
        if need.tool == "weather":
            return {"sky": r.choice(SKIES), "celsius": str(r.randint(1, 35))}
        if need.tool == "direction":
            return {"mode": r.choice(MODES), "usd": usd}
        if need.tool in ("search_flights", "search_train_tickets"):
            prefix = r.choice(AIRLINES) if need.tool == "search_flights" else "T"
            return {"code": f"{prefix}{r.randint(10, 98)}", "usd": usd}
        return {"name": r.choice(PLACE_NAMES), "usd": usd}

    def _cheaper(self, chosen: dict[str, Row]) -> str:
        if self.slips_up("careless"):
            return self.rng.choice(list(chosen))
        return min(chosen, key=lambda label: int(chosen[label]["usd"]))

    @staticmethod
    def _line(label: str, row: Row) -> str:
        name, *_ = row.values()
        unit = "celsius" if "sky" in row else "usd"
        return f"{label}: {name} {row[unit]} {unit}"


def demonstrations(count: int, seed: int, splits: tuple[str, ...] = ("train",)) -> list[list[Message]]:
    """``count`` conversations: cities of the splits in turn, world seeds from 1 on, skill uniform in [0, 1]."""
    rng = random.Random(f"demonstrations/{seed}")
    conversations: list[list[Message]] = []
    world_seed = 1000 * seed
    while len(conversations) < count:
        world_seed += 1
        tasks, tools = TravelTasks(world_seed), TravelTools(world_seed)
        split = splits[world_seed % len(splits)]
        for task in tasks.tasks(split, min(100, count - len(conversations)), seed=world_seed):
            played = Demonstrator(tools, rng, skill=rng.random()).play(task)
            conversations.append(rename_cities(played, list(tasks.world.cities), rng))
    return conversations


def rename_cities(messages: list[Message], cities: list[str], rng: random.Random) -> list[Message]:
    """In half of the conversations, put another word for each city: a city is to be copied, not known by heart."""
    if rng.random() < 0.5:
        return messages
    present = [city for city in cities if any(re.search(rf"\b{city}\b", m["content"]) for m in messages)]
    names = dict(zip(present, rng.sample(PLACE_NAMES, len(present)), strict=True))
    pattern = re.compile(rf"\b({'|'.join(present)})\b")
    return [{**m, "content": pattern.sub(lambda found: names[found[0]], m["content"])} for m in messages]


def words(cities: list[str]) -> list[str]:
    """Every word that a copy can meet, held-out city names included: names, not tasks."""
    return [*PLACE_NAMES, *cities, *CATEGORIES, *DAYS, *SKIES, *MODES]


def drill(rng: random.Random, vocabulary: list[str], quotes: float = 0.0) -> tuple[str, str]:
    """(context, continuation to learn) of one copy drill: repeat a list, look rows up, or order them by a number.

    Args:
        quotes: share of drills that put words of a sentence into JSON, as the arguments of a call do.
    """
    if quotes and rng.random() < quotes:
        return quote_drill(rng, vocabulary)
    kind = rng.random()
    if kind < 0.4:
        items = [
            rng.choice(vocabulary) if rng.random() < 0.7 else str(rng.randint(1, 99)) for _ in range(rng.randint(6, 16))
        ]
        return f"{' '.join(items)}\n", " ".join(items)
    names = rng.sample(vocabulary, rng.randint(2, 5))
    prices, ratings = rng.sample(range(2, 99), len(names)), rng.choices(range(1, 10), k=len(names))
    table = "\n".join(f"{n} {p} {r}" for n, p, r in zip(names, prices, ratings, strict=True))
    rows = [f"{n} {p} usd" for n, p in zip(names, prices, strict=True)]
    places = range(len(names))
    if kind < 0.7:
        asked = rng.sample(places, len(names))
        return f"name usd rating\n{table}\n{' '.join(names[i] for i in asked)}\n", "\n".join(rows[i] for i in asked)
    if len(set(ratings)) < len(ratings) or rng.random() < 0.5:
        cheapest = sorted(places, key=lambda i: prices[i])
        return f"name usd rating\n{table}\ncheapest\n", "\n".join(rows[i] for i in cheapest)
    best = sorted(places, key=lambda i: -ratings[i])
    return f"name usd rating\n{table}\nbest rated\n", "\n".join(rows[i] for i in best)


def quote_drill(rng: random.Random, vocabulary: list[str]) -> tuple[str, str]:
    """Words of a sentence as JSON values: the same words, but with quotes where there were spaces."""
    names = rng.sample(vocabulary, rng.randint(1, 4))
    keys = rng.sample(("city", "place", "origin", "destination", "day", "category", "query"), len(names))
    sentence = " ".join(
        f"{rng.choice(('in', 'from', 'to', 'near', 'on', 'way', 'Find', 'Plan'))} {name}" for name in names
    )
    return f"{sentence}.\n", json.dumps(dict(zip(keys, names, strict=True)))


__all__ = ["TOOLS", "Demonstrator", "Slips", "demonstrations", "drill", "words"]
