"""The filesystem environment, with the real server: what is asked, what solves it, and what does not."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from arenarl.async_env import AsyncToolEnv
from arenarl.envs.filesystem import FILES, KINDS, FilesystemTasks
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory
from tests.playing import play
from tests.processes import descendants

TASKS = FilesystemTasks()
FIELDS = {"code", "owner", "topic", "status", "site", "amount", "note", "txt", "total"}


@pytest.fixture(scope="module")
async def env() -> AsyncIterator[AsyncToolEnv]:
    env = AsyncToolEnv(TASKS)
    yield env
    await env.aclose()
    assert not descendants()


def draw(kind: str, split: str = "train", count: int = 70) -> list[Task]:
    return [task for task in TASKS.tasks(split, count, seed=5) if task.kind == kind]


async def verdict(task: Task, workdir: Path, answer: str = "done") -> float:
    trajectory = Trajectory(messages=(), events=(), answer=answer)
    score = (await TASKS.checklist(task).run(trajectory, EpisodeState(workdir)))["result"]
    assert score is not None
    return score


def begin(task: Task, workdir: Path) -> Path:
    """The starting files, in an empty directory."""
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir()
    TASKS.setup(task, workdir)
    return workdir


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None
    return match[1]


# --- the tasks -------------------------------------------------------------------------------------------------------


def test_splits_share_no_word_and_no_code() -> None:
    train, heldout = (
        {
            word
            for task in TASKS.tasks(split, 210, seed=3)
            for text in (*task.data["files"], *task.data["goal"], *task.data["goal"].values())
            for word in re.findall(r"[A-Z]{2}\d{3}|[a-z]+", text)
        }
        for split in ("train", "heldout")
    )
    assert train & heldout == FIELDS


def conditions(task: Task) -> list[tuple[str, str, str]]:
    """(field, "over " or "", value) of each condition in the prompt."""
    where = found(r"below /workspace/\w+ with (.+)", task.prompt)
    return re.findall(r"(owner|topic|status|site|amount) (over )?(\w+)", where)


def test_levels_are_what_they_say() -> None:
    for task in TASKS.tasks("train", 70, seed=3):
        level, files = task.data["difficulty"], task.data["files"]
        assert len(files) == FILES[level["files"]] == 3 + 3 * level["files"]
        assert max(path.count("/") for path in files) == level["depth"]
        assert len(conditions(task)) == level["conditions"]


def meant(task: Task) -> dict[str, dict[str, str]]:
    """Fields of the files that meet the conditions of the prompt, by path, in the order of their codes."""
    hits: dict[str, dict[str, str]] = {}
    for path, text in task.data["files"].items():
        fields = dict(line.split(": ") for line in text.splitlines())
        met = [int(fields[f]) > int(value) if over else fields[f] == value for f, over, value in conditions(task)]
        hits |= {path: fields} if all(met) else {}
    return dict(sorted(hits.items(), key=lambda item: item[1]["code"]))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_prompt_tells_which_files_are_meant(split: str) -> None:
    for task in TASKS.tasks(split, 70, seed=4):
        files, goal, hits = task.data["files"], task.data["goal"], meant(task)
        assert len(hits) == len(files) // 3
        changed = {path for path in files if goal.get(path) != files[path]}
        assert changed == (hits.keys() if task.kind in ("collect", "sort", "rename", "edit") else set())
        codes, made = [fields["code"] for fields in hits.values()], sorted(goal.keys() - files.keys())
        if task.kind == "rename":
            assert made == sorted(f"{path.rpartition('/')[0]}/{fields['code']}.txt" for path, fields in hits.items())
        elif task.kind == "sort":
            field = found(r"where X is its (\w+)", task.prompt)
            assert sorted(path.split("/")[1] for path in made) == sorted(f[field] for f in hits.values())
        elif task.kind == "merge":
            assert goal[made[0]] == "".join(f"{fields['note']}\n" for fields in hits.values())
        elif task.kind == "report":
            lines = "".join(f"{fields['code']} {fields['amount']}\n" for fields in hits.values())
            assert goal[made[0]] == f"{lines}total {sum(int(fields['amount']) for fields in hits.values())}\n"
        assert task.data["answer"] == (codes if task.kind == "ask" else [])


# --- the verdict, end to end -----------------------------------------------------------------------------------------


async def test_a_call_left_out_costs_its_part(env: AsyncToolEnv) -> None:
    for kind in ("collect", "sort", "rename", "edit"):
        task = draw(kind)[0]
        *before, act, answer = TASKS.oracle(task)
        calls = act.split("\n<tool_call>")
        fewer = "\n<tool_call>".join(calls[:-1])
        assert await play(env, task, [*before, fewer, answer]) == pytest.approx(1 - 1 / len(calls))


async def test_a_question_needs_its_answer_and_untouched_files(env: AsyncToolEnv) -> None:
    task = draw("ask")[0]
    *look, answer = TASKS.oracle(task)
    write = '<tool_call>{"name": "write_file", "arguments": {"path": "/workspace/a.txt", "content": "x"}}</tool_call>'
    assert await play(env, task, [*look, "done"]) == 0.0
    assert await play(env, task, [*look, f"I found them.\n**{answer.lower()}**"]) == 1.0
    assert await play(env, task, [write, answer]) == 0.5


async def test_only_the_useful_tools_are_offered(env: AsyncToolEnv) -> None:
    _, info = await env.reset(seed=0)
    assert [tool["function"]["name"] for tool in info["tools"]] == [
        "read_text_file", "read_multiple_files", "write_file", "edit_file",
        "create_directory", "list_directory", "move_file", "search_files",
    ]  # fmt: skip


# --- the verdict, on directories made by hand ------------------------------------------------------------------------

TEXT = "code: AB123\nowner: ann\nstatus: open\n"
MOVE_AND_EDIT = Task(
    task_id="golden", kind="edit", prompt="",
    data={
        "files": {"x/a.txt": TEXT, "x/b.txt": TEXT, "x/c.txt": "keep\n"},
        "goal": {"y/a.txt": TEXT, "x/b.txt": TEXT.replace("open", "done"), "x/c.txt": "keep\n"},
        "moves": {"y/a.txt": "x/a.txt"},
        "answer": [],
    },
)  # fmt: skip


async def test_golden_scores_of_moves_edits_and_harm(tmp_path: Path) -> None:
    root = begin(MOVE_AND_EDIT, tmp_path / "w")
    assert sorted(p.relative_to(root).as_posix() for p in root.rglob("*.txt")) == ["x/a.txt", "x/b.txt", "x/c.txt"]
    assert await verdict(MOVE_AND_EDIT, root) == 0.0
    (root / "y").mkdir()
    shutil.copy(root / "x/a.txt", root / "y/a.txt")
    assert await verdict(MOVE_AND_EDIT, root) == 0.0  # a copy is no move
    (root / "x/a.txt").unlink()
    assert await verdict(MOVE_AND_EDIT, root) == 0.5
    (root / "x/b.txt").write_text("code: AB123\nowner: ann\nstatus: done")
    assert await verdict(MOVE_AND_EDIT, root) == 1.0  # blank ends of lines and files do not matter
    (root / "x/c.txt").write_text("kept\n")
    assert await verdict(MOVE_AND_EDIT, root) == 0.5
    (root / "stray.txt").write_text("")
    assert await verdict(MOVE_AND_EDIT, root) == 0.25


async def test_golden_scores_of_a_report(tmp_path: Path) -> None:
    data = {"files": {"a.txt": "keep\n"}, "goal": {"a.txt": "keep\n", "r.txt": "A 1\nB 2\ntotal 3\n"}}
    task = Task(task_id="r", kind="report", prompt="", data={**data, "moves": {}, "answer": []})
    root, scores = begin(task, tmp_path / "w"), {}
    for text in (
        "A 1\nB 2\ntotal 3",
        "A 1\nB 2",
        "B 2\nA 1\ntotal 3\n",
        "A 1\nA 9\nB 2\nB 9\ntotal 3",
        "A 1\nX\nY",
        "",
    ):
        (root / "r.txt").write_text(text)
        scores[text] = await verdict(task, root)
    # right lines in order minus lines that do not belong, of three
    assert list(scores.values()) == pytest.approx([1, 2 / 3, 1 / 3, 1 / 3, 0, 0])


async def test_an_edit_is_measured_from_what_the_file_was(tmp_path: Path) -> None:
    files = {"a.txt": "1\n2\n3\n4\n"}
    data = {"files": files, "goal": {"a.txt": "1\n2\nx\ny\n"}, "moves": {}, "answer": []}
    task = Task(task_id="e", kind="edit", prompt="", data=data)
    root = begin(task, tmp_path / "w")
    (root / "a.txt").write_text("1\n2\nx\n4\n")
    assert await verdict(task, root) == pytest.approx(0.5)  # from (2 - 2) / 4 to (3 - 1) / 4
    (root / "a.txt").write_text("nothing of it\n")
    assert await verdict(task, root) == 0.0


@pytest.mark.parametrize("kind", KINDS)
async def test_deleting_everything_earns_nothing(tmp_path: Path, kind: str) -> None:
    for task in draw(kind):
        root = begin(task, tmp_path / "w")
        for folder in root.iterdir():
            shutil.rmtree(folder)
        answer = f"answer: {', '.join(task.data['answer'])}"
        assert await verdict(task, root, answer) < 0.02


async def test_doing_it_to_every_file_earns_next_to_nothing(tmp_path: Path) -> None:
    for task in [task for kind in ("collect", "edit") for task in draw(kind)]:
        root, files = begin(task, tmp_path / "w"), task.data["files"]
        for path, text in files.items():
            if task.kind == "collect":
                target = root / max(task.data["goal"].keys() - files.keys())
                target.parent.mkdir(exist_ok=True)
                (root / path).rename(target.with_name(Path(path).name))
            else:
                status = found(r"Set the status to (\w+)", task.prompt)
                (root / path).write_text(re.sub(r"status: \w+", f"status: {status}", text))
        assert 0 < await verdict(task, root) < 0.1


async def test_writing_or_naming_every_candidate_earns_nothing(tmp_path: Path) -> None:
    for task in [task for kind in ("merge", "report", "ask") for task in draw(kind)]:
        root, texts = begin(task, tmp_path / "w"), sorted(task.data["files"].values())
        fields = [dict(line.split(": ") for line in text.splitlines()) for text in texts]
        lines = [f["note"] if task.kind == "merge" else f"{f['code']} {f['amount']}" for f in fields]
        if task.kind != "ask":
            (root / max(task.data["goal"].keys() - task.data["files"].keys())).write_text("\n".join(lines))
        assert await verdict(task, root, f"answer: {', '.join(lines)}") == 0.0
