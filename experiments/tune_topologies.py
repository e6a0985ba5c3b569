"""A Ray Tune experiment: two topologies on the travel environment, one trial after the other on two cores.

    arenarl train experiments/tune_topologies.py

Each trial is `ArenaRL` itself; a partial dictionary is all that Tune needs to know.
"""

from pathlib import Path

from ray import tune

from arenarl.algorithms.arena_rl import ArenaRL

MODEL = Path(__file__).resolve().parent / "tiny_agent" / "model"


def tuner() -> tune.Tuner:
    return tune.Tuner(
        ArenaRL,
        param_space={
            "env": "arenarl.envs.travel:TravelTasks",
            "model_path": str(MODEL),
            "max_model_len": 768,
            "max_tokens": 64,
            "lr": 3e-4,
            "num_env_runners": 1,
            "topology": tune.grid_search(["even_graph", "single_elimination"]),
        },
        tune_config=tune.TuneConfig(metric="reward/score_mean", mode="max"),
        run_config=tune.RunConfig(
            name="topologies", storage_path=str(Path("runs").resolve()), stop={"training_iteration": 10}
        ),
    )
