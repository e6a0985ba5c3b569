"""One training run from start to finish: evaluate, train, evaluate, save, sum up. What `arenarl train` does.

A first Ctrl-C (or SIGTERM) asks for a stop: the step in progress is given up or finished, whichever is sooner, the last
finished step is saved, and every worker goes down. A second one ends the process at once.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from arenarl.algorithm import AgentAlgorithm, Interrupted
from arenarl.comparison import HELD_OUT_SEED, compare_attempts, evaluation_judge
from arenarl.config import AgentConfig
from arenarl.console import BeforeAfter, TrainingDisplay, before_after_table, side_by_side
from arenarl.tracking import ui_command
from arenarl.types import Episode


class StopRequest:
    """True once the user asked to stop."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self) -> bool:
        return self._event.is_set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn the first SIGINT or SIGTERM into a request, and give the second its usual meaning."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def ask(number: int, _: object) -> None:
            self._event.set()
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def train(config: AgentConfig, console: Console | None = None) -> dict[str, Any] | None:
    """Run an experiment to its end and write its summary.

    Args:
        config: with ``run_dir`` set.

    Returns:
        the summary, or None if the user stopped the run.

    Raises:
        ArenaError: naming what went wrong; every worker has been taken down.
    """
    disable_progress_bar()
    console, stop = console or Console(), StopRequest()
    with stop.listening():
        with console.status("starting the engine and the tool servers"):
            algorithm: AgentAlgorithm = config.build_algo()
        try:
            algorithm.should_stop = stop
            return _train(algorithm, console)
        except Interrupted:
            algorithm.run_status = "KILLED"
            console.print(f"stopped after step {algorithm.learner_steps}; saving it")
            _save(algorithm)
            console.print(f"checkpoint: {_folder(algorithm) / 'checkpoint'}")
            return None
        except BaseException:
            algorithm.run_status = "FAILED"
            raise
        finally:
            algorithm.stop()


def _train(algorithm: AgentAlgorithm, console: Console) -> dict[str, Any]:
    config, taskset = algorithm.config, algorithm.taskset
    tasks = taskset.tasks("heldout", config.evaluation_duration, seed=HELD_OUT_SEED)
    listing = algorithm.listing
    console.print(f"{len(listing.schemas)} tools, {listing.tokens} tokens in every prompt")
    with console.status(f"playing {len(tasks)} held-out tasks with the starting policy"):
        before = algorithm.play(tasks, name="before", seed=HELD_OUT_SEED)
    algorithm.reference = before
    started = time.monotonic()
    with TrainingDisplay(
        config.num_steps, title=f"{type(algorithm).__name__} on {taskset.name}", console=console
    ) as display:
        for step in range(1, config.num_steps + 1):
            algorithm.train()
            display.update(step, algorithm.last_metrics | algorithm.last_evaluation)
    seconds = time.monotonic() - started
    with console.status(f"playing {len(tasks)} held-out tasks with the trained policy"):
        after = algorithm.play(tasks, name="after", seed=HELD_OUT_SEED)
    summary = {
        **(_compare(algorithm, before, after) if tasks else {"held_out_tasks": 0}),
        "steps": algorithm.learner_steps, "train_seconds": seconds, "seed": config.seed,
    }  # fmt: skip
    _save(algorithm)
    assert algorithm.run_folder and algorithm.tracker
    algorithm.run_folder.write_summary(summary)
    reached = {"heldout_win_rate": summary.get("win_rate"), "heldout_checklist": summary.get("checklist_after")}
    algorithm.tracker.log_metrics(
        algorithm.learner_steps, {f"reward/{name}": value for name, value in reached.items() if value is not None}
    )
    algorithm.tracker.log_model_folder(_folder(algorithm) / "model")
    _report(console, algorithm, summary, before, after)
    return summary


def _compare(algorithm: AgentAlgorithm, before: Sequence[Episode], after: Sequence[Episode]) -> dict[str, Any]:
    judge, name = evaluation_judge(algorithm.taskset, algorithm.config)
    return {**compare_attempts(judge, before, after), "judge": name}


def _folder(algorithm: AgentAlgorithm) -> Path:
    assert algorithm.run_folder, "train() needs run_dir"
    return algorithm.run_folder.path


def _save(algorithm: AgentAlgorithm) -> None:
    algorithm.save_pretrained(str(_folder(algorithm) / "model"))
    algorithm.save_to_path(str((_folder(algorithm) / "checkpoint").resolve()))


def _report(
    console: Console,
    algorithm: AgentAlgorithm,
    summary: dict[str, Any],
    before: Sequence[Episode],
    after: Sequence[Episode],
) -> None:
    """Tables, one episode side by side, and where everything is."""
    if after:
        _report_comparison(console, summary, before, after)
    else:
        console.print(f"{algorithm.taskset.name} has no held-out tasks, so nothing tells what was learned")
    folder = _folder(algorithm)
    console.print(
        f"\nmodel      {folder / 'model'}\nepisodes   {folder / 'episodes.jsonl'}\nsummary    {folder / 'summary.json'}"
    )
    console.print(f"dashboard  {ui_command(algorithm.tracker.tracking_uri)}", soft_wrap=True)  # type: ignore[union-attr]


def _report_comparison(
    console: Console, summary: dict[str, Any], before: Sequence[Episode], after: Sequence[Episode]
) -> None:
    rows = [
        BeforeAfter("checklist score", summary["checklist_before"], summary["checklist_after"]),
        BeforeAfter("valid tool calls", summary["valid_calls_before"], summary["valid_calls_after"]),
    ]
    console.print(before_after_table(rows, title=f"{len(after)} held-out tasks"))
    games = f"{summary['wins']} won, {summary['losses']} lost, {summary['ties']} tied, {summary['missing']} without a verdict"
    low, high = summary["win_rate_ci"]
    rate = f"[bold]{summary['win_rate']:.2f}[/] of decided games, 95 % interval {low:.2f} to {high:.2f}"
    if not summary["wins"] + summary["losses"]:
        rate = "unknown, as no game was decided"
    console.print(f"win rate of the trained over the starting policy: {rate} ({games})\njudge: {summary['judge']}\n")
    telling = most_telling(before, after)
    console.print(side_by_side(before[telling], after[telling]))


def most_telling(before: Sequence[Episode], after: Sequence[Episode]) -> int:
    """The task whose score rose most, the shortest of equals. A task that misses a score tells nothing of a rise."""

    def key(n: int) -> tuple[float, int]:
        old, new = before[n].score, after[n].score
        return (-math.inf if old is None or new is None else new - old), -after[n].num_tokens

    return max(range(len(after)), key=key)
