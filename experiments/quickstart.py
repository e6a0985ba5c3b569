"""The quickstart: ArenaRL on the travel environment, from the tiny agent, on two CPU cores in about five minutes.

One worker samples (vLLM, one core) while the learner in the main process trains (the other core).
"""

from pathlib import Path

from arenarl.algorithms.arena_rl import ArenaRLConfig

MODEL = Path(__file__).parent / "tiny_agent" / "model"


def config() -> ArenaRLConfig:
    return (
        ArenaRLConfig()
        .environment("arenarl.envs.travel:TravelTasks")
        .agent(model_path=str(MODEL), max_model_len=768, max_num_seqs=96, max_tokens=64)
        .training(lr=6e-4, group_size=8, groups_per_step=8, max_staleness=1, num_steps=70)
        .env_runners(num_env_runners=1)
        .arena(topology="even_graph")
        .evaluation(evaluation_interval=25, evaluation_duration=128)
        .tracking(experiment_name="quickstart")
    )
