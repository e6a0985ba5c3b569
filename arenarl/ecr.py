"""ECR-Bench (ARISE, arXiv 2609.01058, section on ECR-Bench): reading its files, and its two measures.

A record, one a line of a ``.jsonl`` file or an entry of a JSON list::

    {"query": "...", "metadata": {"rubrics": ["...", ...], "expected_tools": [{"name": "...", "arguments": {...}}, ...],
                                  "task_type": "search_around"}}

A rubric may also be an object with its text under "text", "rubric", "criterion" or "description", and with a "weight"
(ResearchRubrics, negative for a fault), "scope" and "gate". ``expected_tools`` and ``task_type`` may be missing; a
record without a type is of the kind "research".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from arenarl.errors import ConfigError
from arenarl.jsonl import clean_json
from arenarl.rubric import items_from_data
from arenarl.types import Episode, Outcome, Task

TRAVEL_KINDS = ("direction", "compare", "search", "one_day", "multi_day")
_KINDS = {  # as the released files call them
    "compare_itinerary": "compare",
    "search_around": "search",
    "one_day_travel": "one_day",
    "multi_day_travel": "multi_day",
}
_TEXT_KEYS = ("text", "rubric", "criterion", "description")
_RUBRIC_KEYS = ("weight", "scope", "gate", "evidence")
_TASK_KEYS = ("rubrics", "expected_tools", "task_type")


# --- reading -----------------------------------------------------------------------------------------------------


def load_ecr(path: str | Path) -> list[Task]:
    """The tasks of a file, in its order; ``data`` has "rubrics" and "expected_tools" as `items_from_data` reads them.

    Raises:
        ConfigError: the file cannot be read, holds no task, or has a record that is none; names the line or entry.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"task file '{path}' cannot be read: {error.strerror}; give a file in ECR format") from None
    except UnicodeDecodeError:
        raise ConfigError(f"task file '{path}' is not UTF-8 text") from None
    tasks: dict[str, Task] = {}
    for place, record in _records(path, text):
        try:
            task = _task(record)
            if task.task_id in tasks:
                raise ValueError(f"the task {task.task_id!r} was there before; remove one, or give it an id of its own")
        except ValueError as error:
            raise ConfigError(f"task file '{path}', {place}: {error}") from None
        except RecursionError:
            raise ConfigError(f"task file '{path}', {place}: it is nested too deeply; make it flatter") from None
        tasks[task.task_id] = task
    if not tasks:
        raise ConfigError(
            f"task file '{path}' holds no task; write a line such as "
            '{"query": "...", "metadata": {"rubrics": ["..."]}}'
        )
    return list(tasks.values())


def _records(path: str | Path, text: str) -> Iterator[tuple[str, Any]]:
    """(where, record) for each record of the text."""
    if text.lstrip().startswith("["):
        try:
            records = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"task file '{path}' is no JSON list: {error}") from None
        yield from ((f"entry {number}", record) for number, record in enumerate(records, start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"task file '{path}', line {number}: {error}") from None


def _task(record: Any) -> Task:
    """A record as a task.

    Raises:
        ValueError: saying what is wrong with it.
    """
    record = clean_json(record)
    if not isinstance(record, dict):
        raise ValueError(f"a task must be an object, got {type(record).__name__}")
    metadata = record.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata must be an object, got {type(metadata).__name__}")
    about = {key: record[key] for key in _TASK_KEYS if key in record} | metadata
    query, kind, rubrics = record.get("query", ""), about.get("task_type", "research"), about.get("rubrics", [])
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    task_id = record.get("id", f"{kind}-{digest[:12]}")
    for key, value in {"query": query, "task_type": kind, "id": task_id}.items():
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{key} must be a text that is not empty, got {value!r}")
    if not isinstance(rubrics, list):
        raise ValueError(f"rubrics must be a list, got {type(rubrics).__name__}")
    tools = about.get("expected_tools")
    data = {"rubrics": [_rubric(rubric) for rubric in rubrics], "expected_tools": [] if tools is None else tools}
    if not items_from_data(data):
        raise ValueError("it has neither rubrics nor expected_tools, so nothing could be checked")
    return Task(task_id=task_id, kind=_KINDS.get(kind, kind), prompt=query, seed=int(digest[:8], 16), data=data)


def _rubric(rubric: Any) -> Any:
    """A rubric as `items_from_data` reads it; what is none is left to it to refuse."""
    if isinstance(rubric, str):
        return {"text": rubric}
    if not isinstance(rubric, dict):
        return rubric
    text = next((rubric[key] for key in _TEXT_KEYS if key in rubric), None)
    return {"text": text} | {key: rubric[key] for key in _RUBRIC_KEYS if key in rubric}


# --- scoring -----------------------------------------------------------------------------------------------------


def passed(episode: Episode) -> bool | None:
    """Whether an attempt met all rubrics (did none of the faults) and all expected tools of its task.

    None if the attempt failed by the infrastructure's fault, or if an undecided item could still have spoilt it.
    """
    items = items_from_data(episode.task.data)
    if episode.outcome is Outcome.FAILED or not items:
        return None
    met = [episode.checklist.get(item.name) for item in items]
    good = [None if m is None else m == (item.weight > 0) for item, m in zip(items, met, strict=True)]
    if False in good:
        return False
    return None if None in good else True


def ecr_scores(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """The measures of ECR-Bench over attempts at its tasks, each attempt counted once.

    Returns:
        ``ecr_travel/<subtask>``: share of the attempts that `passed`, and ``ecr_travel/mean``, over the subtasks that
        occur; ``ecr_research/share``: mean weighted share of the rubrics met, `Episode.score`. Undecided attempts are
        left out and counted: ``.../episodes`` and ``.../undecided``. A value that no attempt decided is None; a set
        without attempts has no keys.
    """
    travel = [(e.task.kind, passed(e)) for e in episodes if e.task.kind in TRAVEL_KINDS]
    shares = [e.score for e in episodes if e.task.kind not in TRAVEL_KINDS]
    scores: dict[str, float | None] = {}
    if travel:
        kinds = [kind for kind in TRAVEL_KINDS if any(k == kind for k, _ in travel)]
        rates = {kind: _mean([met for k, met in travel if k == kind]) for kind in kinds}
        scores |= {f"ecr_travel/{kind}": rate for kind, rate in rates.items()}
        scores["ecr_travel/mean"] = None if None in rates.values() else _mean(list(rates.values()))
        scores |= _counts("ecr_travel", [met for _, met in travel])
    if shares:
        scores |= {"ecr_research/share": _mean(shares), **_counts("ecr_research", shares)}
    return scores


def _mean(values: Sequence[float | None]) -> float | None:
    decided = [float(value) for value in values if value is not None]
    return sum(decided) / len(decided) if decided else None


def _counts(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    return {f"{name}/episodes": len(values), f"{name}/undecided": sum(value is None for value in values)}
