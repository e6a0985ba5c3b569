"""The tournament as a whole: the runner, both orders, rewards and advantages, missing games, and what the default gains."""

import asyncio
import math

import numpy as np
import pytest

from arenarl.arena import TournamentResult, rate, resolve, run_tournament
from arenarl.errors import ConfigError, JudgeError
from arenarl.estimators import ESTIMATORS, Estimate, Estimator, by_depth, margin_ls
from arenarl.topologies import PAPER_TOPOLOGIES, TOPOLOGIES
from arenarl.types import Abstention, Game, Mark, Verdict

DOWN = Abstention(reason="outage: judge is down")
EVERY_SETTING = [(t, e, o) for t in TOPOLOGIES for e in ESTIMATORS for o in (1, 2)]


def play(topology, n, compare, **options) -> TournamentResult:
    return asyncio.run(run_tournament(topology, n, compare, **options))


def by_quality(q, lost=frozenset()):
    """A perfect judge; pairs in ``lost`` are outages."""

    async def compare(i, j):
        lost_game = (i, j) in lost or (j, i) in lost
        return DOWN if lost_game else Verdict(score_a=float(q[i]), score_b=float(q[j]))

    return compare


async def tied(i, j):
    return Verdict(score_a=0.1 + 0.2, score_b=0.3)


async def down(i, j):
    return DOWN


async def first_side(i, j):
    return Verdict(score_a=7.3, score_b=7.0)


# ---- golden numbers


def test_round_robin_of_four_by_hand():
    result = play("round_robin", 4, by_quality([4, 3, 2, 1]))
    assert result.ranks.tolist() == [0, 1, 2, 3]
    assert result.rewards.tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert result.advantages.tolist() == pytest.approx([1.34164, 0.44721, -0.44721, -1.34164], rel=1e-4)
    assert result.scores.tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0], abs=1e-4)
    assert (result.topology, result.estimator, result.orders) == ("round_robin", "paper", 2)
    assert (result.rounds, result.abstentions, len(result.games)) == (1, 0, 6)


def test_anchor_ranks_by_the_difference_to_player_zero():
    result = play("anchor", 4, by_quality([5, 9, 4, 5]), orders=1)
    assert result.scores.tolist() == [0, 4, -1, 0]
    assert result.ranks.tolist() == [1.5, 0, 3, 1.5]


def test_the_default_scores_margins_of_pairs_asked_once():
    result = play("even_graph", 5, by_quality([5, 9, 4, 5, 2]))
    assert (result.estimator, result.orders, len(result.games)) == ("margin_ls", 1, 10)
    assert result.rewards.tolist() == result.scores.tolist() == pytest.approx([0, 4, -1, 0, -3])
    assert result.stderr.tolist() == [0.0] * 5


# ---- rewards and advantages


def test_rewards_by_rank_and_by_score_are_one_word_apart():
    q = [3.0, 7.0, 1.0, 5.0]
    by_score, by_rank = (play("even_graph", 4, by_quality(q), rewards=kind) for kind in ("score", "rank"))
    assert by_score.rewards.tolist() == pytest.approx([-1, 3, -3, 1])
    assert by_rank.rewards.tolist() == pytest.approx([1 / 3, 1, 0, 2 / 3])
    shares = play("round_robin", 4, by_quality(q), rewards="score")
    assert shares.rewards.tolist() == shares.scores.tolist() == pytest.approx([1 / 3, 1, 0, 2 / 3], abs=1e-4)


def test_advantages_may_keep_the_unit_of_the_rewards():
    q = [3.0, 7.0, 1.0, 5.0]
    plain = play("even_graph", 4, by_quality(q), standardise=False)
    assert plain.advantages.tolist() == pytest.approx([-1, 3, -3, 1])
    assert play("even_graph", 4, by_quality(q)).advantages.std() == pytest.approx(1, abs=1e-5)
    centred = play("round_robin", 3, by_quality(q[:3]), standardise=False)
    assert centred.advantages.tolist() == pytest.approx([0, 0.5, -0.5])


def test_unstandardised_scores_of_a_noisy_group_of_equals_are_shrunk_to_little():
    sizes = {"equals": [], "different": []}
    for group in range(40):
        for kind, q in (("equals", np.zeros(12)), ("different", np.random.default_rng(group).normal(size=12))):
            judge = noisy(q, np.random.default_rng([1, group]))
            sizes[kind].append(
                np.square(play("even_graph", 12, judge, seed=group, standardise=False).advantages).mean()
            )
    assert np.mean(sizes["equals"]) < 0.05 * np.mean(sizes["different"])


def test_rate_leaves_out_whoever_has_no_score():
    ranks, rewards, advantages = rate(np.array([2.0, math.nan, 5.0]), "rank", True)
    assert ranks.tolist() == pytest.approx([1, math.nan, 0], nan_ok=True)
    assert rewards.tolist() == pytest.approx([0, math.nan, 1], nan_ok=True)
    assert advantages.tolist() == pytest.approx([-1, math.nan, 1], nan_ok=True, rel=1e-5)
    ranks, rewards, advantages = rate(np.array([7.0, math.nan]), "rank", True)
    assert (ranks[0], rewards[0], advantages[0]) == (0, 1, 0)  # alone: first, and no signal


@pytest.mark.parametrize(("topology", "estimator", "orders"), EVERY_SETTING)
def test_total_ties_give_exactly_zero(topology, estimator, orders):
    for n, standardise in ((2, True), (3, True), (5, False), (8, True), (11, True), (16, False)):
        result = play(topology, n, tied, estimator=estimator, orders=orders, seed=n, standardise=standardise)
        assert result.advantages.tolist() == [0.0] * n
        assert result.rewards.tolist() == [0.5 if estimator == "paper" else 0.0] * n


@pytest.mark.parametrize(("topology", "estimator", "orders"), EVERY_SETTING)
def test_a_total_outage_gives_exactly_zero_and_is_no_information(topology, estimator, orders):
    for n in (2, 5, 8):
        result = play(topology, n, down, estimator=estimator, orders=orders)
        assert result.advantages.tolist() == [0.0] * n
        for array in (result.scores, result.stderr, result.ranks, result.rewards):
            assert np.isnan(array).all() and array.shape == (n,)
        assert result.abstentions == len(result.games) > 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_judge_that_prefers_a_side_says_nothing_when_both_orders_are_asked(topology, estimator):
    result = play(topology, 6, first_side, estimator=estimator, orders=2)
    assert result.advantages.tolist() == [0.0] * 6
    assert {(g.result.score_a, g.result.score_b) for g in result.games} == {(14.3, 14.3)}


@pytest.mark.parametrize("topology", ["even_graph", "info_gain", "round_robin"])
def test_a_judge_that_prefers_a_side_says_nothing_by_its_margins_when_asked_once(topology):
    for n in (4, 5, 8, 11, 16, 33):
        assert play(topology, n, first_side, estimator="margin_ls", orders=1, seed=n).advantages.tolist() == [0.0] * n


# ---- both orders


async def test_both_orders_are_asked_at_the_same_time_added_and_kept():
    together = asyncio.Barrier(2)

    async def compare(i, j):
        await together.wait()
        marks = {"answer": (8.0, 6.0)} | ({"path": (1.0, 2.0)} if i == 0 else {})
        return Verdict(
            score_a=8 + i, score_b=6 - j, dimensions=marks, judge="oracle", raw="a letter",
            calls=1, prompt_tokens=10, completion_tokens=3 + i, seconds=1.0 + i,
        )  # fmt: skip

    (game,) = (await run_tournament("anchor", 2, compare, game_timeout=30)).games
    assert game.result == Verdict(
        score_a=8 + 6, score_b=5 + 9, dimensions={"answer": (14.0, 14.0)}, judge="oracle",
        calls=2, prompt_tokens=20, completion_tokens=7, seconds=2.0,
    )  # fmt: skip
    assert [(half.score_a, half.score_b, half.raw) for half in game.halves] == [(8, 5, "a letter"), (9, 6, "a letter")]


@pytest.mark.parametrize("missing", [0, 1])
async def test_a_game_is_abstained_if_either_half_is_and_both_were_paid_for(missing):
    async def compare(i, j):
        if i == missing:
            return Abstention(reason="no_json: prose", raw="Well", judge="llm", calls=3, prompt_tokens=7)
        return Verdict(score_a=1, score_b=0, judge="llm", calls=1, prompt_tokens=5)

    (game,) = (await run_tournament("anchor", 2, compare)).games
    assert game.result == Abstention(reason="no_json: prose", judge="llm", calls=4, prompt_tokens=12)
    assert [isinstance(half, Abstention) for half in game.halves] == [missing == 0, missing == 1]


def test_a_pair_asked_once_has_no_halves():
    games = play("anchor", 3, by_quality([1, 2, 3]), orders=1).games
    assert [(g.i, g.j, g.halves, g.margin) for g in games] == [(0, 1, (), -1.0), (0, 2, (), -2.0)]


# ---- missing games


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_player_without_games_leaves_the_tournament_of_the_others(estimator):
    q = [3.0, 7.0, 1.0, 5.0, 5.5]
    whole = play("round_robin", 5, by_quality(q, {(1, k) for k in range(5)}), estimator=estimator)
    others = play("round_robin", 4, by_quality(q[:1] + q[2:]), estimator=estimator)
    rest = [0, 2, 3, 4]
    for array in (whole.scores, whole.stderr, whole.ranks, whole.rewards, whole.advantages):
        assert math.isnan(array[1])
    assert whole.rewards[rest].tolist() == pytest.approx(others.rewards.tolist(), abs=1e-7)
    assert whole.advantages[rest].tolist() == pytest.approx(others.advantages.tolist(), abs=1e-6)


def test_an_abstained_game_is_neither_a_tie_nor_a_point():
    result = play("round_robin", 3, by_quality([3, 2, 1], lost={(0, 2)}))
    assert result.scores.tolist() == pytest.approx([1, 0.5, 0], abs=1e-4)  # a tie would make it .75, .5, .25
    missing_best = play("anchor", 4, by_quality([1, 9, 2, 0], lost={(0, 1)}))
    assert math.isnan(missing_best.rewards[1])
    assert missing_best.rewards[[0, 2, 3]].tolist() == [0.5, 1, 0]


@pytest.mark.parametrize("topology", ["double_elimination", "single_elimination"])
def test_walkovers_favour_no_place_in_the_list(topology):
    async def mostly_down(i, j):
        return DOWN if (i + j) % 2 else Verdict(score_a=1.0, score_b=1.0)

    for seed in range(20):
        result = play(topology, 8, mostly_down, seed=seed)
        assert not np.nan_to_num(result.advantages).any()


# ---- what the default is for


def noisy(q, rng, theta=1.5, binary=False):
    """Logistic noise and a liking for the first side; marks rounded to 0.1 around a level that wanders, or who won."""

    async def compare(i, j):
        seen = q[i] - q[j] + (0.5 + rng.logistic()) / theta
        level = rng.normal(7.0, 1.0)
        a, b = (seen > 0, seen <= 0) if binary else (round(level + seen / 2, 1), round(level - seen / 2, 1))
        return Verdict(score_a=float(a), score_b=float(b))

    return compare


def mean_agreement(topology, *, binary, groups=120) -> tuple[float, int]:
    """Advantage correlation of the topology's own setting over groups of 16 (seeds 0 to 119), and the calls of a group."""
    found = []
    for group in range(groups):
        rng = np.random.default_rng([0, group])
        q = rng.normal(size=16)
        result = play(topology, 16, noisy(q, rng, binary=binary), seed=group)
        found.append(np.corrcoef(result.advantages, q)[0, 1])
    return float(np.mean(found)), len(result.games) * result.orders


@pytest.mark.parametrize(("binary", "goal", "gain"), [(False, 0.89, 0.07), (True, 0.80, 0.07)])
def test_the_default_beats_the_seeded_bracket_at_the_same_price(binary, goal, gain):
    default, calls = mean_agreement("even_graph", binary=binary)
    bracket, same = mean_agreement("single_elimination", binary=binary)
    assert calls == same == 60
    assert default >= goal
    assert default >= bracket + gain


# ---- the runner


async def test_games_of_a_round_run_at_the_same_time():
    together = asyncio.Barrier(12)

    async def compare(i, j):
        await together.wait()
        return Verdict(score_a=i, score_b=j)

    result = await run_tournament("round_robin", 4, compare, game_timeout=30)
    assert result.abstentions == 0


async def test_max_concurrency_bounds_the_questions_in_flight():
    flying, most = 0, 0

    async def compare(i, j):
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        for _ in range(5):
            await asyncio.sleep(0)
        flying -= 1
        return Verdict(score_a=i, score_b=j)

    await run_tournament("round_robin", 5, compare, max_concurrency=3)
    assert most == 3


async def test_a_game_that_never_ends_is_an_abstention():
    async def compare(i, j):
        if 2 in (i, j):
            await asyncio.Event().wait()
        return Verdict(score_a=-i, score_b=-j)

    result = await run_tournament("round_robin", 3, compare, game_timeout=0.05)
    assert result.ranks.tolist()[:2] == [0, 1] and math.isnan(result.ranks[2])
    reasons = [(g.result.kind, g.result.reason) for g in result.games if g.margin is None]
    assert reasons == [("timeout", "timeout: no verdict after 0.05 s")] * 2


@pytest.mark.parametrize(
    "answer",
    [
        None,
        (1, 0),
        Mark(score=1),
        Verdict(score_a=math.nan, score_b=0),
        Verdict(score_a=0, score_b=math.inf),
        Verdict(score_a="7", score_b=0),
    ],
)
async def test_what_is_no_verdict_is_an_error_that_names_the_game(answer):
    async def compare(i, j):
        return answer

    with pytest.raises(JudgeError, match="comparing 0 with 1"):
        await run_tournament("anchor", 2, compare, orders=1)


async def test_a_judge_that_raises_stops_the_tournament_and_its_other_games():
    stopped = []

    async def compare(i, j):
        if (i, j) == (2, 0):
            raise KeyError("prompt")
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append((i, j))

    with pytest.raises(JudgeError, match="comparing 2 with 0: KeyError: 'prompt'"):
        await run_tournament("anchor", 4, compare)
    assert sorted(stopped) == [(0, 1), (0, 2), (0, 3), (1, 0), (3, 0)]


# ---- names and additions


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n", [1, 0, -1])
def test_fewer_than_two_players_are_refused(topology, n):
    with pytest.raises(ConfigError, match=f"group_size={n} .* set group_size to 2 or more"):
        play(topology, n, tied)


@pytest.mark.parametrize(
    ("topology", "options", "message"),
    [
        ("round_robbin", {}, "unknown topology 'round_robbin': did you mean 'round_robin'"),
        ("swiss", {"estimator": "margins"}, "unknown estimator 'margins': did you mean 'margin_ls'"),
        ("swiss", {"max_concurrency": 0}, "max_concurrency=0"),
        ("swiss", {"orders": 3}, "orders=3 is unknown"),
        ("swiss", {"orders": 0}, "orders=0 is unknown"),
        ("swiss", {"rewards": "ranks"}, "rewards='ranks' is unknown: take 'rank', 'score'"),
    ],
)
def test_a_bad_choice_is_refused_with_the_remedy_before_any_game(topology, options, message):
    async def compare(i, j):
        raise AssertionError("no game may be paid for")

    with pytest.raises(ConfigError, match=message):
        play(topology, 4, compare, **options)


def test_the_papers_topologies_come_with_the_papers_setting_and_ours_with_ours():
    for topology, plan in TOPOLOGIES.items():
        name, resolved, estimator, orders = resolve(topology)
        assert (name, resolved) == (topology, plan)
        assert (estimator.name, orders) == (("paper", 2) if topology in PAPER_TOPOLOGIES else ("margin_ls", 1))
    assert resolve("swiss", "bradley_terry", 1)[2:] == (ESTIMATORS["bradley_terry"], 1)


def test_a_topology_is_one_function_and_an_estimator_another():
    def ring(n, rng, orders):
        yield [(k, (k + 1) % n) for k in range(n)]

    result = play(ring, 5, by_quality([3, 1, 4, 0, 2]))
    assert (result.topology, result.estimator, result.orders) == ("ring", "margin_ls", 1)
    assert result.ranks.tolist() == [1, 3, 0, 4, 2]
    loser_first = Estimator("loser_first", lambda n, games: Estimate(-margin_ls(n, games).scores, np.ones(n)))
    result = play(ring, 5, by_quality([3, 1, 4, 0, 2]), estimator=loser_first)
    assert result.rewards.tolist() == pytest.approx([0.25, 0.75, 0, 1, 0.5])
    assert result.stderr.tolist() == [1.0] * 5


def test_a_plan_may_bring_its_own_ranking_and_has_the_share_of_wins_otherwise():
    def final(n, rng, orders):
        (game,) = yield [(0, 1)]
        return by_depth([2, 0] if game.margin > 0 else [0, 2])

    def silent(n, rng, orders):
        yield [(0, 1)]

    assert np.round(play(final, 2, by_quality([1, 2]), estimator="paper").scores).tolist() == [0, 2]
    assert play(silent, 2, by_quality([1, 2]), estimator="paper").scores.tolist() == pytest.approx([0, 1], abs=1e-3)


@pytest.mark.parametrize("pair", [(0, 0), (0, 3), (-1, 1)])
def test_a_plan_that_pairs_nonsense_is_refused(pair):
    def nonsense(n, rng, orders):
        yield [pair]

    with pytest.raises(ConfigError, match="topology 'nonsense' paired"):
        play(nonsense, 3, tied)


def test_a_round_waits_for_the_one_before():
    def two_rounds(n, rng, orders):
        first = yield [(0, 1), (2, 3)]
        yield [(max(g.i, g.j) if g.margin < 0 else min(g.i, g.j), 4) for g in first]

    result = play(two_rounds, 5, by_quality([1, 2, 4, 3, 0]))
    assert [(g.i, g.j, g.round) for g in result.games] == [(0, 1, 0), (2, 3, 0), (1, 4, 1), (2, 4, 1)]
    assert (result.rounds, isinstance(result.games[0], Game)) == (2, True)
