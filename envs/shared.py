"""What environments share: drawing tasks, reading them from files, reading answers, comparing states, writing calls."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from arenarl.errors import ConfigError
from arenarl.tool_calls import HERMES
from arenarl.types import Task

Facts = dict[tuple[object, ...], object]

_ANSWER = re.compile(r"^[^\w\n]*answer[^\w\n]*:(.*)$", re.IGNORECASE | re.MULTILINE)
_CODE = re.compile(r"\b[A-Z]{2}\d{3}\b")


def distinct_tasks(
    split: str, count: int, key: str, kinds: Sequence[str], make: Callable[[str, str, random.Random], Task],
    identity: Callable[[Task], str],
) -> list[Task]:  # fmt: skip
    """``count`` tasks, the kinds in turn, no two alike; equal arguments give equal tasks.

    Args:
        key: names the stream of random numbers, besides the split.
        make: a task of (kind, split, random numbers).
        identity: what makes two tasks the same.

    Raises:
        ConfigError: for an unknown split.
    """
    if split not in ("train", "heldout"):
        raise ConfigError(f"split {split!r} is unknown; use 'train' or 'heldout'")
    rng = random.Random(f"{key}/{split}")
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        task = make(kinds[len(tasks) % len(kinds)], split, rng)
        tasks.setdefault(identity(task), task)
    return list(tasks.values())


def read_tasks(path: Path, what: str, parse: Callable[[str], tuple[Task, str]]) -> list[tuple[Task, str]]:
    """The tasks of a file, one a line, each with its split; blank lines are passed over.

    Args:
        what: a line holds, for errors: "task", "seed".
        parse: raises ValueError, saying what is wrong with the line.

    Raises:
        ConfigError: naming the file, and the line if one is refused or repeats an id.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"{what} file {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} file {str(path)!r} is not UTF-8 text") from None
    found: dict[str, tuple[Task, str]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task, split = parse(line)
            if task.task_id in found:
                raise ValueError(f"the id {task.task_id!r} was there before; ids must be unique")
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{what} file {str(path)!r}, line {number}: {error}") from None
        found[task.task_id] = task, split
    return list(found.values())


def call(tool: str, **arguments: object) -> str:
    """A tool call as the text that an oracle says."""
    return HERMES.render(tool, arguments)


def stated(text: str | None) -> str:
    """What a text gives as its answer: its lines ``answer: ...``, or all of it if it has none."""
    return "\n".join(_ANSWER.findall(text or "")) or (text or "")


def codes_right(text: str | None, wanted: Sequence[str]) -> float:
    """Codes such as AB123 named rightly minus those named wrongly in the last line ``answer: ...``, over those wanted, in [0, 1]."""
    lines = _ANSWER.findall(text or "")
    named = set(_CODE.findall(lines[-1].upper())) if lines else set()
    return max(0, len(named & set(wanted)) - len(named - set(wanted))) / len(wanted)


def share(start: Facts, goal: Facts, now: Facts) -> float:
    """How far what was asked was done, and nothing else, in [0, 1]; only harm counts if nothing was asked.

    With W the facts in which start and goal differ, and H the others in which goal and now differ, those with the same
    first three parts taken as one: |{w in W: now as in goal}| / |W| x 0.5 ^ |H|.
    """
    missing = object()
    right = {key: now.get(key, missing) == goal.get(key, missing) for key in {*start, *goal, *now}}
    wanted = [key for key in right if start.get(key, missing) != goal.get(key, missing)]
    harmed = {key[:3] for key in set(right).difference(wanted) if not right[key]}
    made = sum(right[key] for key in wanted) / len(wanted) if wanted else 1.0
    return made * 0.5 ** len(harmed)
