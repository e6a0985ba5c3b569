"""Two policies on the same held-out tasks: one game a task, under a judge that training did not use where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from arenarl.config import AgentConfig
from arenarl.evaluate import bootstrap_mean_difference, win_rate
from arenarl.judge import Judge, OracleJudge
from arenarl.metrics import episode_metrics
from arenarl.taskset import TaskSet
from arenarl.types import Episode, Verdict


def evaluation_judge(taskset: TaskSet, config: AgentConfig) -> tuple[Judge, str]:
    """A judge that training did not use, if the task set has a verifier of its own; else the training judge, named so."""
    if quality := getattr(taskset, "quality", None):
        return OracleJudge(
            lambda episode: quality(episode.task, episode.trajectory)
        ), f"{taskset.name} verifier (not used in training)"
    return config.build_judge(), f"{config.judge} (the training judge: {taskset.name} has no verifier)"


def margins(judge: Judge, ours: Sequence[Episode], theirs: Sequence[Episode]) -> list[float | None]:
    """One game a task, ours minus theirs; None where the judge abstained."""

    async def play() -> list[float | None]:
        verdicts = await asyncio.gather(*(judge.compare(a, b, a.task) for a, b in zip(ours, theirs, strict=True)))
        return [v.score_a - v.score_b if isinstance(v, Verdict) else None for v in verdicts]

    return asyncio.run(play())


def compare_attempts(judge: Judge, before: Sequence[Episode], after: Sequence[Episode]) -> dict[str, Any]:
    """What an evaluation reports of two policies on the same tasks, with 95 % intervals."""
    games = win_rate(margins(judge, after, before))
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
