"""Every file of algorithms/ scores a group right. Episodes are made by hand; no engine."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from arenarl.algorithm import AgentAlgorithm
from arenarl.algorithms.arena_rl import ArenaRL, ArenaRLConfig
from arenarl.algorithms.grpo import GRPO, GRPOConfig
from arenarl.config import AgentConfig
from arenarl.errors import ConfigError
from arenarl.judge import RubricJudge
from arenarl.types import Abstention, Episode, EpisodeGroup, Outcome, Task, Trajectory

TASK = Task(task_id="t", kind="k", prompt="p")
MODEL = "experiments/tiny_agent/model"


def group(*scores: float | None, failed: tuple[int, ...] = ()) -> EpisodeGroup:
    episodes = [
        Episode(
            episode_id=f"g/{n}", task=TASK, member=n, greedy=False, segments=(), score=score,
            trajectory=Trajectory(messages=(), events=(), answer="a"),
            outcome=Outcome.FAILED if n in failed else Outcome.SCORED,
        )
        for n, score in enumerate(scores)
    ]  # fmt: skip
    return EpisodeGroup(group_id="g", task=TASK, episodes=tuple(episodes), version=0)


def arena(**settings: object) -> ArenaRLConfig:
    return ArenaRLConfig().arena(**settings)


async def test_grpo_standardises_scores_and_leaves_failures_out():
    scores = await GRPO.score_group(group(1.0, 0.0, 0.9, failed=(2,)), GRPOConfig(), RubricJudge())
    assert scores.rewards == (1.0, 0.0, None)
    assert scores.advantages == pytest.approx((1.0, -1.0, None), abs=1e-4)


async def test_arena_ranks_by_the_tournament():
    # four players, round robin: rewards 1, 2/3, 1/3, 0; population sd of these is 0.3727
    scores = await ArenaRL.score_group(group(0.1, 0.9, 0.5, 0.7), arena(topology="round_robin"), RubricJudge())
    assert scores.rewards == pytest.approx((0.0, 1.0, 1 / 3, 2 / 3))
    assert scores.advantages == pytest.approx((-1.3416, 1.3416, -0.4472, 0.4472), abs=1e-3)
    assert len(scores.games) == 6


async def test_arena_of_equals_carries_no_signal():
    scores = await ArenaRL.score_group(group(*[0.1 + 0.2] * 8), arena(), RubricJudge())
    assert scores.advantages == (0.0,) * 8


async def test_arena_keeps_members_in_place_when_some_failed():
    scores = await ArenaRL.score_group(
        group(0.9, 0.0, 0.5, 0.1, failed=(1,)), arena(topology="round_robin"), RubricJudge()
    )
    assert scores.rewards == pytest.approx((1.0, None, 0.5, 0.0))
    assert {member for game in scores.games for member in (game.i, game.j)} == {0, 2, 3}


async def test_arena_without_two_players_gives_nothing():
    scores = await ArenaRL.score_group(group(0.9, 0.1, failed=(0,)), arena(), RubricJudge())
    assert scores.rewards == scores.advantages == (None, None)


async def test_arena_under_a_judge_outage_gives_nothing():
    class Down:
        async def compare(self, a, b, task):
            return Abstention(reason="down")

    scores = await ArenaRL.score_group(group(0.9, 0.1, 0.5), arena(), Down())
    assert scores.advantages == (None, None, None)


async def test_truncated_attempts_are_ranked():
    episodes = group(0.9, 0.1)
    cut = replace(episodes, episodes=(episodes.episodes[0], replace(episodes.episodes[1], outcome=Outcome.TRUNCATED)))
    scores = await ArenaRL.score_group(cut, arena(), RubricJudge())
    assert scores.advantages == pytest.approx((1.0, -1.0), abs=1e-3)


@pytest.mark.parametrize("file", sorted(p.stem for p in Path("algorithms").glob("[a-z]*.py")))
def test_each_algorithm_file_has_one_algorithm_and_its_config(file):
    module = importlib.import_module(f"arenarl.algorithms.{file}")
    own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    (algorithm,) = [c for c in own if issubclass(c, AgentAlgorithm)]
    (config,) = [c for c in own if issubclass(c, AgentConfig)]
    built = config().environment("arenarl.envs.travel:TravelTasks").agent(model_path=MODEL)
    built.validate()
    assert built.algo_class is algorithm and algorithm.get_default_config().__class__ is config


@pytest.mark.parametrize(
    ("section", "settings", "says"),
    [
        ("training", {"group_sise": 4}, "did you mean 'group_size'"),
        ("agent", {"temprature": 1}, "did you mean 'temperature'"),
        ("env_runners", {"num_env_runer": 1}, "did you mean 'num_env_runners'"),
        ("arena", {"topolgy": "swiss"}, "did you mean 'topology'"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_nearest(section, settings, says):
    with pytest.raises(ConfigError, match=says):
        getattr(ArenaRLConfig(), section)(**settings)


def test_update_from_dict_refuses_what_is_no_field():
    with pytest.raises(ConfigError, match="did you mean 'groups_per_step'"):
        ArenaRLConfig().update_from_dict({"group_per_step": 2})
    assert ArenaRLConfig().update_from_dict({"lr": 0.5, "topology": "swiss"}).lr == 0.5


@pytest.mark.parametrize("file", sorted(p.name for p in Path("experiments").glob("[a-z]*.py")))
def test_each_experiment_validates(file):
    from arenarl.cli import load_experiment

    module = load_experiment(f"experiments/{file}")
    if hasattr(module, "config"):
        module.config().validate()
    else:
        assert module.tuner().__class__.__name__ == "Tuner"
