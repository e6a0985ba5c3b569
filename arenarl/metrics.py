"""Numbers of one training step, by family (`arenarl.tracking.FAMILIES`). Pure functions of groups and learner results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from arenarl.arena_metrics import arena_metrics, mean
from arenarl.batching import BatchStats
from arenarl.types import Episode, EpisodeGroup, Outcome


class StepClock:
    """Seconds of a step by phase: ``with clock("learn"): ...``."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self, groups: Sequence[EpisodeGroup]) -> dict[str, float]:
        """``time/step``, ``time/PHASE`` and the sampled tokens of the groups per second of the step."""
        step = time.perf_counter() - self._started
        sampled = sum(e.num_sampled for e in episodes_of(groups))
        phases = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        return {"time/step": step, **phases, "tokens/sampled_per_second": sampled / step}


def episodes_of(groups: Sequence[EpisodeGroup]) -> list[Episode]:
    return [episode for group in groups for episode in group.episodes]


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """What a set of episodes achieved. A mean over nothing is left out, not reported as 0."""
    scores = [e.score for e in episodes if e.score is not None]
    good = sum(e.valid_calls[0] for e in episodes)
    calls = sum(e.valid_calls[1] for e in episodes)
    met = [met for e in episodes for met in e.checklist.values() if met is not None]
    return {
        **mean("reward/score_mean", scores),
        **mean("reward/answered_share", [e.trajectory.answer is not None for e in episodes]),
        **mean("reward/checklist_met_share", met),
        **({"reward/valid_call_share": good / calls} if calls else {}),
        **mean("reward/full_marks_share", [s == 1.0 for s in scores]),
    }


def group_metrics(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Reward, health of the groups, tokens and cost of a step."""
    episodes = episodes_of(groups)
    sampled, tokens = sum(e.num_sampled for e in episodes), sum(e.num_tokens for e in episodes)
    return {
        **episode_metrics(episodes),
        **mean("group/flat_share", [g.flat for g in groups]),
        **mean("group/incomplete_share", [any(a is None for a in g.advantages) for g in groups]),
        **mean("group/failed_share", [e.outcome is Outcome.FAILED for e in episodes]),
        "group/reforks": float(sum(e.reforks for e in episodes)),
        "tokens/sampled": float(sampled),
        "tokens/total": float(tokens),
        **mean("tokens/per_episode", [e.num_tokens for e in episodes]),
        **mean("tokens/truncated_share", [e.outcome is Outcome.TRUNCATED for e in episodes]),
        **mean("time/group", [g.seconds for g in groups]),
        "cost/tool_calls": float(sum(len(e.trajectory.events) for e in episodes)),
        **arena_metrics(groups),
    }


def learner_metrics(learned: Mapping[str, float], stats: BatchStats) -> dict[str, float]:
    """The learner's own numbers under ``policy/``, and what the batch held."""
    policy = {f"policy/{name}": value for name, value in learned.items() if name not in ("tokens", "seconds")}
    return {
        **policy,
        "tokens/trained": float(stats.trained_tokens),
        "tokens/padding_share": stats.padding_share,
        "group/trained_episodes": float(stats.episodes),
        "group/refused_episodes": float(len(stats.refused)),
    }
