"""Whether episodes at the same time see each other: a probe that makes calls and compares answers and files."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from arenarl.mcp import ToolSet, ToolSpec
from arenarl.mcp.pool import Workspace
from arenarl.random_agent import EPISODE_LIMIT_S, first_task, hub_of, random_call
from arenarl.taskset import TaskSet, setup_of
from arenarl.types import Task

_CALLS, _MOST_CALLS = 24, 48
_CLOCK_SECONDS = 1.1  # an answer that holds the time of day must differ


@dataclass(frozen=True)
class Finding:
    """One point of a check: True, False, or None for something that is only said."""

    point: str
    ok: bool | None
    words: str


async def probe_isolation(taskset: TaskSet) -> list[Finding]:
    """Whether of two episodes at once one sees what the other does: in the files, and in the answers to its calls.

    The same calls are made alone, each time on servers of their own, and then by an episode on whose hub another has made
    other calls before. An answer that was the same alone, but is another one now, is a leak.
    """
    task = first_task(taskset)
    alone: list[list[str]] = []
    for pause in (0.0, 0.0, _CLOCK_SECONDS):  # what the first leaves behind for good, the others find alike
        await asyncio.sleep(pause)
        async with _workspaces(taskset, task, 1) as (only,):
            script, others = _script(only.tools, 0), _script(only.tools, 1)
            alone.append(await _answers(only, script))
    async with _workspaces(taskset, task, 2) as (busy, quiet):
        start, before = _files(busy), _files(quiet)
        await _answers(busy, others)
        written = len({path for path, _ in _files(busy).items() ^ start.items()})
        after = _files(quiet)
        together = await _answers(quiet, script)
    worked = sum(answer.startswith("ok ") for answer in alone[2])
    made = f"{len(script)} calls by another episode, {worked} of them without error"
    folder = f"{written} paths written there" if quiet.root else "no working directory"
    steady = [n for n in range(len(script)) if alone[1][n] == alone[2][n]]
    leaks = [n for n in steady if together[n] != alone[2][n]]
    verdicts = [Finding("files", None if quiet.root is None else after == before, f"{folder}, {made}")]
    if leaks:
        server, tool, _ = script[leaks[0]]
        words = (
            f"{tool!r} of {server!r} answers {alone[2][leaks[0]]!r} alone, {together[leaks[0]]!r} after another episode"
        )
        return [*verdicts, Finding("isolation", False, words)]
    words = f"{len(steady)} of {len(script)} answers are the same each time, and the same beside another episode"
    return [*verdicts, Finding("isolation", True if steady else None, words)]


def _script(tools: Sequence[ToolSpec], seed: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Random calls, of each tool in turn, so that what one writes another may read."""
    rng, known, calls = random.Random(seed), ToolSet(tools), []
    for n in range(min(max(_CALLS, len(known.schemas)), _MOST_CALLS) if known.schemas else 0):
        turn, which = divmod(n, len(known.schemas))
        name, arguments = random_call([known.schemas[which]], rng, optional=(turn + 1) % 2)
        tool = known.resolve(name)
        assert tool is not None
        calls.append((tool.server, tool.name, arguments))
    return calls


@contextlib.asynccontextmanager
async def _workspaces(taskset: TaskSet, task: Task, number: int) -> AsyncIterator[Sequence[Workspace]]:
    fill = setup_of(taskset, task)
    async with hub_of() as hub:
        opening = (hub.open(taskset.servers(), fill=fill, seed=task.seed, episode="probe") for _ in range(number))
        yield await asyncio.gather(*opening)


async def _answers(workspace: Workspace, script: Sequence[tuple[str, str, dict[str, Any]]]) -> list[str]:
    answers = []
    for server, tool, arguments in script:
        result = await workspace.call(server, tool, arguments, timeout=EPISODE_LIMIT_S)
        answers.append(f"{result.kind} {result.text}")
    return answers


def _files(workspace: Workspace) -> dict[str, bytes]:
    """Every file of a workspace's directory by its path."""
    if workspace.root is None:
        return {}
    found = (path for path in workspace.root.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(workspace.root)): path.read_bytes() for path in found}
