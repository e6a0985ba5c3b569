"""ArenaRL's central claim, measured: at one budget of judge calls, does ranking attempts teach more than scoring them?

    python experiments/collapse.py --out runs/collapse      # six arms, five seeds, two workers; goes on where it stopped
    python experiments/collapse.py --plot runs/collapse     # the tables and the plot of what is there
    arenarl train experiments/collapse.py                   # one arm as an ordinary run: `config`

Every arm trains the tiny agent on the same travel tasks with the same settings under the same fallible judge
(`arenarl.simulation`); they differ in what the judge is asked and what is made of its answers. Progress is measured on held-out
tasks by the checklist and by a verifier that training never sees. `docs/collapse.md` has the set-up and the results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arenarl.algorithm import AgentAlgorithm
from arenarl.algorithms.arena_rl import ArenaRLConfig
from arenarl.algorithms.grpo import GRPOConfig
from arenarl.batching import Stream
from arenarl.config import AgentConfig
from arenarl.errors import ConfigError
from arenarl.evaluate import win_rate
from arenarl.gates import GATES
from arenarl.metrics import episode_metrics
from arenarl.sweep import Run, arguments, cell, curves, final, interval, paired, report, run_all
from arenarl.training import HELD_OUT_SEED
from arenarl.types import INFRASTRUCTURE_KINDS, Episode, EpisodeGroup

MODEL = Path(__file__).resolve().parent / "tiny_agent" / "model"
STEPS, EVALUATE_EVERY, HELD_OUT_TASKS, START_ATTEMPTS = 32, 8, 128, 4
SPREAD = 0.25
"""Standard deviation of the starting agent's checklist scores within a group of 8: what the judge takes for a difference of 1."""

PLOT = "collapse.svg"


class Arm(NamedTuple):
    """One way to spend the judge; ``calls`` are its model calls for a group of 8, of which the budget is 28."""

    calls: int
    build: Callable[[], AgentConfig]


def _arena(topology: str, **settings: Any) -> ArenaRLConfig:
    """Without gates, which would tell these arms, and not the pointwise ones, for free who gave no answer."""
    return ArenaRLConfig().arena(topology=topology, gates=dict.fromkeys(GATES, "play"), **settings)


ARMS: dict[str, Arm] = {
    # GRPO on one mark an attempt, compressed and to one decimal: the paper's baseline; then on the mean of four such marks
    "pointwise": Arm(8, lambda: GRPOConfig().training(marks=1)),
    "pointwise_same_cost": Arm(32, lambda: GRPOConfig().training(marks=4)),
    # ArenaRL with the paper's plans and rankings: all against the greedy attempt, the seeded bracket, all pairs (in one order)
    "anchor": Arm(14, lambda: _arena("anchor")),
    "single_elimination": Arm(28, lambda: _arena("single_elimination")),
    "round_robin": Arm(28, lambda: _arena("round_robin", orders=1)),
    # ArenaRL with our default: of 8 attempts all pairs, in one order, and least squares on the margins
    "even_graph": Arm(28, lambda: _arena("even_graph")),
    # the same games and scores: by rank only, or not divided by the group's sd; and GRPO on the noise-free checklist, the ceiling
    "even_graph_ranks": Arm(28, lambda: _arena("even_graph", rewards="rank")),
    "even_graph_shrunk": Arm(28, lambda: _arena("even_graph", standardise=False)),
    "oracle": Arm(0, lambda: GRPOConfig().training(marks=0)),
}


def config(arm: str = "even_graph", seed: int = 0, steps: int = STEPS) -> AgentConfig:
    """The configuration of one run: equal for all arms but for what `ARMS` says.

    Raises:
        ConfigError: an unknown arm.
    """
    if arm not in ARMS:
        raise ConfigError(f"unknown arm {arm!r}; known: {', '.join(ARMS)}")
    return (
        ARMS[arm].build()
        .environment("arenarl.envs.travel:TravelTasks")
        .agent(model_path=str(MODEL), max_model_len=768, max_num_seqs=128, max_tokens=64, engine_core="thread")
        .judging(judge="arenarl.simulation:SimulatedJudge", judge_config={"theta": 1.5, "sd": SPREAD, "seed": seed})
        .training(lr=1e-3, group_size=8, groups_per_step=4, max_staleness=0, num_steps=steps)
        .env_runners(num_env_runners=0)
        .evaluation(evaluation_duration=HELD_OUT_TASKS)
        .tracking(experiment_name="collapse")
        .debugging(seed=seed)
    )  # fmt: skip


# -- one run ----------------------------------------------------------------------------------------------------------


def settings_of(steps: int) -> dict[str, Any]:
    """What all runs of a folder must share."""
    c = config(steps=steps)
    return {
        "steps": steps, "every": EVALUATE_EVERY, "tasks": HELD_OUT_TASKS, "lr": c.lr, "groups_per_step": c.groups_per_step,
        "start_attempts": START_ATTEMPTS, "spread": SPREAD,
    }  # fmt: skip


def play_run(
    arm: str, seed: int, should_stop: Callable[[], bool], *, steps: int, start: list[Episode]
) -> dict[str, Any]:
    """Train one arm with one seed and measure it on the way.

    Args:
        start: the starting agent's attempts, ``START_ATTEMPTS`` times the held-out tasks in order; filled in if it is empty.

    Raises:
        Interrupted: ``should_stop`` said so.
        ArenaError: naming what went wrong; engine and servers are down.
    """
    began, cpu, signals = time.monotonic(), time.process_time(), []
    built = config(arm, seed, steps)
    built.algo_class = watched(built.algo_class, signals)
    algorithm: AgentAlgorithm = built.build_algo()
    try:
        algorithm.should_stop = should_stop
        tasks = algorithm.taskset.tasks("heldout", HELD_OUT_TASKS, seed=HELD_OUT_SEED)
        start[:] = start or algorithm.play(tasks * START_ATTEMPTS, name="start", seed=HELD_OUT_SEED)
        curve = [progress(algorithm, 0, start, start)]
        for step in range(1, steps + 1):
            algorithm.train()
            if step % EVALUATE_EVERY == 0 or step == steps:
                attempts = algorithm.play(tasks, name=f"held-out-{step}", seed=seed)
                curve.append(progress(algorithm, step, start, attempts))
    finally:
        algorithm.stop()
    return {
        "curve": curve, "signal": float(np.nanmean(signals)), "flat_share": signals.count(0.0) / len(signals),
        "seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu,
    }  # fmt: skip


def watched(algorithm: type[AgentAlgorithm], signals: list[float]) -> type[AgentAlgorithm]:
    """The same algorithm, which notes `truth_told` of each group that it trains on."""

    class Watched(algorithm):  # type: ignore[misc, valid-type]
        def streams(self, group: EpisodeGroup) -> list[Stream]:
            signals.append(truth_told(group))
            return super().streams(group)

    return Watched


def truth_told(group: EpisodeGroup) -> float:
    """How much of the truth reaches the update: correlation of the advantages that are trained on with the checklist scores.

    0.0 for a flat group: advantages all equal, though the scores are not. nan where the scores are equal.
    """
    members = zip(group.advantages, group.episodes, strict=True)
    told, true = (
        np.array([(a, e.score) for a, e in members if None not in (a, e.score) and not e.greedy]).reshape(-1, 2).T
    )
    if len(set(true)) < 2:
        return math.nan
    return float(np.corrcoef(told, true)[0, 1]) if len(set(told)) > 1 else 0.0


def progress(algorithm: AgentAlgorithm, step: int, start: list[Episode], attempts: list[Episode]) -> dict[str, Any]:
    """A point of the curve: the checklist, and under the verifier each attempt against all of ``start`` at its task."""
    verifier = algorithm.taskset.quality  # type: ignore[attr-defined]  # of the travel environment
    ours, theirs = (np.array([verifier(e.task, e.trajectory) for e in side]) for side in (attempts, start))
    games = win_rate((np.tile(ours, len(theirs) // len(ours)) - theirs).tolist())
    values = episode_metrics(attempts)
    results = [event.result.kind for e in attempts for event in e.trajectory.events]
    return {
        "step": step, "win_rate": None if math.isnan(games.rate) else games.rate, "wins": games.wins, "losses": games.losses,
        "ties": games.ties, "checklist": values["reward/score_mean"], "quality": float(ours.mean()),
        "valid_calls": values.get("reward/valid_call_share"), "faults": sum(kind in INFRASTRUCTURE_KINDS for kind in results),
    }  # fmt: skip


# -- what the runs say ------------------------------------------------------------------------------------------------


def summary(run: Run) -> str:
    """One line on one run."""
    name = f"{run['arm']}, seed {run['seed']}"
    if "error" in run:
        return f"{name}: failed: {run['error']}"
    first, last = run["curve"][0], run["curve"][-1]
    faults = sum(point["faults"] for point in run["curve"])
    return (
        f"{name}: checklist {first['checklist']:.3f} -> {last['checklist']:.3f}, {last['wins']} won {last['losses']} lost "
        f"({run['seconds']:.0f} s, {run['cpu_seconds']:.0f} of CPU)"
        + (f"; {faults} tool calls of the evaluations failed for no fault of the agent's" if faults else "")
    )


def tables(runs: Sequence[Run]) -> str:
    """The results in Markdown: each arm, then each arm minus the others that a claim is about; failed and faulty runs by name."""
    present = [arm for arm in ARMS if final(runs, arm, "checklist")]
    lines = [
        "| arm | judge calls a group | seeds | win rate over the start | checklist score | signal | flat groups |",
        "|---" * 7 + "|",
    ]
    for arm in present:
        rates, scores = (list(final(runs, arm, what).values()) for what in ("win_rate", "checklist"))
        told, flat = (np.mean([r[w] for r in runs if r["arm"] == arm and w in r]) for w in ("signal", "flat_share"))
        cells = (f"`{arm}`", ARMS[arm].calls, len(scores), cell(interval(rates)), cell(interval(scores)))
        lines.append(f"| {' | '.join(map(str, cells))} | {told:.2f} | {flat:.0%} |")
    others = [arm for arm in ("pointwise", "pointwise_same_cost", "single_elimination") if arm in present]
    for what, title in (("checklist", "checklist score"), ("win_rate", "win rate")):
        heads = [f"{title}, difference", *(f"minus `{other}`" for other in others)]
        lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for arm in present:
            cells = ["" if arm == other else cell(paired(runs, arm, other, what), "+") for other in others]
            lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", *(f"- {summary(run)}" for run in runs if "error" in run or any(p["faults"] for p in run["curve"]))]
    ).strip()


def plot(runs: Sequence[Run], path: Path) -> None:
    """Two panels against steps: held-out win rate and checklist score; the mean of each arm with its 95 % t band over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "collapse", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    titles = {"win_rate": "win rate over the starting agent (verifier)", "checklist": "checklist score"}
    for panel, (what, title) in zip(panels, titles.items(), strict=True):
        for k, (name, arm) in enumerate(ARMS.items()):
            steps, values = curves(runs, name, what)
            if not len(values):
                continue
            mean, low, high = np.array([interval(column) for column in values.T]).T
            panel.plot(steps, mean, color=f"C{k}", label=f"{name} ({arm.calls} calls)", marker="o", markersize=3)
            panel.fill_between(steps, low, high, color=f"C{k}", alpha=0.12, linewidth=0)
        panel.set(title=title, xlabel="training step")
        panel.grid(alpha=0.3)
    panels[0].axhline(0.5, color="grey", linewidth=0.8)
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    parser = arguments(__doc__, list(ARMS), list(ARMS)[:-3], range(5))
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    if args.plot:
        report(args.plot, ARMS, tables, plot, PLOT)
        return 0
    play = partial(play_run, steps=args.steps, start=[])
    code = run_all(args.out, play, args.arms, args.seeds, settings_of(args.steps), max(1, args.workers))
    if code != 130:
        report(args.out, ARMS, tables, plot, PLOT)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
