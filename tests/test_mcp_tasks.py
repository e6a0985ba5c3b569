"""Tasks from a file over any servers: what a line may say, and that the verdict is read from the episode."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from arenarl.async_env import AsyncToolEnv
from arenarl.envs.mcp import EXPLORE, McpTasks
from arenarl.errors import ConfigError
from arenarl.types import Outcome
from tests.processes import descendants

SERVERS = Path(__file__).parent / "servers"
FILES = {
    "command": sys.executable,
    "args": ["-I", "-S", str(SERVERS / "files.py"), "${WORKDIR}"],
    "x-env": {"deny": ["count"]},
}
PLAIN = {"command": sys.executable, "args": ["-I", "-S", str(SERVERS / "plain.py")]}
CONFIG = {"mcpServers": {"files": FILES, "plain": PLAIN}}
SUM = {
    "prompt": "Put the sum of a.txt into sum.txt.",
    "id": "sum",
    "kind": "arithmetic",
    "split": "train",
    "files": {"a.txt": "1 2", "deep/er/b.txt": "grüß\r\n"},
    "expect": {
        "answer_contains": ["DONE"],
        "files": {"sum.txt": "3", "gone.txt": None},
        "calls": [{"tool": "read_file"}, {"tool": "count", "server": "plain"}],
    },
}


def file_of(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


async def play(taskset: McpTasks, *messages: str) -> AsyncToolEnv:
    env = AsyncToolEnv(taskset)
    try:
        await env.reset(seed=0)
        for message in messages:
            await env.step(message)
        return env
    finally:
        await env.aclose()
        assert not descendants()


# --- episodes ----------------------------------------------------------------------------------------------------


async def test_an_episode_that_does_all_is_worth_one(tmp_path: Path):
    reading = call("read_file", path="a.txt") + call("count")
    writing = call("write_file", path="/workspace/sum.txt", text="3")
    env = await play(McpTasks(CONFIG, file_of(tmp_path, SUM)), reading, writing, "It is done.")
    assert env.trajectory().events[0].result.text == "1 2"
    assert env.outcome is Outcome.SCORED and env.score == 1.0
    names = "answered", "calls_valid", "answer contains DONE", "file sum.txt", "no file gone.txt", "call read_file"
    assert env.checklist_results == dict.fromkeys([*names, "call plain count"], 1.0)


async def test_each_expectation_is_an_item_of_its_own(tmp_path: Path):
    calls = (
        call("write_file", path="gone.txt", text="")
        + call("read_file", path="absent")
        + call("write_file", path="sum.txt", text="3\n")
    )
    env = await play(McpTasks(CONFIG, file_of(tmp_path, SUM)), calls, " ")
    assert env.checklist_results == {
        "answered": 0.0, "calls_valid": 1.0, "answer contains DONE": 0.0, "file sum.txt": 0.0, "no file gone.txt": 0.0,
        "call read_file": 0.0, "call plain count": 0.0,
    }  # fmt: skip
    assert env.score == 1 / 7


@pytest.mark.parametrize(
    "messages",
    [["hm"], [call("cuont"), "hm"], ["<tool_call>{</tool_call>", "hm"], [call("count", x=1) + call("x"), "hm"]],
)
async def test_no_call_and_bad_calls_are_not_valid(messages: list[str]):
    env = await play(McpTasks({"mcpServers": {"plain": PLAIN}}), *messages)
    assert env.checklist_results == {"answered": True, "calls_valid": False} and env.score == 0.5


async def test_the_starting_state_is_there_byte_for_byte(tmp_path: Path):
    McpTasks(CONFIG, path := file_of(tmp_path, SUM)).setup(
        McpTasks(CONFIG, path).tasks("train", 1, 0)[0], tmp_path / "w"
    )
    assert (tmp_path / "w" / "deep" / "er" / "b.txt").read_bytes() == "grüß\r\n".encode()


async def test_expected_files_abstain_where_there_is_no_directory(tmp_path: Path):
    taskset = McpTasks(CONFIG, file_of(tmp_path, SUM))
    env = await play(taskset, "done")
    results = await taskset.checklist(taskset.tasks("train", 1, 0)[0]).run(env.trajectory())
    assert results["file sum.txt"] is None and results["no file gone.txt"] is None and results["answered"] is True


def test_it_is_a_gymnasium_environment(tmp_path: Path):
    (tmp_path / "mcp.json").write_text(json.dumps(CONFIG))
    config = {
        "config": str(tmp_path / "mcp.json"),
        "tasks": str(file_of(tmp_path, SUM)),
        "max_turns": 1,
        "system_prompt": "S",
    }
    env = gymnasium.make("arenarl/Mcp-v0", env_config=config, disable_env_checker=True)
    observation, info = env.reset(seed=3)
    assert observation == f"S\n\n{SUM['prompt']}" and info["task_id"] == "sum"
    assert env.step(call("count"))[1:4] == (3 / 7, False, True)  # valid calls, no file gone.txt, the call
    env.close()
    assert not descendants()


# --- the task file -----------------------------------------------------------------------------------------------


def test_a_line_becomes_a_task(tmp_path: Path):
    (task,) = McpTasks(CONFIG, file_of(tmp_path, "", SUM, "  ")).tasks("train", 1, 0)
    assert (task.task_id, task.kind, task.prompt) == ("sum", "arithmetic", SUM["prompt"])
    assert task.data == {"files": SUM["files"], "expect": SUM["expect"]}


def ids(taskset: McpTasks, split: str) -> set[str]:
    """Those of all tasks of a split."""
    tasks = taskset.tasks(split, 9999, 0)
    assert len({task.task_id for task in tasks}) == len(tasks)
    return {task.task_id for task in tasks}


def test_a_fifth_is_held_out_whatever_else_is_in_the_file(tmp_path: Path):
    lines = [{"prompt": f"task {n}", "id": f"t{n}"} for n in range(100)]
    taskset = McpTasks(CONFIG, file_of(tmp_path, *lines))
    train, held_out = ids(taskset, "train"), ids(taskset, "heldout")
    assert 10 <= len(held_out) <= 30 and not train & held_out and len(train | held_out) == 100
    more = McpTasks(CONFIG, file_of(tmp_path, {"prompt": "one more", "split": "train"}, *lines[::-1]))
    assert ids(more, "heldout") == held_out and ids(more, "train") > train


def test_a_line_without_an_id_gets_one_that_stays(tmp_path: Path):
    lines = [{"prompt": "a", "split": "train"}, {"prompt": "b", "split": "train", "kind": "k"}]
    ids = {t.prompt: t.task_id for t in McpTasks(CONFIG, file_of(tmp_path, *lines)).tasks("train", 2, 0)}
    again = {t.prompt: t.task_id for t in McpTasks(CONFIG, file_of(tmp_path, *lines[::-1])).tasks("train", 2, 5)}
    assert ids == again and ids["a"].startswith("task-") and ids["b"].startswith("k-")


def test_a_seed_decides_order_and_choice(tmp_path: Path):
    lines = [{"prompt": f"task {n}", "id": f"t{n}", "split": "train"} for n in range(20)]
    taskset = McpTasks(CONFIG, file_of(tmp_path, *lines))
    first = [task.task_id for task in taskset.tasks("train", 20, 1)]
    assert sorted(first) == sorted(line["id"] for line in lines)
    assert first == [task.task_id for task in taskset.tasks("train", 20, 1)]
    assert len({taskset.tasks("train", 1, seed)[0].task_id for seed in range(20)}) > 5


def test_without_a_file_there_are_requests_to_explore():
    taskset = McpTasks(CONFIG)
    prompts = {
        task.prompt for split, count in (("train", 6), ("heldout", 2)) for task in taskset.tasks(split, count, 0)
    }
    assert prompts == {prompt for _, prompt in EXPLORE}
    assert len(taskset.tasks("train", 7, 0)) == 6
    with pytest.raises(ConfigError, match="split 'test' is unknown"):
        taskset.tasks("test", 1, 0)


BAD_LINES = [
    ("{", "Expecting property name"),
    ("[]", "a task must be an object, got list"),
    ({}, "prompt must be a text that is not empty"),
    ({"prompt": " "}, "prompt must be a text"),
    ({"prompt": "p", "id": 5}, "id must be a text"),
    ({"prompt": "p", "kind": ""}, "kind must be a text"),
    ({"promt": "p"}, "a task has the unknown key 'promt'; did you mean 'prompt'"),
    ({"prompt": "p", "split": "test"}, "split 'test' is unknown; use 'train' or 'heldout'"),
    ({"prompt": "p", "files": ["a"]}, "files must be an object of paths and texts"),
    ({"prompt": "p", "files": {"/a": ""}}, "files has the path '/a'; write one relative"),
    ({"prompt": "p", "files": {"a/../../b": ""}}, r"files has the path 'a/\.\./\.\./b'"),
    ({"prompt": "p", "files": {"": ""}}, "files has the path ''"),
    ({"prompt": "p", "files": {"a": 1}}, r"files\['a'\] must be a text$"),
    ({"prompt": "p", "files": {"a": "", "a/b": ""}}, "files has 'a/b' below a path that is a file itself"),
    ({"prompt": "p", "expect": []}, "expect must be an object, got list"),
    ({"prompt": "p", "expect": {"file": {}}}, "expect has the unknown key 'file'; did you mean 'files'"),
    ({"prompt": "p", "expect": {"files": {"a": 1}}}, r"expect\.files\['a'\] must be a text or null"),
    ({"prompt": "p", "expect": {"answer_contains": "x"}}, r"expect\.answer_contains must be a list of texts"),
    ({"prompt": "p", "expect": {"answer_contains": [""]}}, r"expect\.answer_contains must be a list of texts"),
    ({"prompt": "p", "expect": {"answer_contains": ["x", "x"]}}, r"expect\.answer_contains has a text twice"),
    ({"prompt": "p", "expect": {"calls": {}}}, r"expect\.calls must be a list"),
    ({"prompt": "p", "expect": {"calls": [{"tol": "t"}]}}, "has the unknown key 'tol'; did you mean 'tool'"),
    ({"prompt": "p", "expect": {"calls": [{"server": "s"}]}}, r"expect\.calls needs a tool"),
    ({"prompt": "p", "expect": {"calls": [{"tool": "t"}, {"tool": "t"}]}}, r"expect\.calls has a call twice"),
    (SUM, "the id 'sum' was there before"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str):
    path = file_of(tmp_path, SUM, "", line)
    with pytest.raises(ConfigError, match=rf"task file '.*tasks\.jsonl', line 3: .*{message}"):
        McpTasks(CONFIG, path)


def test_a_bad_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"task file '.*absent' cannot be read: No such file"):
        McpTasks(CONFIG, tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"tasks\.jsonl' holds no task"):
        McpTasks(CONFIG, file_of(tmp_path, "\n"))
    (tmp_path / "latin").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(ConfigError, match="latin' is not UTF-8"):
        McpTasks(CONFIG, tmp_path / "latin")


def test_files_need_a_server_that_can_see_them(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"line 1: it has files, but no server has a working directory; name \$\{WORKDIR\}"
    ):
        McpTasks({"mcpServers": {"plain": PLAIN}}, file_of(tmp_path, SUM))


def test_a_file_without_tasks_to_train_on_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r'no task is for training; add "split": "train" to lines of'):
        McpTasks(CONFIG, file_of(tmp_path, {"prompt": "x", "split": "heldout"}))


def test_expected_calls_must_be_possible(tmp_path: Path):
    call = {"prompt": "x", "id": "one", "split": "train", "expect": {"calls": [{"tool": "raed", "server": "nobody"}]}}
    with pytest.raises(ConfigError, match="task 'one' expects a call of server 'nobody'"):
        McpTasks(CONFIG, file_of(tmp_path, call))
    del call["expect"]["calls"][0]["server"]
    taskset = McpTasks(CONFIG, file_of(tmp_path, call))
    with pytest.raises(ConfigError, match=r"task 'one' expects a call of 'raed', which is not offered; .*'read'"):
        taskset.check_tools({("files", "read"), ("files", "write")})
    taskset.check_tools({("files", "raed")})


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a": "1", "./a": "2"}, "a path twice: 'a'"),
        ({"x" * 300: ""}, "a path that is too long"),
        ({"a": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_files_that_cannot_be_written_are_refused_with_their_line(tmp_path: Path, files: dict[str, str], words: str):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n" + json.dumps({"prompt": "x", "files": files}))
    with pytest.raises(ConfigError, match=rf"line 2: files.*{words}"):
        McpTasks(CONFIG, path)
