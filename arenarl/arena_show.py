"""``arenarl arena show RUN STEP``: the tournaments of a step on the terminal, and as a page beside the run's record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from arenarl.arena_svg import number, three_digits
from arenarl.arena_view import ArenaView, Cell, Match, Member, Section, Slot, bracket, view
from arenarl.drawing import step_page
from arenarl.errors import ConfigError
from arenarl.jsonl import read_jsonl

BAR = 28
"""Cells of a score's bar on a wide terminal."""
ASCII = str.maketrans("█▒─│┐┘├┬–−·…", "#=-|++++--..")


def show(run: Path, step: int | None, console: Console, *, out: Path | None = None) -> int:
    """Print the tournaments of a step and write their page.

    Args:
        run: folder of a run.
        step: None takes the last step with games.
        out: file of the page, by default ``RUN/arena/step-N.html``.

    Returns:
        0, the exit code.

    Raises:
        ConfigError: no such folder, record or step, a run without games, or a page that cannot be written.
    """
    step, records = _records(run, step)
    for record in records:
        for part in _group(view(record), console):
            console.print(part)
    path = out or run / "arena" / f"step-{step}.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(step_page(records), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the page '{path}' cannot be written: {error.strerror}; name another file with --out"
        ) from error
    console.print(Text.assemble(("drawn in ", "dim"), _shown(str(path), console)), soft_wrap=True)
    return 0


def _records(run: Path, step: int | None) -> tuple[int, list[dict[str, Any]]]:
    """The step that is meant and its groups. The file is read twice, as it may be larger than memory."""
    file = run / "groups.jsonl"
    if not run.is_dir():
        raise ConfigError(f"run folder '{run}' does not exist; give the folder of a run, such as runs/NAME")
    if not file.is_file():
        raise ConfigError(
            f"run folder '{run}' has no groups.jsonl; give the folder of a run whose first step has ended"
        )
    games: dict[int, int] = {}
    for record in _read(file):
        games[record["step"]] = games.get(record["step"], 0) + len(record.get("games") or ())
    chosen = _choose(run, step, games)
    return chosen, [record for record in _read(file) if record["step"] == chosen]


def _read(file: Path) -> Iterator[dict[str, Any]]:
    try:
        for record in read_jsonl(file):
            if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
                raise ValueError("a line without a step is no group")
            yield record
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{file}' cannot be read ({error}); repair it, or remove the line that is damaged"
        ) from error


def _choose(run: Path, step: int | None, games: Mapping[int, int]) -> int:
    played = [number for number, count in games.items() if count]
    if not games:
        raise ConfigError(f"run '{run}' has recorded no group yet; wait until its first step has ended")
    if not played:
        raise ConfigError(f"run '{run}' has no games: its algorithm plays none, as GRPO; give a run of ArenaRL")
    if step is None:
        return max(played)
    if step not in games:
        raise ConfigError(f"step {step} is not in run '{run}'; it has {_ranges(sorted(games))}: give one of these")
    return step


def _ranges(steps: Sequence[int]) -> str:
    """Ascending numbers with runs of them drawn together: "1 to 4, 7"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


# -- one group


def _group(tournament: ArenaView, console: Console) -> list[Rule | Text | Table]:
    step = "" if tournament.step is None else f"step {tournament.step}, "
    title = _shown(f"{step}group {tournament.group_id}", console)
    prompt = _shown(" ".join(tournament.prompt.split()), console)
    prompt.truncate(2 * console.width, overflow="ellipsis")
    parts: list[Rule | Text | Table] = [Rule(title, style="dim", characters="-" if _ascii(console) else "─")]
    parts += [_plain(prompt, console), _shown(tournament.summary, console, "dim")]
    for section in bracket(tournament):
        lines = _tree(section)
        if max(map(len, lines)) <= console.width:
            parts += [Text(), _shown(section.title, console, "bold"), *(_plain(line, console) for line in lines)]
    return [*parts, Text(), _ladder(tournament, console), Text()]


def _ladder(tournament: ArenaView, console: Console) -> Table:
    """The members by place: score with its error as a bar, reward, advantage, and whom each beat."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    width = max(8, min(BAR, console.width - 78))
    for name in ("place", "member"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=width)
    for name in ("score", "error", "reward", "advantage"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("games", ratio=1)
    low, high = tournament.score_range
    form = three_digits(low, high)
    for member in tournament.members:
        values = [number(member.score, form), number(member.stderr, form), number(member.reward, ".3f")]
        values.append(number(member.advantage, "+.2f"))
        advantage = member.advantage or 0.0
        styles = ["", "dim", "", "green" if advantage > 0 else "red" if advantage < 0 else "dim"]
        cells = [_shown(value, console, style) for value, style in zip(values, styles, strict=True)]
        place, bar = _shown(member.place, console, "bold"), _plain(_bar(member, low, high, width), console)
        table.add_row(place, Text(str(member.index)), bar, *cells, _met(member, console))
    return table


def _met(member: Member, console: Console) -> Text:
    if member.gated:
        return _shown(f"did not play: {member.gated}", console, "yellow")
    said = [f"{name} {' '.join(map(str, others))}" for name, others in member.results().items()]
    return _shown(", ".join(said) or "no games", console, "" if said else "dim")


def _bar(member: Member, low: float, high: float, width: int) -> Text:
    """The score from 0, lighter within a standard error of its end; a line for the error beyond it."""
    if member.score is None or high <= low:
        return Text()
    error, bar = member.stderr or 0.0, Text()
    start, end = sorted((0.0, member.score))
    for k in range(width):
        at = low + (k + 0.5) * (high - low) / width
        inside, unsure = start <= at <= end, abs(at - member.score) <= error
        bar.append("▒" if inside and unsure else "█" if inside else "─" if unsure else " ")
    bar.stylize("cyan" if member.score >= 0 else "magenta")
    return bar


# -- brackets


def _tree(section: Section) -> list[Text]:
    """The bracket in lines of text: each side where it stands, with the margin that brought it there, and who went on."""
    fed = {slot.feeder: cell for cell in section.cells for slot in cell.slots if slot.feeder is not None}
    labels = {
        (k, s): _label(section, cell, slot) for k, cell in enumerate(section.cells) for s, slot in enumerate(cell.slots)
    }
    width = max(map(len, labels.values())) + 4
    grid: dict[tuple[int, int], str] = {}
    bold: list[tuple[int, int, int]] = []

    def write(line: int, x: int, text: str) -> None:
        grid.update({(line, x + k): character for k, character in enumerate(text)})

    for k, cell in enumerate(section.cells):
        lines, out, turn = _lines(cell), int(2 * cell.row), (cell.column + 1) * width - 2
        for s, (line, slot) in enumerate(zip(lines, cell.slots, strict=True)):
            x, label = cell.column * width, labels[k, s]
            write(line, x, f"{label} ".ljust(turn - x, "─"))
            if slot.member == cell.advanced:
                bold.append((line, x, x + len(label)))
        for line in range(lines[0], lines[1] + 1):
            write(line, turn, "┐" if line == lines[0] else "┘" if line == lines[1] else "│")
        later = fed[k].column if k in fed else section.columns
        write(out, turn, ("┬" if out == lines[0] else "├").ljust(later * width - turn - 1, "─") + " ")
        if k not in fed:
            end = _outcome(cell.match, cell.advanced) + (" to the final" if section.lower else "")
            write(out, later * width, end)
            bold.append((out, later * width, later * width + len(end)))
    height, right = 1 + max(line for line, _ in grid), 1 + max(x for _, x in grid)
    drawn = [Text("".join(grid.get((line, x), " ") for x in range(right)).rstrip()) for line in range(height)]
    for line, begin, stop in bold:
        drawn[line].stylize("bold", begin, stop)
    return drawn if drawn[0].plain else drawn[1:]


def _lines(cell: Cell) -> tuple[int, int]:
    """Lines of the two sides: a row has two lines, and a side that joins the row of the other stands below it."""
    top, bottom = (int(2 * slot.row) for slot in cell.slots)
    return top, bottom if bottom > top else top + 1


def _label(section: Section, cell: Cell, slot: Slot) -> str:
    if slot.feeder is not None:
        return _outcome(section.cells[slot.feeder].match, slot.member)
    origin = {"bye": " (bye)", "upper": " (from above)", "lower": " (from below)"}.get(slot.origin, "")
    return f"{slot.member}{origin if cell.column else ''}"


def _outcome(match: Match, advanced: int | None) -> str:
    """Who came out of a game, and by how much."""
    how = "no verdict" if match.margin is None else "tie" if not match.margin else number(abs(match.margin), "+.3g")
    return f"{'?' if advanced is None else advanced} ({how})"


# -- text


def _ascii(console: Console) -> bool:
    return console.options.ascii_only


def _shown(text: str, console: Console, style: str = "") -> Text:
    """Text of anybody's, with characters that could move the cursor, or that the terminal lacks, replaced."""
    return _plain(Text("".join(c if c.isprintable() else "·" for c in text), style=style), console)


def _plain(text: Text, console: Console) -> Text:
    if _ascii(console):
        text.plain = text.plain.translate(ASCII).encode("ascii", "replace").decode()
    return text
