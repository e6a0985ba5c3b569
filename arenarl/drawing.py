"""Tournaments as a web page that stands alone: a drawing, a table of the members, the games with the judge's words.

The page is well-formed XML, has no script, fetches nothing, and follows the reader's choice of light or dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from arenarl.arena_svg import esc, number, picture, three_digits
from arenarl.arena_view import WORDS, ArenaView, Match, Member, view

OPEN_GAMES = 40
NBSP = "\N{NO-BREAK SPACE}"

STYLE = """
:root { color-scheme: light dark; --page: #f6f6f4; --card: #ffffff; --ink: #22262b; --soft: #6a727c; --line: #dcdfe3;
  --cool: #2f74a8; --warm: #c8642b; --dull: #a3a9b1; --on: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1c2024; --ink: #e4e7ea; --soft: #98a1ab;
  --line: #343a41; --cool: #6cb0e0; --warm: #e8935f; --dull: #727a84; --on: #10151a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Noto Sans", sans-serif; }
main { max-width: 1500px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 22px; font-weight: 650; margin: 0 0 16px; }
h2 { font-size: 17px; font-weight: 650; margin: 0; overflow-wrap: anywhere; }
h3 { font-size: 13px; font-weight: 600; margin: 0 0 8px; color: var(--soft); }
nav ol { columns: 2 420px; margin: 0 0 20px; padding-left: 22px; }
a { color: var(--cool); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px; margin: 0 0 24px; }
.about { color: var(--soft); margin: 2px 0 10px; }
.prompt { margin: 0 0 18px; padding: 8px 14px; border-left: 3px solid var(--line); white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 9.2em; overflow-y: auto; }
.sides { display: flex; flex-wrap: wrap; gap: 20px 40px; align-items: flex-start; }
.picture { overflow-x: auto; min-width: 0; max-width: 100%; }
.table { overflow-x: auto; flex: 1 1 540px; min-width: 0; }
table { border-collapse: collapse; width: 100%; max-width: 1000px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 12px; white-space: nowrap; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { white-space: nowrap; }
td.wrap { white-space: normal; min-width: 110px; }
tr:last-child > td { border-bottom: 0; }
td.n, th.n { text-align: right; }
td.gated, .none, .soft { color: var(--soft); }
td.words { white-space: normal; min-width: 280px; width: 60%; overflow-wrap: anywhere; }
td.words p { margin: 0; white-space: pre-wrap; }
tr.lost td { color: var(--soft); }
details.seeding { margin: 0 0 14px 12px; }
details.games table { max-width: none; }
details.games { margin-top: 20px; overflow-x: auto; }
summary { cursor: pointer; }
details.games > summary, details.seeding > summary { font-weight: 600; color: var(--soft); margin-bottom: 6px; }
.dim { display: inline-block; margin: 0 6px 3px 0; padding: 0 7px; border: 1px solid var(--line); border-radius: 9px;
  font-size: 12px; color: var(--soft); }
.flip { color: var(--warm); font-weight: 600; }
b.up { color: var(--cool); } b.down { color: var(--warm); }
.legend { list-style: none; margin: 8px 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 12px;
  color: var(--soft); max-width: 560px; }
.key { display: inline-block; width: 18px; height: 9px; border-radius: 2px; margin-right: 6px; background: currentColor; }
.key.cool { background: var(--cool); } .key.warm { background: var(--warm); } .key.dull { background: var(--dull); height: 3px;
  vertical-align: 3px; } .key.dash { background: none; border-top: 2px dashed var(--dull); height: 4px; border-radius: 0; }
svg { display: block; max-width: none; } .picture svg { margin-bottom: 8px; }
svg text { fill: var(--ink); font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
svg .head { font-weight: 600; fill: var(--soft); } svg .small { font-size: 11px; fill: var(--soft); }
svg .num { font-variant-numeric: tabular-nums; } svg .won, svg .node { font-weight: 650; } svg .out { fill: var(--soft); }
.box, .disc { fill: var(--card); stroke: var(--line); } .rule { stroke: var(--line); fill: none; }
.mark { stroke: var(--cool); stroke-width: 3; stroke-linecap: round; }
.lost-game .box { stroke: var(--dull); stroke-dasharray: 4 3; } .tie-game .box { stroke: var(--dull); }
.game:hover .box, .tie-game:hover .box, .lost-game:hover .box { stroke: var(--cool); }
.way { fill: none; stroke: var(--dull); stroke-width: 1.5; } .lost-way { stroke-dasharray: 5 4; }
.bye { fill: none; stroke: var(--line); stroke-dasharray: 3 3; }
.champion { fill: var(--cool); } svg .on-champion { fill: var(--on); font-weight: 650; }
svg .cool, .fill { fill: var(--cool); } svg .warm { fill: var(--warm); }
.disc { stroke: var(--cool); stroke-width: 1.5; }
.edge { opacity: .62; } .edge:hover { opacity: 1; } .edge polygon:hover { stroke: var(--ink); }
path.tied { stroke: var(--dull); stroke-width: 2; } path.no-verdict { stroke: var(--dull); stroke-dasharray: 4 4; }
rect.tied { fill: var(--dull); } rect.no-verdict { fill: none; stroke: var(--dull); stroke-dasharray: 3 2; }
.cell:hover { stroke: var(--ink); }
.whisker { stroke: var(--ink); stroke-width: 1.2; fill: none; opacity: .75; }
"""


def draw(record: Mapping[str, Any]) -> str:
    """The page of one group.

    Args:
        record: a line of `groups.jsonl`, or what `arenarl.tracking.group_record` makes. Games and standings may be missing.
    """
    return step_page([record])


def step_page(records: Sequence[Mapping[str, Any]], *, words: int | None = None) -> str:
    """The page of several groups, one below the other; with more than one a list of them comes first.

    Args:
        words: characters of all that judges wrote, shared out evenly among their answers; None for no such bound.
    """
    answers = sum(len(game.get("halves") or (1,)) for record in records for game in record.get("games") or ())
    share = WORDS if words is None else min(WORDS, words // max(answers, 1))
    tournaments = [view(record, share) for record in records]
    steps = sorted({tournament.step for tournament in tournaments if tournament.step is not None})
    title = esc(f"Arena, step {', '.join(map(str, steps))}" if steps else "Arena")
    entries = "".join(
        f'<li><a href="#g{k}">{esc(t.group_id or "group", 80)}</a> <span class="soft">{esc(t.task_id, 80)}</span></li>'
        for k, t in enumerate(tournaments)
    )
    contents = f"<nav><ol>{entries}</ol></nav>" if len(tournaments) > 1 else ""
    sections = "".join(_section(tournament, f"g{k}") for k, tournament in enumerate(tournaments))
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main><h1>{title}</h1>{contents}{sections}</main></body></html>\n"
    )


def _section(tournament: ArenaView, key: str) -> str:
    prompt = f'<p class="prompt">{esc(tournament.prompt, 4000)}</p>' if tournament.prompt else ""
    about = " · ".join(filter(None, (tournament.task_id, tournament.summary)))
    return (
        f'<section id="{key}"><h2>{esc(tournament.group_id or "group")}</h2><p class="about">{esc(about)}</p>{prompt}'
        f'<div class="sides"><div class="picture">{picture(tournament, key)}</div>'
        f'<div class="table">{_members(tournament)}</div></div>{_games(tournament)}</section>'
    )


# -- the table of members


def _members(tournament: ArenaView) -> str:
    low, high = tournament.score_range
    form = three_digits(low, high)
    rows = "".join(_member(member, low, high, form) for member in tournament.members)
    return (
        '<table><thead><tr><th>Place</th><th>Member</th><th class="n">Score</th><th>± standard error</th><th class="n">Reward</th>'
        f'<th class="n">Advantage</th><th>Games</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _member(member: Member, low: float, high: float, form: str) -> str:
    style = "up" if (member.advantage or 0.0) > 0 else "down"
    advantage = number(member.advantage, "+.2f")
    if member.advantage:
        advantage = f'<b class="{style}">{advantage}</b>'
    if member.gated:
        played = f'<td class="gated wrap">did not play: {esc(member.gated, 40)}</td>'
    else:
        counts = {name: len(others) for name, others in member.results().items()}
        words = {"beat": "won", "tied": "tied", "lost to": "lost", "no verdict": "no verdict"}
        played = f"<td class='wrap'>{esc(', '.join(f'{count} {words[name]}'.replace(' ', NBSP) for name, count in counts.items()) or 'none')}</td>"
    return (
        f"<tr><td>{member.place}</td><td>member {member.index}</td>"
        f'<td class="n">{number(member.score, form)}</td><td>{_bar(member, low, high)}</td>'
        f'<td class="n">{number(member.reward, ".3f")}</td><td class="n">{advantage}</td>{played}</tr>'
    )


def _bar(member: Member, low: float, high: float) -> str:
    """The score from 0, and one standard error to both sides."""
    if member.score is None or high <= low:
        return ""

    def x(value: float) -> float:
        return 4 + 142 * (value - low) / (high - low)

    start, end = sorted((x(0.0), x(member.score)))
    whisker = ""
    if member.stderr is not None:
        a, b = x(member.score - member.stderr), x(member.score + member.stderr)
        whisker = f'<path class="whisker" d="M{a:.1f} 6v8M{b:.1f} 6v8M{a:.1f} 10H{b:.1f}"/>'
    return (
        f'<svg width="150" height="20" viewBox="0 0 150 20" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{number(member.score)} ± {number(member.stderr)}</title>"
        f'<rect class="{"cool" if member.score >= 0 else "warm"}" x="{start:.1f}" y="4" width="{end - start:.1f}" height="12" '
        f'rx="2" fill-opacity="0.6"/><path class="rule" d="M{x(0.0):.1f} 1v18"/>{whisker}</svg>'
    )


# -- the list of games


def _games(tournament: ArenaView) -> str:
    if not tournament.matches:
        return ""
    state = ' open="open"' if len(tournament.matches) <= OPEN_GAMES else ""
    rows, marks = "".join(map(_game, tournament.matches)), "Marks, summed" if tournament.orders == 2 else "Marks"
    return (
        f'<details class="games"{state}><summary>Games ({len(tournament.matches)})</summary><table><thead><tr><th>Round</th>'
        f'<th>Side a</th><th>Side b</th><th class="n">{marks}</th><th class="n">Margin</th><th class="n">In each order</th>'
        f"<th>The judge</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )


def _game(match: Match) -> str:
    names = [f"<b>member {k}</b>" if k == match.winner else f"member {k}" for k in (match.i, match.j)]
    marks = "–" if match.marks is None else " : ".join(map(number, match.marks))
    margin = "no verdict" if match.margin is None else "tie" if not match.margin else number(match.margin, "+.3g")
    halves = " / ".join(number(half, "+.3g") for half in match.halves)
    flip = '<br/><span class="flip">flipped</span>' if match.flipped else ""
    dimensions = "".join(
        f'<span class="dim">{esc(name, 60)} {number(a)} : {number(b)}</span>'
        for name, (a, b) in match.dimensions.items()
    )
    row = '<tr class="lost">' if match.margin is None else "<tr>"
    return (
        f"{row}<td>{match.round + 1}</td>"
        f'<td>{names[0]}</td><td>{names[1]}</td><td class="n">{marks}</td><td class="n">{margin}</td>'
        f'<td class="n">{halves}{flip}</td><td class="words">{dimensions}{"".join(_words(match))}</td></tr>'
    )


def _words(match: Match) -> Iterator[str]:
    """What the judge wrote; the rest of a long text unfolds."""
    both = len(match.words) > 1
    for k, words in enumerate(match.words):
        if words:
            text = f"{match.i} first: {words}" if both and k == 0 else f"{match.j} first: {words}" if both else words
            if len(text) <= 180:
                yield f"<p>{esc(text)}</p>"
            else:
                yield f"<details><summary>{esc(text, 130)}</summary><p>{esc(text)}</p></details>"
