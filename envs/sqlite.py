"""Questions about a small database and changes to it, through the public MCP sqlite server; verdict from the rows.

## Description
``/workspace/data.sqlite`` holds a made-up business: owners (customers, readers, ...), the things they use, and the
links between both (orders, loans, ...). A task is of one of six kinds: ``lookup`` (which owner), ``aggregate`` (how
many, or how much in all), ``insert`` (rows), ``update`` (a column of the rows that meet the conditions), ``delete``
(those rows) and ``create`` (a table of them).

Three axes of difficulty, each 1 to 3 and drawn apart: ``tables`` (owners; with links; with things; all of them are
needed), ``rows`` of the table in question (8, 24, 60; half as many owners where they are another table), and
``conditions`` that a row must meet beside one for each further table (for ``insert``: rows to add).

## Actions
The text of an assistant message: tool calls, or the final answer (any text without a call).

## Observations
The new chat messages: system and user at reset, tool results after each step.

## Rewards
0 until the end, then *share of the wanted changes made* x 0.5 ^ *other rows harmed*, in [0, 1] (`SqliteTasks`).

## Starting state
The database of a task of the split, picked by the seed. The words of the held-out split never occur in training.

## Episode end
Terminated by an answer; truncated after 10 assistant turns.

## Arguments
``split``: "train" or "heldout". ``max_turns``: see above. ``seed``: another seed gives other tasks.
"""

from __future__ import annotations

import asyncio
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from arenarl.envs.shared import Facts, call, distinct_tasks, share, stated
from arenarl.errors import BrokenFile
from arenarl.mcp.catalogue import find
from arenarl.mcp.config import ServerSpec
from arenarl.rubric import Checklist, Reward
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory

KINDS = ("lookup", "aggregate", "insert", "update", "delete", "create")
AXES = ("tables", "rows", "conditions")
FILE = "data.sqlite"
# All but append_insight, whose memo stays in the process when the files are swapped.
TOOLS = ("list_tables", "describe_table", "read_query", "write_query", "create_table")
SYSTEM_PROMPT = (
    "You work on a SQLite database with tools. Look at its tables first. Do what is asked in SQL and change nothing "
    "else. Then answer 'done'. To a question, answer with one line such as 'answer: 42' or 'answer: Name'."
)
ROWS = {1: 8, 2: 24, 3: 60}
_MAX_ROWS = 5_000  # of one table that a verdict reads; the start has 60

# Per business: owners, things, links, the number of a link, and what its status may be.
_BUSINESSES = {
    "train": (
        ("customers", "products", "orders", "quantity", ("paid", "open", "late")),
        ("readers", "books", "loans", "days", ("returned", "overdue", "renewed")),
        ("drivers", "trucks", "trips", "mileage", ("finished", "planned", "cancelled")),
    ),
    "heldout": (
        ("patients", "clinics", "visits", "minutes", ("billed", "missed", "urgent")),
        ("farmers", "crops", "harvests", "tons", ("sold", "stored", "spoiled")),
    ),
}
_NAMES = {
    "train": [head + tail for head in "Ba Co Di Fe Ga Hu Ka Lo".split() for tail in "ran lis mon tek vid dor nes pal".split()],
    "heldout": [head + tail for head in "Ma Ne Po Ri Sa Te Vo Wi".split() for tail in "bert gill jan kun sol wen zar fin".split()],
}  # fmt: skip
_TOWNS = {"train": "Oslo Riga Turin Lyon Porto Gent", "heldout": "Brno Cadiz Malmo Bari Varna Bergen"}
_TITLES = {
    "train": "amber basalt cobalt dune ember flint garnet harbor ivory jade kelp lava marble nickel onyx pearl quartz",
    "heldout": "acorn birch cedar daisy elder fern ginger hazel iris juniper laurel maple nettle olive poppy rowan sage",
}
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?!\w)")

Query = Callable[[str, Sequence[object]], list[tuple[Any, ...]] | None]
Axes = Mapping[str, int]
Tables = Mapping[str, Mapping[str, list[Any]]]
Plan = tuple[str, str, str, str | int | None]  # prompt; tool and SQL that do it; answer, if it is a question


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A database and a selection of the rows of its main table.

    Attributes:
        tables: name to {"columns": SQL definitions, "rows": values}.
        owners, things: names of the tables that play these parts.
        main, choice, number: the table in question, its column of few values and its column of distinct numbers.
        choices: the values that ``choice`` may take; ``chosen``, the one of the selected rows.
        where, wish: the selection in SQL and in words.
    """

    axes: Axes
    tables: Tables
    owners: str
    things: str
    main: str
    choice: str
    number: str
    choices: Sequence[str]
    chosen: str
    where: str
    wish: str


# --- the database ------------------------------------------------------------------------------------------------


def _load(connection: sqlite3.Connection, tables: Tables) -> sqlite3.Connection:
    for name, table in tables.items():
        connection.execute(f"CREATE TABLE {name} ({', '.join(table['columns'])})")
        connection.executemany(f"INSERT INTO {name} VALUES (?{', ?' * (len(table['columns']) - 1)})", table["rows"])
    connection.commit()
    return connection


def _run(scene: Scene, sql: str) -> list[tuple[Any, ...]]:
    with closing(_load(sqlite3.connect(":memory:"), scene.tables)) as connection:
        return connection.execute(sql).fetchall()


def _tables(rng: random.Random, split: str, axes: Axes, business: Sequence[Any], towns: Sequence[str]) -> Tables:
    """The tables of a business; numbers of the main table are distinct, so that one row has the most."""
    owners, things, links, number, statuses = business
    count = ROWS[axes["rows"]]
    people, goods = count if axes["tables"] == 1 else count // 2, 4 + 4 * axes["rows"]
    names, points = rng.sample(_NAMES[split], people), rng.sample(range(11, 11 + 4 * people), people)
    columns = ["id INTEGER PRIMARY KEY", "name TEXT", "town TEXT", "points INTEGER"]
    rows = [[n + 1, names[n], rng.choice(towns), points[n]] for n in range(people)]
    tables: dict[str, dict[str, list[Any]]] = {owners: {"columns": columns, "rows": rows}}
    if axes["tables"] == 3:
        columns = ["id INTEGER PRIMARY KEY", "title TEXT", "price INTEGER"]
        titles = rng.sample(_TITLES[split].split(), goods)
        tables[things] = {"columns": columns, "rows": [[n + 1, titles[n], rng.randint(11, 99)] for n in range(goods)]}
    if axes["tables"] > 1:
        sizes = (people, goods)[: axes["tables"] - 1]
        keys = [f"{name[:-1]}_id INTEGER" for name in (owners, things)[: len(sizes)]]
        columns = ["id INTEGER PRIMARY KEY", *keys, f"{number} INTEGER", "status TEXT"]
        rows = [
            [n, *(rng.randint(1, size) for size in sizes), amount, rng.choice(statuses)]
            for n, amount in enumerate(rng.sample(range(11, 11 + 4 * count), count), 1)
        ]
        tables[links] = {"columns": columns, "rows": rows}
    return tables


def _scene(rng: random.Random, split: str) -> Scene:
    """A database, and conditions that are true of one row drawn by chance and false of half of the rows at least."""
    axes = {name: rng.randint(1, 3) for name in AXES}
    while True:
        owners, things, links, number, statuses = business = rng.choice(_BUSINESSES[split])
        towns = rng.sample(_TOWNS[split].split(), 4)
        tables = _tables(rng, split, axes, business, towns)
        single, most = axes["tables"] == 1, ROWS[axes["rows"]]
        main, choice, number = (owners, "town", "points") if single else (links, "status", number)
        names = [column.split()[0] for column in tables[main]["columns"]]
        row = dict(zip(names, rng.choice(tables[main]["rows"]), strict=True))
        low, high = max(10, row[number] - rng.randint(1, 2 * most)), row[number] + rng.randint(1, 2 * most)
        tests = [f"{choice} = '{row[choice]}'", f"{number} > {low}", f"{number} < {high}"][: axes["conditions"]]
        words = [f"{choice} {row[choice]}", f"{number} above {low}", f"{number} below {high}"][: axes["conditions"]]
        wish = f"{main} with {', '.join(words)}"
        if axes["tables"] > 1:
            key = f"{owners[:-1]}_id"
            town = tables[owners]["rows"][row[key] - 1][2]
            tests.append(f"{key} IN (SELECT id FROM {owners} WHERE town = '{town}')")
            wish += f", of {owners} from {town}"
        if axes["tables"] > 2:
            key = f"{things[:-1]}_id"
            floor = max(10, tables[things]["rows"][row[key] - 1][2] - rng.randint(1, 30))
            tests.append(f"{key} IN (SELECT id FROM {things} WHERE price > {floor})")
            wish += f", for {things} with a price above {floor}"
        scene = Scene(
            axes=axes, tables=tables, owners=owners, things=things, main=main, choice=choice, number=number,
            choices=towns if single else statuses, chosen=row[choice], where=" AND ".join(tests), wish=wish,
        )  # fmt: skip
        if len(_run(scene, f"SELECT id FROM {main} WHERE {scene.where}")) <= most // 2:
            return scene


# --- what is asked -----------------------------------------------------------------------------------------------


def _join(scene: Scene) -> str:
    joined = f"{scene.main} JOIN {scene.owners} ON {scene.owners}.id = {scene.owners[:-1]}_id"
    return scene.owners if scene.main == scene.owners else joined


def _lookup(rng: random.Random, scene: Scene) -> Plan:
    sql = f"SELECT name FROM {_join(scene)} WHERE {scene.where} ORDER BY {scene.number} DESC LIMIT 1"
    prompt = f"Consider the {scene.wish}. What is the name of the {scene.owners[:-1]} with the largest {scene.number}?"
    return prompt, "read_query", sql, _run(scene, sql)[0][0]


def _aggregate(rng: random.Random, scene: Scene) -> Plan:
    total = f"SUM({scene.number})", f"What is the sum of their {scene.number}?"
    result, question = rng.choice((total, total, ("COUNT(*)", "How many are there?")))
    sql = f"SELECT {result} AS result FROM {scene.main} WHERE {scene.where}"
    return f"Consider the {scene.wish}. {question}", "read_query", sql, _run(scene, sql)[0][0]


def _insert(rng: random.Random, scene: Scene) -> Plan:
    wishes, values = [], []
    for n in range(scene.axes["conditions"]):
        row = ROWS[scene.axes["rows"]] + 1 + n
        name = rng.choice(scene.tables[scene.owners]["rows"])[1]
        amount, choice = rng.randint(10, 400), rng.choice(scene.choices)
        if scene.main == scene.owners:
            name += rng.choice("aeio")
            wishes.append(f"id {row}, name {name}, town {choice}, points {amount}")
            values.append(f"({row}, '{name}', '{choice}', {amount})")
            continue
        found, wish = f"(SELECT id FROM {scene.owners} WHERE name = '{name}')", f"id {row}, {scene.owners[:-1]} {name}"
        if scene.things in scene.tables:
            title = rng.choice(scene.tables[scene.things]["rows"])[1]
            found += f", (SELECT id FROM {scene.things} WHERE title = '{title}')"
            wish += f", {scene.things[:-1]} {title}"
        wishes.append(f"{wish}, {scene.number} {amount}, status {choice}")
        values.append(f"({row}, {found}, {amount}, '{choice}')")
    sql = f"INSERT INTO {scene.main} VALUES {', '.join(values)}"
    return f"Add to the table {scene.main}: {'; '.join(wishes)}.", "write_query", sql, None


def _update(rng: random.Random, scene: Scene) -> Plan:
    value = rng.choice([choice for choice in scene.choices if choice != scene.chosen])
    change, prompt = f"{scene.choice} = '{value}'", f"Set {scene.choice} to {value} for all {scene.wish}."
    others = _run(scene, f"SELECT id FROM {scene.main} WHERE {scene.choice} <> '{value}' AND NOT ({scene.where})")
    if len(others) < 4 or rng.random() < 0.5:  # to set it everywhere must do harm
        change = f"{scene.number} = {scene.number} + {(amount := rng.randint(2, 50))}"
        prompt = f"Add {amount} to the {scene.number} of all {scene.wish}."
    return prompt, "write_query", f"UPDATE {scene.main} SET {change} WHERE {scene.where}", None


def _delete(rng: random.Random, scene: Scene) -> Plan:
    return f"Delete all {scene.wish}.", "write_query", f"DELETE FROM {scene.main} WHERE {scene.where}", None


def _create(rng: random.Random, scene: Scene) -> Plan:
    owner, number, grouped = scene.owners[:-1], scene.number, scene.axes["tables"] > 1 and rng.random() < 0.5
    columns, about = f"name, {number}", f"name (of the {owner}) and {number}: one row for each of the {scene.wish}"
    if grouped:
        columns = f"name, SUM({number}) AS total"
        about = f"name and total: for each {owner} that has any, the sum of {number} of the {scene.wish}"
    sql = f"CREATE TABLE {scene.main}_report AS SELECT {columns} FROM {_join(scene)} WHERE {scene.where}"
    sql += " GROUP BY name" * grouped
    return f"Create the table {scene.main}_report with the columns {about}.", "create_table", sql, None


_PLANS = dict(zip(KINDS, (_lookup, _aggregate, _insert, _update, _delete, _create), strict=True))


# --- the verdict -------------------------------------------------------------------------------------------------


def facts(query: Query) -> Facts:
    """All that a database says: (kind, name) to columns, and ("row", table, id, column) to values.

    Rows without a column ``id`` are told apart by their values; the order of columns does not count.
    """
    found: Facts = {}
    for kind, name in query("SELECT type, name FROM sqlite_master WHERE name NOT GLOB 'sqlite_*'", ()) or ():
        columns = sorted(column for (column,) in query("SELECT name FROM pragma_table_info(?)", (name,)) or ())
        found[kind, name] = tuple(columns)
        if kind != "table":
            continue
        quoted = ['"' + word.replace('"', '""') + '"' for word in (name, *columns)]
        seen: Counter[str] = Counter()
        for values in query(f"SELECT {', '.join(quoted[1:])} FROM {quoted[0]} LIMIT {_MAX_ROWS}", ()) or ():
            row = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]  # 42.0 is 42
            key: object = row[columns.index("id")] if "id" in columns else repr(row)
            seen[repr(key)] += 1
            cells = zip(columns, row, strict=True)
            found |= {("row", name, (key, seen[repr(key)]), column): value for column, value in cells}
    return found


def is_answer(text: str | None, expected: str | int, names: Sequence[str]) -> bool:
    """Whether a text states the expected number and no other, or of the names the expected one only."""
    if isinstance(expected, str):
        words = set(re.findall(r"\w+", stated(text).lower()))
        return [name for name in names if name.lower() in words] == [expected]
    numbers = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", stated(text)))  # 1,234 is 1234
    return {float(number) for number in numbers} == {float(expected)}


def _verdict(task: Task, answer: str | None, state: EpisodeState) -> float:
    plan, tables = task.data, task.data["tables"]
    try:
        now = facts(partial(state.rows, FILE))
    except BrokenFile:  # the agent made it unreadable, so nothing of it is left
        now = {}
    with closing(_load(sqlite3.connect(":memory:"), tables)) as connection:

        def ask(sql: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
            return connection.execute(sql, parameters).fetchall()

        start = goal = facts(ask)
        if plan["answer"] is None:
            connection.execute(plan["sql"])
            goal = facts(ask)
        elif not is_answer(answer, plan["answer"], [row[1] for row in next(iter(tables.values()))["rows"]]):
            return 0.0
    return share(start, goal, now)


class SqliteTasks:
    """The task set: what to ask, with which server, and how it is checked.

    The score compares three databases: as it was, as it should be, and as it is. With W the cells (and tables) in which
    the first two differ, and H the rows (and tables, views, triggers) outside W in which the last two differ:

        score = |{w in W: as it should be}| / |W| x 0.5 ^ |H|

    A question has no W: it scores 0.5 ^ |H| if the answer names the right value and no other one, else 0.

    Args:
        seed: another seed gives other tasks.
    """

    name = "sqlite"
    system_prompt = SYSTEM_PROMPT
    max_turns = 10

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def servers(self) -> Sequence[ServerSpec]:
        return (find("sqlite", allow=TOOLS),)

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """``count`` distinct tasks, the six kinds in turn; equal arguments give equal tasks.

        Raises:
            ConfigError: for an unknown split.
        """
        key = f"sqlite/{self.seed}/{seed}"
        return distinct_tasks(split, count, key, KINDS, self._task, lambda task: task.prompt)

    def _task(self, kind: str, split: str, rng: random.Random) -> Task:
        scene = _scene(rng, split)
        prompt, tool, sql, answer = _PLANS[kind](rng, scene)
        data = {"difficulty": scene.axes, "tables": scene.tables, "tool": tool, "sql": sql, "answer": answer}
        return Task(task_id=f"{kind}-{rng.getrandbits(32):08x}", kind=kind, prompt=prompt, data=data)

    def setup(self, task: Task, workdir: Path) -> None:
        """Write the database of a task."""
        with closing(sqlite3.connect(workdir / FILE)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            _load(connection, task.data["tables"])

    def checklist(self, task: Task) -> Checklist:
        async def result(trajectory: Trajectory, state: EpisodeState) -> float:
            return await asyncio.to_thread(_verdict, task, trajectory.answer, state)

        return Checklist([Reward(name="result", function=result)])

    def oracle(self, task: Task) -> list[str]:
        """Assistant messages that solve the task: look, act, answer."""
        plan = task.data
        looks = [call("describe_table", table_name=name) for name in plan["tables"]]
        answer = "done" if plan["answer"] is None else f"answer: {plan['answer']}"
        return [call("list_tables"), "\n".join(looks), call(plan["tool"], query=plan["sql"]), answer]
