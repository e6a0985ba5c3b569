"""Drawings of tournaments: brackets with the right games in the right places, and pages that hold whatever was written."""

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arenarl.arena import run_tournament
from arenarl.arena_svg import describe, esc, number, three_digits
from arenarl.arena_view import Section, bracket, view
from arenarl.drawing import draw, step_page
from arenarl.jsonl import dumps
from arenarl.tracking import group_record
from arenarl.types import Abstention, Episode, EpisodeGroup, Game, Outcome, Standings, Task, Trajectory, Verdict

TASK = Task(task_id="t1", kind="k", prompt="Plan a day in Évora.")
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(1)</script>&amp;\"'\x00\x1b[2J\ud800\u202e]]>"


async def played(
    topology: str, n: int, *, lost: tuple[int, ...] = (), tied: bool = False, **fields: Any
) -> EpisodeGroup:
    """A group whose member k is k better than member 0; the games number ``lost`` have no verdict."""
    count = iter(range(10_000))

    async def compare(i: int, j: int) -> Verdict | Abstention:
        if next(count) in lost:
            return Abstention(reason="timeout: 60 s", raw="thinking")
        a, b = (5, 5) if tied else (i, j)
        return Verdict(score_a=a, score_b=b, raw=f"{i} and {j}", dimensions={"depth": (a, b)})

    result = await run_tournament(topology, n, compare, orders=1)
    known = [
        tuple(None if x != x else float(x) for x in values) for values in (result.scores, result.stderr, result.ranks)
    ]
    standings = Standings(
        topology=result.topology, estimator=result.estimator, orders=1, seed=0, scores=known[0], stderr=known[1], ranks=known[2]
    )  # fmt: skip
    return group(n, games=result.games, standings=standings, advantages=tuple(result.advantages), **fields)


def group(n: int, **fields: Any) -> EpisodeGroup:
    nothing = Trajectory(messages=(), events=(), answer="x")
    episodes = tuple(
        Episode(
            episode_id=f"e{k}",
            task=TASK,
            member=k,
            greedy=k == 0,
            segments=(),
            trajectory=nothing,
            outcome=Outcome.SCORED,
        )
        for k in range(n)
    )
    whole: dict[str, Any] = {"group_id": "g7", "task": TASK, "episodes": episodes, "version": 1, **fields}
    return EpisodeGroup(**whole)


def record(of: EpisodeGroup) -> dict:
    """As it is read from the run folder."""
    return json.loads(dumps(group_record(of, step=4)))


def parsed(page: str) -> ET.Element:
    return ET.fromstring(page)


def text(page: str) -> str:
    return " ".join(" ".join(parsed(page).itertext()).split())


def classes(page: str) -> Counter:
    return Counter(name for element in parsed(page).iter() for name in element.get("class", "").split())


def sections(of: EpisodeGroup) -> tuple[Section, ...]:
    return bracket(view(record(of)))


def origins(section: Section) -> Counter:
    return Counter(slot.origin for cell in section.cells for slot in cell.slots)


# -- brackets


@pytest.mark.parametrize(
    ("n", "first_round", "byes", "columns"), [(5, 1, 3, 3), (6, 2, 2, 3), (8, 4, 0, 3), (2, 1, 0, 1)]
)
async def test_a_single_elimination_has_its_games_and_byes(n: int, first_round: int, byes: int, columns: int):
    (section,) = sections(await played("single_elimination", n))
    assert len(section.cells) == n - 1
    assert sum(cell.column == 0 for cell in section.cells) == first_round
    expected = {"start": 2 * first_round, "bye": byes, "game": n - 2}
    assert {origin: origins(section)[origin] for origin in expected} == expected
    assert (section.columns, section.rows) == (columns, n)


@pytest.mark.parametrize(("n", "upper", "lower"), [(5, 5, 3), (6, 6, 4), (8, 8, 6), (16, 16, 14)])
async def test_a_double_elimination_has_two_trees(n: int, upper: int, lower: int):
    top, bottom = sections(await played("double_elimination", n))
    assert (len(top.cells), len(bottom.cells)) == (upper, lower)
    assert (origins(top)["bye"], origins(top)["lower"]) == ({5: 3, 6: 2}.get(n, 0), 1)
    assert origins(bottom)["upper"] == n - 1  # everybody but the best drops once
    assert top.cells[-1].advanced == n - 1


@pytest.mark.parametrize("n", range(2, 34))
@pytest.mark.parametrize("topology", ["single_elimination", "double_elimination"])
async def test_every_game_has_its_place_and_every_winner_goes_on(topology: str, n: int):
    of = await played(topology, n, lost=(n, n + 2, 2 * n - 3))
    found = sections(of)
    cells = [cell for section in found for cell in section.cells]
    assert len(cells) == len(of.games) - (n - 1 if topology == "single_elimination" else 0)
    for section in found:
        places = [(cell.column, cell.row) for cell in section.cells]
        assert len(set(places)) == len(places)
        fed = {slot.feeder: slot.member for cell in section.cells for slot in cell.slots if slot.feeder is not None}
        assert fed == {k: section.cells[k].advanced for k in fed}
        assert len(fed) == len(section.cells) - 1  # all but the last


async def test_a_drawn_game_of_the_upper_bracket_leads_on_where_the_plan_led():
    top, bottom = sections(await played("double_elimination", 8, tied=True))
    semifinals = {cell.advanced for cell in top.cells if cell.column == 1}
    assert {slot.member for cell in top.cells if cell.column == 2 for slot in cell.slots} == semifinals
    dropped = {slot.member for cell in bottom.cells for slot in cell.slots if slot.origin == "upper"}
    assert len(dropped) == 7 and top.cells[-2].advanced not in dropped


async def test_the_bracket_names_the_champion_and_draws_each_state():
    page = draw(record(await played("single_elimination", 6, lost=(6,))))
    pill = [e for e in parsed(page).iter(f"{SVG}text") if e.get("class") == "on-champion"]
    assert [e.text for e in pill] == ["member 5"]
    found = classes(page)
    assert (found["game"], found["lost-game"], found["bye"], found["champion"]) == (4, 1, 2, 1)
    assert "no verdict" in text(page) and "2 has a bye" not in text(page)


async def test_seeding_bars_are_margins_to_the_anchor():
    page = text(draw(record(await played("single_elimination", 4))))
    assert "Seeding: margins to member 0 Seeding games against member 0 3: +3, 2: +2, 1: +1, 0: 0" in page


async def test_the_anchor_of_the_seeding_is_who_met_everybody_from_side_a():
    two = await played("single_elimination", 2)
    games = tuple(replace(game, i={0: 3, 1: 8}[game.i], j={0: 3, 1: 8}[game.j]) for game in two.games)
    assert "Seeding: margins to member 3" in text(draw(record(group(9, games=games, standings=two.standings))))


# -- graph and matrix


async def test_few_pairs_are_a_graph_and_many_a_matrix():
    graph, matrix = draw(record(await played("anchor", 9))), draw(record(await played("round_robin", 9)))
    assert (classes(graph)["edge"], classes(graph)["disc"], classes(graph)["cell"]) == (8, 9, 0)
    assert (classes(matrix)["edge"], classes(matrix)["cell"]) == (0, 72)
    assert classes(draw(record(await played("round_robin", 8))))["edge"] == 28


def of_games(*games: Game, n: int = 3) -> str:
    standings = Standings(
        topology="even_graph", estimator="margin_ls", orders=1, seed=0, scores=(1.0, 0.0, -1.0), stderr=(0.5, 0.5, 0.5), ranks=(0, 1, 2)
    )  # fmt: skip
    return draw(record(group(n, games=games, standings=standings)))


def test_an_edge_shows_who_won():
    def colours(result: Verdict | Abstention) -> set[str]:
        return {"cool", "warm", "tied", "no-verdict"} & {
            e.get("class") for edge in parsed(of_games(Game(i=1, j=0, round=0, result=result))).iter(f"{SVG}g")
            if edge.get("class") == "edge" for e in edge
        }  # fmt: skip

    assert colours(Verdict(score_a=1, score_b=4)) == {"cool"}  # the better placed won
    assert colours(Verdict(score_a=4, score_b=1)) == {"warm"}
    assert colours(Verdict(score_a=4, score_b=4)) == {"tied"}
    assert colours(Abstention(reason="budget")) == {"no-verdict"}


def test_an_edge_is_as_wide_as_its_margin():
    page = of_games(*(Game(i=0, j=j, round=0, result=Verdict(score_a=m, score_b=0)) for j, m in ((1, 1), (2, 4))))
    widths = []
    for edge in parsed(page).iter(f"{SVG}polygon"):
        points = [tuple(map(float, p.split(","))) for p in edge.get("points").split()]
        widths.append(sum((a - b) ** 2 for a, b in zip(points[0], points[3], strict=True)) ** 0.5)
    assert widths == pytest.approx([2 * (1.2 + 5 / 4), 2 * (1.2 + 5)], abs=0.2)


# -- table, games, page


async def test_the_table_has_place_score_reward_advantage_and_who_did_not_play():
    of = await played("round_robin", 3, rewards=(0.0, 0.5, 1.0))
    gated = replace(
        of,
        episodes=group(4).episodes,
        rewards=(0.0, 0.5, 1.0, None),
        advantages=(-1.25, 0.0, 1.25, None),
        standings=replace(of.standings, gated=("", "", "", "no_answer")),
    )
    rows = [
        [" ".join("".join(td.itertext()).split()) for td in tr]
        for tr in parsed(draw(record(gated))).iter("{http://www.w3.org/1999/xhtml}tr")
    ]
    assert rows[1][:3] == ["1", "member 2", "1.00"]
    assert rows[1][4:] == ["1.000", "+1.25", "2 won"]
    assert rows[3][5:] == ["\N{MINUS SIGN}1.25", "2 lost"]
    assert rows[4] == ["–", "member 3", "–", "", "–", "–", "did not play: no_answer"]


def test_both_orders_and_their_flip_are_shown():
    halves = (Verdict(score_a=7, score_b=5, raw="a is deeper"), Verdict(score_a=8, score_b=5, raw="a is clearer"))
    game = Game(i=0, j=1, round=2, result=Verdict(score_a=12, score_b=13), halves=halves)
    page = text(of_games(game))
    assert "+2 / \N{MINUS SIGN}3" in page and "flipped" in page and "12 : 13" in page
    assert "0 first: a is deeper" in page and "1 first: a is clearer" in page
    assert "flipped" not in text(of_games(replace(game, halves=(halves[0], replace(halves[1], score_b=9)))))


def test_the_judges_json_is_read_and_a_long_text_folds():
    raw = 'Here: {"path": {"comment": "no route", "marks": {"a": 3}}, "answer": ["late", {"x": "dear"}]}'
    words = view(record(group(2, games=(Game(i=0, j=1, round=0, result=Verdict(score_a=1, score_b=0, raw=raw)),))))
    assert words.matches[0].words == ("path comment: no route\nanswer: late\nanswer x: dear",)
    page = of_games(Game(i=0, j=1, round=0, result=Verdict(score_a=1, score_b=0, raw="x" * 5000)))
    assert classes(page)["words"] == 1 and "x" * 2000 + " …" in page and "x" * 2001 not in page


def test_the_words_of_a_page_share_a_budget():
    halves = (Verdict(score_a=1, score_b=0, raw="x" * 900), Verdict(score_a=1, score_b=0, raw="y" * 900))
    games = tuple(Game(i=0, j=1, round=0, result=Verdict(score_a=1, score_b=1), halves=halves) for _ in range(10))
    pages = {w: step_page([record(group(2, games=games))], words=w) for w in (None, 100_000, 2000)}
    longest = {w: len(max(re.findall("x+|y+", page), key=len)) for w, page in pages.items()}
    assert longest == {None: 900, 100_000: 900, 2000: 100}


def test_a_dimension_that_is_no_number_is_a_dash():
    result = Verdict(score_a=1, score_b=0, dimensions={"depth": (float("nan"), 2.0)})
    assert "depth – : 2" in text(draw(record(group(2, games=(Game(i=0, j=1, round=0, result=result),)))))


@pytest.mark.parametrize("raw", ['{"a":' * 100_000 + "}", "{}", "{", "}{", '{"a": 1}', "[1]"])
def test_words_that_are_no_json_are_shown_as_they_are(raw: str):
    game = Game(i=0, j=1, round=0, result=Verdict(score_a=1, score_b=0, raw=raw))
    assert view(record(group(2, games=(game,)))).matches[0].words[0][:2000] == raw[:2000]


@pytest.mark.parametrize("topology", ["single_elimination", "double_elimination", "even_graph", "round_robin"])
async def test_hostile_text_stays_text(topology: str):
    of = await played(topology, 9, task=replace(TASK, prompt=HOSTILE, task_id=HOSTILE), group_id=HOSTILE)
    result = Verdict(score_a=1, score_b=0, raw=HOSTILE, dimensions={HOSTILE: (1, 0)})
    bad = Abstention(reason=HOSTILE, raw=HOSTILE)
    games = tuple(replace(game, result=bad if k % 3 else result) for k, game in enumerate(of.games))
    standings = replace(of.standings, gated=(HOSTILE, *[""] * 8))
    page = step_page([record(replace(of, games=games, standings=standings)) | {"step": HOSTILE}] * 2)
    assert not {e.tag.rpartition("}")[2] for e in parsed(page).iter()} & {"script", "img", "iframe"}
    assert not re.search(r"<script|[\x00-\x08\x0b-\x1f\ud800-\udfff\u202e]", page)
    assert "<script>alert(1)</script>" in text(page)
    page.encode()


def test_escaping():
    assert esc('<a href="x">&\'') == "&lt;a href=&quot;x&quot;&gt;&amp;&#x27;"
    assert (
        esc("a\x00b\u202ec\ud800d\té\n", 9)
        == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c\N{REPLACEMENT CHARACTER}d\té …"
    )


@pytest.mark.parametrize(
    "topology",
    ["anchor", "round_robin", "swiss", "even_graph", "info_gain", "single_elimination", "double_elimination"],
)
@pytest.mark.parametrize("n", [2, 3, 7, 33])
async def test_every_topology_and_size_is_a_page(topology: str, n: int):
    of = await played(topology, n, lost=(1, 2, n + 1))
    page = draw(record(of))
    assert draw(group_record(of, step=4)) == page  # fresh or read back
    ids = [e.get("id") for e in parsed(page).iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    pictures = [e for e in parsed(page).iter(f"{SVG}svg") if e.get("aria-labelledby")]
    assert pictures and all(set(e.get("aria-labelledby", "").split()) <= set(ids) for e in pictures)
    told = set(re.findall(r"round \d+: member \d+ on side a, member \d+ on side b", page))
    assert told == {f"round {g.round + 1}: member {g.i} on side a, member {g.j} on side b" for g in of.games}


@pytest.mark.parametrize("topology", ["single_elimination", "double_elimination", "even_graph", "round_robin"])
async def test_an_outage_is_a_page(topology: str):
    page = draw(record(await played(topology, 5, lost=tuple(range(100)))))
    assert "Infinity" not in page and "nan" not in page
    assert classes(page)["champion"] == 0


def test_a_group_without_games_or_standings_is_a_page():
    assert "No games were played." in text(draw(record(group(2))))
    older = draw({"group_id": "g", "games": [{"i": 0, "j": 1, "round": 0, "result": {"score_a": 1.0, "score_b": 0.0}}]})
    assert classes(older)["edge"] == 1 and "2 players, 1 game in 1 round" in text(older)
    assert "Arena" in text(step_page([]))


async def test_a_page_of_several_groups_lists_them():
    groups = [record(await played("anchor", 3, group_id=f"g{k}")) for k in (1, 2)]
    links = {e.get("href"): e.text for e in parsed(step_page(groups)).iter("{http://www.w3.org/1999/xhtml}a")}
    assert links == {"#g0": "g1", "#g1": "g2"}
    assert "<nav>" not in step_page(groups[:1]) and "Arena, step 4" in text(step_page(groups))


def test_numbers():
    assert [number(v) for v in (None, 0.1 + 0.2, -1.0, 0.0)] == ["–", "0.3", "\N{MINUS SIGN}1", "0"]
    assert [number(v, "+.2f") for v in (0.0, 2.5, -1e-9, -0.006)] == ["0.00", "+2.50", "0.00", "\N{MINUS SIGN}0.01"]
    assert [three_digits(*v) for v in ((0.5, -3.0), (12.0,), (0.02,), (1234.0,), (0.0,))] == [
        ".2f",
        ".1f",
        ".4f",
        ".0f",
        ".0f",
    ]


def test_a_game_is_described():
    result = Verdict(score_a=7, score_b=5.5, dimensions={"depth": (8, 6)}, raw="well")
    match = view(record(group(4, games=(Game(i=3, j=0, round=1, result=result),)))).matches[0]
    assert describe(match) == "round 2: member 3 on side a, member 0 on side b\n7 : 5.5, margin +1.5\ndepth 8 : 6\nwell"


MARK = st.integers(0, 3).map(float)
ANSWER = st.one_of(
    st.builds(Verdict, score_a=MARK, score_b=MARK, raw=st.text(max_size=9)),
    st.builds(Abstention, reason=st.text(max_size=9)),
)
GAMES = st.lists(
    st.builds(
        lambda sides, result, halves: Game(i=sides[0], j=sides[1], round=0, result=result, halves=tuple(halves)),
        st.permutations(range(6)),
        ANSWER,
        st.one_of(st.just([]), st.lists(ANSWER, min_size=2, max_size=2)),
    ),
    max_size=12,
)
TABLE = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=6, max_size=6).map(tuple)


@settings(max_examples=30)
@given(
    GAMES, st.sampled_from(["single_elimination", "double_elimination", "even_graph", ""]), TABLE, TABLE, st.booleans()
)
def test_any_record_is_a_page(games: list[Game], topology: str, scores: tuple, stderr: tuple, in_rounds: bool):
    stderr = tuple(None if e is None else abs(e) for e in stderr)
    if in_rounds:
        games = [replace(game, round=k // 2) for k, game in enumerate(games)]
    standings = Standings(
        topology=topology, estimator="paper", orders=2, seed=0, scores=scores, stderr=stderr, ranks=scores
    )
    page = draw(record(group(6, games=tuple(games), standings=standings)))
    assert f"{len(games)} game" in text(page)
