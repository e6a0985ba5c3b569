"""Tournaments: golden numbers by hand, comparison counts, and the rules that hold for every plan."""

import asyncio
import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arenarl.arena import FED_BY, TOPOLOGIES, Tournament, both_orders, run_tournament
from arenarl.errors import ConfigError, JudgeError
from arenarl.estimators import ESTIMATORS, Estimator, anchor, bradley_terry, margins, ranks, wins
from arenarl.types import Abstention, Game, Verdict

DOWN = Abstention(reason="judge is down")
EVERY_PAIRING = [(t, e) for t in TOPOLOGIES for e in ESTIMATORS if t in FED_BY.get(e, TOPOLOGIES)]
COUNTS = {
    "round_robin": lambda n: n * (n - 1) // 2,
    "anchor": lambda n: n - 1,
    "swiss": lambda n: n // 2 * math.ceil(math.log2(n)),
    "double_elimination": lambda n: 2 * n - 2,
    "seeded_elimination": lambda n: 2 * n - 2,
    "even_graph": lambda n: {2: 2, 3: 3}.get(n, 2 * n),
}
ROUNDS = {
    "round_robin": lambda n: 1,
    "anchor": lambda n: 1,
    "swiss": lambda n: math.ceil(math.log2(n)),
    "double_elimination": lambda n: 2 * math.ceil(math.log2(n)),
    "seeded_elimination": lambda n: 1 + math.ceil(math.log2(n)),
    "even_graph": lambda n: 1,
}
permutations = st.integers(2, 17).flatmap(lambda n: st.permutations(range(n)))


def play(topology, n, compare, **options) -> Tournament:
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


def games(*results: tuple[int, int, float]) -> list[Game]:
    return [Game(i=i, j=j, round=0, result=Verdict(score_a=m, score_b=0.0)) for i, j, m in results]


# ---- golden numbers


def test_round_robin_of_four_by_hand():
    result = play("round_robin", 4, by_quality([4, 3, 2, 1]))
    assert result.ranks.tolist() == [0, 1, 2, 3]
    assert result.rewards.tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert result.advantages.tolist() == pytest.approx([1.34164, 0.44721, -0.44721, -1.34164], rel=1e-4)
    assert result.scores.tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0], abs=1e-4)
    assert (result.topology, result.estimator, result.rounds, result.abstentions) == ("round_robin", "wins", 1, 0)


def test_wins_counts_a_tie_as_half_and_breaks_equal_shares_by_the_opponents():
    # shares: 0 has 1/2, 1 has 1/2, 2 has 1, 3 has 0; 0 lost to the winner, 1 beat the last.
    scores = wins(4, games((2, 0, 1), (0, 1, 0), (0, 3, 0), (2, 1, 1), (1, 3, 1)))
    assert scores == pytest.approx([1 / 3, 1 / 2, 1, 1 / 4], abs=1e-4)
    swiss = wins(4, games((0, 1, 1), (2, 3, 1), (0, 2, 1), (1, 3, 0)))
    assert ranks(swiss).tolist() == [0, 2, 1, 3]  # 1 and 3 share 1/4, but 1 lost to the winner


def test_anchor_is_the_difference_to_player_zero():
    result = play("anchor", 4, by_quality([5, 9, 4, 5]))
    assert result.scores.tolist() == [0, 4, -1, 0]
    assert result.ranks.tolist() == [1.5, 0, 3, 1.5]
    assert anchor(3, games((1, 2, 9), (1, 0, 2), (0, 2, 3))).tolist() == [0, 2, -3]


def test_margins_on_a_path_by_hand():
    assert margins(3, games((0, 1, 2), (1, 2, 1))).tolist() == pytest.approx([5 / 3, -1 / 3, -4 / 3])


def test_margins_of_games_that_contradict_each_other_are_shrunk():
    # the mean is 1/3; one spread of 6 and a ridge of 10, the largest that is tried, leave 6/16 of it
    scores = margins(2, games((0, 1, 1), (0, 1, -1), (0, 1, 1)))
    assert scores.tolist() == pytest.approx([1 / 16, -1 / 16])
    assert margins(3, games((0, 1, 1), (1, 2, 1), (2, 0, 1))).tolist() == [0, 0, 0]


def test_margins_keep_components_apart_and_each_at_the_mean():
    scores = margins(5, games((0, 1, 2), (2, 3, 4)))
    assert scores[:4].tolist() == pytest.approx([1, -1, 2, -2])
    assert math.isnan(scores[4])


def test_one_order_fit_takes_out_a_liking_for_the_first_side():
    biased = games((0, 1, 2 + 10), (1, 2, 1 + 10), (2, 0, -3 + 10))
    assert margins(3, biased, one_order=True).tolist() == pytest.approx([5 / 3, -1 / 3, -4 / 3])
    star = games((0, 1, 2), (0, 2, 3))  # a liking for side a is a strong player 0 here: leave it
    assert margins(3, star, one_order=True).tolist() == margins(3, star).tolist()


def test_bradley_terry_of_one_game_solves_its_equation():
    x, y = bradley_terry(2, games((0, 1, 0.01)))
    assert y == -x
    assert 1 - 1 / (1 + math.exp(-2 * x)) == pytest.approx(x / 1.5**2)  # derivative of log-likelihood and prior
    assert x == pytest.approx(0.5565, abs=1e-3)


def test_ranks_share_places_within_float_noise():
    assert ranks(np.array([0.3, 1.0, 0.1 + 0.2, math.nan, 0.0])).tolist()[:3] == [1.5, 0, 1.5]
    assert ranks(np.array([1e9 + 1e-3, 1e9])).tolist() == [0.5, 0.5]


# ---- plans


@pytest.mark.parametrize("n", range(2, 17))
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_comparison_counts_and_waits(topology, n):
    result = play(topology, n, by_quality(range(n)), seed=n)
    assert len(result.games) == COUNTS[topology](n)
    assert result.rounds == ROUNDS[topology](n)
    assert [g.round for g in result.games] == sorted(g.round for g in result.games)


def test_bracket_keeps_byes_as_byes():
    result = play("seeded_elimination", 6, by_quality([6, 5, 4, 3, 2, 1]))
    bracket = [[{g.i, g.j} for g in result.games if g.round == r] for r in (1, 2, 3)]
    assert bracket == [[{3, 4}, {2, 5}], [{0, 3}, {1, 2}], [{0, 1}]]
    # levels 3, 2, 1, 1, 0, 0, then the mean margin
    assert result.ranks.tolist() == [0, 1, 2, 3, 4, 5]


def test_double_elimination_gives_everybody_a_second_game():
    result = play("double_elimination", 8, by_quality(range(8)), seed=3)
    lost = Counter(min(g.i, g.j) for g in result.games)
    assert lost == Counter({k: 2 for k in range(7)})
    assert result.ranks[[7, 6]].tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(8))
def test_double_elimination_ranks_by_the_round_of_the_second_defeat(seed):
    result = play("double_elimination", 8, by_quality(range(8)), seed=seed)
    out = {k: max(g.round for g in result.games if k in (g.i, g.j)) for k in range(6)}
    levels = {k: round(result.scores[k]) for k in out}
    assert sorted(out.values()) == [1, 1, 2, 2, 3, 4]
    assert [levels[k] for k in sorted(out, key=out.get)] == [0, 0, 1, 1, 2, 3]
    met = [frozenset((g.i, g.j)) for g in result.games if g.round <= 2]
    assert len(set(met)) == len(met)  # those who drop into the lower bracket meet strangers there


def test_a_player_without_a_seeding_game_is_seeded_in_the_middle():
    result = play("seeded_elimination", 8, by_quality([0, 7, 6, 5, 4, 3, 2, 1], lost={(0, 4)}))
    first = [{g.i, g.j} for g in result.games if g.round == 1]
    assert {0, 1} in first  # the best seed against the worst, neither of them player 4
    assert result.ranks[4] in (2, 3)


@given(st.integers(2, 20), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_swiss_never_repeats_a_pair_and_byes_rotate(n, seed):
    rng = np.random.default_rng(seed)

    async def noisy(i, j):
        return Verdict(score_a=float(rng.integers(3)), score_b=float(rng.integers(3)))

    result = play("swiss", n, noisy, seed=seed)
    assert len({frozenset((g.i, g.j)) for g in result.games}) == len(result.games)
    played = Counter(k for g in result.games for k in (g.i, g.j))
    assert all(result.rounds - played[k] <= n % 2 for k in range(n))


@given(st.integers(4, 24), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_even_graph_is_regular_balanced_and_connected(n, seed):
    result = play("even_graph", n, tied, seed=seed)
    assert Counter(g.i for g in result.games) == Counter(g.j for g in result.games) == Counter({k: 2 for k in range(n)})
    reached, edges = {0}, [{g.i, g.j} for g in result.games]
    for _ in range(n):
        reached |= set().union(*(e for e in edges if e & reached))
    assert len(reached) == n
    assert n == 4 or len({frozenset(e) for e in edges}) == 2 * n


@pytest.mark.parametrize("n", range(2, 12))
def test_round_robin_puts_everybody_on_each_side_equally_often(n):
    sides = Counter(g.i for g in play("round_robin", n, tied).games)
    assert all(abs(2 * sides[k] - (n - 1)) <= 1 for k in range(n))


def test_even_graph_seats_the_players_at_random():
    # five players have one pair of distances only, so what differs is the seating
    assert len({tuple((g.i, g.j) for g in play("even_graph", 5, tied, seed=s).games) for s in range(4)}) > 1


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_tournament_is_repeatable_and_a_plan_depends_on_the_seed(topology):
    pairs = {}
    for seed in (0, 0, 1, 2, 3):
        result = play(topology, 9, tied, seed=seed)
        assert pairs.setdefault(seed, [(g.i, g.j) for g in result.games]) == [(g.i, g.j) for g in result.games]
    shuffled = topology not in ("round_robin", "anchor")
    assert (len(set(map(tuple, pairs.values()))) > 1) == shuffled


# ---- a perfect judge


@given(permutations, st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_perfect_judge_gives_the_perfect_order_wherever_the_games_determine_it(q, seed):
    order = [len(q) - 1 - k for k in q]
    assert play("round_robin", len(q), by_quality(q)).ranks.tolist() == order
    for topology in TOPOLOGIES:
        for estimator in ("margins", "margins_one_order"):
            result = play(topology, len(q), by_quality(q), estimator=estimator, seed=seed)
            assert result.ranks.tolist() == order, (topology, estimator)


@given(permutations, st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_perfect_judge_always_finds_the_champion(q, seed):
    for topology in TOPOLOGIES:
        result = play(topology, len(q), by_quality(q), seed=seed)
        assert result.ranks[q.index(len(q) - 1)] == 0, topology
        if topology in ("seeded_elimination", "anchor"):
            assert result.ranks[q.index(len(q) - 2)] == 1, topology


@given(permutations, st.data())
@settings(max_examples=25, deadline=None)
def test_outages_leave_a_perfect_order_perfect_while_the_games_connect_the_players(q, data):
    n = len(q)
    spine = {frozenset(pair) for pair in zip(range(n), range(1, n), strict=False)}
    lost = data.draw(st.sets(st.sampled_from(list(combinations(range(n), 2)))))
    lost = {pair for pair in lost if frozenset(pair) not in spine}
    result = play("round_robin", n, by_quality(q, lost), estimator="margins")
    assert result.abstentions == len(lost)
    assert result.ranks.tolist() == [n - 1 - k for k in q]


# ---- ties, sides, labels


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 8, 12, 16])
@pytest.mark.parametrize(("topology", "estimator"), EVERY_PAIRING)
def test_total_ties_give_exactly_zero(topology, estimator, n):
    result = play(topology, n, tied, estimator=estimator, seed=n)
    assert result.advantages.tolist() == [0.0] * n
    assert result.rewards.tolist() == [0.5 if ESTIMATORS[estimator].ranked else 0.0] * n


@pytest.mark.parametrize(("topology", "estimator"), EVERY_PAIRING)
def test_a_judge_that_prefers_the_first_side_says_nothing_when_both_orders_are_asked(topology, estimator):
    result = play(topology, 6, both_orders(first_side), estimator=estimator)
    assert result.advantages.tolist() == [0.0] * 6
    assert {g.result for g in result.games} == {Verdict(score_a=14.3, score_b=14.3)}


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 11, 16])
def test_a_judge_that_prefers_the_first_side_says_nothing_on_an_even_graph_asked_once(n):
    for estimator in ("margins", "wins", "bradley_terry", "margins_one_order"):
        assert play("even_graph", n, first_side, estimator=estimator, seed=n).advantages.tolist() == [0.0] * n


async def test_both_orders_abstains_if_either_half_does():
    async def half(i, j):
        return Verdict(score_a=1, score_b=0) if i < j else DOWN

    assert await both_orders(half)(0, 1) == await both_orders(half)(1, 0) == DOWN


@given(st.integers(2, 9), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=25, deadline=None)
def test_relabelling_the_players_relabels_the_rewards(n, seed, data):
    table = np.triu(np.random.default_rng(seed).integers(-3, 4, size=(n, n)).astype(float), 1)
    table -= table.T
    to = data.draw(st.permutations(range(n)))
    back = np.argsort(to)

    async def compare(i, j):
        return Verdict(score_a=table[i, j], score_b=0.0)

    async def renamed(i, j):
        return Verdict(score_a=table[back[i], back[j]], score_b=0.0)

    for estimator in ("wins", "margins", "bradley_terry"):
        first, second = (play("round_robin", n, c, estimator=estimator) for c in (compare, renamed))
        assert second.ranks[to].tolist() == first.ranks.tolist()
        assert second.rewards[to].tolist() == pytest.approx(first.rewards.tolist(), abs=1e-7)


@given(st.integers(3, 12), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=25, deadline=None)
def test_relabelling_all_but_the_anchor_relabels_what_is_seeded_by_it(n, seed, data):
    table = np.triu(np.random.default_rng(seed).normal(size=(n, n)), 1)
    table -= table.T
    to = [0, *data.draw(st.permutations(range(1, n)))]
    back = np.argsort(to)

    async def compare(i, j):
        return Verdict(score_a=table[i, j], score_b=0.0)

    async def renamed(i, j):
        return Verdict(score_a=table[back[i], back[j]], score_b=0.0)

    for topology in ("anchor", "seeded_elimination"):
        first, second = play(topology, n, compare, seed=1), play(topology, n, renamed, seed=2)
        assert second.ranks[to].tolist() == first.ranks.tolist()


@pytest.mark.parametrize("topology", ["swiss", "double_elimination", "seeded_elimination", "even_graph"])
def test_no_place_in_the_list_is_better_than_another(topology):
    def mean_rewards(q):
        judge = by_quality(q)
        return np.mean([play(topology, 6, judge, estimator="wins", seed=s).rewards for s in range(120)], axis=0)

    q, to = [0, 3, 1, 2, 2, 0], [5, 4, 3, 2, 1, 0]
    if topology == "seeded_elimination":
        to = [0, 5, 4, 3, 2, 1]  # player 0 is the anchor by definition
    assert mean_rewards([q[k] for k in to]) == pytest.approx(mean_rewards(q)[to], abs=0.08)


# ---- missing games


@pytest.mark.parametrize(("topology", "estimator"), EVERY_PAIRING)
@pytest.mark.parametrize("n", [2, 5, 8])
def test_all_judges_down_is_no_information_and_still_a_result(topology, estimator, n):
    result = play(topology, n, down, estimator=estimator)
    for array in (result.scores, result.ranks, result.rewards, result.advantages):
        assert np.isnan(array).all() and array.shape == (n,)
    assert result.abstentions == len(result.games) == COUNTS[topology](n)


@pytest.mark.parametrize("estimator", ["wins", "margins", "bradley_terry"])
def test_a_player_without_games_leaves_the_tournament_of_the_others(estimator):
    q = [3.0, 7.0, 1.0, 5.0, 5.5]
    whole = play("round_robin", 5, by_quality(q, {(1, k) for k in range(5)}), estimator=estimator)
    others = play("round_robin", 4, by_quality(q[:1] + q[2:]), estimator=estimator)
    rest = [0, 2, 3, 4]
    assert math.isnan(whole.rewards[1]) and math.isnan(whole.advantages[1])
    assert whole.rewards[rest].tolist() == pytest.approx(others.rewards.tolist())
    assert whole.advantages[rest].tolist() == pytest.approx(others.advantages.tolist())


def test_an_abstained_game_is_neither_a_tie_nor_a_point():
    result = play("round_robin", 3, by_quality([3, 2, 1], lost={(0, 2)}))
    assert result.scores.tolist() == pytest.approx([1, 0.5, 0], abs=1e-4)  # a tie would make it .75, .5, .25
    missing_best = play("anchor", 4, by_quality([1, 9, 2, 0], lost={(0, 1)}))
    assert math.isnan(missing_best.rewards[1])
    assert missing_best.rewards[[0, 2, 3]].tolist() == [0.5, 1, 0]


def test_a_walkover_is_not_a_win():
    q = [0, 3, 2, 1]  # seeds 1, 2, 3, 0; the final is 1 against 2
    played, lost = (play("seeded_elimination", 4, by_quality(q, gone)) for gone in ({}, {(1, 2)}))
    assert np.round(played.scores).tolist() == [0, 2, 1, 0]
    assert np.round(lost.scores).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_a_bracket_without_a_single_verdict_adds_nothing_to_the_seeding(n):
    q = list(range(n, 0, -1))
    asked = set()

    async def only_the_anchor_games(i, j):
        first = (i, j) not in asked and i == 0
        asked.add((i, j))
        return Verdict(score_a=q[i], score_b=q[j]) if first and len(asked) < n else DOWN

    result = play("seeded_elimination", n, only_the_anchor_games, max_concurrency=1)
    assert result.abstentions == n - 1
    assert result.ranks.tolist() == list(range(n))


@pytest.mark.parametrize("topology", ["double_elimination", "seeded_elimination"])
def test_walkovers_favour_no_place_in_the_list(topology):
    async def mostly_down(i, j):
        return DOWN if (i + j) % 2 else Verdict(score_a=1.0, score_b=1.0)

    for seed in range(20):
        result = play(topology, 8, mostly_down, seed=seed)
        assert not np.nan_to_num(result.advantages).any()


def test_an_outage_of_thirty_percent_costs_no_more_than_thirty_percent_fewer_games():
    def circulant_of_20(n, rng):
        yield [(k, (k + d) % n) for d in (1, 2) for k in range(n)] + [(k, k + 4) for k in range(4)]

    def mean_correlation(topology, lost_games):
        total = 0.0
        for group in range(150):
            rng = np.random.default_rng(group)
            q, noise = rng.normal(size=8), rng.logistic(size=(8, 8))
            pairs = list(combinations(range(8), 2))
            lost = {pairs[k] for k in rng.permutation(28)[:lost_games]}

            async def compare(i, j, q=q, noise=noise, lost=lost):
                gone = (min(i, j), max(i, j)) in lost
                return DOWN if gone else Verdict(score_a=q[i] - q[j] + noise[i, j], score_b=0.0)

            result = play(topology, 8, compare, estimator="margins", seed=group)
            assert len(result.games) - result.abstentions == 20
            total += np.corrcoef(result.advantages, q)[0, 1]
        return total / 150

    outage, design = mean_correlation("round_robin", 8), mean_correlation(circulant_of_20, 0)
    assert 0.75 < design < 0.95
    assert outage > design - 0.02


# ---- the runner


async def test_games_of_a_round_run_at_the_same_time():
    together = asyncio.Barrier(6)

    async def compare(i, j):
        await together.wait()
        return Verdict(score_a=i, score_b=j)

    result = await run_tournament("round_robin", 4, compare, game_timeout=30)
    assert result.abstentions == 0


async def test_max_concurrency_bounds_the_games_in_flight():
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
    assert [g.result.reason for g in result.games if g.margin is None] == ["timeout after 0.05 s"] * 2


@pytest.mark.parametrize(
    "answer", [None, (1, 0), Verdict(score_a=math.nan, score_b=0), Verdict(score_a=math.inf, score_b=0)]
)
async def test_what_is_no_verdict_is_an_error_that_names_the_game(answer):
    async def compare(i, j):
        return answer

    with pytest.raises(JudgeError, match="comparing 0 with 1"):
        await run_tournament("anchor", 2, compare)


async def test_a_judge_that_raises_stops_the_tournament_and_its_other_games():
    stopped = []

    async def compare(i, j):
        if j == 2:
            raise KeyError("prompt")
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(j)

    with pytest.raises(JudgeError, match="comparing 0 with 2: KeyError: 'prompt'"):
        await run_tournament("anchor", 4, compare)
    assert sorted(stopped) == [1, 3]


# ---- names and additions


@pytest.mark.parametrize("n", [1, 0, -1])
def test_fewer_than_two_players_are_refused(n):
    with pytest.raises(ConfigError, match=f"group_size={n} .* set group_size to 2 or more"):
        play("round_robin", n, tied)


@pytest.mark.parametrize(
    ("topology", "options", "message"),
    [
        ("round_robbin", {}, "unknown topology 'round_robbin': did you mean 'round_robin'"),
        ("swiss", {"estimator": "margin"}, "unknown estimator 'margin': did you mean 'margins'"),
        ("swiss", {"estimator": "depth"}, "'depth' cannot be had from topology 'swiss': take 'wins'"),
        ("swiss", {"max_concurrency": 0}, "max_concurrency=0"),
    ],
)
def test_a_bad_choice_is_refused_with_the_remedy_before_any_game(topology, options, message):
    async def compare(i, j):
        raise AssertionError("no game may be paid for")

    with pytest.raises(ConfigError, match=message):
        play(topology, 4, compare, **options)


def test_a_topology_is_one_function_and_an_estimator_another():
    def ring(n, rng):
        yield [(k, (k + 1) % n) for k in range(n)]

    result = play(ring, 5, by_quality([3, 1, 4, 0, 2]))
    assert (result.topology, result.estimator) == ("ring", "margins")
    assert result.ranks.tolist() == [1, 3, 0, 4, 2]
    loser_first = Estimator("loser_first", lambda n, games, levels: -margins(n, games))
    result = play(ring, 5, by_quality([3, 1, 4, 0, 2]), estimator=loser_first)
    assert result.rewards.tolist() == pytest.approx([0.25, 0.75, 0, 1, 0.5])


def test_a_plan_may_return_levels_and_must_if_depth_is_asked_for():
    def final(n, rng):
        (game,) = yield [(0, 1)]
        return [1, 0] if game.margin > 0 else [0, 1]

    def nothing(n, rng):
        yield [(0, 1)]

    assert play(final, 2, by_quality([1, 2]), estimator="depth").rewards.tolist() == [0, 1]
    with pytest.raises(ConfigError, match="needs a plan that returns levels"):
        play(nothing, 2, by_quality([1, 2]), estimator="depth")


@pytest.mark.parametrize("pair", [(0, 0), (0, 3), (-1, 1)])
def test_a_plan_that_pairs_nonsense_is_refused(pair):
    def nonsense(n, rng):
        yield [pair]

    with pytest.raises(ConfigError, match="topology 'nonsense' paired"):
        play(nonsense, 3, tied)
