"""Hard gates before ranking: who plays, who is placed last, who is left out."""

import math
from dataclasses import replace

import numpy as np
import pytest

from arenarl.errors import ConfigError
from arenarl.gates import DEFAULT_GATES, Field, below, check_gates, sort_out
from arenarl.types import Episode, Outcome, Task, ToolCall, ToolEvent, ToolResult, Trajectory

TASK = Task(task_id="t", kind="k", prompt="p")
BAD_CALL = ToolEvent(
    call=ToolCall(id="c", name="", raw="{", error="not JSON"), result=ToolResult(kind="parse_error", text="?"), turn=0
)


def attempt(answer: str | None = "done", outcome: Outcome = Outcome.SCORED, events: tuple[ToolEvent, ...] = ()):
    trajectory = Trajectory(messages=(), events=events, answer=answer)
    return Episode(
        episode_id="e", task=TASK, member=0, greedy=False, segments=(), trajectory=trajectory, outcome=outcome
    )


GOOD, SILENT, BLANK = attempt(), attempt(answer=None), attempt(answer=" \n")
CUT = attempt(answer=None, outcome=Outcome.TRUNCATED)
CLUMSY = attempt(events=(BAD_CALL,))
BROKEN = attempt(outcome=Outcome.FAILED)
UNSCORED = attempt(outcome=Outcome.ABSTAINED)


def test_by_default_attempts_without_an_answer_are_last_and_clumsy_ones_play():
    field = sort_out([GOOD, SILENT, BLANK, CUT, CLUMSY, BROKEN, UNSCORED], DEFAULT_GATES)
    assert field.players == (0, 4, 6)
    assert field.last == (1, 2, 3)
    assert field.gated == ("", "no_answer", "no_answer", "truncated", "", "failed", "")


def test_a_gate_may_leave_attempts_out_or_let_them_play():
    out = sort_out([GOOD, SILENT, CLUMSY], check_gates({"no_answer": "out", "invalid_calls": "last"}))
    assert (out.players, out.last, out.gated) == ((0,), (2,), ("", "no_answer", "invalid_calls"))
    play = sort_out([GOOD, SILENT, CUT], check_gates({"no_answer": "play", "truncated": "play"}))
    assert play == Field(players=(0, 1, 2), last=(), gated=("", "", ""))


def test_the_strictest_of_two_gates_counts():
    silent_and_clumsy = replace(CLUMSY, trajectory=replace(CLUMSY.trajectory, answer=None))
    field = sort_out([silent_and_clumsy], check_gates({"no_answer": "last", "invalid_calls": "out"}))
    assert (field.last, field.gated) == ((), ("invalid_calls",))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0, 3.0], 0.0),  # worst 1, population sd 1
        ([2.0, math.nan, 2.0], 1.0),  # equal players: one unit
        ([5.0], 4.0),
        ([0.3, 0.1 + 0.2, 0.3], -0.7),  # equal up to float noise
        ([], 0.0),
        ([math.nan, math.nan], math.nan),
    ],
)
def test_the_last_are_one_standard_deviation_below_the_worst(scores, expected):
    assert below(np.array(scores)) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("gates", "says"),
    [
        ({"no_anwser": "last"}, "did you mean 'no_answer'"),
        ({"truncated": "lose"}, "choose one of play, last, out"),
        ("last", "gates='last' says nothing about gates"),
    ],
)
def test_a_gate_or_treatment_that_does_not_exist_is_refused(gates, says):
    with pytest.raises(ConfigError, match=says):
        check_gates(gates)
