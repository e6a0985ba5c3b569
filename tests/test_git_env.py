"""The git environment, with the real server: what is asked, what solves it, and what does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from arenarl.async_env import AsyncToolEnv
from arenarl.envs.git import COMMITS, FILES, GitTasks, answered
from arenarl.envs.git_repository import Repository, blob
from arenarl.errors import EnvError
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory
from tests.playing import play
from tests.processes import descendants

TASKS = GitTasks()
QUESTIONS = ("find", "compare")

# main: c0 - c1; side: c0 - c2; tag v1 at c0. In the working directory a.cfg, b.cfg and c.cfg are changed.
SMALL = Repository(
    commits=[
        {"branch": "main", "parent": None, "message": "first", "author": "Ann", "files": {
            "a.cfg": "x = 1\n", "b.cfg": "x = 1\n", "c.cfg": "x = 1\n", "d.cfg": "x = 1\n"}},
        {"branch": "main", "parent": 0, "message": "second", "author": "Ben", "files": {"d.cfg": "x = 2\n"}},
        {"branch": "side", "parent": 0, "message": "third", "author": "Ann", "files": {"d.cfg": "x = 3\n"}},
    ],
    tags={"v1": 0},
    changed={"a.cfg": "x = 7\n", "b.cfg": "x = 8\n", "c.cfg": "x = 9\n"},
)  # fmt: skip
SHAS = SMALL.hashes()


def a_task(*, staged: Sequence[str] = (), **data: object) -> Task:
    repository = asdict(SMALL) | {"staged": list(staged)}
    return Task(task_id="one", kind="commit", prompt="", data={"difficulty": {}, "repository": repository, **data})


COMMIT = a_task(branch="main", plan=[["one", ["a.cfg"]]])
SPLIT = a_task(branch="main", plan=[["one", ["a.cfg"]], ["two", ["b.cfg"]]])
MOVE = a_task(branch="new", plan=[["one", ["a.cfg"]]])
BRANCH = a_task(new={"old": SHAS[0], "there": SHAS[2]})
UNSTAGE = a_task(staged=["a.cfg", "b.cfg", "c.cfg"], unstaged=["a.cfg"])
FIND = a_task(answer=[SHAS[1]])


def git(folder: Path, line: str) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    env |= {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", "-C", str(folder), *line.split()], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout


async def verdict(task: Task, folder: Path, *commands: str, answer: str = "done") -> float | None:
    """The score after some git commands on a fresh repository."""
    os.mkdir(folder)
    TASKS.setup(task, folder)
    for command in commands:
        git(folder, command)
    trajectory = Trajectory(messages=(), events=(), answer=answer)
    return (await TASKS.checklist(task).run(trajectory, EpisodeState(folder)))["result"]


# --- the tasks ---------------------------------------------------------------------------------------------------


def words(split: str) -> set[str]:
    """Words of the messages, files, lines, branches, tags and authors of 70 repositories."""
    found = set()
    for task in TASKS.tasks(split, 70, seed=3):
        repository = task.data["repository"]
        said = [
            *repository["tags"],
            *(text for commit in repository["commits"][1:] for text in map(str, commit.values())),
        ]
        found |= {word.lower() for text in said for word in re.findall(r"[A-Za-z]+|\w+", text)}
    return found


def test_splits_share_no_word() -> None:
    shared = words("train") & words("heldout")
    assert len(words("train")) > 40
    assert {word for word in shared if word.isalpha()} == {"main", "cfg", "n"}  # n: the end of a line


def test_an_axis_makes_more_of_what_it_says() -> None:
    for task in TASKS.tasks("train", 70, seed=4):
        axes, repository = task.data["difficulty"], Repository(**task.data["repository"])
        assert repository.tips()["main"] == COMMITS[axes["commits"]] - 1
        assert len(repository.tree(0)) == FILES[axes["files"]]
        assert len(repository.tips()) == 1 + axes["files"]
        steps = axes["steps"]
        if task.kind in ("commit", "move", "unstage"):
            assert len(repository.changed) == steps + 3
        if task.kind == "split":
            assert len(task.data["plan"]) == steps + 1
        if task.kind == "branch":
            assert len(task.data["new"]) == steps
        if task.kind == "compare":
            assert steps <= len(task.data["answer"]) <= steps + 1


def test_a_line_to_be_found_was_brought_by_one_commit_only() -> None:
    for task in TASKS.tasks("heldout", 140, seed=5):
        if task.kind == "find":
            repository = Repository(**task.data["repository"])
            line, path = re.search(r"the line '(.*)' into (\S+\.cfg)", task.prompt).groups()
            trees = [repository.tree(n) for n in range(len(repository.commits))]
            parents = [commit["parent"] for commit in repository.commits]
            brought = [
                n for n, tree in enumerate(trees)
                if line in tree[path] and (parents[n] is None or line not in trees[parents[n]][path])
            ]  # fmt: skip
            assert [repository.hashes()[n] for n in brought] == task.data["answer"]
            there = line in trees[repository.tips()["main"]][path]
            assert there == (task.data["difficulty"]["steps"] == 1)


def test_a_branch_to_be_made_is_not_there() -> None:
    for task in TASKS.tasks("heldout", 350, seed=21):
        new = {*task.data.get("new", {}), task.data.get("branch", "main")} - {"main"}
        assert not new & set(Repository(**task.data["repository"]).tips())


def test_tasks_are_plain_data() -> None:
    tasks = TASKS.tasks("train", 14, seed=1)
    assert [json.loads(json.dumps(task.data)) for task in tasks] == [task.data for task in tasks]


# --- the repository ----------------------------------------------------------------------------------------------


def test_git_gives_the_names_that_we_foretell(tmp_path: Path) -> None:
    SMALL.write(tmp_path)
    refs = git(tmp_path, "for-each-ref --format=%(refname)=%(objectname)").split()
    assert refs == [f"refs/heads/main={SHAS[1]}", f"refs/heads/side={SHAS[2]}", f"refs/tags/v1={SHAS[0]}"]
    assert git(tmp_path, "status --short") == " M a.cfg\n M b.cfg\n M c.cfg\n"
    assert git(tmp_path, "fsck --strict") == ""
    assert blob("x = 7\n") == git(tmp_path, "hash-object a.cfg").strip()


def test_names_are_the_same_everywhere() -> None:
    assert SHAS[1] == "5bc043bebeab2f57943c75c2711e5c6040a70afd"


def test_a_folder_that_is_not_there_is_an_environment_fault(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="git init could not set up"):
        TASKS.setup(COMMIT, tmp_path / "none")


# --- the verdict, by hand ----------------------------------------------------------------------------------------


async def test_a_commit_done_half_done_and_overdone(tmp_path: Path) -> None:
    assert await verdict(COMMIT, tmp_path / "nothing") == 0.0
    assert await verdict(COMMIT, tmp_path / "staged", "add a.cfg") == 0.0
    assert await verdict(COMMIT, tmp_path / "done", "add a.cfg", "commit -m one") == 1.0
    assert await verdict(COMMIT, tmp_path / "message", "add a.cfg", "commit -m two") == 0.5
    assert await verdict(COMMIT, tmp_path / "file", "add b.cfg", "commit -m one") == 0.25
    assert await verdict(COMMIT, tmp_path / "all", "add .", "commit -m one") == 0.25
    assert await verdict(COMMIT, tmp_path / "left", "add a.cfg", "commit -m one", "add b.cfg") == 0.5


async def test_what_else_is_moved_halves_the_score(tmp_path: Path) -> None:
    done = ("add a.cfg", "commit -m one")
    assert await verdict(COMMIT, tmp_path / "branch", *done, "branch extra") == 0.5
    assert await verdict(COMMIT, tmp_path / "moved", *done, "branch -f side main") == 0.5
    assert await verdict(COMMIT, tmp_path / "tag", *done, "tag -d v1") == 0.5
    assert await verdict(COMMIT, tmp_path / "head", *done, "checkout --detach") == 0.5
    assert await verdict(COMMIT, tmp_path / "more", *done, "commit --allow-empty -m more") == 0.5
    assert await verdict(COMMIT, tmp_path / "early", "commit --allow-empty -m early", *done) == 0.0  # out of place


async def test_two_commits_in_their_order(tmp_path: Path) -> None:
    first, second = ("add a.cfg", "commit -m one"), ("add b.cfg", "commit -m two")
    assert await verdict(SPLIT, tmp_path / "both", *first, *second) == 1.0
    assert await verdict(SPLIT, tmp_path / "first", *first) == 0.5
    assert await verdict(SPLIT, tmp_path / "turned", *second, *first) == 0.0
    assert await verdict(SPLIT, tmp_path / "joined", "add a.cfg b.cfg", "commit -m one") == 0.25


async def test_a_commit_on_a_new_branch_of_main(tmp_path: Path) -> None:
    commit = ("add a.cfg", "commit -m one")
    assert await verdict(MOVE, tmp_path / "done", "checkout -b new", *commit) == 1.0
    assert await verdict(MOVE, tmp_path / "made", "branch new main") == 0.25
    assert await verdict(MOVE, tmp_path / "switched", "checkout -b new") == 0.5
    assert await verdict(MOVE, tmp_path / "old", "checkout -b new v1", *commit) == 0.5
    assert await verdict(MOVE, tmp_path / "main", *commit) == 0.0


async def test_branches_at_old_commits(tmp_path: Path) -> None:
    assert await verdict(BRANCH, tmp_path / "none") == 0.0
    assert await verdict(BRANCH, tmp_path / "one", "branch old v1") == 0.5
    assert await verdict(BRANCH, tmp_path / "both", "branch old v1", "branch there side") == 1.0
    assert await verdict(BRANCH, tmp_path / "wrong", "branch old v1", "branch there main") == 0.5
    assert await verdict(BRANCH, tmp_path / "head", "branch there side", "checkout -b old v1") == 0.5


async def test_unstaging_some_and_not_the_rest(tmp_path: Path) -> None:
    assert await verdict(UNSTAGE, tmp_path / "none") == 0.0
    assert await verdict(UNSTAGE, tmp_path / "all", "reset") == 0.25
    assert await verdict(UNSTAGE, tmp_path / "done", "reset", "add b.cfg c.cfg") == 1.0
    assert await verdict(UNSTAGE, tmp_path / "committed", "commit -m all") == 0.125


async def test_a_question_is_judged_by_its_answer_and_by_what_was_left_alone(tmp_path: Path) -> None:
    assert await verdict(FIND, tmp_path / "right", answer=f"answer: {SHAS[1][:7]}") == 1.0
    assert await verdict(FIND, tmp_path / "wrong", answer=f"answer: {SHAS[2][:7]}") == 0.0
    assert await verdict(FIND, tmp_path / "empty", answer="") == 0.0
    assert await verdict(FIND, tmp_path / "away", "checkout --detach", answer=f"answer: {SHAS[1]}") == 1.0
    assert await verdict(FIND, tmp_path / "branch", "branch extra", answer=f"answer: {SHAS[1]}") == 0.5


def test_a_hash_is_the_answer_only_alone() -> None:
    right, other = "ab12" * 10, "cd34" * 10
    assert answered(f"answer: {right[:7]}", [right], []) == answered(f"It is {right[:10].upper()}.", [right], []) == 1.0
    assert answered(right[:6], [right], []) == answered(f"{right} {other}", [right], []) == 0.0
    assert answered(f"{right}0", [right], []) == answered(None, [right], []) == 0.0


def test_files_count_each_and_every_other_one_halves() -> None:
    files = ["a.cfg", "b.cfg", "c.cfg", "d.cfg"]
    assert answered("answer: B.cfg, a.cfg", ["a.cfg", "b.cfg"], files) == 1.0
    assert answered("a.cfg", ["a.cfg", "b.cfg"], files) == 0.5
    assert answered("a.cfg, c.cfg", ["a.cfg", "b.cfg"], files) == 0.25
    assert answered(", ".join(files), ["a.cfg", "b.cfg"], files) == 0.25
    assert answered("done", ["a.cfg"], files) == 0.0


# --- the real server ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def env() -> AsyncIterator[AsyncToolEnv]:
    env = AsyncToolEnv(TASKS)
    yield env
    await env.aclose()
    assert not descendants()


def call(tool: str, **arguments: object) -> str:
    body = {"name": tool, "arguments": {"repo_path": "/workspace", **arguments}}
    return f"<tool_call>\n{json.dumps(body)}\n</tool_call>"


async def test_equal_work_gives_equal_results(env: AsyncToolEnv) -> None:
    task = TASKS.tasks("train", 2, seed=6)[1]
    texts = []
    for _ in range(2):
        await play(env, task, TASKS.oracle(task))
        texts.append([event.result.text for event in env.trajectory().events])
    assert texts[0] == texts[1]
    assert "Changes committed successfully with hash" in texts[0][2]


async def test_the_oracle_has_turns_to_spare() -> None:
    assert all(len(TASKS.oracle(task)) < TASKS.max_turns for task in TASKS.tasks("train", 70, seed=8))


async def test_committing_everything_earns_little(env: AsyncToolEnv) -> None:
    for task in TASKS.tasks("train", 14, seed=9):
        if task.kind in ("commit", "move"):
            (message, _), branch = task.data["plan"][0], task.data["branch"]
            acts = [call("git_create_branch", branch_name=branch), call("git_checkout", branch_name=branch)]
            commit = [call("git_add", files=["."]), call("git_commit", message=message), "done"]
            assert await play(env, task, [*acts * (branch != "main"), *commit]) == 0.125, task.prompt


async def test_listing_everything_is_no_answer(env: AsyncToolEnv) -> None:
    for task in TASKS.tasks("train", 21, seed=9):
        if task.kind in QUESTIONS:
            repository = Repository(**task.data["repository"])
            everything = ", ".join([*repository.hashes(), *repository.tree(0)])
            assert await play(env, task, [f"answer: {everything}"]) <= 0.125, task.prompt


async def test_the_tools_are_few(env: AsyncToolEnv) -> None:
    _, info = await env.reset(seed=1)
    names = {tool["function"]["name"] for tool in info["tools"]}
    assert len(names) == 11
    assert "git_diff_staged" not in names
    assert [spec.scope for spec in TASKS.servers()] == ["pool"]


async def test_a_branch_name_of_any_letters_is_read(env: AsyncToolEnv) -> None:
    task = next(task for task in TASKS.tasks("train", 14, seed=9) if task.kind == "branch")
    odd = call("git_create_branch", branch_name="a\u2028b", base_branch="main")
    assert await play(env, task, [*TASKS.oracle(task)[:-1], odd, "done"]) == 0.5
