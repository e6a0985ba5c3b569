"""What a run shows on the terminal: progress while it trains, and what training changed at its end.

Text of models and tools is shown with control characters replaced, so it cannot move the cursor or colour the screen.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from arenarl.types import Episode, ToolEvent

PHASES: Mapping[str, str] = {"collect": "cyan", "learn": "magenta", "push": "yellow", "other": "bright_black"}
TOOL_COLOURS = ("cyan", "magenta", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_yellow")


class Cell(NamedTuple):
    """A number of the display: its label, its metric, and how it is written."""

    label: str
    metric: str
    form: str


CELLS = (
    Cell("score", "reward/score_mean", ".3f"),
    Cell("win rate", "reward/win_rate", ".2f"),
    Cell("flat groups", "group/flat_share", ".0%"),
    Cell("tokens/s", "tokens/sampled_per_second", ",.0f"),
    Cell("lag", "policy/lag_mean", ".1f"),
    Cell("s/step", "time/step", ".1f"),
)


class TrainingDisplay:
    """Progress of a run: a calm panel that stays in place on a terminal, one plain line per step anywhere else.

    Metrics that are absent or nan are shown as a dash. ``step`` counts the steps that are done, from 1.
    """

    def __init__(self, num_steps: int, *, title: str = "arenarl", console: Console | None = None) -> None:
        self.num_steps = num_steps
        self.title = title
        self.console = console or Console()
        self.step = 0
        self._metrics: Mapping[str, float] = {}
        self._history: dict[str, list[float]] = {cell.metric: [] for cell in CELLS}
        self._recent_seconds: deque[float] = deque(maxlen=10)
        in_place = (
            self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.options.ascii_only
        )
        self._live = Live(self, console=self.console, auto_refresh=False) if in_place else None

    def __enter__(self) -> TrainingDisplay:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the step that just ended. Uses the metrics of `CELLS`, and time/collect, time/learn and time/push."""
        self.step, self._metrics = step, metrics
        for name, values in self._history.items():
            if (value := _number(metrics, name)) is not None:
                values.append(value)
        if (seconds := _number(metrics, "time/step")) is not None:
            self._recent_seconds.append(seconds)
        if self._live:
            self._live.refresh()
        else:
            self.console.print(self.line(), soft_wrap=True, highlight=False, markup=False)

    @property
    def eta(self) -> str:
        """Time left, from the mean of the last ten steps."""
        if not self._recent_seconds:
            return "-"
        return _duration((self.num_steps - self.step) * sum(self._recent_seconds) / len(self._recent_seconds))

    def line(self) -> str:
        """The step as one line of ASCII, cut at the end, where the least important is, to the width of the console."""
        width = len(str(self.num_steps))
        shown = {cell.label: _shown(self._metrics, cell, dash="-") for cell in CELLS}
        parts = [
            f"[{self.step:{width}d}/{self.num_steps}]",
            f"score {shown['score']}",
            f"win {shown['win rate']}",
            f"flat {shown['flat groups']}",
            f"lag {shown['lag']}",
            f"{shown['s/step']}s",
            f"eta {self.eta}",
            f"{shown['tokens/s']} tok/s",
            " ".join(f"{name} {share:.0%}" for name, (_, share) in _phases(self._metrics).items() if name != "other"),
        ]
        while len(line := "  ".join(parts).rstrip()) > self.console.width and len(parts) > 1:
            parts.pop()
        return line

    def __rich__(self) -> RenderableType:
        head = Table.grid(expand=True)
        head.add_column()
        head.add_column(justify="right")
        done = Text.assemble(("step ", "dim"), (f"{self.step}", "bold"), (f"/{self.num_steps}", "dim"))
        left = Text.assemble(("   eta ", "dim"), (self.eta, "bold"))
        head.add_row(Text(self.title, style="bold"), done + left)
        bar = ProgressBar(total=self.num_steps, completed=self.step, complete_style="green", finished_style="green")
        return Panel(Group(head, bar, Text(), self._cells(), Text(), TimeBar(self._metrics)), border_style="dim")

    def _cells(self) -> Table:
        table = Table.grid(expand=True, padding=(0, 1))
        for _ in CELLS:
            table.add_column(ratio=1, no_wrap=True)
        table.add_row(*(Text(cell.label, style="dim") for cell in CELLS))
        table.add_row(*(Text(_shown(self._metrics, cell, dash="–"), style="bold") for cell in CELLS))
        table.add_row(*(Sparkline(tuple(self._history[cell.metric])) for cell in CELLS))
        return table


@dataclass(frozen=True)
class Sparkline:
    """The course of a number in one line: the last values that fit, from its lowest to its highest."""

    values: tuple[float, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self.values[-options.max_width :]
        low, high = min(shown, default=0.0), max(shown, default=0.0)
        scale = 7 / (high - low) if high > low else 0.0
        yield Text("".join("▁▂▃▄▅▆▇█"[round((v - low) * scale)] for v in shown), style="cyan", no_wrap=True)


@dataclass(frozen=True)
class TimeBar:
    """Where the time of a step goes: a bar over the whole width and a legend below it."""

    metrics: Mapping[str, float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        phases = _phases(self.metrics)
        if not phases:
            yield Text("–", style="dim")
            return
        position, used, legend = 0.0, 0, Text()
        for name, (seconds, share) in phases.items():
            position += share * options.max_width
            cells = round(position) - used
            used += cells
            yield Segment("━" * cells, Style.parse(PHASES[name]))
            spent = f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
            legend += Text.assemble(("■ ", PHASES[name]), (f"{name} ", "dim"), spent, (f" {share:.0%}  ", "dim"))
        yield Segment.line()
        legend.rstrip()
        legend.truncate(options.max_width, overflow="ellipsis")
        yield legend


def _phases(metrics: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Seconds and share of each phase; the rest of the step is "other". Empty before the first step."""
    total = _number(metrics, "time/step")
    if not total:
        return {}
    seconds = {name: _number(metrics, f"time/{name}") or 0.0 for name in PHASES if name != "other"}
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    whole = sum(seconds.values())
    return {name: (s, s / whole) for name, s in seconds.items()}


def _number(metrics: Mapping[str, float], name: str) -> float | None:
    value = metrics.get(name)
    return value if value is not None and math.isfinite(value) else None


def _shown(metrics: Mapping[str, float], cell: Cell, *, dash: str) -> str:
    value = _number(metrics, cell.metric)
    return dash if value is None else format(value, cell.form)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


# ---------------------------------------------------------------------------------------------- before and after


class BeforeAfter(NamedTuple):
    """A row of `before_after_table`. A value of None was not measured."""

    name: str
    before: float | None
    after: float | None
    form: str = ".2f"
    lower_is_better: bool = False
    note: str = ""


def before_after_table(rows: Iterable[BeforeAfter], *, title: str = "") -> Table:
    """What training changed. The change is green where it is for the better, red where it is for the worse."""
    table = Table(
        title=title or None, title_style="bold", title_justify="left", box=None, padding=(0, 2), pad_edge=False
    )
    table.add_column("")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", header_style="dim")
    table.add_column("", style="dim")
    for row in rows:
        change = Text("–", style="dim")
        if row.before is not None and row.after is not None:
            difference = row.after - row.before
            better = difference < 0 if row.lower_is_better else difference > 0
            same = format(row.before, row.form) == format(row.after, row.form)
            style = "dim" if same else "bold green" if better else "bold red"
            change = Text(format(0.0 if same else difference, "+" + row.form), style=style)
        before, after = (Text("–" if v is None else format(v, row.form)) for v in (row.before, row.after))
        after.stylize("bold")
        table.add_row(Text(row.name), before, after, change, Text(row.note))
    return table


def side_by_side(before: Episode, after: Episode, *, result_lines: int = 6) -> Group:
    """Two attempts at one task: the task above, then what each said, called and got, and how its checklist came out.

    ``result_lines`` is how much of a tool's result is shown.
    """
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    columns = [_attempt(e, name, result_lines) for e, name in ((before, "before"), (after, "after"))]
    table.add_row(*columns)
    task = Panel(
        _readable(after.task.prompt), title=Text(_safe(after.task.kind)), title_align="left", border_style="dim"
    )
    return Group(task, table)


def _attempt(episode: Episode, name: str, result_lines: int) -> Panel:
    parts: list[RenderableType] = []
    turn = 0
    for message in episode.trajectory.messages:
        if message["role"] != "assistant":
            continue
        events = [e for e in episode.trajectory.events if e.turn == turn]
        if said := _without_calls(message["content"], events):
            parts.append(_readable(said))
        parts += [part for event in events for part in _call_lines(event, result_lines)]
        turn += 1
    parts.append(Rule(style="dim"))
    for item, met in episode.checklist.items():
        mark, style = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "dim")}[met]
        parts.append(Text.assemble((f"{mark} ", style), (_safe(item), "" if met else style)))
    score = "no score" if episode.score is None else f"score {episode.score:.2f}"
    ended = str(episode.outcome) + (f": {episode.detail}" if episode.detail else "")
    title = Text.assemble((name, "bold"), ("  " + score, "bold cyan"))
    return Panel(Group(*parts), title=title, title_align="left", subtitle=Text(ended, style="dim"), border_style="dim")


def _call_lines(event: ToolEvent, result_lines: int) -> list[RenderableType]:
    """The call with its tool's name in the tool's own colour, and below it the first lines of the result."""
    call, result = event.call, event.result
    colour = TOOL_COLOURS[sum(call.name.encode("utf-8", "replace")) % len(TOOL_COLOURS)]
    shown = ", ".join(f"{k}={v!r}" for k, v in call.arguments.items()) if call.error is None else call.raw
    line = Text.assemble(("→ ", "dim"), (_safe(call.name or "?"), f"bold {colour}"), (_safe(f"({shown})"), ""))
    lines = _safe(result.text).splitlines() or ["(nothing)"]
    text = "\n".join(lines[:result_lines])
    if len(lines) > result_lines:
        text += f"\n… {len(lines) - result_lines} more lines"
    got = Text(text, style="dim") if result.ok else Text(f"{result.kind}: {text}", style="red")
    return [line, Padding(got, (0, 0, 0, 2))]


def _without_calls(content: str, events: list[ToolEvent]) -> str:
    """What the message says besides its calls."""
    for event in events:
        content = content.replace(event.call.raw, "", 1)
    return re.sub(r"</?tool_call>", "", content).strip()


def _readable(text: str) -> Text:
    return Text(_safe(text), overflow="fold")


def _safe(text: str) -> str:
    """The text with every character that is neither printable nor a line break replaced by a middle dot."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text.expandtabs(4))
