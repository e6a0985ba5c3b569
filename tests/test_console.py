"""What the terminal shows, rendered to a recording console at 80 and at 120 columns."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from arenarl.console import BeforeAfter, TrainingDisplay, before_after_table, side_by_side
from arenarl.types import Episode, Message, Outcome, Task, ToolCall, ToolEvent, ToolResult, Trajectory

METRICS = {
    "reward/score_mean": 0.4126,
    "reward/win_rate": 0.625,
    "group/flat_share": 0.125,
    "tokens/sampled_per_second": 12938.4,
    "policy/lag_mean": 0.5,
    "time/step": 4.0,
    "time/collect": 2.0,
    "time/learn": 1.0,
    "time/push": 0.2,
}
RAW = '{"name": "poi_search", "arguments": {"city": "Évora"}}'


def make_episode(
    score: float | None, *, said: str = "Here it is: Museu de Évora.", text: str = "1. Museu de Évora"
) -> Episode:
    messages = (
        Message(role="user", content="Find a museum."),
        Message(role="assistant", content=f"Let me see.\n<tool_call>{RAW}</tool_call><tool_call>{{</tool_call>"),
        Message(role="tool", content=text, tool_call_id="c1", name="poi_search"),
        Message(role="assistant", content=said),
    )
    events = (
        ToolEvent(
            call=ToolCall(id="c1", name="poi_search", arguments={"city": "Évora"}, raw=RAW),
            result=ToolResult(kind="ok", text=text),
            turn=0,
        ),
        ToolEvent(
            call=ToolCall(id="c2", name="", raw="{", error="not JSON"),
            result=ToolResult(kind="parse_error", text="say it again"),
            turn=0,
        ),
    )
    return Episode(
        episode_id="e",
        task=Task(task_id="t", kind="search", prompt="Find a museum in [bold]Évora[/bold]."),
        member=0,
        greedy=True,
        segments=(),
        trajectory=Trajectory(messages=messages, events=events, answer=said),
        outcome=Outcome.SCORED if score is not None else Outcome.TRUNCATED,
        detail="" if score is not None else "turns",
        checklist={"museum named": True, "price grounded": False, "city right": None},
        score=score,
    )


def terminal(width: int) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", record=True)


def shown(renderable: RenderableType, width: int) -> list[str]:
    """The lines as a reader sees them; none is wider than the console."""
    console = terminal(width)
    console.print(renderable)
    lines = console.export_text().splitlines()
    assert max(cell_len(line) for line in lines) <= width
    return lines


# ---------------------------------------------------------------------------------------------- progress


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_shows_every_number(width: int) -> None:
    display = TrainingDisplay(40, title="ArenaRL", console=terminal(width))
    display.update(23, METRICS)
    text = "\n".join(shown(display, width))
    for expected in ("ArenaRL", "step 23/40", "eta 1m08s", "0.413", "0.62", "12%", "12,938", "0.5", "4.0"):
        assert expected in text
    assert "■ collect 2.0s 50%  ■ learn 1.0s 25%  ■ push 0.2s 5%  ■ other 0.8s 20%" in text


def test_the_time_bar_is_as_long_as_the_line_and_split_by_share() -> None:
    display = TrainingDisplay(4, console=terminal(84))
    display.update(1, METRICS)
    console = terminal(84)
    console.print(display)
    html = console.export_html(inline_styles=True, code_format="{code}").splitlines()
    bar = next(line for line in html if line.count("━") == 80 and "step" not in line and line.count("<span") > 4)
    assert [piece.count("━") for piece in bar.split("<span") if "━" in piece] == [40, 20, 4, 16]


def test_missing_numbers_are_dashes_and_nothing_breaks_before_the_first_step() -> None:
    display = TrainingDisplay(4, console=terminal(80))
    assert "step 0/4" in shown(display, 80)[1]
    display.update(1, {"reward/score_mean": math.nan, "time/step": 2.0})
    lines = shown(display, 80)
    assert lines[4].strip("│ ").split() == ["–"] * 5 + ["2.0"]
    assert "other 2.0s 100%" in lines[-2]


def test_the_time_left_follows_the_last_ten_steps() -> None:
    display = TrainingDisplay(100, console=terminal(80))
    for step in range(1, 31):
        display.update(step, {"time/step": 1000.0 if step <= 20 else 60.0})
    assert display.eta == "1h10m"


def test_the_course_of_a_number_is_drawn_from_its_lowest_to_its_highest() -> None:
    display = TrainingDisplay(8, console=terminal(120))
    for step in range(1, 9):
        display.update(step, {"reward/score_mean": step / 8})
    assert "▁▂▃▄▅▆▇█" in "\n".join(shown(display, 120))


@pytest.mark.parametrize(("width", "end"), [(79, "2m04s"), (80, "12,938 tok/s"), (120, "learn 25% push 5%")])
def test_elsewhere_than_on_a_terminal_a_step_is_one_plain_line(width: int, end: str) -> None:
    out = io.StringIO()
    with TrainingDisplay(40, console=Console(file=out, width=width)) as display:
        display.update(9, METRICS)
        display.update(10, METRICS)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("[ 9/40]  score 0.413  win 0.62  flat 12%  lag 0.5  4.0s  eta 2m04s") and lines[
        0
    ].endswith(end)
    assert len(lines) == 2 and all(line.isascii() and len(line) <= width for line in lines)


def test_on_a_terminal_the_panel_stays_in_place_and_the_last_state_remains() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    with TrainingDisplay(2, console=console) as display:
        display.update(1, METRICS)
        display.update(2, METRICS)
    assert out.getvalue().count("\x1b[1A") >= 20, "two updates must climb back over a panel of ten lines"
    assert "2\x1b[0m" in out.getvalue() and "\x1b[?25h" in out.getvalue()


# ---------------------------------------------------------------------------------------------- before and after


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_shows_the_change(width: int) -> None:
    rows = [
        BeforeAfter("checklist score", 0.41, 0.58),
        BeforeAfter("win rate", None, 0.74, note="95% CI 0.66 to 0.81"),
        BeforeAfter("valid calls", 0.912, 0.909, ".0%"),
        BeforeAfter("turns", 6.1, 4.2, ".1f", lower_is_better=True),
    ]
    lines = [line.split() for line in shown(before_after_table(rows, title="64 held-out tasks"), width)]
    assert lines[0] == ["64", "held-out", "tasks"]
    assert lines[2] == ["checklist", "score", "0.41", "0.58", "+0.17"]
    assert lines[3][:5] == ["win", "rate", "–", "0.74", "–"]
    assert lines[4] == ["valid", "calls", "91%", "91%", "+0%"]
    assert lines[5] == ["turns", "6.1", "4.2", "-1.9"]


def test_the_colour_of_a_change_says_whether_it_is_good() -> None:
    rows = [BeforeAfter("a", 1.0, 2.0), BeforeAfter("b", 2.0, 1.0), BeforeAfter("c", 2.0, 1.0, lower_is_better=True)]
    changes = before_after_table(rows).columns[3].cells
    assert [str(c.style) for c in changes] == ["bold green", "bold red", "bold green"]


@pytest.mark.parametrize("width", [80, 120])
def test_two_attempts_stand_side_by_side(width: int) -> None:
    lines = shown(side_by_side(make_episode(None, said="I do not know."), make_episode(0.9)), width)
    text = "\n".join(lines)
    assert "Find a museum in [bold]Évora[/bold]." in text
    assert any("before  no score" in line and "after  score 0.90" in line for line in lines)
    assert any(line.count("→ poi_search(city='Évora')") == 2 for line in lines)
    assert any(line.count("parse_error: say it again") == 2 for line in lines)
    assert any("I do not know." in line and "Here it is" in line for line in lines)
    for mark in ("✓ museum named", "✗ price grounded", "– city right"):
        assert any(line.count(mark) == 2 for line in lines)
    assert "truncated: turns" in text and "tool_call" not in text and "arguments" not in text


def test_a_long_result_is_cut() -> None:
    episode = make_episode(1.0, text="\n".join(f"place {k}" for k in range(9)))
    text = "\n".join(shown(side_by_side(episode, episode, result_lines=2), 80))
    assert "place 1" in text and "place 2" not in text and "… 7 more lines" in text


@given(st.text(st.characters(exclude_categories=()), max_size=60), st.integers(40, 120))
@settings(max_examples=60)
def test_text_of_a_model_cannot_break_the_screen(text: str, width: int) -> None:
    episode = make_episode(0.5, said=text + "\x1b[2J\x9b1m\tword" + "w" * 90, text=text)
    console = terminal(width)
    console.print(side_by_side(episode, episode))
    drawn = console.export_text()
    assert "\x1b" not in drawn and "\x9b" not in drawn
    assert max(cell_len(line) for line in drawn.splitlines()) <= width
