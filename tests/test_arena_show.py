"""`arenarl arena show`: what it prints, the page it writes, and what it refuses."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_drawing import HOSTILE, group, played

from arenarl.arena_show import show
from arenarl.errors import ConfigError
from arenarl.tracking import RunFolder
from arenarl.types import EpisodeGroup, Game, Standings, Task, Verdict


def run_of(folder: Path, **steps: list[EpisodeGroup]) -> Path:
    """A run folder with the groups of each step, as ``s4=[...]``."""
    run = RunFolder(folder / "run")
    for name, groups in steps.items():
        for each in groups:
            run.append_group(each, step=int(name[1:]))
    return run.path


def shown(run: Path, step: int | None = None, *, width: int = 100, encoding: str = "utf-8", **options: object) -> str:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding, write_through=True), width=width)
    assert show(run, step, console, **options) == 0
    return raw.getvalue().decode(encoding)


def ladder(output: str) -> list[list[str]]:
    """The lines of the table, cut where two blanks are: place and member first."""
    lines = (re.split(r"  +", line.strip()) for line in output.splitlines())
    return [line for line in lines if re.fullmatch(r"[\d.–]+", line[0]) and len(line) > 3]


def seeded_four() -> EpisodeGroup:
    """Semifinals 3 over 0 by 3, and 2 and 1 level; final 3 over 2 by 1."""
    played = [(0, 1, 0, 1), (0, 2, 0, 2), (0, 3, 0, 3), (3, 0, 1, -3), (1, 2, 1, 0), (2, 3, 2, 1)]
    games = tuple(Game(i=i, j=j, round=r, result=Verdict(score_a=5 - m, score_b=5)) for i, j, r, m in played)
    standings = Standings(
        topology="single_elimination", estimator="paper", orders=1, seed=0, scores=(-0.5, 0.0, 1.0, 2.0),
        stderr=(None, 0.5, 0.5, 0.5), ranks=(3, 2, 1, 0),
    )  # fmt: skip
    return group(
        4, games=games, standings=standings, rewards=(0.0, 1 / 3, 2 / 3, 1.0), advantages=(-1.34, -0.45, 0.45, 1.34)
    )


def test_a_bracket_shows_the_way_of_each_and_the_margin(tmp_path: Path):
    output = shown(run_of(tmp_path, s4=[seeded_four()]))
    lines = [line.rstrip() for line in output.split("Bracket\n")[1].splitlines()[:7]]
    assert lines == [
        "1 ───────┐",
        "         ├ 2 (tie) ─┐",
        "2 ───────┘          │",
        "                    ├ 3 (+1)",
        "3 ───────┐          │",
        "         ├ 3 (+3) ──┘",
        "0 ───────┘",
    ]
    assert "single_elimination + paper · 4 players, 6 games in 3 rounds · each pair asked once · 1 tie" in output


def test_the_ladder_has_places_scores_and_results(tmp_path: Path):
    rows = ladder(shown(run_of(tmp_path, s4=[seeded_four()]), width=130))
    assert [row[:2] for row in rows] == [["1", "3"], ["2", "2"], ["3", "1"], ["4", "0"]]
    assert rows[0][3:] == ["2.00", "0.50", "1.000", "+1.34", "beat 0 0 2"]
    assert rows[3][3:] == ["\N{MINUS SIGN}0.50", "–", "0.000", "\N{MINUS SIGN}1.34", "lost to 1 2 3 3"]
    assert [row[2] for row in rows] == ["█" * 14 + "▒" * 4 + "─" * 5, "█" * 4 + "▒" * 5 + "─" * 5, "─" * 9, "█" * 5]


async def test_ties_outages_and_gates_are_named(tmp_path: Path):
    of = await played("round_robin", 3, tied=True, lost=(0,))
    gated = replace(
        of, episodes=group(4).episodes, advantages=(), standings=replace(of.standings, gated=("", "", "", "truncated"))
    )
    output = shown(run_of(tmp_path, s0=[gated]), width=150)
    assert "did not play: truncated" in output
    assert "2 ties · 1 without a verdict" in output
    assert "no verdict" in output and "tied" in output


async def test_the_last_step_with_games_is_the_default(tmp_path: Path):
    run = run_of(tmp_path, s1=[await played("anchor", 2)], s3=[await played("anchor", 4)] * 2, s5=[group(2)])
    output = shown(run)
    assert output.count("step 3, group g7") == 2
    assert (run / "arena" / "step-3.html").read_text(encoding="utf-8").count("<section") == 2
    assert str(run / "arena" / "step-3.html") in output.replace("\n", "")
    assert "step 1," in shown(run, 1) and "step 5," in shown(run, 5)


async def test_the_page_goes_where_it_is_told(tmp_path: Path):
    run = run_of(tmp_path, s1=[await played("anchor", 2)])
    shown(run, 1, out=tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert not (run / "arena").exists()
    with pytest.raises(ConfigError, match=r"cannot be written.*--out"):
        shown(run, 1, out=tmp_path)


async def test_a_bracket_that_is_too_wide_is_left_out(tmp_path: Path):
    run = run_of(tmp_path, s0=[await played("double_elimination", 16)])
    assert "Lower bracket" in shown(run, width=200)
    narrow = shown(run, width=70)
    assert "Lower bracket" not in narrow and len(ladder(narrow)) == 16


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
async def test_hostile_text_cannot_move_the_cursor(tmp_path: Path, encoding: str):
    of = await played("double_elimination", 5, lost=(1,), group_id=HOSTILE)
    of = replace(of, task=replace(of.task, prompt=HOSTILE + "[bold]x[/bold]"))
    output = shown(run_of(tmp_path, s0=[of]), encoding=encoding)
    assert "\x1b" not in output and "\u202e" not in output and "[bold]x[/bold]" in output
    assert "Upper bracket and final" in output


@pytest.mark.parametrize(("encoding", "end"), [("utf-8", "…"), ("ascii", ".")])
async def test_a_long_prompt_is_cut_to_two_lines(tmp_path: Path, encoding: str, end: str):
    of = await played("anchor", 2, task=Task(task_id="t", kind="k", prompt="x" * 1000))
    output = shown(run_of(tmp_path, s0=[of]), width=100, encoding=encoding)
    assert "".join(re.findall("x+.?", output)) == "x" * 199 + end


async def test_what_cannot_be_shown_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "groups.jsonl").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "groups.jsonl").write_text('nonsense\n{"step": 1}\n')
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "groups.jsonl").write_text('{"games": []}\n')
    run = run_of(tmp_path, **{f"s{k}": [await played("anchor", 2)] for k in (1, 2, 3, 7)})
    pointwise = run_of(tmp_path / "grpo", s1=[group(2)])
    for folder, step, message in (
        (tmp_path / "none", None, "none' does not exist; give the folder of a run"),
        (tmp_path / "empty", None, "has no groups.jsonl; give"),
        (tmp_path / "fresh", None, "no group yet; wait"),
        (tmp_path / "broken", None, "groups.jsonl.*line 1.*; repair"),
        (tmp_path / "foreign", None, "groups.jsonl' cannot be read .a line without a step"),
        (run, 5, "step 5 is not in run .*; it has 1 to 3, 7: give one"),
        (pointwise, None, "has no games: its algorithm plays none, as GRPO; give"),
    ):
        with pytest.raises(ConfigError, match=message):
            shown(folder, step)
