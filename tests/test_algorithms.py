"""Every file of algorithms/ scores a group right. Episodes are made by hand; no engine."""

import asyncio
import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from arenarl.algorithm import AgentAlgorithm
from arenarl.algorithms.arena_rl import ArenaRL, ArenaRLConfig
from arenarl.algorithms.grpo import GRPO, GRPOConfig
from arenarl.arena import resolve
from arenarl.config import AgentConfig
from arenarl.errors import ConfigError, JudgeError
from arenarl.estimators import ESTIMATORS
from arenarl.gates import DEFAULT_GATES as GATES
from arenarl.judge import RubricJudge
from arenarl.types import Abstention, Episode, EpisodeGroup, Mark, Outcome, Task, Trajectory, Verdict
from tests.judging import judged_by

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
    scores = await GRPO.score_group(group(1.0, 0.0, 0.9, failed=(2,)), GRPOConfig(), judged_by(RubricJudge()))
    assert scores.rewards == (1.0, 0.0, None)
    assert scores.advantages == pytest.approx((1.0, -1.0, None), abs=1e-4)


async def test_arena_ranks_by_the_tournament():
    # four players, round robin: rewards 1, 2/3, 1/3, 0; population sd of these is 0.3727
    scores = await ArenaRL.score_group(
        group(0.1, 0.9, 0.5, 0.7), arena(topology="round_robin"), judged_by(RubricJudge())
    )
    assert scores.rewards == pytest.approx((0.0, 1.0, 1 / 3, 2 / 3))
    assert scores.advantages == pytest.approx((-1.3416, 1.3416, -0.4472, 0.4472), abs=1e-3)
    assert len(scores.games) == 6


async def test_arena_of_equals_carries_no_signal():
    scores = await ArenaRL.score_group(group(*[0.1 + 0.2] * 8), arena(), judged_by(RubricJudge()))
    assert scores.advantages == (0.0,) * 8


async def test_arena_keeps_members_in_place_when_some_failed():
    scores = await ArenaRL.score_group(
        group(0.9, 0.0, 0.5, 0.1, failed=(1,)), arena(topology="round_robin"), judged_by(RubricJudge())
    )
    assert scores.rewards == pytest.approx((1.0, None, 0.5, 0.0))
    assert {member for game in scores.games for member in (game.i, game.j)} == {0, 2, 3}


async def test_arena_without_two_players_gives_nothing():
    scores = await ArenaRL.score_group(group(0.9, 0.1, failed=(0,)), arena(), judged_by(RubricJudge()))
    assert scores.rewards == scores.advantages == (None, None)


async def test_arena_under_a_judge_outage_gives_nothing():
    class Down:
        async def compare(self, a, b, task):
            return Abstention(reason="down")

    scores = await ArenaRL.score_group(group(0.9, 0.1, 0.5), arena(), judged_by(Down()))
    assert (scores.rewards, scores.advantages) == ((None,) * 3, (0.0,) * 3)
    assert [game.result.kind for game in scores.games] == ["down"] * 3


async def test_a_total_outage_is_no_information_on_members_placed_last_either():
    class Down:
        async def compare(self, a, b, task):
            return Abstention(reason="down")

    for rewards in ("rank", "score"):
        scores = await ArenaRL.score_group(silence(group(0.9, 0.1, 0.5), 2), arena(rewards=rewards), judged_by(Down()))
        assert (scores.rewards, scores.advantages) == ((None,) * 3, (0.0,) * 3)
        assert scores.standings.ranks == scores.standings.scores == (None,) * 3


def silence(episodes: EpisodeGroup, *members: int, outcome: Outcome = Outcome.SCORED) -> EpisodeGroup:
    """The group with members that gave no answer."""
    changed = [
        replace(e, outcome=outcome, trajectory=replace(e.trajectory, answer=None)) if e.member in members else e
        for e in episodes.episodes
    ]
    return replace(episodes, episodes=tuple(changed))


async def test_attempts_without_an_answer_share_the_last_place_without_a_game():
    episodes = silence(group(0.9, 1.0, 0.5, 0.95), 1, 3, outcome=Outcome.TRUNCATED)
    scores = await ArenaRL.score_group(episodes, arena(topology="round_robin"), judged_by(RubricJudge()))
    assert scores.rewards == pytest.approx((1.0, 1 / 6, 2 / 3, 1 / 6))  # ranks 0, 2.5, 1, 2.5
    assert {member for game in scores.games for member in (game.i, game.j)} == {0, 2}
    assert scores.standings.gated == ("", "truncated", "", "truncated")
    by_score = await ArenaRL.score_group(silence(group(0.9, 1.0, 0.5), 1), arena(), judged_by(RubricJudge()))
    assert by_score.rewards == pytest.approx((0.2, -0.4, -0.2))  # one standard deviation, 0.2, below the worst


async def test_a_gate_may_leave_attempts_out_or_let_them_play():
    episodes = silence(group(0.9, 1.0, 0.5), 1)
    out = await ArenaRL.score_group(episodes, arena(gates=GATES | {"no_answer": "out"}), judged_by(RubricJudge()))
    assert out.advantages == pytest.approx((1.0, None, -1.0), abs=1e-3)
    play = await ArenaRL.score_group(episodes, arena(gates=GATES | {"no_answer": "play"}), judged_by(RubricJudge()))
    assert play.advantages[1] == max(play.advantages)


async def test_one_answer_among_silent_attempts_wins_without_a_game_and_silence_alone_is_flat():
    one = await ArenaRL.score_group(silence(group(0.1, 0.9, 0.9), 1, 2), arena(), judged_by(RubricJudge()))
    assert one.games == () and one.advantages == pytest.approx((1.414, -0.707, -0.707), abs=1e-3)
    none = await ArenaRL.score_group(silence(group(0.1, 0.9), 0, 1), arena(), judged_by(RubricJudge()))
    assert none.advantages == (0.0, 0.0)


async def test_a_member_placed_last_with_nobody_to_compare_with_has_no_place():
    alone = await ArenaRL.score_group(silence(group(0.1, 0.9, failed=(0,)), 1), arena(), judged_by(RubricJudge()))
    assert alone.rewards == alone.advantages == alone.standings.ranks == alone.standings.scores == (None, None)
    assert alone.standings.gated == ("failed", "no_answer")


async def test_a_topology_may_be_a_plan_of_ones_own():
    def ring(n, rng, orders):
        yield [(k, (k + 1) % n) for k in range(n)]

    scores = await ArenaRL.score_group(group(0.1, 0.9, 0.5), arena(topology=ring), judged_by(RubricJudge()))
    assert scores.standings.topology == "ring" and scores.standings.ranks == (2.0, 0.0, 1.0)


async def test_a_judge_ranks_attempts_that_no_checklist_could_score():
    class Longest:
        async def compare(self, a, b, task):
            return Verdict(score_a=len(a.trajectory.answer), score_b=len(b.trajectory.answer))

    words = ("a", "aaa", "aa")
    episodes = [
        replace(e, outcome=Outcome.ABSTAINED, score=None, trajectory=replace(e.trajectory, answer=w))
        for e, w in zip(group(0, 0, 0).episodes, words, strict=True)
    ]
    bare = replace(group(0, 0, 0), episodes=tuple(episodes))
    scores = await ArenaRL.score_group(bare, arena(topology="round_robin"), judged_by(Longest()))
    assert scores.rewards == (0.0, 1.0, 0.5)


async def test_unstandardised_scores_let_a_group_of_near_equals_weigh_little():
    near = await ArenaRL.score_group(group(0.50, 0.51, 0.49), arena(standardise=False), judged_by(RubricJudge()))
    far = await ArenaRL.score_group(group(0.5, 0.6, 0.4), arena(standardise=False), judged_by(RubricJudge()))
    assert near.advantages == pytest.approx((0.0, 0.01, -0.01)) and far.advantages == pytest.approx((0.0, 0.1, -0.1))


async def test_standings_say_how_the_games_were_read():
    standings = (await ArenaRL.score_group(group(0.1, 0.9, 0.5), arena(orders=2), judged_by(RubricJudge()))).standings
    assert (standings.topology, standings.estimator, standings.orders) == ("even_graph", "margin_ls", 2)
    assert standings.ranks == (2.0, 0.0, 1.0) and standings.stderr == (0.0, 0.0, 0.0)


def test_the_papers_setting_is_one_word():
    paper = arena(topology="single_elimination")
    assert resolve(paper.topology, paper.estimator, paper.orders)[2:] == (ESTIMATORS["paper"], 2)
    assert paper.greedy_first and not arena().greedy_first and not arena(topology="swiss").greedy_first


class Fifths:
    """Marks an attempt with its score, one fifth of a point more at each repeat; abstains from a score of 0."""

    async def compare(self, a, b, task):
        raise AssertionError("nobody asked for games")

    async def mark(self, a, task, repeat=0):
        return Mark(score=a.score + repeat / 5) if a.score else Abstention(reason="zero")


async def test_grpo_takes_the_mean_of_a_judges_marks():
    scores = await GRPO.score_group(
        group(1.0, 0.5, 0.0, 0.9, failed=(3,)), GRPOConfig().training(marks=2), judged_by(Fifths())
    )
    assert scores.rewards == pytest.approx((1.1, 0.6, None, None))
    assert scores.advantages == pytest.approx((1.0, -1.0, None, None), abs=1e-4)
    assert [len(given) for given in scores.marks] == [2, 2, 2, 0]


@pytest.mark.parametrize("mark", [Mark(score=float("nan")), Verdict(score_a=1, score_b=0), None, KeyError("prompt")])
async def test_what_is_no_mark_is_an_error_that_names_the_attempt(mark):
    class Broken(Fifths):
        async def mark(self, a, task, repeat=0):
            if isinstance(mark, Exception):
                raise mark
            return mark

    with pytest.raises(JudgeError, match="marking g/0"):
        await GRPO.score_group(group(1.0, 0.5), GRPOConfig().training(marks=1), judged_by(Broken()))


async def test_a_judge_that_raises_ends_the_other_marks():
    ended = []

    class Stuck(Fifths):
        async def mark(self, a, task, repeat=0):
            if a.member == 2:
                raise KeyError("prompt")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(a.member)

    with pytest.raises(JudgeError, match="marking g/2: KeyError: 'prompt'"):
        await GRPO.score_group(group(1.0, 0.5, 0.2), GRPOConfig().training(marks=1), judged_by(Stuck()))
    assert sorted(ended) == [0, 1]


def test_a_judge_that_cannot_mark_is_refused_where_marks_are_asked_for():
    config = GRPOConfig().training(marks=2).judging(judge="tests.test_algorithms:ComparesOnly")
    with pytest.raises(ConfigError, match="has no method mark"):
        config.build_judge()
    assert type(config.training(marks=0).build_judge()).__name__ == "ComparesOnly"


class ComparesOnly:
    async def compare(self, a, b, task):
        return Abstention(reason="none")


STREAMS = {"rg_sed"}  # terms of the loss that any algorithm may add


@pytest.mark.parametrize("file", sorted({p.stem for p in Path("algorithms").glob("[a-z]*.py")} - STREAMS))
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
