"""Keep a knowledge graph right through the public MCP memory server; the verdict is read from its file.

## Description
The graph holds people and the companies they work at. Everyone has a mentor, a neighbour and an employer. A task names
people by following relations ("the mentor of the neighbour of Ada") and asks, of six kinds: ``observe`` (note something
about them), ``correct`` (replace a wrong observation), ``relink`` (they changed their employer), ``hire`` (new people
who work where they do), ``remove`` (delete them) and ``ask`` (name their badges).

Three axes of difficulty, each 1 to 3 and drawn apart: how large the graph is, how many relations must be followed, and
how many people the task is about (`Difficulty`).

## Actions
The text of an assistant message: tool calls, or the final answer (any text without a call).

## Observations
The new chat messages: system and user at reset, tool results after each step.

## Rewards
0 until the end, then *share of the changes made* x 0.5 ^ *facts harmed*, in [0, 1] (`MemoryTasks`).

## Starting state
The graph of a task of the split, picked by the seed. The names and badges of the held-out split never occur in training.

## Episode end
Terminated by an answer; truncated after 16 assistant turns.

## Arguments
``split``: "train" or "heldout". ``max_turns``: see above. ``seed``: another seed gives other tasks.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

from arenarl.envs.shared import call, codes_right, distinct_tasks
from arenarl.mcp.catalogue import find
from arenarl.mcp.config import ServerSpec
from arenarl.rubric import Checklist, Reward
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory

KINDS = ("observe", "correct", "relink", "hire", "remove", "ask")
# All but read_graph: the whole graph in one result is long, and following relations is what is to be learnt.
TOOLS = (
    "open_nodes", "search_nodes", "create_entities", "create_relations", "add_observations",
    "delete_entities", "delete_observations", "delete_relations",
)  # fmt: skip
SYSTEM_PROMPT = (
    "You keep a knowledge graph with tools. 'The mentor of Ada' is where the relation mentor from Ada leads. "
    "Do what is asked and change nothing else. Then answer 'done'. "
    "To a question, answer with one line such as 'answer: AB123, CD456'."
)
FILE = "memory.jsonl"
PEOPLE = {1: 7, 2: 10, 3: 14}
CHAIN_RELATIONS = ("mentor", "neighbour")

# Even words are for training, odd ones are held out.
_WORDS = {
    "person": "Ada Bela Carl Dora Egon Fay Gus Hedy Ivo Jana Kurt Lena Milo Nora Otto Pia Quin Rosa Saul Tess Ugo Vera "
    "Walt Xena Yuri Zoe Arlo Bria Cody Dale Elsa Finn Greta Hank Ines Jock Kaya Lars Mona Nils",
    "company": "Acme Borel Cinder Delmar Exeter Fabric Glint Hazel Inkwell Jetty",
    "team": "red blue green gold grey pink teal plum rust mint",
    "note": "allergic-to-nuts speaks-french likes-chess left-handed vegetarian night-shift plays-cello cycles-daily "
    "has-parking works-remote studies-law keeps-bees",
}
_LETTERS = {"train": "BCDFGHJK", "heldout": "LMNPQRST"}

# ("entity", name, type), ("observation", name, text) or ("relation", from, type, to)
Fact = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """Three axes, each 1 to 3.

    Attributes:
        size: 7, 10 or 14 people, who work at 2, 3 or 4 companies.
        hops: how many relations lead from the name in the prompt to the person who is meant.
        edits: how many people are meant.
    """

    size: int
    hops: int
    edits: int


# --- the graph and its file ------------------------------------------------------------------------------------------


def facts_text(facts: Sequence[Fact]) -> str:
    """The server's own file: one JSON object a line, entities with their observations first, then relations."""
    lines = []
    for _, name, kind in (fact for fact in facts if fact[0] == "entity"):
        notes = [fact[2] for fact in facts if fact[:2] == ("observation", name)]
        lines.append({"type": "entity", "name": name, "entityType": kind, "observations": notes})
    for _, source, relation, target in (fact for fact in facts if fact[0] == "relation"):
        lines.append({"type": "relation", "from": source, "to": target, "relationType": relation})
    return "\n".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in lines)


def parse_facts(text: str) -> set[Fact]:
    """The facts in the server's file."""
    facts: set[Fact] = set()
    for line in filter(str.strip, text.split("\n")):
        item = json.loads(line)
        if item["type"] == "entity":
            facts.add(("entity", item["name"], item["entityType"]))
            facts |= {("observation", item["name"], note) for note in item["observations"]}
        else:
            facts.add(("relation", item["from"], item["relationType"], item["to"]))
    return facts


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A graph and who is meant.

    Attributes:
        facts: the graph.
        badges, employers: of each person.
        companies: all of them.
        paths: for each person who is meant, the names from the one that the prompt tells to the person.
        chains: the same in words, such as "the mentor of Ada".
        newcomers, notes: as many unused names and notes as people are meant.
        spare: unused badges, as many.
    """

    facts: tuple[Fact, ...]
    badges: dict[str, str]
    employers: dict[str, str]
    companies: tuple[str, ...]
    paths: tuple[tuple[str, ...], ...]
    chains: tuple[str, ...]
    newcomers: tuple[str, ...]
    notes: tuple[str, ...]
    spare: tuple[str, ...]

    @property
    def subjects(self) -> list[str]:
        return [path[-1] for path in self.paths]


def _scene(rng: random.Random, split: str, difficulty: Difficulty) -> Scene:
    words = {name: text.split()[split == "heldout" :: 2] for name, text in _WORDS.items()}
    count, edits = PEOPLE[difficulty.size], difficulty.edits
    names = rng.sample(words["person"], count + edits)
    people, newcomers = names[:count], names[count:]
    companies = rng.sample(words["company"], 1 + difficulty.size)
    numbers = rng.sample(range(100, 1000), count + edits)
    codes = ["".join(rng.choices(_LETTERS[split], k=2)) + str(number) for number in numbers]
    badges = dict(zip(people, codes, strict=False))
    employers = dict(zip(rng.sample(people, count), cycle(companies), strict=False))
    leads = {relation: _circle(rng, people) for relation in CHAIN_RELATIONS}
    facts: list[Fact] = [("entity", company, "company") for company in companies]
    for person in people:
        facts += [("entity", person, "person"), ("observation", person, f"badge: {badges[person]}")]
        facts += [
            ("observation", person, f"team: {rng.choice(words['team'])}"),
            ("relation", person, "works_at", employers[person]),
        ]
        facts += [("relation", person, relation, leads[relation][person]) for relation in CHAIN_RELATIONS]
    walks = [_walk(rng, person, leads, difficulty.hops) for person in rng.sample(people, edits)]
    return Scene(
        facts=tuple(facts), badges=badges, employers=employers, companies=tuple(companies),
        paths=tuple(path for path, _ in walks), chains=tuple(chain for _, chain in walks),
        newcomers=tuple(newcomers), notes=tuple(rng.sample(words["note"], edits)), spare=tuple(codes[count:]),
    )  # fmt: skip


def _circle(rng: random.Random, people: Sequence[str]) -> dict[str, str]:
    """A relation that leads through all people and back, so that following it never stays in place."""
    order = rng.sample(people, len(people))
    return dict(zip(order, [*order[1:], order[0]], strict=True))


def _walk(rng: random.Random, person: str, leads: dict[str, dict[str, str]], hops: int) -> tuple[tuple[str, ...], str]:
    """(names on a way of ``hops`` relations that ends at a person and visits nobody twice, the way in words)."""
    back = {relation: {target: source for source, target in lead.items()} for relation, lead in leads.items()}
    while True:
        path, relations = [person], []
        for _ in range(hops):
            relations.append(rng.choice(CHAIN_RELATIONS))
            path.insert(0, back[relations[-1]][path[0]])
        if len(set(path)) == len(path):
            return tuple(path), "".join(f"the {relation} of " for relation in relations) + path[0]


# --- the kinds of tasks ----------------------------------------------------------------------------------------------


def _plan(kind: str, scene: Scene, rng: random.Random) -> tuple[str, set[Fact], list[str]]:
    """(the prompt, the facts at the end, the badges to name) of a task."""
    start, subjects = set(scene.facts), scene.subjects
    added: set[Fact] = set()
    removed: set[Fact] = set()
    wishes = []
    if kind in ("remove", "ask"):
        gone = set(subjects) if kind == "remove" else set()
        wish = "Delete these people, but find all of them first: " if gone else "What are the badges of these people: "
        answer = [] if gone else [scene.badges[person] for person in subjects]
        return wish + "; ".join(scene.chains) + ".", {f for f in start if gone.isdisjoint(_names(f))}, answer
    for n, (person, chain) in enumerate(zip(subjects, scene.chains, strict=True)):
        badge, spare, note, newcomer = scene.badges[person], scene.spare[n], scene.notes[n], scene.newcomers[n]
        if kind == "observe":
            wishes.append(f"Add the observation '{note}' to {chain}.")
            added.add(("observation", person, note))
        elif kind == "correct":
            wishes.append(f"The badge of {chain} is wrong: replace the observation by 'badge: {spare}'.")
            added.add(("observation", person, f"badge: {spare}"))
            removed.add(("observation", person, f"badge: {badge}"))
        elif kind == "relink":
            employer = rng.choice([company for company in scene.companies if company != scene.employers[person]])
            wishes.append(f"Replace the relation works_at of {chain}: it leads to {employer} now.")
            added.add(("relation", person, "works_at", employer))
            removed.add(("relation", person, "works_at", scene.employers[person]))
        else:
            wishes.append(
                f"Add {newcomer}, a person with the observation 'badge: {spare}' and the relation works_at to the "
                f"company where {chain} works."
            )
            added |= {("entity", newcomer, "person"), ("observation", newcomer, f"badge: {spare}")}
            added.add(("relation", newcomer, "works_at", scene.employers[person]))
    return " ".join(wishes), (start - removed) | added, []


def _names(fact: Fact) -> set[str]:
    """The entities that a fact is about."""
    return {fact[1], fact[3]} if fact[0] == "relation" else {fact[1]}


# --- the verdict -----------------------------------------------------------------------------------------------------


def judge_facts(start: set[Fact], goal: set[Fact], now: set[Fact]) -> tuple[float, int]:
    """(share of the wanted additions and removals that were made, facts lost or added without need).

    All that is to be added of a new entity is one addition. The share is 0 if nothing was to be changed.
    """
    there = {fact[1] for fact in start if fact[0] == "entity"}
    additions: defaultdict[object, set[Fact]] = defaultdict(set)
    for fact in goal - start:
        additions[fact if fact[1] in there else fact[1]].add(fact)
    wanted = len(additions) + len(start - goal)
    made = sum(facts <= now for facts in additions.values()) + len((start - goal) - now)
    harm = len((start & goal) - now) + len(now - start - goal)
    return made / wanted if wanted else 0.0, harm


def _facts(rows: Sequence[Sequence[str]]) -> set[Fact]:
    return {tuple(row) for row in rows}


# --- the task set ----------------------------------------------------------------------------------------------------


class MemoryTasks:
    """The task set. An episode scores *share* x 0.5 ^ *harm*, over the facts of the graph.

    A fact is an entity with its type, an observation of an entity, or a relation. *share* is the part of the wanted
    additions and removals that were made; for a question it is `codes_right`. *harm* counts the facts that were lost
    or added without need: each halves the score. Doing nothing scores 0.

    Args:
        seed: another seed gives other tasks.
    """

    name = "memory"
    system_prompt = SYSTEM_PROMPT
    max_turns = 16

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def servers(self) -> Sequence[ServerSpec]:
        return (find("memory", allow=TOOLS),)

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """``count`` distinct tasks, the kinds in turn and each axis of difficulty drawn; equal arguments, equal tasks.

        Raises:
            ConfigError: for an unknown split.
        """
        key = f"memory/{self.seed}/{seed}"
        return distinct_tasks(split, count, key, KINDS, self._task, lambda task: json.dumps(task.data))

    def _task(self, kind: str, split: str, rng: random.Random) -> Task:
        difficulty = Difficulty(size=rng.randint(1, 3), hops=rng.randint(1, 3), edits=rng.randint(1, 3))
        scene = _scene(rng, split, difficulty)
        prompt, goal, answer = _plan(kind, scene, rng)
        data = {
            "difficulty": asdict(difficulty),
            "start": [list(fact) for fact in scene.facts],
            "goal": [list(fact) for fact in sorted(goal)],
            "paths": [list(path) for path in scene.paths],
            "answer": answer,
        }
        return Task(task_id=f"{kind}-{rng.getrandbits(32):08x}", kind=kind, prompt=prompt, data=data)

    def setup(self, task: Task, workdir: Path) -> None:
        """Write the graph that the task begins with."""
        text = facts_text([tuple(row) for row in task.data["start"]])
        (workdir / FILE).write_text(text, encoding="utf-8")

    def checklist(self, task: Task) -> Checklist:
        async def result(trajectory: Trajectory, state: EpisodeState) -> float:
            now = parse_facts(state.read(FILE) or "")
            share, harm = judge_facts(_facts(task.data["start"]), _facts(task.data["goal"]), now)
            if task.data["answer"]:
                share = codes_right(trajectory.answer, task.data["answer"])
            return share * 0.5**harm

        return Checklist([Reward(name="result", function=result)])

    def oracle(self, task: Task) -> list[str]:
        """Messages that solve the task: follow the relations a hop at a time, change the graph, answer."""
        steps = [sorted(set(names)) for names in zip(*task.data["paths"], strict=True)]
        changes = _changes(task.kind, _facts(task.data["start"]), _facts(task.data["goal"]))
        answer = f"answer: {', '.join(task.data['answer'])}" if task.data["answer"] else "done"
        return [call("open_nodes", names=names) for names in steps] + changes + [answer]


def _changes(kind: str, start: set[Fact], goal: set[Fact]) -> list[str]:
    """The calls that turn one graph into another, a message each."""
    lost, new = sorted(start - goal), sorted(goal - start)
    if kind == "remove":
        return [call("delete_entities", entityNames=[fact[1] for fact in lost if fact[0] == "entity"])]
    born = {fact[1]: fact[2] for fact in new if fact[0] == "entity"}
    notes = {name: [fact[2] for fact in new if fact[:2] == ("observation", name)] for name in born}
    told = [fact for fact in new if fact[0] == "observation" and fact[1] not in born]
    untold = [fact for fact in lost if fact[0] == "observation"]
    calls = [
        ("create_entities", "entities", [{"name": n, "entityType": born[n], "observations": notes[n]} for n in born]),
        ("delete_observations", "deletions", [{"entityName": f[1], "observations": [f[2]]} for f in untold]),
        ("add_observations", "observations", [{"entityName": f[1], "contents": [f[2]]} for f in told]),
        ("delete_relations", "relations", [_relation(fact) for fact in lost if fact[0] == "relation"]),
        ("create_relations", "relations", [_relation(fact) for fact in new if fact[0] == "relation"]),
    ]
    return [call(name, **{key: items}) for name, key, items in calls if items]


def _relation(fact: Fact) -> dict[str, str]:
    return {"from": fact[1], "relationType": fact[2], "to": fact[3]}
