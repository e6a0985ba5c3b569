"""Who meets whom: counts and waits of the paper, and the rules that hold for every plan."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arenarl.estimators import Fit, margin_ls, ranks, win_share
from arenarl.topologies import PAPER_TOPOLOGIES, TOPOLOGIES
from arenarl.types import Abstention, Game, Verdict

Judge = Callable[[int, int], float | None]  # margin of i over j, None for an outage
DOWN = Abstention(reason="judge is down")
LOG = {n: math.ceil(math.log2(n)) for n in range(2, 34)}
COUNTS = {  # ArenaRL (arXiv 2601.06487), topologies; a bye costs nothing
    "round_robin": lambda n: n * (n - 1) // 2,
    "anchor": lambda n: n - 1,
    "swiss": lambda n: n // 2 * LOG[n],
    "double_elimination": lambda n: 2 * n - 2,
    "single_elimination": lambda n: 2 * n - 2,
}
WAITS = {
    "round_robin": lambda n: 1,
    "anchor": lambda n: 1,
    "swiss": lambda n: LOG[n],
    "double_elimination": lambda n: 2 * LOG[n],
    "single_elimination": lambda n: 1 + LOG[n],
}
sizes = st.integers(2, 33)
seeds = st.integers(0, 2**32 - 1)
permutations = sizes.flatmap(lambda n: st.permutations(range(n)))


def drive(topology, n, judge: Judge, *, seed=0, orders=2, rng=None, down=()) -> tuple[list[list[Game]], Fit]:
    """Rounds of games as played, and the plan's own ranking. ``down`` are the rounds in which the judge is."""
    plan = TOPOLOGIES[topology](n, rng or np.random.default_rng(seed), orders)
    rounds: list[list[Game]] = []
    try:
        pairs = next(plan)
        while True:
            results = [None if len(rounds) in down else judge(i, j) for i, j in pairs]
            verdicts = [DOWN if m is None else Verdict(score_a=m, score_b=0.0) for m in results]
            rounds.append(
                [Game(i=i, j=j, round=len(rounds), result=v) for (i, j), v in zip(pairs, verdicts, strict=True)]
            )
            pairs = plan.send(rounds[-1])
    except StopIteration as end:
        return rounds, end.value


def rank(fit: Fit, n: int, rounds: list[list[Game]]) -> list[float]:
    return ranks(fit(n, decided(rounds)).scores).tolist()


def by_quality(q, i, j) -> float:
    return float(q[i] - q[j])


def tied(i, j) -> float:
    return 0.0


def pairs_of(rounds) -> list[tuple[int, int]]:
    return [(g.i, g.j) for played in rounds for g in played]


def decided(rounds) -> list[Game]:
    return [g for played in rounds for g in played if g.margin is not None]


def connected(n, pairs) -> bool:
    reached = {0}
    for _ in range(n):
        reached |= {k for pair in pairs if reached & set(pair) for k in pair}
    return len(reached) == n


# ---- counts and waits


@pytest.mark.parametrize("orders", [1, 2])
@pytest.mark.parametrize("topology", PAPER_TOPOLOGIES)
def test_games_and_waits_are_those_of_the_paper(topology, orders):
    for n in range(2, 34):
        rounds, _ = drive(topology, n, partial(by_quality, range(n)), seed=n, orders=orders)
        assert (len(pairs_of(rounds)), len(rounds)) == (COUNTS[topology](n), WAITS[topology](n)), n


@pytest.mark.parametrize(("topology", "waits"), [("even_graph", 1), ("info_gain", 4)])
def test_our_own_cost_no_more_calls_than_an_elimination(topology, waits):
    for n in range(2, 34):
        everybody = n * (n - 1) // 2
        for orders, games in ((2, min(2 * n - 2, everybody)), (1, min(4 * n - 4, everybody))):
            rounds, _ = drive(topology, n, partial(by_quality, range(n)), seed=n, orders=orders)
            pairs = pairs_of(rounds)
            assert len(pairs) == games == len({frozenset(p) for p in pairs})
            assert len(rounds) == (waits if games < everybody else 1)


@given(sizes, seeds, st.sampled_from(list(TOPOLOGIES)))
@settings(max_examples=60)
def test_no_plan_sends_a_player_against_itself_and_every_player_plays(n, seed, topology):
    pairs = pairs_of(drive(topology, n, tied, seed=seed)[0])
    assert all(i != j for i, j in pairs)
    assert {k for pair in pairs for k in pair} == set(range(n))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_plan_is_repeatable_and_depends_on_the_seed_where_it_shuffles(topology):
    plans = {}
    for seed in (0, 0, 1, 2, 3):
        pairs = pairs_of(drive(topology, 9, tied, seed=seed)[0])
        assert plans.setdefault(seed, pairs) == pairs
    assert (len(set(map(tuple, plans.values()))) > 1) == (topology not in ("round_robin", "anchor"))


# ---- graphs


@given(sizes, seeds, st.sampled_from([1, 2]))
@settings(max_examples=120)
def test_even_graph_is_connected_and_even_in_games_and_sides(n, seed, orders):
    pairs = pairs_of(drive("even_graph", n, tied, seed=seed, orders=orders)[0])
    games, first = Counter(k for pair in pairs for k in pair), Counter(i for i, _ in pairs)
    assert connected(n, pairs)
    assert max(games.values()) - min(games[k] for k in range(n)) <= 1
    assert all(abs(2 * first[k] - games[k]) == games[k] % 2 for k in range(n))


def test_even_graph_seats_the_players_at_random():
    # five players, each pair but two: what is left out differs
    assert len({frozenset(map(frozenset, pairs_of(drive("even_graph", 5, tied, seed=s)[0]))) for s in range(9)}) > 3


@pytest.mark.parametrize("n", range(2, 12))
def test_round_robin_puts_everybody_on_each_side_equally_often(n):
    sides = Counter(i for i, _ in pairs_of(drive("round_robin", n, tied)[0]))
    assert all(abs(2 * sides[k] - (n - 1)) <= 1 for k in range(n))


@given(sizes, seeds, st.sampled_from(["swiss", "info_gain", "single_elimination", "double_elimination"]))
@settings(max_examples=80)
def test_a_player_takes_the_side_where_it_was_less_often(n, seed, topology):
    q = np.random.default_rng(seed).normal(size=n)
    rounds, _ = drive(topology, n, partial(by_quality, q), seed=seed, orders=1)
    lead = Counter()
    for i, j in pairs_of(rounds[topology == "single_elimination" :]):
        assert lead[i] <= lead[j]
        lead[i] += 1
        lead[j] -= 1


@given(sizes, seeds)
@settings(max_examples=60)
def test_swiss_never_repeats_a_pair_and_byes_rotate(n, seed):
    rng = np.random.default_rng(seed)
    rounds, _ = drive("swiss", n, lambda i, j: float(rng.integers(-1, 2)), seed=seed)
    pairs = pairs_of(rounds)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    played = Counter(k for pair in pairs for k in pair)
    assert all(len(rounds) - played[k] <= n % 2 for k in range(n))


def test_swiss_pairs_winners_with_winners():
    rounds, _ = drive("swiss", 16, partial(by_quality, range(16)), seed=5)
    wins = Counter()
    for played in rounds[:3]:
        assert all(wins[g.i] == wins[g.j] for g in played)
        wins.update(max(g.i, g.j) for g in played)


def test_info_gain_spreads_its_first_round_and_then_asks_for_close_pairs():
    first, last = [], []
    for seed in range(20):
        q = np.random.default_rng(seed).permutation(24)
        rounds, _ = drive("info_gain", 24, partial(by_quality, q), seed=seed, orders=2)
        assert max(Counter(k for pair in pairs_of(rounds[:1]) for k in pair).values()) == 1
        first += [abs(q[g.i] - q[g.j]) for g in rounds[0]]
        last += [abs(q[g.i] - q[g.j]) for g in rounds[-1]]
    assert np.mean(last) < 0.75 * np.mean(first)


# ---- brackets


def test_bracket_keeps_byes_as_byes():
    rounds, paper = drive("single_elimination", 6, partial(by_quality, [6, 5, 4, 3, 2, 1]))
    assert [[{g.i, g.j} for g in played] for played in rounds[1:]] == [[{3, 4}, {2, 5}], [{0, 3}, {1, 2}], [{0, 1}]]
    # levels 3, 2, 1, 1, 0, 0, then the mean margin
    assert rank(paper, 6, rounds) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("n", range(2, 34))
def test_byes_go_to_the_best_seeds_and_the_best_two_meet_last(n):
    rounds, _ = drive("single_elimination", n, partial(by_quality, range(n, 0, -1)))
    byes = 2 ** LOG[n] - n
    assert {k for g in rounds[1] for k in (g.i, g.j)} == set(range(byes, n))
    assert [{g.i, g.j} for g in rounds[-1]] == [{0, 1}]


def test_a_player_without_a_seeding_game_is_seeded_in_the_middle():
    q = [0, 7, 6, 5, 4, 3, 2, 1]
    rounds, paper = drive("single_elimination", 8, lambda i, j: None if {i, j} == {0, 4} else float(q[i] - q[j]))
    assert {0, 1} in [{g.i, g.j} for g in rounds[1]]  # the best seed against the worst, neither of them player 4
    assert rank(paper, 8, rounds)[4] in (2, 3)


@pytest.mark.parametrize("n", range(2, 34))
def test_double_elimination_puts_a_player_out_at_the_second_defeat(n):
    rounds, paper = drive("double_elimination", n, partial(by_quality, range(n)), seed=n)
    assert Counter(min(pair) for pair in pairs_of(rounds)) == Counter({k: 2 for k in range(n - 1)})
    assert rank(paper, n, rounds)[-1] == 0
    assert n == 2 or rank(paper, n, rounds)[-2] == 1


@pytest.mark.parametrize("seed", range(8))
def test_double_elimination_ranks_by_the_round_of_the_second_defeat(seed):
    rounds, paper = drive("double_elimination", 8, partial(by_quality, range(8)), seed=seed)
    out = {k: max(r for r, played in enumerate(rounds) for g in played if k in (g.i, g.j)) for k in range(6)}
    levels = dict(enumerate(np.round(paper(8, decided(rounds)).scores)))
    assert sorted(out.values()) == [1, 1, 2, 2, 3, 4]
    assert [levels[k] for k in sorted(out, key=out.get)] == [0, 0, 1, 1, 2, 3]
    met = [frozenset(pair) for pair in pairs_of(rounds[:3])]
    assert len(set(met)) == len(met)  # those who drop into the lower bracket meet strangers there


def test_a_walkover_is_not_a_win():
    q = [0, 3, 2, 1]  # seeds 1, 2, 3, 0; the final is 1 against 2
    for lost, levels in ({}, [0, 2, 1, 0]), ({1, 2}, [0, 1, 1, 0]):
        rounds, paper = drive("single_elimination", 4, lambda i, j, lost=lost: None if {i, j} == lost else q[i] - q[j])
        assert np.round(paper(4, decided(rounds)).scores).tolist() == levels


@pytest.mark.parametrize("stage", range(1, 5))
@pytest.mark.parametrize("n", [9, 12, 16])
def test_an_outage_of_any_stage_of_a_knock_out_advances_the_better_seeds_without_credit(n, stage):
    rounds, paper = drive("single_elimination", n, partial(by_quality, range(n, 0, -1)), seed=n, down={stage})
    assert len(pairs_of(rounds)) == 2 * n - 2
    assert [{g.i, g.j} for g in rounds[-1]] == [{0, 1}]
    places = rank(paper, n, rounds)
    assert places[0] == 0 and places[1] < 2
    levels = np.round(paper(n, decided(rounds)).scores)
    assert levels[0] == LOG[n] - (
        stage == LOG[n]
    )  # later wins lift past the gap; nobody won a final that was not played
    assert all(levels[k] < stage for g in rounds[stage] for k in (g.i, g.j) if k >= 2 ** (LOG[n] - stage))


def test_a_knock_out_whose_seeding_is_lost_is_seeded_by_the_shuffle():
    first = set()
    for seed in range(12):
        rounds, paper = drive("single_elimination", 9, partial(by_quality, range(9)), seed=seed, down={0})
        assert rank(paper, 9, rounds)[8] == 0
        first.add(frozenset(k for g in rounds[1] for k in (g.i, g.j)))
    assert len(first) > 5


@pytest.mark.parametrize("stage", range(8))
@pytest.mark.parametrize("n", [9, 13])
def test_an_outage_of_any_stage_of_a_double_elimination_leaves_a_whole_tournament(n, stage):
    q = np.random.default_rng(n).permutation(n)
    for seed in range(5):
        rounds, paper = drive("double_elimination", n, partial(by_quality, q), seed=seed, down={stage})
        assert (len(pairs_of(rounds)), len(rounds)) == (2 * n - 2, 8)
        assert all(c <= 2 for c in Counter(g.i if g.margin < 0 else g.j for g in decided(rounds)).values())
        assert round(np.nanmax(paper(n, decided(rounds)).scores)) == 8 - (stage == 7)  # nobody won a lost final


# ---- a perfect judge


@given(permutations, seeds, st.sampled_from([1, 2]))
@settings(max_examples=40)
def test_perfect_judge_puts_the_best_first(q, seed, orders):
    for topology in TOPOLOGIES:
        rounds, paper = drive(topology, len(q), partial(by_quality, q), seed=seed, orders=orders)
        places = rank(margin_ls if topology not in PAPER_TOPOLOGIES else paper, len(q), rounds)
        assert places[q.index(len(q) - 1)] == 0, topology
        if topology in ("single_elimination", "double_elimination"):
            assert places[q.index(len(q) - 2)] == 1, topology


@given(permutations, seeds, st.sampled_from([1, 2]))
@settings(max_examples=40)
def test_perfect_judge_gives_the_perfect_order_where_the_games_determine_it(q, seed, orders):
    order = [len(q) - 1 - k for k in q]
    for topology in TOPOLOGIES:
        rounds, paper = drive(topology, len(q), partial(by_quality, q), seed=seed, orders=orders)
        assert rank(margin_ls, len(q), rounds) == order, topology
        if topology in ("anchor", "round_robin"):
            assert rank(paper, len(q), rounds) == order, topology


@given(st.permutations(range(9)), st.data())
@settings(max_examples=40)
def test_outages_leave_a_perfect_order_perfect_while_the_games_connect_the_players(q, data):
    rounds, _ = drive("round_robin", 9, partial(by_quality, q))
    lost = data.draw(st.sets(st.integers(0, 35)))
    left = [g for k, g in enumerate(rounds[0]) if k not in lost or abs(g.i - g.j) == 1]
    assert rank(margin_ls, 9, [left]) == [8 - k for k in q]


# ---- missing games


def noisy_field(group: int, n: int = 12):
    """Qualities, a judge with logistic noise and a liking for side a, and the pairs, 30 %, that it would not answer."""
    rng = np.random.default_rng(group)
    q, noise, lost = rng.normal(size=n), rng.logistic(size=(n, n)) / 1.5, rng.random((n, n)) < 0.3
    return q, lambda i, j: float(q[i] - q[j] + noise[i, j] + 0.3), lambda i, j: bool(lost[min(i, j), max(i, j)])


def with_outage(judge, lost) -> Judge:
    return lambda i, j: None if lost(i, j) else judge(i, j)


def agreement(games, q) -> float:
    scores, _ = margin_ls(len(q), games)
    known = np.isfinite(scores)
    return float(np.corrcoef(scores[known], q[known])[0, 1])


@pytest.mark.parametrize("topology", ["round_robin", "even_graph", "info_gain"])
def test_an_outage_of_thirty_percent_costs_no_more_than_thirty_percent_fewer_games(topology):
    """Fewer games: as many pairs, taken at random. Seeds 0 to 149; the standard error of the difference is 0.006 to 0.01."""
    outage, fewer = [], []
    for group in range(150):
        q, judge, lost = noisy_field(group)
        rounds, _ = drive(topology, 12, with_outage(judge, lost), seed=group, orders=1)
        outage.append(agreement(decided(rounds), q))
        pairs = np.random.default_rng([1, group]).permutation(list(combinations(range(12), 2))).tolist()
        taken = pairs[: round(0.7 * len(pairs_of(rounds)))]
        verdicts = [Verdict(score_a=judge(i, j), score_b=0.0) for i, j in taken]
        fewer.append(
            agreement([Game(i=i, j=j, round=0, result=v) for (i, j), v in zip(taken, verdicts, strict=True)], q)
        )
    assert 0.8 < np.mean(fewer) < 0.95
    assert np.mean(outage) > np.mean(fewer) - 0.01


@pytest.mark.parametrize("topology", ["swiss", "double_elimination", "single_elimination"])
def test_a_plan_that_is_told_of_an_outage_does_no_worse_than_one_that_loses_its_games_afterwards(topology):
    """Seeds 0 to 399; the standard error of the difference is 0.008 to 0.010."""
    during, after = [], []
    for group in range(400):
        q, judge, lost = noisy_field(group)
        whole, _ = drive(topology, 12, judge, seed=group, orders=1)
        rounds, _ = drive(topology, 12, with_outage(judge, lost), seed=group, orders=1)
        after.append(agreement([g for g in decided(whole) if not lost(g.i, g.j)], q))
        during.append(agreement(decided(rounds), q))
    assert 0.6 < np.mean(after) < 0.9
    assert np.mean(during) > np.mean(after) - 0.02


# ---- labels


class Renamed:
    """A generator that shuffles the same players under other names."""

    def __init__(self, seed: int, to: list[int]) -> None:
        self.rng, self.to = np.random.default_rng(seed), np.array(to)

    def permutation(self, n: int):
        return self.to[self.rng.permutation(n)] if n == len(self.to) else self.rng.permutation(n)

    def random(self) -> float:
        return self.rng.random()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(n=st.integers(1, 8).map(lambda k: 2 * k), seed=seeds, orders=st.sampled_from([1, 2]), data=st.data())
@settings(max_examples=25)
def test_relabelling_the_players_relabels_the_games(topology, n, seed, orders, data):
    """Plans that shuffle know players only by the shuffle; the anchor is by definition player 0.

    With n even no other shuffle of a plan is of the same size.
    """
    table = np.triu(np.random.default_rng(seed).integers(-3, 4, size=(n, n)).astype(float), 1)
    table -= table.T
    seeded = topology in ("anchor", "single_elimination")
    to = [0, *data.draw(st.permutations(range(1, n)))] if seeded else data.draw(st.permutations(range(n)))
    back = np.argsort(to)
    first, paper = drive(topology, n, lambda i, j: table[i, j], orders=orders, rng=Renamed(seed, list(range(n))))
    second, renamed = drive(topology, n, lambda i, j: table[back[i], back[j]], orders=orders, rng=Renamed(seed, to))
    fixed = {"anchor": 1, "round_robin": 1, "single_elimination": 1}.get(topology, 0)  # rounds in the order of the list
    assert pairs_of(second[fixed:]) == [(to[i], to[j]) for i, j in pairs_of(first[fixed:])]
    assert [rank(renamed, n, second)[k] for k in to] == rank(paper, n, first)


@pytest.mark.parametrize("topology", ["swiss", "double_elimination", "single_elimination", "even_graph", "info_gain"])
def test_no_place_in_the_list_is_better_than_another(topology):
    def mean_ranks(q):
        plays = [drive(topology, 6, partial(by_quality, q), seed=seed)[0] for seed in range(150)]
        return np.mean([rank(win_share, 6, rounds) for rounds in plays], axis=0)

    q, to = [0, 3, 1, 2, 2, 0], [5, 4, 3, 2, 1, 0]
    if topology == "single_elimination":
        to = [0, 5, 4, 3, 2, 1]  # player 0 is the anchor by definition
    assert mean_ranks([q[k] for k in to]) == pytest.approx(mean_ranks(q)[to], abs=0.4)
