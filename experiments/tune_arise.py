"""Co-evolution under Ray Tune: ``arenarl train experiments/tune_arise.py``. Each trial is one arm; each cycle is a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune

from arenarl.cli import load_experiment

if TYPE_CHECKING:
    from ray.tune import Tuner

ARISE = str(Path(__file__).resolve().parent / "arise.py")


def trainable(settings: dict[str, Any]) -> None:
    """``settings`` are arguments of `coevolve` in ``experiments/arise.py``."""
    for point in load_experiment(ARISE).coevolve(**settings):
        tune.report({name: value for name, value in point.items() if isinstance(value, int | float)})


def tuner() -> Tuner:
    """With and without distillation, side by side, one core each."""
    space = {"arm": tune.grid_search(["full", "no_rg_sed"]), "seed": 0}
    return tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(metric="checklist", mode="max"),
    )
