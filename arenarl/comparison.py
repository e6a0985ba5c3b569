"""Two policies on the same tasks: games between their attempts, asked in both orders, under one or more judges.

Attempts are [task][attempt]. A task has as many games as the side with more attempts; attempts that the infrastructure
lost are left out first. A valid attempt ended by itself with an answer. Win rates are given twice:

    valid pairs    games between two valid attempts, as in ArenaRL's evaluation; flatters a model that fails often
    all queries    in the other games the valid attempt wins, by the largest margin that the judge gave; two invalid tie

A task is one decision, the mean margin of its games, since attempts at one task are not independent.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arenarl.arena import run_tournament
from arenarl.config import AgentConfig
from arenarl.errors import ConfigError, JudgeError, boundary
from arenarl.evaluate import WinRate, bootstrap_mean_difference, win_rate
from arenarl.jsonl import dumps
from arenarl.judge import Judge, OracleJudge
from arenarl.metrics import episode_metrics
from arenarl.taskset import TaskSet, load_object
from arenarl.topologies import anchor
from arenarl.types import FLOAT_NOISE, Abstention, Episode, Outcome, Verdict

log = logging.getLogger(__name__)

HELD_OUT_SEED = 0
"""Picks the held-out tasks, the same for every evaluation."""

AT_ONCE = 16
"""Games of one judge in flight: the wait for a turn of a judge's own counts against its deadline."""

CLOSE_TIMEOUT_S = 60.0
"""For one judge. A local engine that is still starting stops after its start."""

Attempts = Sequence[Sequence[Episode]]
Answer = Verdict | Abstention


# -- judges ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NamedJudge:
    """A judge, a short name for tables, and what it is."""

    name: str
    about: str
    judge: Judge


def evaluation_judge(taskset: TaskSet, config: AgentConfig) -> tuple[Judge, str]:
    """A judge that training did not use, if the task set has a verifier of its own; else the training judge, named so."""
    if verifier := _verifier(taskset):
        return verifier.judge, f"{verifier.name} ({verifier.about})"
    return config.build_judge(), f"{config.judge} (the training judge: {taskset.name} has no verifier)"


def evaluation_judges(taskset: TaskSet, config: AgentConfig, more: Sequence[str] = ()) -> list[NamedJudge]:
    """The training judge, the task set's own verifier if it has one, and more: "module:Class" or "module:Class{JSON}".

    Raises:
        ConfigError: a judge that cannot be built, naming it.
    """
    trained = f"{config.judge}{dumps(config.judge_config) if config.judge_config else ''}"
    judges = [NamedJudge(name=_short(config.judge), about=f"{trained}, the training judge", judge=config.build_judge())]
    judges += [verifier] if (verifier := _verifier(taskset)) else []
    judges += [NamedJudge(name=_short(text), about=text, judge=load_judge(text)) for text in more]
    seen: Counter[str] = Counter()
    for n, judge in enumerate(judges):
        seen[judge.name] += 1
        if seen[judge.name] > 1:
            judges[n] = replace(judge, name=f"{judge.name} {seen[judge.name]}")
    return judges


def load_judge(text: str) -> Judge:
    """Build the judge "module:Class" or, with arguments, "module:Class{JSON object}".

    Raises:
        ConfigError: naming the text and what is wrong with it.
    """
    path, brace, rest = text.partition("{")
    try:
        arguments = json.loads(brace + rest) if brace else {}
    except ValueError as error:
        raise ConfigError(f"the arguments of judge {text!r} are no JSON object: {error}") from error
    with boundary(ConfigError, f"judge {text!r} cannot be built"):
        judge = load_object(path.strip(), "judge", **arguments)
    check_compares(judge, text)
    return judge


def check_compares(judge: Judge, text: str) -> None:
    """Raises ConfigError for what is no judge; ``text`` names it."""
    if not callable(getattr(judge, "compare", None)):
        raise ConfigError(f"judge {text!r} has no method compare(a, b, task); name a class that has, as 'module:Class'")


async def close_judges(judges: Sequence[Judge]) -> None:
    """Take down what judges hold, all of them: one that fails to close, or takes too long, is logged and left."""
    for judge in judges:
        if aclose := getattr(judge, "aclose", None):
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await aclose()
            except Exception as error:
                log.warning("judge %s did not close: %s: %s", type(judge).__name__, type(error).__name__, error)


def _verifier(taskset: TaskSet) -> NamedJudge | None:
    if (quality := getattr(taskset, "quality", None)) is None:
        return None
    judge = OracleJudge(lambda episode: quality(episode.task, episode.trajectory))
    return NamedJudge(name=f"{taskset.name} verifier", about="not used in training", judge=judge)


def _short(path: str) -> str:
    return path.partition("{")[0].rpartition(":")[2].strip()


# -- games ----------------------------------------------------------------------------------------------------------------


def valid(episode: Episode) -> bool:
    """Whether it ended by itself, with an answer that is not blank."""
    return episode.outcome in (Outcome.SCORED, Outcome.ABSTAINED) and bool((episode.trajectory.answer or "").strip())


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two attempts that meet. ``task`` is an index."""

    task: int
    ours: Episode
    theirs: Episode

    @property
    def walkover(self) -> int | None:
        """1 if only ours is valid, -1 if only theirs, 0 if neither; None if both are, and a judge must decide."""
        a, b = valid(self.ours), valid(self.theirs)
        return None if a and b else a - b


def pair_up(ours: Attempts, theirs: Attempts) -> list[Pair]:
    """The games of each task. A task that one side has no attempt at, failures of the infrastructure aside, has none."""
    pairs = []
    for task, sides in enumerate(zip(ours, theirs, strict=True)):
        a, b = ([e for e in side if e.outcome is not Outcome.FAILED] for side in sides)
        if a and b:
            n = max(len(a), len(b))
            pairs += [Pair(task=task, ours=a[k % len(a)], theirs=b[k % len(b)]) for k in range(n)]
    return pairs


def play_games(judges: Sequence[Judge], pairs: Sequence[Pair]) -> list[list[Answer]]:
    """Every judge on every pair, in both orders; ours first in the verdicts, [judge][pair]. Closes the judges.

    Raises:
        JudgeError: a judge raised, or answered with something that is no verdict.
    """
    return asyncio.run(_play_all(judges, pairs))


async def _play_all(judges: Sequence[Judge], pairs: Sequence[Pair]) -> list[list[Answer]]:
    try:
        for judge in judges:
            if begin_step := getattr(judge, "begin_step", None):
                begin_step(0)
        slots = [asyncio.Semaphore(AT_ONCE) for _ in judges]
        async with asyncio.TaskGroup() as group:
            games = [
                [group.create_task(_game(judge, pair, free)) for pair in pairs]
                for judge, free in zip(judges, slots, strict=True)
            ]
        return [[game.result() for game in row] for row in games]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        await close_judges(judges)


async def _game(judge: Judge, pair: Pair, free: asyncio.Semaphore) -> Answer:
    """A tournament of two, in both orders."""
    sides = pair.ours, pair.theirs

    async def compare(i: int, j: int) -> Answer:
        return await judge.compare(sides[i], sides[j], sides[i].task)

    async with free:
        try:
            played = await run_tournament(anchor, 2, compare, estimator="paper", orders=2)
        except JudgeError as error:
            raise JudgeError(f"{pair.ours.episode_id} against {pair.theirs.episode_id}: {error}") from error
    return played.games[0].result


# -- what the games say ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """What one judge made of all games.

    Attributes:
        valid_margins: [task] mean margin of the games between valid attempts; None without such a game or verdict.
        all_margins: [task] mean margin of all games, walkovers included.
        valid_pairs: win rate over the tasks with a game between valid attempts.
        all_queries: win rate over all tasks.
        dimensions: ``valid_pairs`` by dimension of the judge's rubric.
        abstentions: games without a verdict, by reason.
    """

    name: str
    about: str
    valid_margins: tuple[float | None, ...]
    all_margins: tuple[float | None, ...]
    valid_pairs: WinRate
    all_queries: WinRate
    dimensions: Mapping[str, WinRate]
    abstentions: Mapping[str, int]
    games: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float


def rule(name: str, about: str, pairs: Sequence[Pair], answers: Sequence[Answer], num_tasks: int) -> Ruling:
    """Sum a judge's answers up; ``answers`` holds one for each pair of two valid attempts, in their order."""
    contested = [pair for pair in pairs if pair.walkover is None]
    verdicts = [a if isinstance(a, Verdict) else None for a in answers]
    margins = [None if v is None else v.margin for v in verdicts]
    largest = max((abs(m) for m in margins if m is not None), default=0.0)
    forfeit = largest if largest > FLOAT_NOISE else 1.0
    decided = iter(margins)
    every = [next(decided) if p.walkover is None else p.walkover * forfeit for p in pairs]
    names = dict.fromkeys(name for v in verdicts if v for name in v.dimensions)

    def rate(values: Sequence[float | None]) -> WinRate:
        means = _by_task(contested, values, num_tasks)
        return win_rate([means[task] for task in sorted({p.task for p in contested})])

    return Ruling(
        name=name, about=about,
        valid_margins=tuple(_by_task(contested, margins, num_tasks)), all_margins=tuple(_by_task(pairs, every, num_tasks)),
        valid_pairs=rate(margins), all_queries=win_rate(_by_task(pairs, every, num_tasks)),
        dimensions={
            d: rate([v.dimensions[d][0] - v.dimensions[d][1] if v and d in v.dimensions else None for v in verdicts])
            for d in names
        },
        abstentions=Counter(a.kind for a in answers if isinstance(a, Abstention)),
        games=len(answers), calls=sum(a.calls for a in answers), prompt_tokens=sum(a.prompt_tokens for a in answers),
        completion_tokens=sum(a.completion_tokens for a in answers), seconds=sum(a.seconds for a in answers),
    )  # fmt: skip


def _by_task(pairs: Sequence[Pair], values: Sequence[float | None], num_tasks: int) -> list[float | None]:
    """[task] mean of the known values of its games."""
    known: list[list[float]] = [[] for _ in range(num_tasks)]
    for pair, value in zip(pairs, values, strict=True):
        if value is not None:
            known[pair.task].append(value)
    return [sum(v) / len(v) if v else None for v in known]


def compare_attempts(judge: Judge, before: Sequence[Episode], after: Sequence[Episode]) -> dict[str, Any]:
    """What an evaluation reports of two policies with one attempt at each task, with 95 % intervals. Closes the judge.

    An attempt that ran into a limit is judged by what it has; one that the infrastructure lost is missing.
    """
    pairs = pair_up([[e] for e in after], [[e] for e in before])
    (answers,) = play_games([judge], pairs)
    margins = [a.margin if isinstance(a, Verdict) else None for a in answers]
    games = win_rate(_by_task(pairs, margins, len(after)))
    gain = bootstrap_mean_difference([e.score for e in after], [e.score for e in before])
    old, new = episode_metrics(before), episode_metrics(after)
    return {
        "win_rate": games.rate,
        "win_rate_ci": [games.low, games.high],
        "wins": games.wins,
        "losses": games.losses,
        "ties": games.ties,
        "missing": games.missing,
        "checklist_before": old.get("reward/score_mean"),
        "checklist_after": new.get("reward/score_mean"),
        "checklist_gain": gain.mean,
        "checklist_gain_ci": [gain.low, gain.high],
        "valid_calls_before": old.get("reward/valid_call_share"),
        "valid_calls_after": new.get("reward/valid_call_share"),
        "held_out_tasks": len(after),
    }
