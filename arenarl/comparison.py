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
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from arenarl.config import AgentConfig
from arenarl.errors import ConfigError, JudgeError, boundary
from arenarl.evaluate import (
    Estimate,
    Share,
    WinRate,
    bootstrap_mean,
    bootstrap_mean_difference,
    pass_at_k,
    pass_hat_k,
    share,
    win_rate,
)
from arenarl.functional import FLOAT_NOISE
from arenarl.judge import Judge, OracleJudge
from arenarl.metrics import episode_metrics
from arenarl.taskset import TaskSet, load_object
from arenarl.types import Abstention, Episode, Outcome, Verdict

HELD_OUT_SEED = 0
"""Picks the held-out tasks, the same for every evaluation."""

GAME_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 10.0

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
    trained = f"{config.judge}{json.dumps(config.judge_config) if config.judge_config else ''}"
    judges = [NamedJudge(name=_short(config.judge), about=f"{trained}, the training judge", judge=config.build_judge())]
    judges += [verifier] if (verifier := _verifier(taskset)) else []
    judges += [NamedJudge(name=_short(text), about=text, judge=load_judge(text)) for text in more]
    seen: Counter[str] = Counter()
    named = []
    for j in judges:
        seen[j.name] += 1
        name = j.name if seen[j.name] == 1 else f"{j.name} {seen[j.name]}"
        named.append(NamedJudge(name=name, about=j.about, judge=j.judge))
    return named


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
    return load_object(path.strip(), "judge", **arguments)


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
    """Every judge on every pair, at once and in both orders; ours first in the verdicts, [judge][pair]. Closes the judges.

    A game that takes longer than `GAME_TIMEOUT_S` is an abstention.

    Raises:
        JudgeError: a judge raised, or answered with something that is no verdict.
    """
    return asyncio.run(_play_all(judges, pairs))


async def _play_all(judges: Sequence[Judge], pairs: Sequence[Pair]) -> list[list[Answer]]:
    try:
        for judge in judges:
            if begin_step := getattr(judge, "begin_step", None):
                begin_step(0)
        answers = await _together([_both_orders(judge, pair) for judge in judges for pair in pairs])
        return [answers[k * len(pairs) : (k + 1) * len(pairs)] for k in range(len(judges))]
    finally:
        for judge in judges:
            if aclose := getattr(judge, "aclose", None):
                with suppress(TimeoutError):
                    await asyncio.wait_for(aclose(), CLOSE_TIMEOUT_S)


async def _together(coroutines: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Results of all at once, in order. The first failure cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _both_orders(judge: Judge, pair: Pair) -> Answer:
    """(s_ours, s_theirs) = J(ours, theirs) + J(theirs, ours). Source: ArenaRL (arXiv 2601.06487), arena judge."""
    first = await _ask(judge, pair.ours, pair.theirs)
    if isinstance(first, Abstention):
        return first
    second = await _ask(judge, pair.theirs, pair.ours)
    cost = {
        name: getattr(first, name) + getattr(second, name)
        for name in ("calls", "prompt_tokens", "completion_tokens", "seconds")
    }
    if isinstance(second, Abstention):
        return replace(second, **cost)
    return Verdict(
        score_a=first.score_a + second.score_b, score_b=first.score_b + second.score_a,
        dimensions={
            name: (a + second.dimensions[name][1], b + second.dimensions[name][0])
            for name, (a, b) in first.dimensions.items() if name in second.dimensions
        }, **cost,
    )  # fmt: skip


async def _ask(judge: Judge, a: Episode, b: Episode) -> Answer:
    what = f"comparing {a.episode_id} with {b.episode_id}"
    with boundary(JudgeError, what):
        try:
            async with asyncio.timeout(GAME_TIMEOUT_S):
                answer = await judge.compare(a, b, a.task)
        except TimeoutError as error:
            return Abstention(reason=f"timeout: {error or f'no verdict after {GAME_TIMEOUT_S:g} s'}")
    if isinstance(answer, Abstention):
        return answer
    if not isinstance(answer, Verdict) or not math.isfinite(answer.score_a - answer.score_b):
        raise JudgeError(f"{what}: {answer!r} is no verdict; a judge that cannot decide gives an Abstention")
    return answer


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
    margins = [None if v is None else v.score_a - v.score_b for v in verdicts]
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
    margins = [a.score_a - a.score_b if isinstance(a, Verdict) else None for a in answers]
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


# -- each side by itself --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number for each side, and the mean difference (ours minus theirs) over the tasks that both have it for."""

    ours: Estimate | Share
    theirs: Estimate | Share | None = None
    difference: Estimate | None = None


def measure_share(
    values: Callable[[Episode], Sequence[float]], ours: Attempts, theirs: Attempts | None = None
) -> Measure:
    """Share that is met of all values in [0, 1] that the attempts of a side have. The interval is over tasks, see `share`."""

    def one(side: Attempts) -> tuple[Share, list[float | None]]:
        known = [[v for e in task for v in values(e)] for task in side]
        means = [sum(v) / len(v) if v else None for v in known]
        return share(sum(map(sum, known)), sum(map(len, known)), sum(map(bool, known))), means

    return _measure(one, ours, theirs)


def measure_mean(
    value: Callable[[Sequence[Episode]], float | None], ours: Attempts, theirs: Attempts | None = None
) -> Measure:
    """Mean over tasks of what ``value`` in [0, 1] makes of a task's attempts; None is missing."""

    def one(side: Attempts) -> tuple[Estimate, list[float | None]]:
        values = [value(task) for task in side]
        return bootstrap_mean(values, shares=True), values

    return _measure(one, ours, theirs)


def _measure(
    one: Callable[[Attempts], tuple[Any, list[float | None]]], ours: Attempts, theirs: Attempts | None
) -> Measure:
    mine, values = one(ours)
    if theirs is None:
        return Measure(ours=mine)
    other, others = one(theirs)
    return Measure(ours=mine, theirs=other, difference=bootstrap_mean_difference(values, others))


def mean_score(attempts: Sequence[Episode]) -> float | None:
    """Mean checklist score of a task's attempts; None if none has one."""
    scores = [e.score for e in attempts if e.score is not None]
    return sum(scores) / len(scores) if scores else None


def passes(k: int, success: float, *, every: bool) -> Callable[[Sequence[Episode]], float | None]:
    """pass@k (or, with ``every``, pass^k) of a task's attempts; success is a checklist score of at least ``success``.

    None for a task with fewer than k attempts that have a score.
    """

    def estimate(attempts: Sequence[Episode]) -> float | None:
        scores = [e.score for e in attempts if e.score is not None]
        if len(scores) < k:
            return None
        return (pass_hat_k if every else pass_at_k)(len(scores), sum(s >= success - FLOAT_NOISE for s in scores), k)

    return estimate
