"""Arms times seeds of an experiment: played by a few processes side by side, resumed where they stopped, summed up with intervals.

A record is a line of JSON: ``arm``, ``seed``, ``settings``, and what `play` returned, among it ``curve``: a list of points with their
``step``. A run that failed has ``error`` instead, and is played again by the next call.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arenarl.algorithm import Interrupted
from arenarl.errors import ConfigError
from arenarl.jsonl import dumps, read_jsonl
from arenarl.training import StopRequest

RECORDS = "runs.jsonl"
Run = Mapping[str, Any]  # a line of RECORDS
Tables = Callable[[Sequence[Run]], str]
Plot = Callable[[Sequence[Run], Path], None]
Play = Callable[[str, int, Callable[[], bool]], dict[str, Any]]
"""(arm, seed, whether to stop) to what is written down of the run. Pickled into the workers. May raise `Interrupted`."""


def work(play: Play, jobs: Sequence[tuple[str, int]], settings: Run, folder: Path) -> None:
    """A worker process: play ``jobs`` one after another and write each down. Ends after the step in progress if its parent ends."""
    import ray
    from transformers.utils.logging import disable_progress_bar

    os.setsid()  # the terminal's Ctrl-C is for the parent, which asks once
    disable_progress_bar()
    ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False, logging_level=logging.ERROR)
    stop = StopRequest()
    with stop.listening():
        threading.Thread(target=_end_with_parent, daemon=True).start()
        for arm, seed in jobs:
            if stop():
                break
            record: dict[str, Any] = {"arm": arm, "seed": seed, "settings": settings}
            try:
                record |= play(arm, seed, stop)
            except Interrupted:
                break
            except Exception as error:  # the boundary of a run: its failure is its result, and the next one begins
                record["error"] = f"{type(error).__name__}: {error}"
            with open(folder / RECORDS, "ab", buffering=0) as file:
                file.write((dumps(record) + "\n").encode("utf-8", "backslashreplace"))
            print(f"{arm}, seed {seed}: {record.get('error', 'done')}", flush=True)
    ray.shutdown()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]  # a worker has one
    os.kill(os.getpid(), signal.SIGTERM)


def run_all(folder: Path, play: Play, arms: Sequence[str], seeds: Sequence[int], settings: Run, workers: int) -> int:
    """Play what the folder lacks, seeds first, so that all arms grow together.

    Returns:
        an exit code: 0 if all runs are there, 1 if some are missing or failed, 130 if the user stopped.

    Raises:
        ConfigError: the folder holds runs of other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    todo = missing(load(folder), arms, seeds, settings)
    print(f"{len(todo)} of {len(arms) * len(seeds)} runs to play, {workers} at a time", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    shares = [todo[k::workers] for k in range(min(workers, len(todo)))]
    crew = [context.Process(target=work, args=(play, share, settings, folder)) for share in shares]
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
    return int(bool(missing(load(folder), arms, seeds, settings)))


def arguments(
    text: str | None, arms: Sequence[str], chosen: Sequence[str], seeds: Sequence[int]
) -> argparse.ArgumentParser:
    """The command line of a study: where, which arms, which seeds, how many workers. A study adds its own sizes."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder of the runs; those that it holds are not played again")
    where.add_argument("--plot", type=Path, metavar="FOLDER", help="play nothing: print the tables and draw the plot")
    parser.add_argument("--arms", nargs="+", choices=arms, default=list(chosen))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    parser.add_argument("--workers", type=int, default=2, help="processes side by side, one core each")
    return parser


def report(folder: Path, order: Iterable[str], tables: Tables, plot: Plot, file: str) -> None:
    """Print the tables and draw the plot of what a folder holds."""
    runs = load(folder, order)
    failures = [f"{run['arm']}, seed {run['seed']}: failed: {run['error']}" for run in runs if "error" in run]
    if len(failures) == len(runs):
        print("\n".join([f"{folder} holds no finished run", *failures]))
        return
    plot(runs, folder / file)
    print(f"\n{tables(runs)}\n\nplot: {folder / file}")


def load(folder: Path, order: Iterable[str] = ()) -> list[Run]:
    """The last record of each (arm, seed), arms in the given order, then seeds."""
    path, places = folder / RECORDS, list(order)
    runs = {(run["arm"], run["seed"]): run for run in read_jsonl(path)} if path.exists() else {}
    place = {arm: n for n, arm in enumerate(dict.fromkeys([*places, *(arm for arm, _ in runs)]))}
    return [runs[key] for key in sorted(runs, key=lambda key: (place[key[0]], key[1]))]


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


# -- what the runs say ------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean with its 95 % t interval over seeds: (mean, low, high). nan is left out; with fewer than 2 values the interval is nan."""
    from scipy.special import stdtrit  # the quantile of Student's t

    x = np.asarray(values, dtype=np.float64)
    x = x[~np.isnan(x)]
    if len(x) < 2:
        return float(x.mean()) if len(x) else math.nan, math.nan, math.nan
    half = float(stdtrit(len(x) - 1, 0.975) * x.std(ddof=1) / math.sqrt(len(x)))
    return float(x.mean()), float(x.mean()) - half, float(x.mean()) + half


def curves(runs: Sequence[Run], arm: str, what: str) -> tuple[list[int], NDArray[np.float64]]:
    """Steps [T] and values [S, T] of an arm, a row for each seed that was played; nan where a value is missing."""
    rows = [run["curve"] for run in runs if run["arm"] == arm and "error" not in run]
    steps = [point["step"] for point in rows[0]] if rows else []
    return steps, np.array([[p.get(what) for p in row] for row in rows], dtype=np.float64).reshape(
        len(rows), len(steps)
    )


def final(runs: Sequence[Run], arm: str, what: str) -> dict[int, float]:
    """The last value of each seed; nan where it is missing."""
    last = {r["seed"]: r["curve"][-1].get(what) for r in runs if r["arm"] == arm and "error" not in r}
    return {seed: math.nan if value is None else value for seed, value in last.items()}


def paired(runs: Sequence[Run], arm: str, other: str, what: str) -> tuple[float, float, float]:
    """Mean of arm - other over the seeds that both have, with its 95 % t interval.

    A seed fixes the order of the tasks and the held-out draws, so that what it does to both arms drops out.
    """
    ours, theirs = final(runs, arm, what), final(runs, other, what)
    return interval([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def cell(estimate: tuple[float, float, float], sign: str = "") -> str:
    """An `interval` for a table."""
    mean, low, high = estimate
    if math.isnan(mean):
        return ""
    return f"{mean:{sign}.3f}" + ("" if math.isnan(low) else f" ({low:{sign}.3f} to {high:{sign}.3f})")
