"""Stored attempts that evaluations compare with: JSON lines, one attempt a line.

A line stands by itself, so files can be cut, joined and written by hand:

    {"format": "arenarl-reference/1", "taskset": "travel", "model": "path/to/model",
     "task": {"task_id": ..., "kind": ..., "prompt": ..., "seed": 0, "data": {...}},
     "episode_id": ..., "member": 0, "greedy": false, "messages": [...], "events": [...], "answer": ...,
     "outcome": "scored", "detail": "", "checklist": {...}, "score": 0.5}

Needed are ``task`` (with ``task_id`` and ``prompt``) and ``messages``; the rest may be left out. Without ``answer`` it is
the last message, if that is the assistant's. What is written is read again exactly. Tokens and timings are not stored: a
reference is read by judges, and never trained on.

Lines of a run's `episodes.jsonl` are read too: their ``task_id``, ``task_kind`` and first user message stand for the task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arenarl.errors import ConfigError
from arenarl.jsonl import dumps, plain
from arenarl.types import Episode, Message, Outcome, Task, ToolCall, ToolEvent, ToolResult, Trajectory

FORMAT = "arenarl-reference/1"
_STORED = ("episode_id", "member", "greedy", "outcome", "detail", "checklist", "score")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One stored attempt. ``taskset`` and ``model`` are empty if the line does not say."""

    episode: Episode
    taskset: str = ""
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class References:
    """Stored attempts at the tasks of an evaluation.

    Attributes:
        models: what made them, as far as the file says.
        attempts: [task][attempt], in the order of the tasks; empty for a task without a reference.
        unused: attempts of the file at other tasks.
    """

    models: tuple[str, ...]
    attempts: tuple[tuple[Episode, ...], ...]
    unused: int


def write_references(path: str | Path, episodes: Sequence[Episode], *, taskset: str, model: str) -> None:
    """Store attempts; the file appears whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    lines = "".join(dumps(_record(Reference(episode=e, taskset=taskset, model=model))) + "\n" for e in episodes)
    scratch = Path(path).with_name(f".{Path(path).name}.tmp")
    try:
        scratch.write_bytes(lines.encode("utf-8", "backslashreplace"))
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"reference file '{path}' cannot be written: {error.strerror}; name another") from error


def read_references(path: str | Path) -> list[Reference]:
    """All attempts of a file, in its order. Blank lines are allowed.

    Raises:
        ConfigError: the file cannot be read, or a line is no attempt; it names the line by its number.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"reference file '{path}' cannot be read: {error.strerror}; make one with arenarl eval --save"
        ) from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(_reference(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"reference file '{path}', line {number} is no attempt: {what}; mend or remove the line"
            ) from error
    return found


def references_for(path: str | Path, tasks: Sequence[Task], taskset: str) -> References:
    """The attempts of a file at these tasks, found by ``task_id`` and prompt.

    An attempt gets the task as the task set has it now, and the id "reference/TASK_ID/NUMBER", which no attempt of
    another side has.

    Raises:
        ConfigError: as `read_references`; the file is of another task set, or has no attempt at any of the tasks.
    """
    found = read_references(path)
    other = next((r.taskset for r in found if r.taskset not in ("", taskset)), None)
    if other is not None:
        raise ConfigError(
            f"reference file '{path}' holds attempts at task set {other!r}, the experiment plays {taskset!r}; give a file "
            "that was saved with this experiment"
        )
    attempts: dict[tuple[str, str], list[Episode]] = {(t.task_id, t.prompt): [] for t in tasks}
    used = [r for r in found if _key(r.episode.task) in attempts]
    if not used:
        raise ConfigError(
            f"reference file '{path}' has {len(found)} attempts, none of them at one of the {len(tasks)} held-out tasks of "
            f"{taskset!r}; give a file that was saved with the same env_config"
        )
    for reference in used:
        attempts[_key(reference.episode.task)].append(reference.episode)
    return References(
        models=tuple(dict.fromkeys(r.model for r in used if r.model)),
        attempts=tuple(tuple(_as_reference(attempts[_key(t)], t)) for t in tasks),
        unused=len(found) - len(used),
    )


def _key(task: Task) -> tuple[str, str]:
    return task.task_id, task.prompt


def _as_reference(episodes: Sequence[Episode], task: Task) -> list[Episode]:
    return [replace(e, episode_id=f"reference/{task.task_id}/{n}", task=task) for n, e in enumerate(episodes)]


def _record(reference: Reference) -> dict[str, Any]:
    episode = reference.episode
    return {
        "format": FORMAT,
        "taskset": reference.taskset,
        "model": reference.model,
        "task": plain(episode.task),
        **{name: getattr(episode, name) for name in _STORED},
        **plain(episode.trajectory),
    }


def _reference(record: Any) -> Reference:
    """Raises ValueError, KeyError, TypeError or AttributeError for anything that is no attempt."""
    if not isinstance(record, dict):
        raise TypeError(f"a line is a JSON object, this is {type(record).__name__}")
    if record.get("format", FORMAT) != FORMAT:
        raise ValueError(f"its format is {record['format']!r}, this version reads {FORMAT!r}")
    messages: tuple[Message, ...] = tuple(_message(m) for m in record["messages"])
    task = _task(record["task"]) if "task" in record else _task_of_run(record, messages)
    episode = Episode(
        episode_id=str(record.get("episode_id", "")), task=task, member=int(record.get("member", 0)),
        greedy=bool(record.get("greedy", False)), segments=(),
        trajectory=Trajectory(
            messages=messages, events=tuple(_event(e) for e in record.get("events", ())),
            answer=_answer(record, messages),
        ),
        outcome=Outcome(record.get("outcome", Outcome.SCORED)), detail=str(record.get("detail", "")),
        checklist={str(name): _part(met) for name, met in record.get("checklist", {}).items()},
        score=_part(record.get("score")),
    )  # fmt: skip
    return Reference(episode=episode, taskset=str(record.get("taskset", "")), model=str(record.get("model", "")))


def _message(message: Mapping[str, Any]) -> Message:
    if not isinstance(message["content"], str) or message["role"] not in ("system", "user", "assistant", "tool"):
        raise ValueError("a message needs a role (system, user, assistant or tool) and a text as its content")
    return Message(**message)


def _task(record: Mapping[str, Any]) -> Task:
    task = Task(**{"kind": "", "task_id": record["task_id"], "prompt": record["prompt"], **record})
    for name in ("task_id", "kind", "prompt"):
        _text(name, getattr(task, name))
    return task


def _task_of_run(record: Mapping[str, Any], messages: Sequence[Message]) -> Task:
    prompt = next((m["content"] for m in messages if m["role"] == "user"), "")
    return _task({"task_id": record["task_id"], "kind": record.get("task_kind", ""), "prompt": prompt})


def _event(record: Mapping[str, Any]) -> ToolEvent:
    call, result = ToolCall(**record["call"]), ToolResult(**record["result"])
    if not isinstance(call.arguments, Mapping):
        raise ValueError(f"the arguments of a call are an object, not {call.arguments!r}")
    for name, value in (("name", call.name), ("text", result.text), ("kind", result.kind)):
        _text(name, value)
    return ToolEvent(call=call, result=result, turn=int(record.get("turn", 0)))


def _answer(record: Mapping[str, Any], messages: Sequence[Message]) -> str | None:
    if "answer" not in record:
        return messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else None
    return None if record["answer"] is None else _text("answer", record["answer"])


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is a text, not {value!r}")
    return value


def _part(value: Any) -> float | None:
    """A score or how far a checklist item is met: in [0, 1], or None."""
    if value is None or (isinstance(value, int | float) and 0 <= value <= 1):
        return value
    raise ValueError(f"scores and checklist items are in [0, 1] or null, not {value!r}")
