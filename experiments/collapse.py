"""ArenaRL's central claim, measured: at one budget of judge calls, does ranking attempts teach more than scoring them?

    python experiments/collapse.py --out runs/collapse      # six arms, five seeds, two workers; goes on where it stopped
    python experiments/collapse.py --plot runs/collapse     # the tables and the plot of what is there
    arenarl train experiments/collapse.py                   # one arm as an ordinary run: `config`

Every arm trains the tiny agent on the same travel tasks with the same settings under the same fallible judge
(`arenarl.simulation`); they differ in what the judge is asked and what is made of its answers. Progress is measured on held-out
tasks by the checklist and by a verifier that training never sees. `docs/collapse.md` has the set-up and the results.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arenarl.algorithm import AgentAlgorithm, Interrupted
from arenarl.algorithms.arena_rl import ArenaRLConfig
from arenarl.algorithms.grpo import GRPOConfig
from arenarl.batching import Stream
from arenarl.config import AgentConfig
from arenarl.errors import ConfigError
from arenarl.evaluate import win_rate
from arenarl.gates import GATES
from arenarl.jsonl import dumps, read_jsonl
from arenarl.metrics import episode_metrics
from arenarl.training import HELD_OUT_SEED, StopRequest
from arenarl.types import INFRASTRUCTURE_KINDS, Episode, EpisodeGroup

MODEL = Path(__file__).resolve().parent / "tiny_agent" / "model"
STEPS, EVALUATE_EVERY, HELD_OUT_TASKS, START_ATTEMPTS = 32, 8, 128, 4
SPREAD = 0.25
"""Standard deviation of the starting agent's checklist scores within a group of 8: what the judge takes for a difference of 1."""

RECORDS, PLOT = "runs.jsonl", "collapse.svg"
Run = Mapping[str, Any]  # a line of RECORDS
Values = NDArray[np.float64]


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


def play_run(arm: str, seed: int, steps: int, start: list[Episode], should_stop: Callable[[], bool]) -> dict[str, Any]:
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
        def streams(self, group: EpisodeGroup) -> Stream:
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


# -- all runs ---------------------------------------------------------------------------------------------------------


def work(jobs: Sequence[tuple[str, int]], steps: int, folder: Path) -> None:
    """A worker process: play ``jobs`` one after another and write each down. Ends after the step in progress if its parent ends."""
    import ray
    from transformers.utils.logging import disable_progress_bar

    os.setsid()  # the terminal's Ctrl-C is for the parent, which asks once
    disable_progress_bar()
    ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False, logging_level=logging.ERROR)
    stop, start = StopRequest(), []
    with stop.listening():
        threading.Thread(target=_end_with_parent, daemon=True).start()
        for arm, seed in jobs:
            if stop():
                break
            record: dict[str, Any] = {"arm": arm, "seed": seed, "settings": settings_of(steps)}
            try:
                record |= play_run(arm, seed, steps, start, stop)
            except Interrupted:
                break
            except Exception as error:  # the boundary of a run: its failure is its result, and the next one begins
                record["error"] = f"{type(error).__name__}: {error}"
            with open(folder / RECORDS, "ab", buffering=0) as file:
                file.write((dumps(record) + "\n").encode("utf-8", "backslashreplace"))
            print(summary(record), flush=True)
    ray.shutdown()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]  # a worker has one
    os.kill(os.getpid(), signal.SIGTERM)


def run_all(folder: Path, arms: Sequence[str], seeds: Sequence[int], steps: int, workers: int) -> int:
    """Play what the folder lacks, seeds first, so that all arms grow together. Returns an exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    todo = missing(load(folder), arms, seeds, settings_of(steps))
    print(f"{len(todo)} of {len(arms) * len(seeds)} runs to play, {workers} at a time", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    shares = [todo[k::workers] for k in range(min(workers, len(todo)))]
    crew = [context.Process(target=work, args=(share, steps, folder)) for share in shares]
    try:
        for worker in crew:
            worker.start()
        for worker in crew:
            worker.join()
    except KeyboardInterrupt:
        print("stopping after the step in progress", flush=True)
        return 130
    finally:
        for worker in crew:
            if worker.is_alive():
                worker.terminate()
        for worker in crew:
            if worker.pid:
                worker.join()
    for worker in crew:
        if worker.exitcode:
            print(f"a worker died with exit code {worker.exitcode}; the same command goes on where it stopped")
    report(folder)
    return int(bool(missing(load(folder), arms, seeds, settings_of(steps))))


def load(folder: Path) -> list[Run]:
    """The last record of each (arm, seed), in the order of `ARMS`."""
    path = folder / RECORDS
    runs = {(run["arm"], run["seed"]): run for run in read_jsonl(path)} if path.exists() else {}
    return [runs[key] for key in sorted(runs, key=lambda key: (list(ARMS).index(key[0]), key[1]))]


def missing(runs: Sequence[Run], arms: Sequence[str], seeds: Sequence[int], settings: Run) -> list[tuple[str, int]]:
    """(arm, seed) of what has not been played, or failed, seeds first.

    Raises:
        ConfigError: the folder holds runs of other settings.
    """
    for run in runs:
        if run["settings"] != settings:
            raise ConfigError(f"the folder holds runs of {run['settings']}, not {settings}: name another folder")
    done = {(run["arm"], run["seed"]) for run in runs if "error" not in run}
    return [(arm, seed) for seed in seeds for arm in arms if (arm, seed) not in done]


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


# -- what the runs say ------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean with its 95 % t interval over seeds: (mean, low, high); the interval is nan with fewer than 2 values."""
    from scipy.special import stdtrit  # the quantile of Student's t

    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return float(x.mean()) if len(x) else math.nan, math.nan, math.nan
    half = float(stdtrit(len(x) - 1, 0.975) * x.std(ddof=1) / math.sqrt(len(x)))
    return float(x.mean()), float(x.mean()) - half, float(x.mean()) + half


def curves(runs: Sequence[Run], arm: str, what: str) -> tuple[list[int], Values]:
    """Steps [T] and values [S, T] of an arm, a row for each seed that was played; nan where a value is missing."""
    rows = [run["curve"] for run in runs if run["arm"] == arm and "error" not in run]
    steps = [point["step"] for point in rows[0]] if rows else []
    return steps, np.array([[p[what] for p in row] for row in rows], dtype=np.float64).reshape(len(rows), len(steps))


def final(runs: Sequence[Run], arm: str, what: str) -> dict[int, float]:
    """The last value of each seed."""
    return {r["seed"]: r["curve"][-1][what] for r in runs if r["arm"] == arm and "error" not in r}


def paired(runs: Sequence[Run], arm: str, other: str, what: str) -> tuple[float, float, float]:
    """Mean of arm - other over the seeds that both have, with its 95 % t interval.

    A seed fixes the order of the tasks and the held-out draws, so that what it does to both arms drops out.
    """
    ours, theirs = final(runs, arm, what), final(runs, other, what)
    return interval([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


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
        cells = (f"`{arm}`", ARMS[arm].calls, len(scores), _cell(interval(rates)), _cell(interval(scores)))
        lines.append(f"| {' | '.join(map(str, cells))} | {told:.2f} | {flat:.0%} |")
    others = [arm for arm in ("pointwise", "pointwise_same_cost", "single_elimination") if arm in present]
    for what, title in (("checklist", "checklist score"), ("win_rate", "win rate")):
        heads = [f"{title}, difference", *(f"minus `{other}`" for other in others)]
        lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for arm in present:
            cells = ["" if arm == other else _cell(paired(runs, arm, other, what), "+") for other in others]
            lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", *(f"- {summary(run)}" for run in runs if "error" in run or any(p["faults"] for p in run["curve"]))]
    ).strip()


def _cell(estimate: tuple[float, float, float], sign: str = "") -> str:
    mean, low, high = estimate
    return f"{mean:{sign}.3f}" + ("" if math.isnan(low) else f" ({low:{sign}.3f} to {high:{sign}.3f})")


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
            mean, low, high = np.array([interval(column[~np.isnan(column)]) for column in values.T]).T
            panel.plot(steps, mean, color=f"C{k}", label=f"{name} ({arm.calls} calls)", marker="o", markersize=3)
            panel.fill_between(steps, low, high, color=f"C{k}", alpha=0.12, linewidth=0)
        panel.set(title=title, xlabel="training step")
        panel.grid(alpha=0.3)
    panels[0].axhline(0.5, color="grey", linewidth=0.8)
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def report(folder: Path) -> None:
    """Print the tables and draw the plot of what a folder holds."""
    runs = load(folder)
    if not any("error" not in run for run in runs):
        print(f"{folder} holds no finished run\n" + "\n".join(map(summary, runs)))
        return
    plot(runs, folder / PLOT)
    print(f"\n{tables(runs)}\n\nplot: {folder / PLOT}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder of the runs; those that it holds are not played again")
    where.add_argument("--plot", type=Path, metavar="FOLDER", help="play nothing: print the tables and draw the plot")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS)[:-3], help="all but the last three")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--workers", type=int, default=2, help="processes side by side, one core each")
    args = parser.parse_args()
    if args.plot:
        report(args.plot)
        return 0
    return run_all(args.out, args.arms, args.seeds, args.steps, max(1, args.workers))


if __name__ == "__main__":
    raise SystemExit(main())
