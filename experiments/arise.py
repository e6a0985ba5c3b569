"""ARISE on the travel environment: a Generator and a Solver raise each other, on two CPU cores. ARISE-RL, arXiv 2609.01058.

    python experiments/arise.py --out runs/arise            # all arms, three seeds, two workers; goes on where it stopped
    python experiments/arise.py --plot runs/arise           # the tables and the plot of what is there
    arenarl train experiments/arise.py                      # the Generator alone against a frozen Solver: `config`
    arenarl pool show runs/arise/pools/full-0.parquet       # what was written, with pass rates and sources

A cycle trains the Generator against the Solver as it is, lets it write tasks into the pool, trains the Solver on those of the pool that it
can learn from, and gives the Solver's new weights to the Generator's executor. The arms take one part away each; ``fixed_pool`` trains the
Solver as often on the pool of the untrained Generator. `docs/arise.md` has the set-up and the results.
"""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from arenarl.algorithm import AgentAlgorithm
from arenarl.algorithms.arise_generator import ARISEGenerator, ARISEGeneratorConfig
from arenarl.algorithms.arise_solver import ARISESolverConfig
from arenarl.algorithms.rg_sed import RGSED
from arenarl.ecr import ecr_scores, load_ecr
from arenarl.envs.rubric_tasks import EMBEDDED
from arenarl.envs.travel_rubrics import world_truth
from arenarl.metrics import episode_metrics
from arenarl.novelty import Novelty, signature
from arenarl.sweep import Run, arguments, cell, curves, final, interval, paired, report, run_all
from arenarl.task_pool import PoolTask, TaskPool

HERE = Path(__file__).resolve().parent
MODEL = HERE / "tiny_agent" / "arise"
ADVICE = runpy.run_path(str(HERE / "tiny_agent" / "advice.py"))
SOLVER_ENV, GENERATOR_ENV = "arenarl.envs.rubric_tasks:RubricTasks", "arenarl.envs.travel_generator:TravelGenerator"
BAND = (0.15, 0.85)
"""Posterior pass rates, when they were written, of the tasks that the Solver trains on: one that all runs pass, or none, teaches little."""
ARMS = ("full", "no_rg_sed", "no_gate", "no_grounding", "no_difficulty", "fixed_pool")
PLOT, POOLS = "arise.svg", "pools"


class Scale(NamedTuple):
    """How large a co-evolution is; the paper's has 3 cycles of 120 steps and pools of 500."""

    cycles: int = 3
    generator_steps: int = 4
    solver_steps: int = 8
    prompts: int = 32
    """For the Generator at each refresh of the pool, one attempt each."""
    held_out: int = 128
    """Ordinary travel tasks that measure the Solver after each cycle."""


SCALE = Scale()


def solver_agent() -> dict[str, Any]:
    """The Solver's engine and limits, in training and in the executor."""
    return {"max_model_len": 768, "max_num_seqs": 128, "max_tokens": 64, "max_turns": 8, "engine_core": "thread"}


def rg_sed(arm: str, role: str) -> list[RGSED]:
    """Distillation for a role, with the rule-based coach that the tiny agent understands."""
    if arm == "no_rg_sed":
        return []
    coach = {"rules": ADVICE[f"{role.upper()}_RULES"], "prefix": ADVICE["PREFIX"]}
    if role == "generator":
        coach |= {"easier": ADVICE["EASIER"], "harder": ADVICE["HARDER"]}
    return [
        RGSED(
            coach="arenarl.coach:RuleCoach", coach_config=coach, memory_rollouts=4, warmup=4, decay=40,
            place="system" if role == "solver" else "user", gate="open" if arm == "no_gate" else "stderr",
        )
    ]  # fmt: skip


def solver_config(arm: str = "full", seed: int = 0) -> ARISESolverConfig:
    """The Solver on generated tasks; held out are the ordinary travel tasks of other cities."""
    return (
        ARISESolverConfig()
        .environment(SOLVER_ENV)
        .agent(model_path=str(MODEL), temperature=1.0, **solver_agent())
        .training(lr=6e-4, group_size=8, groups_per_step=4, max_staleness=0, extra_streams=rg_sed(arm, "solver"))
        .tracking(experiment_name="arise")
        .debugging(seed=seed)
    )


def config(arm: str = "full", seed: int = 0) -> ARISEGeneratorConfig:
    """The Generator against a frozen Solver in the same process."""
    solver = {"env": SOLVER_ENV, "model_path": str(MODEL), "temperature": 1.0, **solver_agent()}
    return (
        ARISEGeneratorConfig()
        .environment(GENERATOR_ENV)
        .agent(
            model_path=str(MODEL), temperature=0.7, max_model_len=1024, max_num_seqs=64, max_tokens=420, engine_core="thread"
        )
        .generator(
            executor="arenarl.executor:RunnerExecutor", executor_config=solver, solver_runs=8,
            grounding=arm != "no_grounding", difficulty="none" if arm == "no_difficulty" else "count",
        )
        .training(
            lr=4e-4, group_size=8, groups_per_step=2, max_staleness=0, num_steps=24, num_train_tasks=360,
            extra_streams=rg_sed(arm, "generator"),
        )
        .env_runners(num_env_runners=0)
        .evaluation(evaluation_duration=40)
        .tracking(experiment_name="arise")
        .debugging(seed=seed)
    )  # fmt: skip


# -- one run ----------------------------------------------------------------------------------------------------------


def coevolve(
    arm: str = "full", seed: int = 0, *, scale: Scale = SCALE, pool: TaskPool | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Train both in turn; yields a point before the first cycle and after each.

    Args:
        arm: what is taken away; see `ARMS`.
        pool: filled with all that was written, if given.

    Raises:
        Interrupted: ``should_stop`` said so.
        ArenaError: naming what went wrong; engines and servers are down.
    """
    scale, pool = Scale(*scale), TaskPool() if pool is None else pool  # Tune hands a tuple on
    novelty, written = Novelty(), dict[str, float]()
    generator: ARISEGenerator = config(arm, seed).build_algo()
    solver: AgentAlgorithm | None = None
    try:
        solver = solver_config(arm, seed).build_algo()
        generator.should_stop = solver.should_stop = should_stop
        yield {"step": 0, **progress(solver, 0, scale.held_out), **ecr_progress(solver, 0)}
        for cycle in range(1, scale.cycles + 1):
            steps = train(generator, 0 if arm == "fixed_pool" else scale.generator_steps)
            if cycle == 1 or arm != "fixed_pool":
                fresh = generator.write_tasks(scale.prompts, cycle=cycle, seed=1000 * seed + cycle)
                pool.add(fresh, novelty)
                fresh = [entry for entry in fresh if entry.task.task_id in pool]
                written = pool_metrics(fresh, scale.prompts)
            # Of all that was ever written: a refresh may hold no usable task of a kind.
            tasks = [entry.task for entry in pool.band(*BAND)] or [entry.task for entry in pool]
            solver.train_on(tasks)
            learned = train(solver, scale.solver_steps)
            generator.follow(solver.learner_group.weights(), cycle)
            yield {
                "step": cycle, **progress(solver, cycle, scale.held_out), **(ecr_progress(solver, cycle) if cycle == scale.cycles else {}),
                **written, "tasks": len(tasks), "generator": steps, "solver": learned,
            }  # fmt: skip
    finally:
        for algorithm in (solver, generator):
            if algorithm is not None:
                algorithm.stop()


KEPT_METRICS = (
    "reward/score_mean", "task/valid_share", "task/pass_rate", "task/distance_from_half", "task/distinct_share",
    "lesson/gap_mean", "lesson/distilled_share", "policy/distill_kl", "time/step",
)  # fmt: skip


def train(algorithm: AgentAlgorithm, steps: int) -> list[dict[str, float]]:
    """Steps of an algorithm, and what is kept of their metrics."""
    curve = []
    for _ in range(steps):
        algorithm.train()
        curve.append({name: algorithm.last_metrics[name] for name in KEPT_METRICS if name in algorithm.last_metrics})
    return curve


def progress(solver: AgentAlgorithm, cycle: int, held_out: int) -> dict[str, Any]:
    """The Solver on what it never trains on: travel tasks of held-out cities, by their checklist and by the verifier."""
    ordinary = solver.taskset.tasks("heldout", held_out, seed=0)
    attempts = solver.play(ordinary, name=f"held-out-{cycle}", seed=cycle)
    values = episode_metrics(attempts)
    quality = [solver.taskset.quality(e.task, e.trajectory) for e in attempts]  # type: ignore[attr-defined]
    return {
        "checklist": values["reward/score_mean"], "full_marks": values["reward/full_marks_share"],
        "quality": sum(quality) / len(quality),
    }  # fmt: skip


def ecr_progress(solver: AgentAlgorithm, cycle: int) -> dict[str, Any]:
    """The Solver on the embedded set in ECR-Travel's format: passed tasks, and items met."""
    played = solver.play(load_ecr(EMBEDDED), name=f"ecr-{cycle}", seed=cycle)
    return {
        "ecr_travel": ecr_scores(played)["ecr_travel/mean"],
        "ecr_share": episode_metrics(played)["reward/score_mean"],
    }


def pool_metrics(fresh: Sequence[PoolTask], prompts: int) -> dict[str, float]:
    """What one refresh of the pool is like. ``true_share``: tasks whose assertions hold in the world, which training never sees."""
    from arenarl.envs.travel_world import World

    rates = [entry.successes / entry.runs for entry in fresh if entry.successes is not None and entry.runs]
    truth = [world_truth(entry.task, World(0)) for entry in fresh]
    return {
        "pool_valid": len(fresh) / prompts,
        "pool_pass_rate": sum(rates) / max(1, len(rates)),
        "pool_distance": sum(abs(rate - 0.5) for rate in rates) / max(1, len(rates)),
        "pool_signatures": len({signature(entry.task) for entry in fresh}) / max(1, len(fresh)),
        "pool_true": sum(truth) / max(1, len(truth)),
    }


def play_run(arm: str, seed: int, should_stop: Callable[[], bool], *, scale: Scale, folder: Path) -> dict[str, Any]:
    """One arm with one seed for `arenarl.sweep`; its pool is kept beside the records."""
    began, cpu, pool, curve = time.monotonic(), time.process_time(), TaskPool(), []
    for point in coevolve(arm, seed, scale=scale, pool=pool, should_stop=should_stop):
        curve.append(point)
        told = f"held-out checklist {point['checklist']:.3f}, {len(pool)} tasks written"
        print(
            f"{arm}, seed {seed}, cycle {point['step']} of {scale.cycles}: {told} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    (folder / POOLS).mkdir(parents=True, exist_ok=True)
    pool.save(folder / POOLS / f"{arm}-{seed}.parquet")
    return {"curve": curve, "seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu}


# -- what the runs say ------------------------------------------------------------------------------------------------

SOLVER_COLUMNS = {
    "checklist": "held-out checklist", "quality": "verifier", "full_marks": "all met", "ecr_travel": "ECR-Travel pass rate",
}  # fmt: skip
POOL_COLUMNS = {
    "pool_valid": "valid", "pool_pass_rate": "pass rate", "pool_distance": "distance from 1/2",
    "pool_signatures": "distinct signatures", "pool_true": "true in the world",
}  # fmt: skip


def tables(runs: Sequence[Run]) -> str:
    """The results in Markdown: the Solver after the last cycle, its differences to two arms, and the last pool of each arm."""
    present = [arm for arm in ARMS if final(runs, arm, "checklist")]
    lines = _table(["arm", "seeds", *SOLVER_COLUMNS.values()])
    if present:
        start = [cell(interval(curves(runs, present[0], what)[1][:, 0])) for what in SOLVER_COLUMNS]
        lines.append(f"| at the start | | {' | '.join(start)} |")
    for arm in present:
        cells = [cell(interval(list(final(runs, arm, what).values()))) for what in SOLVER_COLUMNS]
        lines.append(f"| `{arm}` | {len(final(runs, arm, 'checklist'))} | {' | '.join(cells)} |")
    for other in (arm for arm in ("fixed_pool", "full") if arm in present):
        lines += ["", *_table([f"minus `{other}`", *SOLVER_COLUMNS.values()])]
        lines += [
            f"| `{arm}` | {' | '.join(cell(paired(runs, arm, other, what), '+') for what in SOLVER_COLUMNS)} |"
            for arm in present
            if arm != other
        ]
    lines += ["", *_table(["last pool of", *POOL_COLUMNS.values()])]
    lines += [
        f"| `{arm}` | {' | '.join(cell(interval(list(final(runs, arm, what).values()))) for what in POOL_COLUMNS)} |"
        for arm in present
    ]
    failures = [f"- {run['arm']}, seed {run['seed']}: {run['error']}" for run in runs if "error" in run]
    return "\n".join([*lines, "", *failures]).strip()


def _table(heads: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]


def plot(runs: Sequence[Run], path: Path) -> None:
    """The Solver against cycles, and the Generator against its steps: means over seeds, with 95 % t bands from three on."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "arise", "svg.fonttype": "none"}
    import numpy as np
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    for k, arm in enumerate(ARMS):
        steps, values = curves(runs, arm, "checklist")
        series = [(panels[0], steps, values)]
        series += [
            (panel, *generator_curve(runs, arm, what)) for panel, what in zip(panels[1:], GENERATOR_CURVES, strict=True)
        ]
        for panel, x, rows in series:
            if not rows.size:
                continue
            mean, low, high = np.array([interval(column) for column in rows.T]).T
            panel.plot(x, mean, color=f"C{k}", label=arm, marker="o", markersize=3)
            if len(rows) > 2:  # the interval of two seeds fills the panel and says nothing
                panel.fill_between(x, low, high, color=f"C{k}", alpha=0.12, linewidth=0)
    panels[0].set(title="Solver: held-out checklist score", xlabel="cycle")
    for panel, title in zip(panels[1:], GENERATOR_CURVES.values(), strict=True):
        panel.set(title=f"Generator: {title}", xlabel="Generator step")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ARMS), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


GENERATOR_CURVES = {"task/valid_share": "share of valid tasks", "task/distance_from_half": "|solver pass rate - 1/2|"}


def generator_curve(runs: Sequence[Run], arm: str, what: str) -> tuple[list[int], Any]:
    """Steps [T] and values [S, T] of a metric of the Generator's training, all cycles in a row."""
    import numpy as np

    rows = [
        [step.get(what, np.nan) for point in run["curve"] for step in point.get("generator", ())]
        for run in runs
        if run["arm"] == arm and "error" not in run
    ]
    width = min(map(len, rows), default=0)
    return list(range(1, width + 1)), np.array([row[:width] for row in rows], dtype=float).reshape(len(rows), width)


def main() -> int:
    parser = arguments(__doc__, ARMS, ARMS, (0, 1, 2))
    for name, default in SCALE._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    args = parser.parse_args()
    if args.plot:
        report(args.plot, ARMS, tables, plot, PLOT)
        return 0
    scale = Scale(*(getattr(args, name) for name in Scale._fields))
    play = partial(play_run, scale=scale, folder=args.out)
    code = run_all(args.out, play, args.arms, args.seeds, scale._asdict(), max(1, args.workers))
    if code != 130:
        report(args.out, ARMS, tables, plot, PLOT)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
