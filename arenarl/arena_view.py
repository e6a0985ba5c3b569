"""A line of `groups.jsonl` read for showing: who played whom, with what result, and where a bracket led."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from arenarl.jsonl import dumps
from arenarl.types import margin_of

Origin = Literal["start", "bye", "game", "upper", "lower"]
BRACKETS = ("single_elimination", "double_elimination")
WORDS = 2000
"""Characters of one answer of a judge that are shown."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """One game: member ``i`` on side a, ``j`` on side b.

    Attributes:
        marks: of i and of j, summed over the orders asked; None if the judge abstained.
        margin: i's mark minus j's, 0.0 for a tie; None if the judge abstained.
        halves: the margin in each order if both were asked; None for an order that has no verdict.
        dimensions: marks by dimension of the judge's rubric, ``name: (i, j)``.
        words: what the judge wrote, or why it abstained; an entry for each time that it was asked.
    """

    i: int
    j: int
    round: int
    marks: tuple[float, float] | None
    margin: float | None
    halves: tuple[float | None, ...]
    dimensions: Mapping[str, tuple[float | None, float | None]]
    words: tuple[str, ...]

    @property
    def sides(self) -> tuple[int, int]:
        return self.i, self.j

    @property
    def winner(self) -> int | None:
        return None if not self.margin else self.i if self.margin > 0 else self.j

    @property
    def flipped(self) -> bool:
        """Whether the two orders have different winners."""
        return len(self.halves) == 2 and (self.halves[0] or 0.0) * (self.halves[1] or 0.0) < 0


@dataclass(frozen=True, kw_only=True)
class Member:
    """A row of the table. ``met`` lists the results of its games: opponent and margin from its own side."""

    index: int
    episode: str
    rank: float | None
    score: float | None
    stderr: float | None
    reward: float | None
    advantage: float | None
    gated: str
    met: tuple[tuple[int, float | None], ...]

    @property
    def place(self) -> str:
        """The rank as people count, from 1; "2.5" for two who share the places 2 and 3."""
        return "–" if self.rank is None else f"{self.rank + 1:g}"

    def results(self) -> dict[str, list[int]]:
        """Opponents by result: ``beat``, ``tied``, ``lost to``, ``no verdict``; only what there is."""
        names = {1: "beat", 0: "tied", -1: "lost to", None: "no verdict"}
        found: dict[str, list[int]] = {name: [] for name in names.values()}
        for other, margin in self.met:
            found[names[None if margin is None else (margin > 0) - (margin < 0)]].append(other)
        return {name: sorted(others) for name, others in found.items() if others}


@dataclass(frozen=True, kw_only=True)
class ArenaView:
    """One tournament. ``members`` are in the order of their places; those without one come last."""

    group_id: str
    step: int | None
    task_id: str
    prompt: str
    topology: str
    estimator: str
    orders: int | None
    members: tuple[Member, ...]
    matches: tuple[Match, ...]

    @property
    def players(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.met)

    @property
    def score_range(self) -> tuple[float, float]:
        """From the lowest to the highest end of an error bar, 0 included."""
        known = [(m.score, m.stderr or 0.0) for m in self.members if m.score is not None]
        return min([0.0, *(s - e for s, e in known)]), max([0.0, *(s + e for s, e in known)])

    @property
    def seeding(self) -> tuple[Match, ...]:
        """The anchor games that seed a single elimination: its first round."""
        if self.topology != "single_elimination":
            return ()
        first = min((match.round for match in self.matches), default=0)
        return tuple(match for match in self.matches if match.round == first)

    @property
    def bracket_games(self) -> tuple[Match, ...]:
        """The games of an elimination that are in its bracket."""
        return self.matches[len(self.seeding) :] if self.topology in BRACKETS else ()

    @property
    def summary(self) -> str:
        """The tournament in one line."""
        games, ties = len(self.matches), sum(match.margin == 0 for match in self.matches)
        lost, flips = sum(m.margin is None for m in self.matches), sum(m.flipped for m in self.matches)
        asked = {1: "each pair asked once", 2: "each pair asked in both orders"}.get(self.orders or 0, "")
        rounds = len({match.round for match in self.matches})
        parts = [
            " + ".join(filter(None, (self.topology, self.estimator))),
            f"{_count(len(self.players), 'player')}, {_count(games, 'game')} in {_count(rounds, 'round')}",
            asked,
            _count(ties, "tie") if ties else "",
            f"{lost} without a verdict" if lost else "",
            f"{flips} flipped with the order" if flips else "",
        ]
        return " · ".join(filter(None, parts))

    def standing(self, member: int) -> int:
        """Position of a member in ``members``."""
        return next(k for k, other in enumerate(self.members) if other.index == member)


def view(record: Mapping[str, Any], words: int = WORDS) -> ArenaView:
    """Reads a record as `arenarl.tracking.group_record` makes it, fresh or from the file; fields may be missing.

    Args:
        words: characters of each answer of the judge to keep.
    """
    record = json.loads(dumps(record))
    task, table = record.get("task") or {}, record.get("standings") or {}
    matches = tuple(_match(game, words) for game in record.get("games") or ())
    episodes = record.get("episodes") or ()
    size = max([len(episodes), *(1 + max(match.i, match.j) for match in matches)])

    def column(values: Sequence[Any] | None) -> list[Any]:
        return [*(values or ()), *[None] * size][:size]

    columns = [column(table.get(name)) for name in ("ranks", "scores", "stderr")]
    columns += [column(record.get(name)) for name in ("rewards", "advantages")]
    gated, names = column(table.get("gated")), column(episodes)
    members = [
        Member(
            index=k,
            episode=names[k] or "",
            **dict(zip(("rank", "score", "stderr", "reward", "advantage"), values, strict=True)),
            gated=gated[k] or "",
            met=tuple(_met(k, matches)),
        )
        for k, values in enumerate(zip(*columns, strict=True))
    ]
    return ArenaView(
        group_id=str(record.get("group_id", "")),
        step=record.get("step"),
        task_id=str(task.get("task_id", "")),
        prompt=str(task.get("prompt", "")),
        topology=str(table.get("topology", "")),
        estimator=str(table.get("estimator", "")),
        orders=table.get("orders"),
        members=tuple(sorted(members, key=_place)),
        matches=matches,
    )


def _place(member: Member) -> tuple[float, bool, float]:
    """Sorts by rank; without ranks (a record of an older version) by reward."""
    rank, reward = member.rank, member.reward
    return (math.inf if rank is None else rank, bool(member.gated), math.inf if reward is None else -reward)


def _met(member: int, matches: Sequence[Match]) -> Iterator[tuple[int, float | None]]:
    for match in matches:
        if member == match.i:
            yield match.j, match.margin
        elif member == match.j:
            yield match.i, None if match.margin is None else -match.margin


def _match(game: Mapping[str, Any], words: int) -> Match:
    result, halves = game["result"], game.get("halves") or ()
    marks = _marks(result)
    return Match(
        i=game["i"],
        j=game["j"],
        round=game.get("round", 0),
        marks=marks,
        margin=_margin(marks),
        halves=tuple(_exchanged(_margin(_marks(half)), k) for k, half in enumerate(halves)),
        dimensions={name: (a, b) for name, (a, b) in (result.get("dimensions") or {}).items()},
        words=tuple(_words(answer, words) for answer in halves or (result,)),
    )


def _marks(answer: Mapping[str, Any]) -> tuple[float, float] | None:
    a, b = answer.get("score_a"), answer.get("score_b")
    return None if a is None or b is None else (a, b)


def _margin(marks: tuple[float, float] | None) -> float | None:
    return None if marks is None else margin_of(*marks)


def _exchanged(margin: float | None, half: int) -> float | None:
    """Margin of i over j in the first or second half; in the second j is on side a."""
    return margin if margin is None or half == 0 else -margin


def _words(answer: Mapping[str, Any], limit: int) -> str:
    """What the judge said: of a JSON answer the texts in it, of any other the text; an abstention's reason first."""
    raw = str(answer.get("raw") or "").strip()
    start, end = raw.find("{"), raw.rfind("}")
    if 0 <= start < end:
        with suppress(ValueError, RecursionError):
            raw = "\n".join(_texts(json.loads(raw[start : end + 1]))) or raw
    text = "\n".join(filter(None, (str(answer.get("reason") or ""), raw)))
    return text if len(text) <= limit else text[:limit] + " …"


def _texts(value: object, name: str = "") -> Iterator[str]:
    if isinstance(value, str):
        yield f"{name}: {value}" if name else value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _texts(below, f"{name} {key}" if name else str(key))
    elif isinstance(value, list):
        for below in value:
            yield from _texts(below, name)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# -- brackets


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A side of a bracket game: who, at which row, from where, and if from a game of the section out of which cell."""

    member: int
    row: float
    feeder: int | None
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A game in its place. ``advanced`` is who went on, also where the game itself had no winner."""

    match: Match
    column: int
    row: float
    slots: tuple[Slot, Slot]
    advanced: int | None


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a bracket that is drawn as a tree: rows from 0 to ``rows``, a leaf each."""

    title: str
    cells: tuple[Cell, ...]
    columns: int
    rows: int
    lower: bool


def bracket(tournament: ArenaView) -> tuple[Section, ...]:
    """The trees of an elimination, empty for other topologies. The seeding games of a single elimination are in none."""
    matches = tournament.bracket_games
    if not matches:
        return ()
    if tournament.topology == "single_elimination":
        main, titles = [True] * len(matches), ("Bracket", "")
    else:
        main, titles = _upper(matches), ("Upper bracket and final", "Lower bracket")
    parts = (
        (title, [k for k, here in enumerate(main) if here is part])
        for title, part in zip(titles, (True, False), strict=True)
    )
    return tuple(_section(title, tournament, main, chosen) for title, chosen in parts if chosen)


def _upper(matches: Sequence[Match]) -> list[bool]:
    """Which games of a double elimination are of the upper bracket, the final among them.

    A round has first its games of the upper bracket, if any: half as many each time, of players of the upper round before.
    """
    alive = {member for match in matches for member in match.sides}
    wanted = (1 << (len(alive) - 1).bit_length()) // 4
    found: list[bool] = []
    for number, (_, games) in enumerate(groupby(matches, key=lambda match: match.round)):
        played = list(games)
        first = played if number == 0 else played[:wanted]
        upper = bool(first) and all({match.i, match.j} <= alive for match in first)
        if upper and number:
            alive, wanted = {member for match in first for member in match.sides}, wanted // 2
        found += [upper and k < len(first) for k in range(len(played))]
    return [*found[:-1], True]


def _section(title: str, tournament: ArenaView, main: Sequence[bool], chosen: Sequence[int]) -> Section:
    """Lays the chosen games out. A game stands in the middle of the two that fed it; starts and byes are leaves with a row of
    their own; a side that comes from the other part of a double elimination joins the row of the side that it meets."""
    matches = tournament.bracket_games
    rounds = {number: k for k, number in enumerate(sorted({matches[k].round for k in chosen}))}
    place = {k: at for at, k in enumerate(chosen)}
    cells: dict[int, Cell] = {}
    leaves = 0

    def lay(k: int) -> float:
        nonlocal leaves
        match, sides = matches[k], (matches[k].i, matches[k].j)
        before = {side: max((p for p in range(k) if side in matches[p].sides), default=None) for side in sides}
        feeds = {p: side for side, p in before.items() if p in place and p not in cells and side != _loser(matches[p])}
        feeder = {side: p for p, side in feeds.items()}
        origins = {side: _origin(before[side], k, main, first=match.round == min(rounds)) for side in sides}
        joins = len(feeder) == 1 and "bye" not in origins.values()
        rows: dict[int, float] = {}
        for side in sorted(sides, key=lambda side: joins and side not in feeder):
            if side in feeder:
                rows[side] = lay(feeder[side])
            elif joins:
                rows[side] = rows[next(iter(feeder))]
            else:
                leaves += 1
                rows[side] = leaves - 0.5
        top, bottom = (
            Slot(member=side, row=row, feeder=place[feeder[side]] if side in feeder else None, origin=origins[side])
            for side, row in rows.items()
        )
        row, advanced = (top.row + bottom.row) / 2, _advanced(tournament, main, k)
        cells[k] = Cell(match=match, column=rounds[match.round], row=row, slots=(top, bottom), advanced=advanced)
        return row

    for k in reversed(chosen):
        if k not in cells:
            lay(k)
    return Section(
        title=title,
        cells=tuple(cells[k] for k in chosen),
        columns=len(rounds),
        rows=leaves,
        lower=not main[chosen[0]],
    )


def _origin(before: int | None, k: int, main: Sequence[bool], *, first: bool) -> Origin:
    """Where a side of game k comes from, whose last game was ``before``."""
    if before is None:
        return "start" if first else "bye"
    return "game" if main[before] == main[k] else "upper" if main[before] else "lower"


def _loser(match: Match) -> int | None:
    return None if match.winner is None else match.i if match.winner == match.j else match.j


def _advanced(tournament: ArenaView, main: Sequence[bool], k: int) -> int | None:
    """The winner; without one, who plays on, in the upper bracket if both do; after a drawn final the better placed."""
    matches = tournament.bracket_games
    match = matches[k]
    if match.winner is not None:
        return match.winner
    later = {  # the next game of each: 2 in the upper bracket, 1 in the lower, 0 none
        member: next((1 + main[p] for p in range(k + 1, len(matches)) if member in matches[p].sides), 0)
        for member in match.sides
    }
    if later[match.i] != later[match.j]:
        return max(later, key=lambda member: later[member])
    ranks = {member.index: member.rank for member in tournament.members}
    known = {member: rank for member in match.sides if (rank := ranks[member]) is not None}
    return min(known, key=lambda member: known[member]) if len(set(known.values())) == 2 else None
