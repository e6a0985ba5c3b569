"""The servers of a desktop client's ``mcp.json`` as a training environment, with tasks from a file. No code to write.

## Description
Every server of the configuration (`arenarl.mcp.config_file`) is started for the episode, as its ``x-env`` block says. The
tasks come from a JSON Lines file, one object a line::

    {"prompt": "Put the sum of a.txt into sum.txt.", "files": {"a.txt": "1 2"}, "expect": {"files": {"sum.txt": "3"}}}

========  ==============================================================================================================
prompt    what the agent is asked
id        unique; a digest of the line if left out
kind      any word, for statistics
split     "train" or "heldout"; if left out, one task in five is held out, chosen by its id
files     starting state: relative path to text, written into the working directory, which the servers know as ${WORKDIR}
expect    ``answer_contains``: texts, upper or lower case; ``files``: relative path to exact text, or to null for a file
          that must not exist; ``calls``: ``{"tool": NAME, "server": NAME}``, the server if it matters, answered without error
========  ==============================================================================================================

Without a file there are a few requests to explore the tools, enough to try an environment out.

## Actions
The text of an assistant message: Hermes-style tool calls, or the final answer (any text without a call).

## Observations
The new chat messages: system and user at reset, tool results after each step.

## Rewards
0 until the end, then the share of the task's checklist that is met, in [0, 1]: ``answered`` (the answer is not empty),
``calls_valid`` (some call was made, and each reached its tool with valid arguments), and an item per expectation.

## Starting state
A task of the split, picked by the seed, with its files in the working directory.

## Episode end
Terminated by an answer; truncated after ``max_turns`` assistant turns.

## Arguments
``config``: path of the configuration. ``tasks``: path of the task file, or None. ``max_turns``, ``system_prompt``.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from arenarl.envs.shared import read_tasks
from arenarl.errors import ConfigError, near_name
from arenarl.mcp.config import ServerSpec
from arenarl.mcp.config_file import load_mcp_config
from arenarl.rubric import Checklist, ChecklistItem, Reward
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory

SYSTEM_PROMPT = (
    "You are a careful assistant. Use the tools to do what is asked; your files are in /workspace. "
    "When it is done, answer in a few words, without calling a tool."
)
_SPLITS = ("train", "heldout")
_KEYS = ("prompt", "id", "kind", "split", "files", "expect")
_EXPECT_KEYS = ("answer_contains", "files", "calls")
_CALL_KEYS = ("tool", "server")
_HELD_OUT_ONE_IN = 5
_NAME_CHARS = 40
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

EXPLORE = (
    ("train", "Find out what the tools can do: call one of them and say in a sentence what it gave."),
    ("train", "Call every tool that needs no argument once, then say which of them was the most useful."),
    ("train", "Show what you can read with the tools, then summarise it in one sentence."),
    ("train", "Pick a tool, call it with arguments of your choice, and explain its result."),
    ("train", "Call two different tools and say how their results differ."),
    ("train", "Look around with the tools and say what you would use them for."),
    ("heldout", "Try three different calls, then list what each of them returned."),
    ("heldout", "Use the tools to learn one fact, and answer with that fact."),
)


class McpTasks:
    """Tasks of a JSON Lines file over the servers of an ``mcp.json``. See the module docstring.

    Args:
        config: path of the configuration, or its data.
        tasks: path of the task file; a few requests to explore if None.

    Raises:
        ConfigError: for a configuration or a line that is refused, naming file and line.
    """

    name = "mcp"

    def __init__(
        self, config: str | Path | Mapping[str, Any] = "mcp.json", tasks: str | Path | None = None, *, max_turns: int = 16,
        system_prompt: str = SYSTEM_PROMPT,
    ) -> None:  # fmt: skip
        self.max_turns, self.system_prompt, self._path = max_turns, system_prompt, tasks
        self._specs = tuple(load_mcp_config(config))
        has_folder = any("WORKDIR" in spec.variables for spec in self._specs)
        self._tasks = _explore() if tasks is None else _read(Path(tasks), has_folder)
        self._check_servers()

    def servers(self) -> Sequence[ServerSpec]:
        return self._specs

    def _check_servers(self) -> None:
        if not any(split == "train" for _, split in self._tasks):
            raise ConfigError(f'no task is for training; add "split": "train" to lines of {str(self._path)!r}')
        names = [spec.name for spec in self._specs]
        for task, call in self._expected_calls():
            if (server := call.get("server")) is not None and server not in names:
                raise ConfigError(
                    f"task {task.task_id!r} expects a call of server {server!r}; {near_name(server, names)}"
                )

    def check_tools(self, tools: Collection[tuple[str, str]]) -> None:
        """Refuse tasks that expect a call of a tool that there is not.

        Raises:
            ConfigError: naming the task and the nearest tool.
        """
        for task, call in self._expected_calls():
            known = [tool for server, tool in tools if call.get("server") in (None, server)]
            if call["tool"] not in known:
                raise ConfigError(
                    f"task {task.task_id!r} expects a call of {call['tool']!r}, which is not offered; "
                    f"{near_name(call['tool'], known)}"
                )

    def _expected_calls(self) -> Iterator[tuple[Task, Mapping[str, str]]]:
        for task, _ in self._tasks:
            yield from ((task, call) for call in task.data.get("expect", {}).get("calls", []))

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """``count`` distinct tasks, or all there are, in an order that the seed decides.

        Raises:
            ConfigError: for an unknown split.
        """
        if split not in _SPLITS:
            raise ConfigError(f"split {split!r} is unknown; use 'train' or 'heldout'")
        found = [task for task, where in self._tasks if where == split]
        return random.Random(f"tasks/{split}/{seed}").sample(found, min(count, len(found)))

    def setup(self, task: Task, workdir: Path) -> None:
        for path, text in task.data.get("files", {}).items():
            file = workdir / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="")

    def checklist(self, task: Task) -> Checklist:
        expect = task.data.get("expect", {})
        items: list[ChecklistItem | Reward] = [
            ChecklistItem(name="answered", check=lambda t: bool((t.answer or "").strip()), scope="answer"),
            ChecklistItem(name="calls_valid", check=_calls_valid),
        ]
        items += [_answer_item(text) for text in expect.get("answer_contains", [])]
        items += [_file_item(path, text) for path, text in expect.get("files", {}).items()]
        items += [_call_item(call["tool"], call.get("server")) for call in expect.get("calls", [])]
        return Checklist(items)


def _calls_valid(trajectory: Trajectory) -> bool:
    bad = ("parse_error", "unknown_tool", "invalid_args")
    return bool(trajectory.events) and not any(event.result.kind in bad for event in trajectory.events)


def _answer_item(text: str) -> ChecklistItem:
    wanted = text.casefold()
    return ChecklistItem(
        name=_short("answer contains", text), check=lambda t: wanted in (t.answer or "").casefold(), scope="answer"
    )


def _file_item(path: str, text: str | None) -> Reward:
    async def as_expected(trajectory: Trajectory, state: EpisodeState) -> float | None:
        if state.root is None:  # a replayed tape has no files
            return None
        return float(not state.exists(path) if text is None else state.read(path) == text)

    return Reward(name=_short("no file" if text is None else "file", path), function=as_expected)


def _call_item(tool: str, server: str | None) -> ChecklistItem:
    def was_called(trajectory: Trajectory) -> bool:
        results = [event.result for event in trajectory.events]
        return any(r.ok and r.tool == tool and server in (None, r.server) for r in results)

    return ChecklistItem(name=_short("call", tool if server is None else f"{server} {tool}"), check=was_called)


def _short(what: str, text: str) -> str:
    """A name of one line; a cut one has a digest, so that names stay unique."""
    line = " ".join(text.split())
    if line == text and len(line) <= _NAME_CHARS:
        return f"{what} {text}"
    return f"{what} {line[:_NAME_CHARS]} {_digest(text)[:4]}"


# --- the task file -----------------------------------------------------------------------------------------------


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _task(task_id: str, kind: str, prompt: str, data: Mapping[str, Any]) -> Task:
    return Task(task_id=task_id, kind=kind, prompt=prompt, seed=int(_digest(task_id)[:8], 16), data=data)


def _explore() -> list[tuple[Task, str]]:
    return [(_task(f"explore-{n}", "explore", prompt, {}), split) for n, (split, prompt) in enumerate(EXPLORE)]


def _read(path: Path, has_folder: bool) -> list[tuple[Task, str]]:
    found = read_tasks(path, "task", lambda line: _parse(line, has_folder))
    if not found:
        raise ConfigError(f'task file {str(path)!r} holds no task; write a line such as {{"prompt": "..."}}')
    return found


def _parse(line: str, has_folder: bool) -> tuple[Task, str]:
    """A line as a task with its split.

    Raises:
        ValueError: saying what is wrong with it.
    """
    entry = json.loads(line)
    _check_keys("a task", entry, _KEYS)
    prompt, kind = entry.get("prompt"), entry.get("kind", "task")
    task_id = entry.get("id", f"{kind}-{_digest(json.dumps(entry, sort_keys=True))}")
    for key, value in (("prompt", prompt), ("id", task_id), ("kind", kind)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{key} must be a text that is not empty")
    held_out = int(_digest(task_id), 16) % _HELD_OUT_ONE_IN == 0
    split = entry.get("split", "heldout" if held_out else "train")
    if split not in _SPLITS:
        raise ValueError(f"split {split!r} is unknown; use 'train' or 'heldout'")
    files, expect = entry.get("files", {}), entry.get("expect", {})
    _check_keys("expect", expect, _EXPECT_KEYS)
    _check_files("files", files, (str,))
    _check_files("expect.files", expect.get("files", {}), (str, type(None)))
    _check_lists(expect)
    if (files or expect.get("files")) and not has_folder:
        raise ValueError("it has files, but no server has a working directory; name ${WORKDIR} in its args, env or cwd")
    return _task(task_id, kind, prompt, {"files": files, "expect": expect}), split


def _check_keys(what: str, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, got {type(value).__name__}")
    for key in value:
        if key not in known:
            raise ValueError(f"{what} has the unknown key {key!r}; {near_name(key, known)}")


def _check_files(what: str, files: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(files, dict):
        raise ValueError(f"{what} must be an object of paths and texts")
    plain = [str(PurePosixPath(path)) for path in files]
    if len(set(plain)) < len(plain):
        raise ValueError(f"{what} has a path twice: {max(plain, key=plain.count)!r}")
    for path, text in files.items():
        parts = PurePosixPath(path).parts
        if len(path) > 1024 or any(len(part.encode("utf-8", "replace")) > 255 for part in parts):
            raise ValueError(f"{what} has a path that is too long: {path[:60]!r}...")
        for words in (path, text or ""):
            if isinstance(words, str) and _LONE_SURROGATE.search(words):
                raise ValueError(f"{what}[{path!r}] holds half of a surrogate pair, which no file can")
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise ValueError(f"{what} has the path {path!r}; write one relative to the working directory, without '..'")
        if not isinstance(text, kinds):
            raise ValueError(f"{what}[{path!r}] must be a text{' or null' if type(None) in kinds else ''}")
        if any(str(folder) in files for folder in PurePosixPath(path).parents):
            raise ValueError(f"{what} has {path!r} below a path that is a file itself")


def _check_lists(expect: Mapping[str, Any]) -> None:
    texts, calls = expect.get("answer_contains", []), expect.get("calls", [])
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("expect.answer_contains must be a list of texts that are not empty")
    if len(set(texts)) < len(texts):
        raise ValueError("expect.answer_contains has a text twice")
    if not isinstance(calls, list):
        raise ValueError("expect.calls must be a list of objects")
    for call in calls:
        _check_keys("expect.calls", call, _CALL_KEYS)
        if not isinstance(call.get("tool"), str) or not isinstance(call.get("server", ""), str):
            raise ValueError("expect.calls needs a tool, and tool and server must be texts")
    if len({(call["tool"], call.get("server")) for call in calls}) < len(calls):
        raise ValueError("expect.calls has a call twice")
