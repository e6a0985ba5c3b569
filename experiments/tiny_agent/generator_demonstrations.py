"""Scripted demonstrations for both roles of the tiny agent: writing travel tasks, and solving the tasks so written.

A writer looks things up with the travel tools and then writes a request, assertions about the right answer with the
result that supports each, and the calls that a solver needs, as JSON. As in `demonstrations`, skill is drawn for each
episode and shows only in slips: most make the task invalid, ``untrue`` makes it unjust. How hard a task is (how many
things it asks for, how strictly it asserts) is drawn too, over a wide range within each kind, so a generator that
imitates the mix has something to choose from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from advice import EASIER, GENERATOR, HARDER, SOLVER, draw, note, ruled_out
from demonstrations import Demonstrator, Row, Slips, rename_cities
from written_requests import PLAN, Request, Requester, call_arguments, look_up, right_row

from arenarl.envs.travel import Need, TravelTasks, parse_table
from arenarl.envs.travel_generator import TravelGenerator
from arenarl.envs.travel_server import TravelTools
from arenarl.envs.travel_world import CATEGORIES
from arenarl.types import Memory, Message, Task

SHOWN = 8  # most items that a task may have
SOLVER_SLIPS = Slips(skip=0.45, careless=0.7, forget=0.35, repeat=0.35)
Demonstration = tuple[list[Message], Memory | None]


@dataclass(frozen=True, kw_only=True)
class WritingSlips:
    """Probabilities of one slip each in an episode, before they are scaled by (1 - skill)."""

    broken: float = 0.2
    few: float = 0.25
    misquote: float = 0.06
    misnumber: float = 0.12
    idle: float = 0.04
    unmatched: float = 0.25
    forgotten: float = 0.15
    untrue: float = 0.15
    malformed: float = 0.05


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A need with what was found for it: the rows, the row to assert, and the number of the tool result."""

    need: Need
    rows: list[Row]
    row: Row
    observation: int

    @property
    def label(self) -> str:
        return "way" if self.need.label == "go by" else self.need.label

    @property
    def quote(self) -> str:
        return " ".join(list(self.row.values())[:2])

    @property
    def name(self) -> str:
        return next(iter(self.row.values()))


class Writer:
    """Writes one task for a seed of `TravelGenerator` and records the conversation."""

    def __init__(self, tools: TravelTools, rng: random.Random, skill: float, slips: WritingSlips) -> None:
        self.tools, self.rng, self.skill, self.slips = tools, rng, skill, slips
        self.observations = 0

    def slips_up(self, kind: str) -> bool:
        return self.rng.random() < getattr(self.slips, kind) * (1 - self.skill)

    def play(self, seed: Task, hardness: float) -> list[Message]:
        """The whole conversation, system message first, the JSON last."""
        requester = Requester(self.tools.world, self.rng, hardness)
        request = requester.request(seed.kind, seed.data["cities"])
        messages: list[Message] = [
            {"role": "system", "content": TravelGenerator.system_prompt},
            {"role": "user", "content": seed.prompt},
        ]
        idle, untrue = self.slips_up("idle"), self.slips_up("untrue")
        if not idle:
            self._explore(request, seed, messages)
        findings = [self._find(need, messages, idle, untrue) for need in request.needs]
        items = self._items(request, findings, hardness)
        if self.slips_up("few"):
            items = items[: self.rng.randint(1, 2)]
        written = {"query": request.text, "rubrics": items, "expected_tools": self._expected(request)}
        messages.append({"role": "assistant", "content": self._spelled(written)})
        return messages

    def _explore(self, request: Request, seed: Task, messages: list[Message]) -> None:
        """Find the places that the request speaks of; now and then look at something that is not used."""
        arguments, city = request.needs[0].arguments, str(seed.data["cities"][0])
        places = self.tools.world.places(city)
        named = [arguments[key] for key in ("place", "origin", "destination") if arguments.get(key) in places]
        wanted = dict.fromkeys(places[name].category for name in named)
        if not wanted and len(request.needs) < 4 and self.rng.random() < 0.15:
            wanted = {self.rng.choice(CATEGORIES): None}
        for category in wanted:
            if self.slips_up("malformed"):
                self._call("poi_search", {"city": city, "category": category}, messages, broken=True)
            self._call("poi_search", {"city": city, "category": category}, messages)

    def _find(self, need: Need, messages: list[Message], idle: bool, untrue: bool) -> Finding:
        text = look_up(self.tools, need) if idle else self._call(need.tool, call_arguments(need), messages)
        rows = parse_table(text)
        row = self.rng.choice(rows) if untrue else right_row(rows, need.wish)
        return Finding(need=need, rows=rows, row=row, observation=max(1, self.observations))

    def _call(self, tool: str, arguments: dict[str, str], messages: list[Message], *, broken: bool = False) -> str:
        raw = json.dumps({"name": tool, "arguments": arguments})[: -1 if broken else None]
        messages.append({"role": "assistant", "content": f"<tool_call>\n{raw}\n</tool_call>"})
        text = "Error: the call is not valid JSON" if broken else getattr(self.tools, tool)(**arguments)
        messages.append({"role": "tool", "content": text})
        self.observations += 1
        return text

    def _items(self, request: Request, findings: list[Finding], hardness: float) -> list[dict[str, Any]]:
        """Assertions with their evidence: strict ones for a hard task, weak ones until there are three."""
        chosen = [(text, f) for f in findings for text in self._assertions(f, hardness)]
        if request.take and self.rng.random() < 0.3 + 0.7 * hardness:
            rides = [f for f in findings if f.need.label in ("flight", "train")]
            least = min(rides, key=lambda f: int(f.row["usd"]))
            chosen.append((f"The answer takes the {least.label}.", least))
        if request.budget is not None:
            chosen.append((f"The total is at most {request.budget} usd.", findings[-1]))
        weak = [(f"{f.need.tool} was called.", f) for f in findings]
        weak += [(f"The answer names a {f.label}.", f) for f in findings]
        weak += [
            (f"The {f.label} is not {next(iter(worst.values()))}.", replace(f, row=worst))
            for f in findings
            if (worst := right_row(f.rows, f.need.wish, worst=True)) != f.row
        ]
        weak += [(f"The {f.label} costs {f.row['usd']} usd.", f) for f in findings if "usd" in f.row]
        least_items, by_text = self.rng.choice((3, 3, 4)), dict(chosen)
        for text, finding in weak:
            if len(by_text) < least_items:
                by_text.setdefault(text, finding)
        chosen = list(by_text.items())[:SHOWN]
        wrong = self.rng.randrange(len(chosen)) if self.slips_up("misquote") else None
        misnumbered = self.rng.randrange(len(chosen)) if self.slips_up("misnumber") else None
        return [
            self._item(text, f, misquoted=i == wrong, misnumbered=i == misnumbered)
            for i, (text, f) in enumerate(chosen)
        ]

    def _assertions(self, finding: Finding, hardness: float) -> list[str]:
        label, row = finding.label, finding.row
        strict = hardness + self.rng.uniform(-0.25, 0.25)
        if label == "weather":
            return [f"The weather is {row['celsius']} celsius." if strict > 0.35 else "The answer names a weather."]
        if strict < 0.3 or (len(finding.rows) > 1 and not finding.need.wish):
            return [f"The answer names a {label}."]
        price = f"The {label} costs {row['usd']} usd."
        return [f"The {label} is {finding.name}.", *([price] if strict > 0.6 else [])]

    def _item(self, text: str, finding: Finding, *, misquoted: bool, misnumbered: bool) -> dict[str, Any]:
        quote, observation = finding.quote, finding.observation
        if misquoted:
            quote = f"{finding.name} {self.rng.choice([n for n in range(10, 99) if str(n) not in quote])}"
        if misnumbered:
            observation += self.rng.choice((-1, 1)) if observation > 1 else 1
        return {"text": text, "observation": observation, "evidence": quote}

    def _expected(self, request: Request) -> list[dict[str, Any]]:
        calls = [{"name": n.tool, "arguments": call_arguments(n)} for n in request.needs]
        if self.slips_up("forgotten") and len(calls) > 1:
            calls.pop(self.rng.randrange(len(calls)))
        if self.slips_up("unmatched"):
            place = self.rng.randrange(len(calls))
            arguments = dict(calls[place]["arguments"])
            key = self.rng.choice([key for key in arguments if key != "day"])  # the day of a ride is not compared
            arguments[key] = self.rng.choice([category for category in CATEGORIES if category != arguments[key]])
            calls[place] = {**calls[place], "arguments": arguments}
        return calls

    def _spelled(self, written: dict[str, Any]) -> str:
        text = json.dumps(written)
        if not self.slips_up("broken"):
            return text
        return self.rng.choice((text[:-1], text[:-2], text.replace("}, {", "}{", 1), text.replace("}], ", "}, ", 1)))


def generator_demonstrations(
    count: int, seed: int, splits: tuple[str, ...] = ("train",), advised: float = 0.35
) -> list[Demonstration]:
    """``count`` conversations of a writer: five kinds in turn, skill and hardness uniform in [0, 1].

    Args:
        advised: share of conversations with a note at the end of the user prompt.
    """
    rng = random.Random(f"generator demonstrations/{seed}")
    played: list[Demonstration] = []
    for world_seed, split in _worlds(seed, splits):
        generator, tools = TravelGenerator(world_seed), TravelTools(world_seed)
        for task in generator.tasks(split, min(50, count - len(played)), seed=world_seed):
            sentences, hardness = [], rng.random()
            if rng.random() < advised:
                hint = rng.choice((EASIER, HARDER, None, None))
                sentences = draw(GENERATOR, rng, least=0 if hint else 1) + ([hint] if hint else [])
                hardness *= 0.3 if hint else 1
                hardness = 1 - hardness if hint == HARDER else hardness
            slips = replace(WritingSlips(), **ruled_out(GENERATOR, sentences))
            if EASIER in sentences:
                slips = replace(slips, untrue=0.0)
            messages = Writer(tools, rng, rng.random(), slips).play(task, hardness)
            memory = Memory(text=note(sentences), place="user") if sentences else None
            played.append((rename_cities(messages, list(tools.world.cities), rng), memory))
        if len(played) == count:
            return played
    raise AssertionError("there are always more worlds")


def solver_demonstrations(
    count: int, seed: int, splits: tuple[str, ...] = ("train",), advised: float = 0.35, written: float = 0.5
) -> list[Demonstration]:
    """``count`` conversations of a solver.

    Args:
        advised: share of conversations with a note at the end of the system prompt.
        written: share of requests as a generator words them; the others are those of `TravelTasks`.
    """
    rng = random.Random(f"solver demonstrations/{seed}")
    played: list[Demonstration] = []
    for world_seed, split in _worlds(seed, splits):
        tools, share = TravelTools(world_seed), min(50, count - len(played))
        ordinary = TravelTasks(world_seed).tasks(split, share, seed=world_seed)
        seeds = TravelGenerator(world_seed).tasks(split, share, seed=world_seed)
        for task, generator_seed in zip(ordinary, seeds, strict=True):
            if rng.random() < written:
                kind = generator_seed.kind
                task = Requester(tools.world, rng, rng.random()).request(kind, generator_seed.data["cities"]).task(kind)
            sentences = draw(SOLVER, rng) if rng.random() < advised else []
            slips = replace(SOLVER_SLIPS, **ruled_out(SOLVER, sentences))
            messages = Demonstrator(tools, rng, rng.random(), slips).play(task)
            memory = Memory(text=note(sentences)) if sentences else None
            played.append((rename_cities(messages, list(tools.world.cities), rng), memory))
        if len(played) == count:
            return played
    raise AssertionError("there are always more worlds")


def row_drill(rng: random.Random, names: Sequence[str]) -> tuple[str, str]:
    """(context, continuation to learn): numbered tables and what is asked of each, then assertions that quote the rows."""
    labels = rng.sample(CATEGORIES, rng.randint(1, 3))
    context, items = [], []
    for number, label in enumerate(labels, 1):
        prices, ratings = rng.sample(range(4, 90), 3), rng.sample(range(1, 10), 3)
        rows = [dict(zip(("name", "usd", "rating"), (rng.choice(names), str(p), str(r)), strict=True))
                for p, r in zip(prices, ratings, strict=True)]  # fmt: skip
        context.append("\n".join(["name usd rating", *(" ".join(row.values()) for row in rows)]))
        wish = rng.choice(("best", "cheap"))
        finding = Finding(
            need=Need(label=label, tool="poi_search", arguments={}, wish=wish),
            rows=rows, row=right_row(rows, wish), observation=number,
        )  # fmt: skip
        items.append((f"{PLAN[wish]}{label}", finding))
    asked = ", ".join(words for words, _ in items)
    lines: list[dict[str, Any]] = []
    for _, f in items:
        for text in (f"The {f.label} is {f.name}.", f"The {f.label} costs {f.row['usd']} usd.")[: rng.randint(1, 2)]:
            lines.append({"text": text, "observation": f.observation, "evidence": f.quote})
    return "\n".join(context) + f"\n{asked}.\n", json.dumps(lines)


def _worlds(seed: int, splits: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """World seeds from 1,001 on: the experiments play in world 0."""
    world_seed = 1000 * seed
    while True:
        world_seed += 1
        yield world_seed, splits[world_seed % len(splits)]
