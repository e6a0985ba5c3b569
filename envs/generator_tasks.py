"""Any environment as a place to write tasks about: the agent explores its tools and answers with a task as JSON.

## Description
The tools are those of another task set. A seed asks for a task; the agent calls tools to learn what is true, then writes
a request, assertions that a good answer to it meets, each with a quote from a tool result that supports it, and the calls
that it needs (the Generator of ARISE, arXiv 2609.01058, 2.1). `arenarl.generated` has the format.

Seeds come from a file: a text file with a request a line, or JSON Lines of objects::

    {"prompt": "Write a hard task about hotels.", "kind": "search"}

========  ==============================================================================================================
prompt    what the agent is asked
kind      any word; the tasks written for it are of this kind
id        unique; a digest of the line if left out
split     "train" or "heldout"; if left out, ``heldout_share`` of these seeds are held out, chosen by their ids
========  ==============================================================================================================

Without a file there are a few general requests, enough to try an environment out.

## Actions
The text of an assistant message: tool calls, or the final answer, which is the task as JSON.

## Observations
The new chat messages: system and user at reset, tool results after each step.

## Rewards
0 until the end, then the share of four items that is met: ``json`` (one object with a query), ``items`` (3 to 8 different
assertions), ``grounded`` (each quotes a successful tool result), ``tools`` (each expected call was made with success).
Whether the task is of the right difficulty is for an algorithm to find out.

## Starting state
That of the other task set without files: one whose ``setup`` needs more cannot be the base.

## Episode end
Terminated by an answer; truncated after ``rounds`` turns with calls and one for the task.

## Arguments
``base``, ``base_config``: the other task set, "module:Class", and its arguments. ``seeds``: path of the file, or None.
``heldout_share``, ``system_prompt``, ``rounds``.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arenarl.envs.shared import read_tasks
from arenarl.errors import ConfigError, near_name
from arenarl.generated import generator_checklist
from arenarl.jsonl import clean_json
from arenarl.mcp.config import ServerSpec
from arenarl.rubric import Checklist
from arenarl.taskset import load_taskset
from arenarl.types import Task

SYSTEM_PROMPT = """\
You write tasks for another assistant, which has the same tools as you and will see nothing but the request.

First explore: call tools until you know enough true facts for the task you are asked for. Then answer, without calling a \
tool, with one JSON object and nothing else:

{"query": "the request, as a user would write it, with all that is needed to understand it",
 "rubrics": [{"text": "one assertion about the answer", "observation": 1, "evidence": "a quote"}],
 "expected_tools": [{"name": "a tool", "arguments": {"name of an argument": "its value"}}]}

Rules:
- 3 to 8 rubrics, no two the same. Each is a single statement that is true or false of an answer to the request, can be \
checked alone, and is true of every good answer.
- "observation" is the number of the tool result that supports the rubric: 1 is the first result you received, 2 the second, \
and so on; failed calls are counted, but support nothing. "evidence" is copied from that result word for word.
- "expected_tools" are calls that anybody needs to answer the request, each one that you made yourself with success.
- The request must not give away what the rubrics ask for, must have one right outcome, and must be answerable with the tools.
"""
SEEDS = (
    ("train", "Write a task that one tool call answers."),
    ("train", "Write a task that needs two different tools."),
    ("train", "Write a task in which things have to be compared."),
    ("train", "Write a task with a condition that rules most possibilities out."),
    ("train", "Write a task in which the result of one call is needed for the next."),
    ("train", "Write a hard task that needs four calls or more."),
    ("heldout", "Write a task that needs three tool calls."),
    ("heldout", "Write a task in which something has to be counted or added up."),
)
_SPLITS = ("train", "heldout")
_KEYS = ("prompt", "kind", "id", "split")


class GeneratorTasks:
    """Tasks that ask for tasks about another environment. See the module docstring.

    Args:
        base: "module:Class" of the task set whose tools are explored.
        seeds: a ``.jsonl`` file of objects, or a text file of requests, one a line; a few general requests if None.
        heldout_share: of the seeds without a split, in [0, 1).
        rounds: turns with tool calls.

    Raises:
        ConfigError: for an argument or a line that is refused, naming file and line.
    """

    name = "generator"

    def __init__(
        self, base: str = "arenarl.envs.travel:TravelTasks", base_config: Mapping[str, Any] | None = None,
        seeds: str | Path | None = None, *, heldout_share: float = 0.25, system_prompt: str = SYSTEM_PROMPT, rounds: int = 6,
    ) -> None:  # fmt: skip
        if not 0 <= heldout_share < 1:
            raise ConfigError(f"heldout_share={heldout_share} must be at least 0 and below 1")
        if rounds < 1:
            raise ConfigError(f"rounds={rounds} leaves no turn to call a tool; give 1 or more")
        self.system_prompt, self.max_turns = system_prompt, rounds + 1
        self._base = load_taskset(base, base_config)
        lines = [(_task(text), split) for split, text in SEEDS] if seeds is None else _read(Path(seeds))
        self._seeds = _split(lines, heldout_share)

    def servers(self) -> Sequence[ServerSpec]:
        return self._base.servers()

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """``count`` distinct seeds, or all there are, in an order that the seed decides.

        Raises:
            ConfigError: for an unknown split.
        """
        if split not in _SPLITS:
            raise ConfigError(f"split {split!r} is unknown; use 'train' or 'heldout'")
        found = [task for task, where in self._seeds if where == split]
        return random.Random(f"tasks/{split}/{seed}").sample(found, min(count, len(found)))

    def checklist(self, task: Task) -> Checklist:
        return generator_checklist()


# --- the seed file -----------------------------------------------------------------------------------------------


def _task(prompt: str, kind: str = "task", task_id: str | None = None) -> Task:
    digest = _digest(task_id or f"{kind}/{prompt}")
    return Task(task_id=task_id or f"{kind}-{digest[:12]}", kind=kind, prompt=prompt, seed=int(digest[:8], 16))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _split(seeds: Sequence[tuple[Task, str]], share: float) -> list[tuple[Task, str]]:
    """The seeds with a split each: of those without, the share with the smallest digests is held out, at least one if any."""
    free = sorted((task.task_id for task, split in seeds if not split), key=_digest)
    count = min(max(round(share * len(free)), 1), len(free) - 1) if share and free else 0
    held_out = set(free[:count])
    return [(task, split or _SPLITS[task.task_id in held_out]) for task, split in seeds]


def _read(path: Path) -> list[tuple[Task, str]]:
    """The seeds of a file, each with its split, or "" if it names none."""
    parse = _parse if path.suffix == ".jsonl" else lambda line: (_task(line.strip()), "")
    found = read_tasks(path, "seed", parse)
    if not any(split != "heldout" for _, split in found):
        raise ConfigError(f"seed file {str(path)!r} holds no seed for training; write a line such as {SEEDS[0][1]!r}")
    return found


def _parse(line: str) -> tuple[Task, str]:
    """Raises ValueError, saying what is wrong with the line."""
    entry = clean_json(json.loads(line))
    if not isinstance(entry, dict):
        raise ValueError(f"a seed must be an object, got {type(entry).__name__}")
    for key, value in entry.items():
        if key not in _KEYS:
            raise ValueError(f"a seed has the unknown key {key!r}; {near_name(key, _KEYS)}")
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{key} must be a text that is not empty")
    if "prompt" not in entry:
        raise ValueError("a seed needs a prompt")
    if (split := entry.get("split", "")) not in ("", *_SPLITS):
        raise ValueError(f"split {split!r} is unknown; use 'train' or 'heldout'")
    return _task(entry["prompt"].strip(), entry.get("kind", "task"), entry.get("id")), split
