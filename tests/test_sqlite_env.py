"""The sqlite environment, with the real server: what is asked, what solves it, and what does not."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from arenarl.async_env import AsyncToolEnv
from arenarl.envs.sqlite import FILE, ROWS, SqliteTasks, facts, is_answer
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory
from tests.playing import play
from tests.processes import descendants

TASKS = SqliteTasks()
QUESTIONS = ("lookup", "aggregate")

CUSTOMERS = [[1, "Baran", "Oslo", 20], [2, "Colis", "Riga", 30], [3, "Dimon", "Oslo", 40], [4, "Fetek", "Riga", 50]]
CITIES = [[1, "Oslo"], [2, "Riga"]]
TABLES = {
    "customers": {
        "columns": ["id INTEGER PRIMARY KEY", "name TEXT", "town TEXT", "points INTEGER"], "rows": CUSTOMERS,
    },
    "cities": {"columns": ["id INTEGER PRIMARY KEY", "city TEXT"], "rows": CITIES},
}  # fmt: skip


def a_task(sql: str, answer: str | int | None = None) -> Task:
    data = {"difficulty": {}, "tables": TABLES, "tool": "write_query", "sql": sql, "answer": answer}
    return Task(task_id="one", kind="update", prompt="", data=data)


RAISE_OSLO = a_task("UPDATE customers SET points = points + 5, town = 'Turin' WHERE town = 'Oslo'")
DELETE_RIGA = a_task("DELETE FROM customers WHERE town = 'Riga'")
REPORT = a_task("CREATE TABLE report AS SELECT name, points FROM customers WHERE points > 35")
QUESTION = a_task("SELECT SUM(points) FROM customers", answer=140)


async def verdict(task: Task, workdir: Path, *statements: str, answer: str | None = "done") -> float | None:
    """The score after some SQL on a fresh database."""
    (workdir / FILE).unlink(missing_ok=True)
    TASKS.setup(task, workdir)
    with closing(sqlite3.connect(workdir / FILE)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    trajectory = Trajectory(messages=(), events=(), answer=answer)
    return (await TASKS.checklist(task).run(trajectory, EpisodeState(workdir)))["result"]


# --- the tasks ---------------------------------------------------------------------------------------------------


def words(split: str) -> set[str]:
    """Names of tables, and all texts in their rows."""
    tables = [task.data["tables"] for task in TASKS.tasks(split, 240, seed=3)]
    texts = [str(cell) for table in tables for part in table.values() for row in part["rows"] for cell in row]
    return {name for table in tables for name in table} | {text for text in texts if not text.isdigit()}


def test_splits_share_no_table_and_no_value() -> None:
    assert len(words("train")) > 80
    assert not words("train") & words("heldout")


def test_an_axis_makes_more_of_what_it_says() -> None:
    for task in TASKS.tasks("train", 120, seed=4):
        axes, tables = task.data["difficulty"], task.data["tables"]
        assert len(tables) == axes["tables"]
        assert len(tables[list(tables)[-1]]["rows"]) == ROWS[axes["rows"]]
        if task.kind == "insert":
            assert task.prompt.count("id ") == axes["conditions"]
        else:
            where = task.data["sql"].split("WHERE", 1)[1]
            assert len(re.findall(r" AND ", where)) + 1 == axes["conditions"] + axes["tables"] - 1


def test_a_change_leaves_half_of_the_rows_alone(tmp_path: Path) -> None:
    for task in TASKS.tasks("train", 60, seed=4):
        if task.kind == "delete":
            main = list(task.data["tables"])[-1]
            with closing(sqlite3.connect(":memory:")) as connection:
                TASKS.setup(task, tmp_path)
                connection.execute("ATTACH ? AS task", (str(tmp_path / FILE),))
                gone = connection.execute(task.data["sql"]).rowcount
            (tmp_path / FILE).unlink()
            assert 1 <= gone <= len(task.data["tables"][main]["rows"]) // 2


def test_tasks_are_plain_data() -> None:
    tasks = TASKS.tasks("train", 12, seed=1)
    assert [json.loads(json.dumps(task.data)) for task in tasks] == [task.data for task in tasks]


# --- the verdict, by hand ----------------------------------------------------------------------------------------


async def test_an_update_done_and_half_done(tmp_path: Path) -> None:
    assert await verdict(RAISE_OSLO, tmp_path) == 0.0
    assert await verdict(RAISE_OSLO, tmp_path, RAISE_OSLO.data["sql"]) == 1.0
    assert await verdict(RAISE_OSLO, tmp_path, "UPDATE customers SET points = points + 5 WHERE id IN (1, 3)") == 0.5
    assert await verdict(RAISE_OSLO, tmp_path, "UPDATE customers SET points = 25 WHERE id = 1") == 0.25
    assert await verdict(RAISE_OSLO, tmp_path, "UPDATE customers SET points = 99") == 0.0


async def test_every_other_row_that_changes_halves_the_score(tmp_path: Path) -> None:
    done = RAISE_OSLO.data["sql"]
    assert await verdict(RAISE_OSLO, tmp_path, done, "UPDATE customers SET points = 0, name = '' WHERE id = 2") == 0.5
    assert await verdict(RAISE_OSLO, tmp_path, done, "DELETE FROM customers WHERE town = 'Riga'") == 0.25
    assert await verdict(RAISE_OSLO, tmp_path, done, "INSERT INTO cities VALUES (3, 'Lyon')") == 0.5
    assert await verdict(RAISE_OSLO, tmp_path, done, "CREATE VIEW v AS SELECT 1") == 0.5
    assert await verdict(RAISE_OSLO, tmp_path, done, "DROP TABLE cities") == 0.125  # two rows and the table


async def test_deleted_rows_are_gone_not_empty(tmp_path: Path) -> None:
    assert await verdict(DELETE_RIGA, tmp_path, "DELETE FROM customers WHERE id = 2") == 0.5
    assert await verdict(DELETE_RIGA, tmp_path, "DELETE FROM customers WHERE id IN (2, 4)") == 1.0
    emptied = "UPDATE customers SET name = NULL, town = NULL, points = NULL WHERE id IN (2, 4)"
    assert await verdict(DELETE_RIGA, tmp_path, emptied) == 0.0
    assert await verdict(DELETE_RIGA, tmp_path, "DELETE FROM customers") == 0.25
    assert await verdict(DELETE_RIGA, tmp_path, "DROP TABLE customers") == 0.125


async def test_a_table_is_wanted_with_its_columns_in_any_order(tmp_path: Path) -> None:
    assert await verdict(REPORT, tmp_path, REPORT.data["sql"]) == 1.0
    turned = "CREATE TABLE report AS SELECT points, name FROM customers WHERE points > 35"
    assert await verdict(REPORT, tmp_path, turned) == 1.0
    assert await verdict(REPORT, tmp_path, "CREATE TABLE report (name TEXT, points INT)") == 0.2  # the columns of five
    everyone = "CREATE TABLE report AS SELECT name, points FROM customers"
    assert await verdict(REPORT, tmp_path, everyone) == 0.25


async def test_a_question_is_judged_by_its_answer_and_by_what_was_left_alone(tmp_path: Path) -> None:
    assert await verdict(QUESTION, tmp_path, answer="answer: 140") == 1.0
    assert await verdict(QUESTION, tmp_path, answer="answer: 139") == 0.0
    assert await verdict(QUESTION, tmp_path, answer=None) == 0.0
    assert await verdict(QUESTION, tmp_path, "DELETE FROM cities WHERE id = 1", answer="answer: 140") == 0.5


async def test_a_database_that_cannot_be_read_is_lost_work(tmp_path: Path) -> None:
    TASKS.setup(QUESTION, tmp_path)
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)
    results = await TASKS.checklist(QUESTION).run(
        Trajectory(messages=(), events=(), answer="140"), EpisodeState(tmp_path)
    )
    assert results["result"] == 0.5**8  # two tables and six rows


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("42", True), ("answer: 42", True), ("The rows are 7 and 8.\nanswer: 42.", True), ("**Answer:** 42.0", True),
        ("answer: 42, 43", False), ("41 or 42", False), ("answer: 142", False), ("answer: -42", False), ("done", False),
        ("answer: 42\nanswer: 43", False), ("", False), ("answer: x42", False),
    ],
)  # fmt: skip
def test_a_number_is_the_answer_only_alone(text: str, right: bool) -> None:
    assert is_answer(text, 42, []) is right


@pytest.mark.parametrize(
    ("text", "right"),
    [("Baran", True), ("answer: baran", True), ("answer: Baran, Colis", False), ("Barans", False), (None, False)],
)
def test_a_name_is_the_answer_only_alone(text: str | None, right: bool) -> None:
    assert is_answer(text, "Baran", ["Baran", "Colis"]) is right


# --- the real server ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def env() -> AsyncIterator[AsyncToolEnv]:
    env = AsyncToolEnv(TASKS)
    yield env
    await env.aclose()
    assert not descendants()


def sql_call(tool: str, query: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': {'query': query}})}\n</tool_call>"


async def test_the_oracle_has_turns_to_spare() -> None:
    assert all(len(TASKS.oracle(task)) <= TASKS.max_turns for task in TASKS.tasks("train", 60, seed=8))


async def test_the_answer_of_the_server_holds_the_answer_of_the_task(env: AsyncToolEnv) -> None:
    for task in TASKS.tasks("heldout", 12, seed=8):
        await play(env, task, TASKS.oracle(task))
        if task.kind in QUESTIONS:
            assert str(task.data["answer"]) in env.trajectory().events[-1].result.text


async def test_listing_every_value_is_no_answer(env: AsyncToolEnv) -> None:
    for task in TASKS.tasks("train", 12, seed=9):
        rows = next(iter(task.data["tables"].values()))["rows"]
        everything = ", ".join([*(row[1] for row in rows), *map(str, range(1000))])
        assert await play(env, task, [f"answer: {everything}"]) == 0.0


async def test_acting_on_every_row_earns_little(env: AsyncToolEnv) -> None:
    for task in TASKS.tasks("train", 24, seed=9):
        if task.kind in ("update", "delete"):
            everywhere = sql_call("write_query", task.data["sql"].split(" WHERE ")[0])
            assert await play(env, task, [everywhere, "done"]) <= 1 / 16, task.prompt


async def test_dropping_the_tables_earns_nothing_to_speak_of(env: AsyncToolEnv) -> None:
    for task in TASKS.tasks("train", 12, seed=10):
        drops = [sql_call("write_query", f"DROP TABLE {name}") for name in task.data["tables"]]
        answer = f"answer: {task.data['answer']}"
        assert await play(env, task, [*drops, answer]) <= 1 / 32, task.prompt


async def test_part_of_the_rows_earns_part_of_the_score(env: AsyncToolEnv) -> None:
    task = next(
        t for t in TASKS.tasks("train", 60, seed=11) if t.kind == "insert" and t.data["difficulty"]["conditions"] == 2
    )
    first = re.sub(r"\), \(\d+, .*", ")", task.data["sql"])
    assert first != task.data["sql"]
    assert await play(env, task, [sql_call("write_query", first), "done"]) == 0.5


async def test_the_tools_are_few_and_keep_nothing_in_the_process(env: AsyncToolEnv) -> None:
    _, info = await env.reset(seed=1)
    names = {tool["function"]["name"] for tool in info["tools"]}
    assert names == {"list_tables", "describe_table", "read_query", "write_query", "create_table"}
    assert [spec.scope for spec in TASKS.servers()] == ["pool"]


def test_a_number_may_have_separators() -> None:
    assert is_answer("answer: 1,234", 1234, []) and is_answer("It is 12,345,678.", 12345678, [])
    assert not is_answer("answer: 1, 234", 1234, [])


def test_whole_numbers_are_the_same_as_text_or_real() -> None:
    def table(values: list[object]) -> Any:
        connection = sqlite3.connect(":memory:")
        connection.execute("create table t (name, total)")
        connection.executemany("insert into t values (?, ?)", [("a", value) for value in values])
        return facts(lambda query, parameters: connection.execute(query, parameters).fetchall())

    assert table([42.0, 7]) == table([42, 7.0]) != table([42.5, 7])
