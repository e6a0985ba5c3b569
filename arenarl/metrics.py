"""Numbers of one training step, by family (`arenarl.tracking.FAMILIES`). Pure functions of groups and learner results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from arenarl.arena_metrics import arena_metrics, mean
from arenarl.batching import BatchStats, Stream
from arenarl.novelty import signature
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
        **mean("reward/undecided_share", [value is None for e in episodes for value in e.checklist.values()]),
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
        **lesson_metrics(groups),
        **task_metrics(groups),
    }


def stream_metrics(streams: Sequence[Sequence[Stream]]) -> dict[str, float]:
    """How much is distilled: the share of groups with a distillation, and the mean of its largest weight over all groups.

    For runs with such a term of the loss: a step without a distillation counts as 0.
    """
    lambdas = [
        max((float(w.max(initial=0.0)) for row in stream.weights if row for w in row), default=0.0)
        for group in streams
        for stream in group
        if stream.name == "distillation"
    ]
    return {"lesson/distilled_share": len(lambdas) / len(streams), "lesson/lambda_mean": sum(lambdas) / len(streams)}


def lesson_metrics(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """What the coach's notes were worth, over the groups with a coach."""
    lessons = [g.lesson for g in groups if g.lesson]
    gaps = [lesson.gap for lesson in lessons if lesson.gap is not None]
    return {
        **mean("lesson/gap_mean", gaps),
        **mean("lesson/helpful_share", [gap > 0 for gap in gaps]),
        **mean("lesson/outage_share", [bool(lesson.outage) for lesson in lessons]),
        **mean("lesson/words_mean", [len(lesson.memory.text.split()) for lesson in lessons if lesson.memory]),
    }


def task_metrics(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """What generators wrote. Pass rates are those of the tasks that were solved; a share over nothing is left out."""
    written = [g for group in groups for g in group.generated]
    valid = [g for g in written if g.task and not g.refusal]
    rates = [g.pass_rate for g in valid if g.pass_rate is not None]
    kinds = Counter(g.refusal.partition(":")[0] for g in written if g.refusal)
    return {
        **mean("task/valid_share", [g.task is not None and not g.refusal for g in written if not g.outage or g.task]),
        **{f"task/refused_{kind}": count / len(written) for kind, count in sorted(kinds.items())},
        **mean("task/pass_rate", rates),
        **mean("task/distance_from_half", [abs(rate - 0.5) for rate in rates]),
        **mean("task/outage_share", [bool(g.outage) for g in written]),
        **({"task/distinct_share": len({signature(g.task) for g in valid if g.task}) / len(valid)} if valid else {}),
        **({"cost/solver_runs": float(sum(g.runs for g in written))} if written else {}),
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
        **({"tokens/teacher": float(stats.teacher_tokens)} if stats.teacher_tokens else {}),
        **({"lesson/undistilled_segments": float(stats.undistilled)} if stats.undistilled else {}),
    }
