"""The memory environment, with the real server: what is asked, what solves it, and what does not."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from arenarl.async_env import AsyncToolEnv
from arenarl.envs.memory import FILE, KINDS, PEOPLE, Fact, MemoryTasks, facts_text, judge_facts, parse_facts
from arenarl.mcp.session import McpSession
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory
from tests.playing import play
from tests.processes import descendants

TASKS = MemoryTasks()
CHAIN = re.compile(r"((?:the (?:mentor|neighbour) of )+)([A-Z][a-z]+)")


@pytest.fixture(scope="module")
async def env() -> AsyncIterator[AsyncToolEnv]:
    env = AsyncToolEnv(TASKS)
    yield env
    await env.aclose()
    assert not descendants()


def draw(kind: str, split: str = "train", count: int = 60) -> list[Task]:
    return [task for task in TASKS.tasks(split, count, seed=5) if task.kind == kind]


def graph(task: Task, key: str) -> set[Fact]:
    return {tuple(fact) for fact in task.data[key]}


async def verdict(task: Task, workdir: Path, facts: set[Fact], answer: str = "done") -> float:
    (workdir / FILE).write_text(facts_text(sorted(facts)))
    trajectory = Trajectory(messages=(), events=(), answer=answer)
    score = (await TASKS.checklist(task).run(trajectory, EpisodeState(workdir)))["result"]
    assert score is not None
    return score


# --- the tasks -------------------------------------------------------------------------------------------------------


def test_splits_share_no_name_and_no_badge() -> None:
    train, heldout = (
        {
            word
            for task in TASKS.tasks(split, 210, seed=3)
            for sort, *fact in graph(task, "start") | graph(task, "goal")
            for word in ([fact[0], fact[2]] if sort == "relation" else [fact[0], fact[1].split(": ")[-1]])
        }
        for split in ("train", "heldout")
    )
    assert train & heldout == {"person", "company"}


def test_levels_are_what_they_say() -> None:
    for task in TASKS.tasks("train", 60, seed=3):
        level, chains = task.data["difficulty"], CHAIN.findall(task.prompt)
        assert sum(fact[2] == "person" for fact in task.data["start"]) == PEOPLE[level["size"]]
        assert sum(fact[2] == "company" for fact in task.data["start"]) == 1 + level["size"]
        assert [relations.count("the ") for relations, _ in chains] == [level["hops"]] * level["edits"]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_prompt_leads_to_the_people_who_change(split: str) -> None:
    for task in TASKS.tasks(split, 60, seed=4):
        start, goal = graph(task, "start"), graph(task, "goal")
        leads = {(fact[1], fact[2]): fact[3] for fact in start if fact[0] == "relation"}
        people = []
        for relations, name in CHAIN.findall(task.prompt):
            for relation in reversed(re.findall(r"the (\w+) of", relations)):
                name = leads[name, relation]
            people.append(name)
        assert len(set(people)) == len(people)
        if task.kind == "ask":
            assert [
                ("observation", p, f"badge: {b}") in start for p, b in zip(people, task.data["answer"], strict=True)
            ]
            assert goal == start
        elif task.kind == "hire":
            assert sorted(f[3] for f in goal - start if f[0] == "relation") == sorted(
                leads[p, "works_at"] for p in people
            )
        else:
            changed = {f[1] for f in start ^ goal if f[0] != "relation" or f[2] == "works_at"}
            assert changed == set(people)


# --- the verdict, end to end -----------------------------------------------------------------------------------------


async def test_half_of_a_change_is_half_of_the_score(env: AsyncToolEnv) -> None:
    for kind in ("correct", "relink"):  # the oracle's last two calls: away with the old, in with the new
        task = draw(kind)[0]
        *look, delete, create, answer = TASKS.oracle(task)
        assert await play(env, task, [*look, delete, answer]) == 0.5
        assert await play(env, task, [*look, create, answer]) == 0.5


async def test_a_question_needs_its_answer_and_an_untouched_graph(env: AsyncToolEnv) -> None:
    task = draw("ask")[0]
    *look, answer = TASKS.oracle(task)
    name = task.data["paths"][0][0]
    add = f'{{"observations": [{{"entityName": "{name}", "contents": ["seen"]}}]}}'
    call = f'<tool_call>{{"name": "add_observations", "arguments": {add}}}</tool_call>'
    assert await play(env, task, [*look, "done"]) == 0.0
    assert await play(env, task, [*look, f"Found.\n**{answer.lower()}**"]) == 1.0
    assert await play(env, task, [call, answer]) == 0.5


async def test_the_file_is_as_the_server_itself_writes_it(tmp_path: Path) -> None:
    task = draw("observe")[0]
    TASKS.setup(task, tmp_path)
    before = (tmp_path / FILE).read_bytes()
    session = await McpSession(TASKS.servers()[0], {"WORKDIR": str(tmp_path)}).start()
    try:
        result = await session.call("delete_relations", {"relations": []}, timeout=30)
        assert result.ok and (tmp_path / FILE).read_bytes() == before
    finally:
        await session.close()
    assert parse_facts(before.decode()) == graph(task, "start")


async def test_all_tools_but_the_whole_graph_are_offered(env: AsyncToolEnv) -> None:
    _, info = await env.reset(seed=0)
    assert [tool["function"]["name"] for tool in info["tools"]] == [
        "create_entities", "create_relations", "add_observations", "delete_entities",
        "delete_observations", "delete_relations", "search_nodes", "open_nodes",
    ]  # fmt: skip


# --- the verdict, on graphs made by hand -----------------------------------------------------------------------------

ADA, ACME = ("entity", "Ada", "person"), ("entity", "Acme", "company")
OLD, NEW, WORKS = ("observation", "Ada", "badge: AA111"), ("observation", "Ada", "badge: BB222"), ("relation", "Ada", "works_at", "Acme")  # fmt: skip
EXTRA = ("entity", "Bela", "person")
START, GOAL = {ADA, ACME, OLD, WORKS}, {ADA, ACME, NEW, WORKS}
CORRECT = Task(
    task_id="golden", kind="correct", prompt="",
    data={"start": [list(f) for f in sorted(START)], "goal": [list(f) for f in sorted(GOAL)], "answer": []},
)  # fmt: skip
LINES = """{"type":"entity","name":"Ada","entityType":"person","observations":["badge: AA111"]}
{"type":"entity","name":"Acme","entityType":"company","observations":[]}
{"type":"relation","from":"Ada","to":"Acme","relationType":"works_at"}"""


def test_golden_file() -> None:
    assert facts_text([ADA, ACME, OLD, WORKS]) == LINES
    assert parse_facts(LINES) == START
    assert parse_facts("\n") == set()


async def test_golden_scores(tmp_path: Path) -> None:
    assert await verdict(CORRECT, tmp_path, START) == 0.0
    assert await verdict(CORRECT, tmp_path, GOAL) == 1.0
    assert await verdict(CORRECT, tmp_path, START | GOAL) == 0.5
    assert await verdict(CORRECT, tmp_path, START & GOAL) == 0.5
    assert await verdict(CORRECT, tmp_path, GOAL | {EXTRA}) == 0.5
    assert await verdict(CORRECT, tmp_path, GOAL - {WORKS}) == 0.5
    assert await verdict(CORRECT, tmp_path, {NEW, ADA}) == 0.25
    (tmp_path / FILE).unlink()
    trajectory = Trajectory(messages=(), events=(), answer="done")
    results = await TASKS.checklist(CORRECT).run(trajectory, EpisodeState(tmp_path))
    assert results["result"] == 0.0625  # the old badge is gone, and so are three facts that had to stay


def test_nothing_to_change_earns_nothing() -> None:
    assert judge_facts(START, START, START) == (0.0, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_deleting_everything_earns_nothing(tmp_path: Path, kind: str) -> None:
    for task in draw(kind):
        assert await verdict(task, tmp_path, set(), f"answer: {', '.join(task.data['answer'])}") < 1e-6


@pytest.mark.parametrize("kind", ["observe", "correct", "relink", "remove"])
async def test_doing_it_to_everybody_earns_next_to_nothing(tmp_path: Path, kind: str) -> None:
    for task in draw(kind):
        start, goal = graph(task, "start"), graph(task, "goal")
        new, people = goal - start, {fact[1] for fact in start if fact[2] == "person"}
        spread = {(fact[0], name, *fact[2:]) for fact in new for name in people}
        gone = {f for f in start if f[1] in people and (kind == "remove" or (f[2] == "works_at" and kind == "relink"))}
        assert await verdict(task, tmp_path, (start - gone) | spread) < 0.1


async def test_naming_every_badge_earns_nothing(tmp_path: Path) -> None:
    for task in draw("ask"):
        badges = [fact[2] for fact in graph(task, "start") if fact[2].startswith("badge")]
        assert await verdict(task, tmp_path, graph(task, "start"), f"answer: {', '.join(badges)}") == 0.0


def test_a_newcomer_counts_when_all_of_it_is_there():
    start = {("entity", "Ann", "person"), ("entity", "Acme", "company")}
    new = {("entity", "Bob", "person"), ("observation", "Bob", "badge: XY123"), ("relation", "Bob", "works_at", "Acme")}
    goal = start | new
    without_the_relation = goal - {("relation", "Bob", "works_at", "Acme")}
    assert judge_facts(start, goal, without_the_relation) == (0.0, 0)
    assert judge_facts(start, goal, goal) == (1.0, 0)
