"""Writing travel tasks as an environment: the generator of ARISE (arXiv 2609.01058) on the travel tools.

## Description
The agent is told a kind of task and its cities. It looks things up with the travel tools and then writes one task as
JSON: a request, three to eight assertions about the right answer, each with the number of the tool result that
supports it and a quote from it, and the calls that a solver needs. A task so written is played in `travel`.

## Actions
The text of an assistant message: Hermes-style tool calls, or the task (any text without a call).

## Observations
The new chat messages: system and user at reset, tool results after each step.

## Rewards
0 until the end, then the share of `arenarl.generated.generator_checklist` that is met: format and grounding. How hard
the task is for a solver is the affair of the algorithm.

## Starting state
A seed of the split, picked by the seed: one of five kinds, in turn, with one city or two.

## Episode end
Terminated by the task; truncated after 7 assistant turns, six of which can call tools.

## Arguments
``split``: "train" or "heldout". ``max_turns``: see above.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from arenarl.envs.travel import KINDS, TravelTasks
from arenarl.envs.travel_world import World
from arenarl.errors import ConfigError
from arenarl.generated import generator_checklist
from arenarl.mcp.config import ServerSpec
from arenarl.rubric import Checklist
from arenarl.types import Task

PROMPTS = {
    "search": "Write a search task for {0}.",
    "direction": "Write a direction task for {0}.",
    "compare": "Write a compare task from {0} to {1}.",
    "one_day": "Write a one day task for {0}.",
    "multi_day": "Write a multi day task for {0} from {1}.",
}
_PLACES = ("poi_search", "around_search")
REQUIRED: dict[str, tuple[tuple[str, ...], ...]] = {
    "search": (_PLACES,),
    "direction": (("direction",),),
    "compare": (("search_flights",), ("search_train_tickets",)),
    "one_day": (_PLACES,),
    "multi_day": (("search_flights", "search_train_tickets"), _PLACES),
}
"""By kind: groups of tools, of each of which one must be among the expected tools."""


class TravelGenerator:
    """The task set: seeds of travel tasks to write.

    Args:
        seed: seed of the world; the server is started with the same one.
    """

    name = "travel_generator"
    system_prompt = "You write travel tasks. Call tools, then write one task as JSON."
    max_turns = 7

    def __init__(self, seed: int = 0) -> None:
        self.travel = TravelTasks(seed)

    @property
    def world(self) -> World:
        return self.travel.world

    def servers(self) -> Sequence[ServerSpec]:
        return self.travel.servers()

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """``count`` distinct seeds, or all there are, the five kinds in turn; equal arguments give equal seeds.

        Raises:
            ConfigError: for an unknown split.
        """
        if split not in ("train", "heldout"):
            raise ConfigError(f"split {split!r} is unknown; use 'train' or 'heldout'")
        rng, cities = random.Random(f"generator/{split}/{seed}"), self.world.split(split)
        count = min(count, len(KINDS) * len(cities))
        order = {kind: rng.sample(cities, len(cities)) for kind in KINDS}
        return [self._seed(kind, order[kind][turn // len(KINDS)], cities, rng) for turn, kind in _turns(count)]

    def checklist(self, task: Task) -> Checklist:
        return generator_checklist()

    def refuse(self, task: Task, seed: Task) -> str:
        """Why a written task is not one of its seed: a kind, a colon and details; empty if it is.

        The rules for travel of ARISE (appendix on rewards): the tools that the kind requires are expected, a way or a
        trip has two different ends, and the cities of the seed occur, in the request and in the expected calls.
        """
        calls = task.data["expected_tools"]
        names = [call["name"] for call in calls]
        for group in REQUIRED[seed.kind]:
            if not set(group) & set(names):
                return f"missing_tool: {seed.kind} needs {' or '.join(group)}"
        values = [{key: str(v).strip().lower() for key, v in call["arguments"].items()} for call in calls]
        for name, arguments in zip(names, values, strict=True):
            if "origin" in arguments and arguments["origin"] == arguments.get("destination"):
                return f"same_ends: {name} from {arguments['origin']!r} to itself"
        asked = {word for arguments in values for value in arguments.values() for word in value.split()}
        for city in seed.data["cities"]:
            if city.lower() not in task.prompt.lower():
                return f"other_city: the request does not name {city}"
            if city.lower() not in asked:
                return f"other_city: no expected call asks about {city}"
        return ""

    def _seed(self, kind: str, city: str, cities: list[str], rng: random.Random) -> Task:
        named = [city]
        if kind in ("compare", "multi_day"):
            named.append(rng.choice(self.world.neighbours(city, cities)))
        data = {"kind": kind, "cities": named}
        prompt = PROMPTS[kind].format(*named)
        return Task(task_id=f"write-{kind}-{'-'.join(named)}".lower(), kind=kind, prompt=prompt, data=data)


def _turns(count: int) -> list[tuple[int, str]]:
    return [(turn, KINDS[turn % len(KINDS)]) for turn in range(count)]
