"""What `arenarl eval` does: attempts of a model at the held-out tasks, compared with stored ones or with another model's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console

from arenarl.comparison import (
    HELD_OUT_SEED,
    Attempts,
    NamedJudge,
    Ruling,
    close_judges,
    evaluation_judges,
    pair_up,
    play_games,
    rule,
    valid,
)
from arenarl.config import AgentConfig
from arenarl.errors import ConfigError, EnvError, boundary
from arenarl.evaluate import (
    Agreement,
    Estimate,
    Share,
    agreement,
    bootstrap_mean,
    bootstrap_mean_difference,
    mean_win_rate,
    pass_at_k,
    pass_hat_k,
    share,
    win_rate,
)
from arenarl.evaluation_tables import print_evaluation
from arenarl.jsonl import dumps
from arenarl.preflight import check_engine, check_listing, preflight
from arenarl.references import References, references_for, write_references
from arenarl.taskset import draw_tasks
from arenarl.types import FLOAT_NOISE, Episode, Outcome, Task


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """A checked request. ``against`` and ``references`` exclude each other; without either one side is measured alone."""

    config: AgentConfig
    taskset: str
    tasks: Sequence[Task]
    attempts: int
    success: float
    judges: Sequence[NamedJudge]
    against: str | None
    reference: str | None
    references: References | None
    save: str | None
    out: str | None


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number for each side, and the mean difference (ours minus theirs) over the tasks that both have it for."""

    ours: Estimate | Share
    theirs: Estimate | Share | None = None
    difference: Estimate | None = None


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of an evaluation.

    Attributes:
        model: folder of the model, or the file and what it says of its maker.
        tasks: tasks with an attempt that the infrastructure did not lose.
        attempts: all of them.
        failed: attempts that the infrastructure lost; they count nowhere.
        invalid: attempts without a usable answer, by reason.
    """

    model: str
    tasks: int
    attempts: int
    failed: int
    invalid: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Win:
    """Win rate of ours, a mean over the judges, over valid pairs and over all queries."""

    valid_pairs: Estimate
    all_queries: Estimate


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The tasks of one kind."""

    tasks: int
    score: Measure
    valid: Measure
    win: Win | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All that `arenarl eval` reports; the JSON file has these fields.

    Attributes:
        measures: checklist score, valid generations, pass@k and pass^k.
        rulings, win, agreements: None and empty without a second side. Agreement is over valid pairs.
        checklist: how far each item was met.
        checklist_groups: the same, with items whose names differ only after a colon taken together.
    """

    taskset: str
    num_tasks: int
    attempts: int
    success: float
    ours: Side
    theirs: Side | None
    measures: Mapping[str, Measure]
    kinds: Mapping[str, Kind]
    rulings: Sequence[Ruling]
    win: Win | None
    agreements: Mapping[str, Agreement]
    checklist: Mapping[str, Measure]
    checklist_groups: Mapping[str, Measure]


# -- a request, checked and carried out ------------------------------------------------------------------------------------


def plan_evaluation(
    config: AgentConfig,
    *,
    against: str | None = None,
    reference: str | None = None,
    attempts: int = 1,
    judges: Sequence[str] = (),
    success: float = 1.0,
    save: str | None = None,
    out: str | None = None,
) -> EvaluationPlan:
    """Check all that can be checked before anything is played.

    Raises:
        ConfigError: naming the value and the remedy.
        McpServerError: a tool server that does not start.
    """
    if against is not None and reference is not None:
        raise ConfigError(f"--against {against!r} and --reference {reference!r} exclude each other; give one of them")
    if attempts < 1:
        raise ConfigError(f"--attempts {attempts} plays nothing; give 1 or more")
    if not 0 < success <= 1:
        raise ConfigError(f"--success {success} is no checklist score to reach; give more than 0 and at most 1")
    if judges and against is None and reference is None:
        raise ConfigError(f"--judge {judges[0]!r} has nothing to compare; add --against MODEL or --reference FILE")
    taskset = config.build_taskset()
    tasks = draw_tasks(taskset, "heldout", config.evaluation_duration, HELD_OUT_SEED)
    references = None if reference is None else references_for(reference, tasks, taskset.name)
    listing = preflight(config, taskset)
    if against is not None:
        other = _with_model(config, against)
        check_engine(other)
        check_listing(other, taskset, listing.schemas)
    two = against is not None or reference is not None
    return EvaluationPlan(
        config=config, taskset=taskset.name, tasks=tasks, attempts=attempts, success=success,
        judges=evaluation_judges(taskset, config, judges) if two else (),
        against=against, reference=reference, references=references, save=save, out=out,
    )  # fmt: skip


def run_evaluation(plan: EvaluationPlan, console: Console) -> Evaluation:
    """Play, store, judge, report.

    Raises:
        ArenaError: naming what went wrong; every worker and every judge has been taken down. Attempts of ours that were
            played have been saved, if that was asked for.
    """
    try:
        ours = evaluate_model(plan, plan.config.model_path, "ours", console)
        if plan.save:
            write_references(plan.save, _flat(ours), taskset=plan.taskset, model=plan.config.model_path)
        theirs = other_side(plan, console)
    except BaseException:
        asyncio.run(close_judges([j.judge for j in plan.judges]))
        raise
    with console.status("judging"):
        evaluation = assess(plan, (plan.config.model_path, ours), theirs)
    print_evaluation(evaluation, console)
    if plan.out:
        with boundary(ConfigError, f"--out {plan.out!r} cannot be written"):
            Path(plan.out).write_bytes((dumps(evaluation, indent=2) + "\n").encode("utf-8", "backslashreplace"))
    for option, path in (("attempts", plan.save), ("report", plan.out)):
        if path:
            console.print(f"{option:8} {path}", soft_wrap=True, markup=False, highlight=False)
    return evaluation


def other_side(plan: EvaluationPlan, console: Console) -> tuple[str, Attempts] | None:
    """Name and attempts of what ours is compared with, played if need be."""
    if plan.against is not None:
        return plan.against, evaluate_model(plan, plan.against, "theirs", console)
    if plan.references is None:
        return None
    found = plan.references
    unused = f", {found.unused} of its attempts at other tasks" if found.unused else ""
    return f"{plan.reference} ({', '.join(found.models) or 'maker unknown'}{unused})", found.attempts


def evaluate_model(plan: EvaluationPlan, model: str, name: str, console: Console) -> list[list[Episode]]:
    """Attempts of a model at each task of the plan, [task][attempt]. The ids of the episodes begin with ``name``.

    Raises:
        EnvError: the infrastructure lost every attempt.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with console.status(f"starting the engine for {model}"):
        algorithm = _with_model(plan.config, model).build_algo()
    rounds: list[list[Episode]] = []
    try:
        for k in range(plan.attempts):
            with console.status(f"{model}: attempt {k + 1} of {plan.attempts} at {len(plan.tasks)} held-out tasks"):
                played = algorithm.play(plan.tasks, name=f"{name}-{k}", seed=HELD_OUT_SEED + k)
            rounds.append([replace(e, member=k) for e in played])
    finally:
        algorithm.stop()
    if all(e.outcome is Outcome.FAILED for e in _flat(rounds)):
        raise EnvError(f"all {len(_flat(rounds))} attempts of {model} failed, the first with: {rounds[0][0].detail}")
    return [list(task) for task in zip(*rounds, strict=True)]


# -- what it says -----------------------------------------------------------------------------------------------------------


def assess(plan: EvaluationPlan, ours: tuple[str, Attempts], theirs: tuple[str, Attempts] | None) -> Evaluation:
    """Judge the games and sum everything up. Each side is (name, attempts)."""
    mine, other = ours[1], theirs[1] if theirs else None
    rulings = _rulings(plan, mine, other) if other is not None else []
    deepest = max(len(task) for side in (mine, other or ()) for task in side)
    items = list(dict.fromkeys(name for e in [*_flat(mine), *_flat(other or ())] for name in e.checklist))
    kinds: dict[str, list[int]] = {}
    for n, task in enumerate(plan.tasks):
        kinds.setdefault(task.kind, []).append(n)
    return Evaluation(
        taskset=plan.taskset, num_tasks=len(plan.tasks), attempts=plan.attempts, success=plan.success,
        ours=_side(*ours), theirs=_side(*theirs) if theirs else None,
        measures={
            "checklist score": measure_mean(mean_score, mine, other),
            "valid generations": measure_share(_valid, mine, other),
            **{f"pass@{k}": measure_mean(passes(k, plan.success, every=False), mine, other) for k in range(1, deepest + 1)},
            **{f"pass^{k}": measure_mean(passes(k, plan.success, every=True), mine, other) for k in range(2, deepest + 1)},
        },
        kinds={kind: _kind(chosen, mine, other, rulings) for kind, chosen in kinds.items()},
        rulings=rulings, win=_win(rulings, range(len(plan.tasks))) if rulings else None,
        agreements={
            f"{a.name} and {b.name}": agreement(a.valid_margins, b.valid_margins) for a, b in combinations(rulings, 2)
        },
        checklist={i: measure_share(lambda e, i=i: _met(e, [i]), mine, other) for i in items},
        checklist_groups={g: measure_share(lambda e, n=n: _met(e, n), mine, other) for g, n in _groups(items).items()},
    )  # fmt: skip


def _rulings(plan: EvaluationPlan, ours: Attempts, theirs: Attempts) -> list[Ruling]:
    pairs = pair_up(ours, theirs)
    answers = play_games([j.judge for j in plan.judges], [pair for pair in pairs if pair.walkover is None])
    return [rule(j.name, j.about, pairs, a, len(plan.tasks)) for j, a in zip(plan.judges, answers, strict=True)]


def _win(rulings: Sequence[Ruling], tasks: Sequence[int]) -> Win:
    return Win(
        valid_pairs=mean_win_rate([win_rate([r.valid_margins[t] for t in tasks]) for r in rulings]),
        all_queries=mean_win_rate([win_rate([r.all_margins[t] for t in tasks]) for r in rulings]),
    )


def _kind(chosen: Sequence[int], ours: Attempts, theirs: Attempts | None, rulings: Sequence[Ruling]) -> Kind:
    mine, other = [ours[t] for t in chosen], None if theirs is None else [theirs[t] for t in chosen]
    return Kind(
        tasks=len(chosen), score=measure_mean(mean_score, mine, other), valid=measure_share(_valid, mine, other),
        win=_win(rulings, chosen) if rulings else None,
    )  # fmt: skip


def _side(name: str, attempts: Attempts) -> Side:
    lost = [e.outcome is Outcome.FAILED for e in _flat(attempts)]
    unusable = [e for e in _flat(attempts) if _valid(e) == [0.0]]
    reasons = Counter(f"truncated: {e.detail}" if e.outcome is Outcome.TRUNCATED else "no answer" for e in unusable)
    present = sum(any(e.outcome is not Outcome.FAILED for e in task) for task in attempts)
    return Side(model=name, tasks=present, attempts=len(lost), failed=sum(lost), invalid=reasons)


def _valid(episode: Episode) -> list[float]:
    return [] if episode.outcome is Outcome.FAILED else [float(valid(episode))]


def _met(episode: Episode, items: Sequence[str]) -> list[float]:
    return [met for item in items if (met := episode.checklist.get(item)) is not None]


def _groups(items: Sequence[str]) -> dict[str, list[str]]:
    """Checklist items by the part of their names before a colon, "called:*"; an item that is alone keeps its name."""
    groups: dict[str, list[str]] = {}
    for item in items:
        groups.setdefault(item.partition(":")[0], []).append(item)
    return {f"{prefix}:*" if len(names) > 1 else names[0]: names for prefix, names in groups.items()}


def _flat(attempts: Attempts) -> list[Episode]:
    return [episode for task in attempts for episode in task]


def _with_model(config: AgentConfig, model: str) -> AgentConfig:
    changed: Any = config.copy(copy_frozen=False)
    return changed.update_from_dict({"model_path": model, "run_dir": None})


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
