"""Pictures of a tournament as inline SVG: a bracket, a graph of who beat whom, a matrix where the graph would be a ball.

Colours are classes of `arenarl.drawing.STYLE`. All text goes through `esc`, since judges and tasks write what they like.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence

from arenarl.arena_view import ArenaView, Cell, Match, Member, Section, bracket

BOX, LINE, GAP, LEAF = 148, 25, 80, 31  # a game's width, the height of a side, the way to the next game, rows of leaves
UNSAFE = r"[^\t\n -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"


def esc(text: object, limit: int = 100_000) -> str:
    """Text for HTML and XML, in attributes too: no markup, no control characters, no change of direction."""
    text = str(text)
    text = text if len(text) <= limit else text[:limit] + " …"
    return html.escape(re.sub(UNSAFE, "\N{REPLACEMENT CHARACTER}", text))


def number(value: float | None, form: str = ".3g") -> str:
    """A number as it is shown: a minus that is one, a zero without a sign, a dash for a missing value."""
    if value is None:
        return "–"
    shown = format(value, form)
    return shown.replace("-", "\N{MINUS SIGN}") if float(shown) else shown.lstrip("+-")


def three_digits(*values: float) -> str:
    """The form that gives the largest of the values three digits, and all the same decimals."""
    largest = max(map(abs, values))
    return f".{min(4, max(0, 2 - math.floor(math.log10(largest)))) if largest else 0}f"


def picture(tournament: ArenaView, key: str) -> str:
    """The drawing that suits the topology; ``key`` makes its ids unique on the page."""
    sections, players, matches = bracket(tournament), tournament.players, tournament.matches
    if not matches:
        return '<p class="none">No games were played.</p>'
    if sections:
        before = _seeding(tournament, f"{key}-s") if tournament.seeding else ""
        return before + "".join(_bracket(section, f"{key}-{k}") for k, section in enumerate(sections))
    pairs = {frozenset((match.i, match.j)) for match in matches}
    dense = len(players) > 8 and 4 * len(pairs) > len(players) * (len(players) - 1)
    return _matrix(tournament, key) if dense else _graph(tournament, key)


def describe(match: Match) -> str:
    """A game in a few lines, for a title that shows on hovering."""
    lines = [f"round {match.round + 1}: member {match.i} on side a, member {match.j} on side b"]
    if match.marks is None:
        lines.append("no verdict")
    else:
        a, b = match.marks
        lines.append(f"{number(a)} : {number(b)}, margin {number(match.margin, '+.3g')}")
    lines += [f"{name} {number(a)} : {number(b)}" for name, (a, b) in match.dimensions.items()]
    if match.flipped:
        lines.append("the winner changed with the order")
    return "\n".join([*lines, *(words[:200] for words in match.words)])


def _svg(width: float, height: float, key: str, title: str, description: str, body: Sequence[str]) -> str:
    return (
        f'<svg role="img" aria-labelledby="{key}-t {key}-d" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" xmlns="http://www.w3.org/2000/svg">'
        f'<title id="{key}-t">{esc(title)}</title><desc id="{key}-d">{esc(description)}</desc>{"".join(body)}</svg>'
    )


def _text(x: float, y: float, text: object, style: str = "", anchor: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    place = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{place}>{esc(text)}</text>'


# -- brackets


def _bracket(section: Section, key: str) -> str:
    """A game is a box with its two sides; the line to the next game carries the margin."""
    left = 12.0
    body = [part for cell in section.cells for part in _cell(section, cell, left)]
    width, height = left + section.columns * (BOX + GAP) + BOX - 12, section.rows * LEAF + 42
    order = ", ".join(
        f"round {cell.match.round + 1} {cell.match.i} against {cell.match.j}"
        + ("" if cell.advanced is None else f" to {cell.advanced}")
        for cell in section.cells
    )
    return _svg(width, height, key, section.title, order, [_text(left, 18, section.title, "head"), *body])


def _cell(section: Section, cell: Cell, left: float) -> Iterator[str]:
    match, x, y = cell.match, left + cell.column * (BOX + GAP), _y(cell.row)
    marks = dict(zip((match.i, match.j), match.marks or (None, None), strict=True))
    state = "lost-game" if match.margin is None else "tie-game" if match.winner is None else "game"
    yield f'<g class="{state}"><title>{esc(describe(match))}</title>'
    yield f'<rect class="box" x="{x:.1f}" y="{y - LINE:.1f}" width="{BOX}" height="{2 * LINE}" rx="7"/>'
    yield f'<path class="rule" d="M{x:.1f} {y:.1f}h{BOX}"/>'
    for k, slot in enumerate(cell.slots):
        base = y - 8 if k == 0 else y + LINE - 8
        style = "won" if slot.member == cell.advanced else "out"
        if slot.member == match.winner:
            yield f'<path class="mark" d="M{x + 1.5:.1f} {base - 13:.1f}v17"/>'
        yield _text(x + 11, base, f"member {slot.member}", style)
        yield _text(x + BOX - 9, base, number(marks[slot.member]), style + " num", "end")
    yield "</g>"
    yield from _leaves(section, cell, x, y)
    yield from _way_on(section, cell, x, y, left)


def _leaves(section: Section, cell: Cell, x: float, y: float) -> Iterator[str]:
    """Where a side came from if not out of a game of this section."""
    for k, slot in enumerate(cell.slots):
        at = y + (k - 0.5) * LINE
        if slot.origin == "bye":
            yield f'<rect class="bye" x="{x - GAP - 92:.1f}" y="{_y(slot.row) - 11:.1f}" width="92" height="22" rx="11"/>'
            yield _text(x - GAP - 46, _y(slot.row) + 4, f"{slot.member} has a bye", "small", "middle")
            yield _elbow("way", x - GAP, _y(slot.row), x, at)
        elif slot.origin in ("upper", "lower") and cell.column:
            yield _text(x - 8, at + 4, f"{slot.origin} →", "small", "end")


def _way_on(section: Section, cell: Cell, x: float, y: float, left: float) -> Iterator[str]:
    """The line to the game that the winner, or who went on, plays next; at the end of the tree, a pill with its winner."""
    match, number_of = cell.match, section.cells.index(cell)
    label = "no verdict" if match.margin is None else "tie" if not match.margin else number(abs(match.margin), "+.3g")
    style = "way lost-way" if match.margin is None else "way tie-way" if not match.margin else "way"
    yield _text(x + BOX + 5, y - 5, label, "small")
    for later in section.cells:
        for k, slot in enumerate(later.slots):
            if slot.feeder == number_of:
                yield _elbow(style, x + BOX, y, left + later.column * (BOX + GAP), _y(later.row) + (k - 0.5) * LINE)
                return
    yield f'<path class="{style}" d="M{x + BOX:.1f} {y:.1f}h{GAP}"/>'
    if cell.advanced is not None:
        shape, style, to = ("bye", "won", " → final") if section.lower else ("champion", "on-champion", "")
        width, at = (132 if section.lower else 104), x + BOX + GAP
        yield f'<rect class="{shape}" x="{at:.1f}" y="{y - 14:.1f}" width="{width}" height="28" rx="14"/>'
        yield _text(at + width / 2, y + 4.5, f"member {cell.advanced}{to}", style, "middle")


def _y(row: float) -> float:
    return 34 + row * LEAF


def _elbow(style: str, x: float, y: float, to_x: float, to_y: float) -> str:
    """A line that leaves and arrives level, with round corners, and turns close to its end."""
    turn, radius = to_x - 14, min(7.0, abs(to_y - y) / 2)
    if radius < 0.5:
        return f'<path class="{style}" d="M{x:.1f} {y:.1f}H{to_x:.1f}"/>'
    down = math.copysign(radius, to_y - y)
    return (
        f'<path class="{style}" d="M{x:.1f} {y:.1f}H{turn - radius:.1f}q{radius:.1f} 0 {radius:.1f} {down:.1f}'
        f'V{to_y - down:.1f}q0 {down:.1f} {radius:.1f} {down:.1f}H{to_x:.1f}"/>'
    )


def _seeding(tournament: ArenaView, key: str) -> str:
    """Margins of all to the anchor, the best first, as bars to both sides of it."""
    games = tournament.seeding
    anchor = games[0].i
    rows: list[tuple[int, float | None, Match | None]] = [(anchor, 0.0, None)]
    for match in games:
        sign = 1 if match.j == anchor else -1
        rows.append((match.i if sign > 0 else match.j, None if match.margin is None else sign * match.margin, match))
    rows.sort(key=lambda row: math.inf if row[1] is None else -row[1])
    largest = max((abs(margin) for _, margin, _ in rows if margin is not None), default=0.0) or 1.0
    middle, body = 250.0, []
    for k, (member, margin, game) in enumerate(rows):
        y, name = 18 + 21 * k, f"member {member}"
        body.append(f"<g><title>{esc(describe(game) if game else 'the anchor of the seeding games')}</title>")
        body.append(_text(12, y, name, "won" if game is None else ""))
        if margin is None:
            body.append(_text(middle + 8, y, "no verdict", "small"))
        else:
            length, style = 120 * margin / largest, "cool" if margin >= 0 else "warm"
            x = middle + min(length, 0.0)
            body.append(
                f'<rect class="{style}" x="{x:.1f}" y="{y - 11}" width="{abs(length):.1f}" height="13" rx="3"/>'
            )
            body.append(_text(440, y, "anchor" if game is None else number(margin, "+.3g"), "small num", "end"))
        body.append("</g>")
    body.append(f'<path class="rule" d="M{middle} 2V{8 + 21 * len(rows)}"/>')
    order = ", ".join(f"{member}: {number(margin, '+.3g')}" for member, margin, _ in rows)
    drawing = _svg(452, 16 + 21 * len(rows), key, f"Seeding games against member {anchor}", order, body)
    state = ' open="open"' if len(rows) <= 12 else ""
    return f'<details class="seeding"{state}><summary>Seeding: margins to member {anchor}</summary>{drawing}</details>'


# -- graph and matrix


def _by_pair(tournament: ArenaView) -> dict[tuple[int, int], list[Match]]:
    """Games by pair of members, the better placed first; in the order of the places."""
    found: dict[tuple[int, int], list[Match]] = {}
    for match in tournament.matches:
        pair = sorted((match.i, match.j), key=tournament.standing)
        found.setdefault((pair[0], pair[1]), []).append(match)
    return found


def _mean_margin(better: int, games: Sequence[Match]) -> float | None:
    """Mean margin of the better placed; None if no game was decided."""
    known = [match.margin if match.i == better else -match.margin for match in games if match.margin is not None]
    return sum(known) / len(known) if known else None


def _graph(tournament: ArenaView, key: str) -> str:
    """Players clockwise by place from the top; an edge is wide at who won, as wide as the margin is large."""
    players, pairs = tournament.players, _by_pair(tournament)
    radius = min(330.0, max(120.0, 12.5 * len(players)))
    side = 2 * radius + 96
    turn = {member.index: 2 * math.pi * k / len(players) - math.pi / 2 for k, member in enumerate(players)}
    at = {k: (side / 2 + radius * math.cos(t), side / 2 + radius * math.sin(t)) for k, t in turn.items()}
    margins = {pair: _mean_margin(pair[0], games) for pair, games in pairs.items()}
    largest = max((abs(margin) for margin in margins.values() if margin is not None), default=0.0) or 1.0
    body = []
    for (better, worse), margin in sorted(margins.items(), key=lambda item: abs(item[1] or 0.0)):
        tip = esc("\n\n".join(map(describe, pairs[better, worse])))
        body.append(f'<g class="edge"><title>{tip}</title>{_edge(at[better], at[worse], margin, largest)}</g>')
    body += [_node(member, *at[member.index], turn[member.index], players) for member in players]
    lines = [f"{a} over {b} by {number(m, '+.3g')}" for (a, b), m in margins.items()]
    return _svg(side, side, key, "Graph of the games", "; ".join(lines), body) + _legend(
        ("cool", "the better placed won: wide at the winner, as wide as the margin"),
        ("warm", "the worse placed won"),
        ("dull", "tie"),
        ("dash", "no verdict"),
    )


def _edge(start: tuple[float, float], end: tuple[float, float], margin: float | None, largest: float) -> str:
    if not margin:
        style = "no-verdict" if margin is None else "tied"
        return f'<path class="{style}" d="M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"/>'
    (x, y), (to_x, to_y) = (start, end) if margin > 0 else (end, start)
    wide, narrow = 1.2 + 5.0 * abs(margin) / largest, 0.4
    length = math.hypot(to_x - x, to_y - y)
    nx, ny = (y - to_y) / length, (to_x - x) / length
    corners = [(x, y, wide), (to_x, to_y, narrow), (to_x, to_y, -narrow), (x, y, -wide)]
    points = " ".join(f"{px + nx * w:.1f},{py + ny * w:.1f}" for px, py, w in corners)
    return f'<polygon class="{"cool" if margin > 0 else "warm"}" points="{points}"/>'


def _node(member: Member, x: float, y: float, turn: float, players: Sequence[Member]) -> str:
    """A disc that is the fuller the better the score, with the place outside of the ring."""
    scores = [player.score for player in players if player.score is not None]
    spread = max(scores) - min(scores) if scores else 0.0
    full = 0.0 if member.score is None or not spread else (member.score - min(scores)) / spread
    tip = f"member {member.index}: place {member.place}, score {number(member.score)} ± {number(member.stderr)}"
    results = "\n".join(f"{name} {', '.join(map(str, others))}" for name, others in member.results().items())
    out_x, out_y = x + 31 * math.cos(turn), y + 31 * math.sin(turn)
    return (
        f'<g><title>{esc(tip)}\n{esc(results)}</title><circle class="disc" cx="{x:.1f}" cy="{y:.1f}" r="16"/>'
        f'<circle class="fill" cx="{x:.1f}" cy="{y:.1f}" r="16" fill-opacity="{0.06 + 0.44 * full:.2f}"/>'
        f"{_text(x, y + 4.5, member.index, 'node', 'middle')}"
        f"{_text(out_x, out_y + 4, '' if member.rank is None else '#' + member.place, 'small', 'middle')}</g>"
    )


def _matrix(tournament: ArenaView, key: str) -> str:
    """Row against column, both by place: in a clean order all above the diagonal is won and all below it lost."""
    players, pairs = tournament.players, _by_pair(tournament)
    cell, left, top = 25 if len(players) <= 20 else 20, 112, 40
    column = {member.index: k for k, member in enumerate(players)}
    margins = {pair: _mean_margin(pair[0], games) for pair, games in pairs.items()}
    largest = max((abs(margin) for margin in margins.values() if margin is not None), default=0.0) or 1.0
    body = []
    for k, member in enumerate(players):
        middle = k * cell + cell / 2
        body.append(_text(left - 8, top + middle + 4, f"#{member.place} member {member.index}", "small", "end"))
        body.append(_text(left + middle, top - 8, member.index, "small", "middle"))
    for (better, worse), margin in margins.items():
        tip = esc("\n\n".join(map(describe, pairs[better, worse])))
        for row, col, won in ((better, worse, margin), (worse, better, None if margin is None else -margin)):
            x, y = left + column[col] * cell, top + column[row] * cell
            style = "no-verdict" if won is None else "tied" if won == 0 else "cool" if won > 0 else "warm"
            strength = 1.0 if not won else 0.15 + 0.85 * abs(won) / largest
            body.append(
                f'<rect class="cell {style}" x="{x + 1}" y="{y + 1}" width="{cell - 2}" height="{cell - 2}" rx="3" '
                f'fill-opacity="{strength:.2f}"><title>{tip}</title></rect>'
            )
    lines = [f"{a} over {b} by {number(m, '+.3g')}" for (a, b), m in margins.items()]
    size = len(players) * cell
    return _svg(left + size + 8, top + size + 8, key, "Row against column", "; ".join(lines), body) + _legend(
        ("cool", "the member of the row won, as deep as the margin"),
        ("warm", "it lost"),
        ("dull", "tie"),
        ("dash", "no verdict"),
    )


def _legend(*entries: tuple[str, str]) -> str:
    items = "".join(f'<li><span class="key {style}"></span>{esc(text)}</li>' for style, text in entries)
    return f'<ul class="legend">{items}</ul>'
