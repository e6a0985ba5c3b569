"""Checklists: weights, gates, items that cannot be decided, items for a grader, items as data, and predicates that break."""

from __future__ import annotations

import asyncio
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.errors import ConfigError, EnvError
from arenarl.expected_tools import ExpectedTool, Tolerance
from arenarl.rubric import Checklist, ChecklistItem, Evidence, Reward, item_to_data, items_from_data, tool_items
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory
from tests.judging import call

ANSWERED = Trajectory(messages=(), events=(), answer="done")


TASK = Task(task_id="t7", kind="search", prompt="Find a cafe in Hanoi.")


def item(name: str, met: bool | None, weight: float = 1.0, gate: bool = False) -> ChecklistItem:
    return ChecklistItem(name=name, check=lambda trajectory: met, weight=weight, gate=gate)


def score(*items: ChecklistItem) -> float | None:
    checklist = Checklist(list(items))
    return checklist.score(asyncio.run(checklist.run(ANSWERED)))


def test_items_see_the_trajectory_and_keep_their_order():
    checklist = Checklist(
        [
            ChecklistItem(name="said done", check=lambda t: t.answer == "done"),
            ChecklistItem(name="said no", check=lambda t: t.answer == "no"),
            item("unclear", None),
        ]
    )
    results = asyncio.run(checklist.run(ANSWERED))
    assert results == {"said done": True, "said no": False, "unclear": None}
    assert list(results) == ["said done", "said no", "unclear"]


def test_score_is_the_weighted_share_of_what_is_met():
    assert score(item("a", True), item("b", False)) == 0.5
    assert score(item("a", True, weight=3.0), item("b", False)) == 0.75
    assert score(item("a", False, weight=3.0), item("b", True)) == 0.25
    assert score(item("a", True), item("b", True)) == 1.0
    assert score(item("a", False)) == 0.0


def test_an_undecided_item_carries_no_weight():
    assert score(item("a", True), item("b", False), item("c", None, weight=100.0)) == 0.5
    assert score(item("a", True), item("c", None)) == 1.0


def test_nothing_decided_is_no_score():
    assert score(item("a", None), item("b", None)) is None
    assert score() is None


def test_two_items_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"unique names, got \['a', 'b', 'a'\]"):
        Checklist([item("a", True), item("b", True), item("a", False)])


def test_a_fault_that_is_there_costs_its_weight():
    # ResearchRubrics: (3 + 1 - 2) / (3 + 1 + 1) = 0.4, the negative weight in the numerator alone.
    good = [item("a", True, 3.0), item("b", True), item("c", False)]
    assert score(*good, item("fault", True, -2.0)) == 0.4
    assert score(*good, item("fault", False, -2.0)) == 0.8
    assert score(*good, item("fault", None, -2.0)) == 0.8


def test_the_score_stays_between_0_and_1():
    assert score(item("a", True), item("fault", True, -3.0)) == 0.0
    assert score(item("a", True), item("fault", False, -3.0)) == 1.0


def test_faults_alone_are_no_score():
    assert score(item("fault", False, -1.0), item("a", None)) is None


def test_a_gate_that_is_not_met_closes_the_score():
    assert score(item("gate", False, gate=True), item("a", True, 9.0)) == 0.0
    assert score(item("gate", True, gate=True), item("a", False)) == 0.5
    assert score(item("gate", None, gate=True), item("a", True), item("b", False)) == 0.5
    assert score(item("gate", None, gate=True)) is None


@given(st.lists(st.tuples(st.sampled_from([True, False, None]), st.sampled_from([-2.0, -0.5, 0.5, 1.0, 3.0]))))
def test_more_that_is_met_never_lowers_the_score(drawn: list[tuple[bool | None, float]]):
    items = [item(str(n), met, weight) for n, (met, weight) in enumerate(drawn)]
    before, after = score(*items, item("new", False)), score(*items, item("new", True))
    assert before is not None and after is not None and 0 <= before <= after <= 1


@pytest.mark.parametrize("weight", [0.0, float("nan"), float("inf"), float("-inf"), 1e308, 10**400])
def test_a_weight_that_weighs_nothing_is_refused(weight: float):
    with pytest.raises(ValueError, match=re.escape(f"'a' must be a number other than 0, got {weight}")):
        item("a", True, weight)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_gate_and_a_reward_have_positive_weights(weight: float):
    with pytest.raises(ValueError, match=f"'a' must be positive, got {weight}"):
        item("a", True, weight, gate=True)
    with pytest.raises(ValueError, match=f"'a' must be positive, got {weight}"):
        reward("a", 0.5, weight)


def test_an_item_needs_a_check_or_a_text():
    with pytest.raises(ValueError, match="'a' has neither a check nor a text"):
        ChecklistItem(name="a", text=" ")


# --- a grader ------------------------------------------------------------------------------------------------------


@dataclass
class Fixed:
    """A grader that gives these results, and keeps what it was asked."""

    results: list[bool | None]
    asked: list[tuple[list[str], Trajectory, Task]] = field(default_factory=list)

    async def grade(self, items: Sequence[ChecklistItem], trajectory: Trajectory, task: Task) -> list[bool | None]:
        self.asked.append(([item.name for item in items], trajectory, task))
        return self.results


def judged(name: str, **fields: Any) -> ChecklistItem:
    return ChecklistItem(name=name, text=f"It is {name}.", **fields)


def test_judged_items_go_to_the_grader_in_one_call():
    grader = Fixed([True, None])
    checklist = Checklist([judged("a", weight=3.0), item("code", False), judged("b")], grader=grader, task=TASK)
    results = asyncio.run(checklist.run(ANSWERED))
    assert list(results.items()) == [("a", True), ("code", False), ("b", None)]
    assert grader.asked == [(["a", "b"], ANSWERED, TASK)]
    assert checklist.score(results) == 0.75


def test_what_code_checks_does_not_speak_for_an_answer_that_nobody_could_read():
    checklist = Checklist([judged("a"), judged("b"), item("tool", True)], grader=Fixed([None, None]), task=TASK)
    assert checklist.score({"a": None, "b": None, "tool": True}) is None
    assert checklist.score({"tool": True}) is None
    assert checklist.score({"a": None, "b": True, "tool": True}) == 1.0
    gated = Checklist([judged("a"), item("gate", False, gate=True)], grader=Fixed([None]), task=TASK)
    assert gated.score({"a": None, "gate": False}) == 0.0


def test_without_judged_items_the_grader_is_not_called():
    grader = Fixed([])
    assert asyncio.run(Checklist([item("code", True)], grader=grader, task=TASK).run(ANSWERED)) == {"code": True}
    assert grader.asked == []


def test_a_judged_item_needs_a_grader_and_a_task():
    with pytest.raises(ValueError, match="'a' is judged by its text: give a grader"):
        Checklist([judged("a")], task=TASK)
    with pytest.raises(ValueError, match="'a' is judged by its text: give a task"):
        Checklist([judged("a")], grader=Fixed([True]))


class Broken:
    async def grade(self, items: Sequence[ChecklistItem], trajectory: Trajectory, task: Task) -> list[bool | None]:
        raise KeyError("lost")


def test_a_grader_that_breaks_is_a_fault_and_no_score():
    with pytest.raises(EnvError, match=r"grader of task 't7': KeyError: 'lost'"):
        asyncio.run(Checklist([judged("a")], grader=Broken(), task=TASK).run(ANSWERED))
    with pytest.raises(EnvError, match=r"grader of task 't7' gave 1 results for 2 items"):
        asyncio.run(Checklist([judged("a"), judged("b")], grader=Fixed([True]), task=TASK).run(ANSWERED))


# --- items as data -------------------------------------------------------------------------------------------------

DATA = {
    "rubrics": [
        {"text": "The cafe is Lotus."},
        {"text": "Every price was found.", "scope": "trajectory", "weight": 2, "gate": True,
         "evidence": {"observation": 1, "quote": "Lotus 12 7"}},
        {"text": "It advertises.", "scope": "turn", "weight": -0.5},
    ],
    "expected_tools": [{"name": "poi_search", "arguments": {"city": "Hanoi"}}],
}  # fmt: skip


def test_items_are_read_from_a_task():
    first, second, third, tool = items_from_data(DATA)
    assert first == ChecklistItem(name="r1", text="The cafe is Lotus.", scope="answer")
    assert second == ChecklistItem(
        name="r2", text="Every price was found.", weight=2, gate=True,
        evidence=Evidence(observation=1, quote="Lotus 12 7"),
    )  # fmt: skip
    assert third == ChecklistItem(name="r3", text="It advertises.", scope="turn", weight=-0.5)
    assert (tool.name, tool.text) == ("tool1:poi_search", "poi_search was called with city Hanoi.")
    assert (tool.scope, tool.weight, tool.judged, first.judged) == ("trajectory", 1.0, False, True)


def test_a_task_without_any_has_no_items():
    assert items_from_data({}) == items_from_data({"needs": []}) == []


def test_items_written_as_data_are_read_back():
    items = items_from_data({"rubrics": DATA["rubrics"]})
    written = [item_to_data(one) for one in items]
    assert written == DATA["rubrics"]
    assert items_from_data({"rubrics": written}) == items


def test_an_item_checked_by_code_is_no_data():
    with pytest.raises(ValueError, match="'a' is checked by code"):
        item_to_data(item("a", True))


@pytest.mark.parametrize(
    ("rubrics", "match"),
    [
        ("The cafe is Lotus.", "is a str; give a list"),
        ([{"text": "a"}, "b"], "r2, is 'b'; give an object"),
        ([{"text": "a"}, {"text": " "}], "r2, has text=' '; give an assertion"),
        ([{"weight": 1}], "r1, has text=None"),
        ([{"text": "a", "wieght": 1}], "r1, has the key 'wieght', which no rubric has"),
        ([{"text": "a", "scope": "all"}], "scope='all'; give one of turn, trajectory, answer"),
        ([{"text": "a", "scope": ["turn"]}], "scope="),
        ([{"text": "a", "weight": 0}], "weight=0; give a number other than 0"),
        ([{"text": "a", "weight": True}], "weight=True"),
        ([{"text": "a", "weight": "2"}], "weight='2'"),
        ([{"text": "a", "weight": float("nan")}], "weight=nan"),
        ([{"text": "a", "weight": 10**400}], "weight=10+; give a number other than 0, at most 1e"),
        ([{"text": "a", "gate": 1}], "gate=1; give true or false"),
        ([{"text": "a", "gate": True, "weight": -1}], "true only with a positive weight"),
        ([{"text": "a", "evidence": "Lotus"}], "evidence='Lotus'; give"),
        ([{"text": "a", "evidence": {"observation": 0}}], "evidence="),
        ([{"text": "a", "evidence": {"observation": True}}], "evidence="),
        ([{"text": "a", "evidence": {"observation": 1, "qoute": ""}}], "evidence="),
        ([{"text": "a", "evidence": {"quote": "Lotus"}}], "evidence="),
    ],
)
def test_data_that_is_no_rubric_names_task_key_and_remedy(rubrics: object, match: str):
    with pytest.raises(ConfigError, match="^rubrics of task 'x9'.*" + match):
        items_from_data({"rubrics": rubrics}, task_id="x9")


# --- expected tools as items ---------------------------------------------------------------------------------------

CAFE = ExpectedTool(name="poi_search", arguments={"city": "Hanoi", "category": "cafe"})
FIND = call("poi_search", {"city": "hanoi", "category": "cafe"}, "Lotus 12 7")


def calls(*events: Any, items: Sequence[ChecklistItem]) -> list[float | None]:
    trajectory = Trajectory(messages=(), events=events, answer=None)
    return list(asyncio.run(Checklist(items).run(trajectory)).values())


def test_each_expected_call_needs_one_of_its_own():
    items = tool_items([CAFE, CAFE])
    assert [one.name for one in items] == ["tool1:poi_search", "tool2:poi_search"]
    assert calls(items=items) == [False, False]
    assert sorted(calls(FIND, items=items)) == [False, True]
    assert calls(FIND, FIND, items=items) == [True, True]


class Counted(dict):
    """Arguments of a call that count how often they are looked into."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.looks += 1
        return super().get(key, default)


def test_the_calls_of_an_attempt_are_matched_once_for_all_items():
    items = tool_items([ExpectedTool(name="poi_search", arguments={"city": "Hanoi"})] * 30)
    asked = Counted(city="hanoi")
    assert sum(map(bool, calls(call("poi_search", asked, "ok"), items=items))) == 1
    assert asked.looks == 30  # once for each expected call
    assert calls(items=items) == [False] * 30  # of another attempt


def test_the_tolerance_reaches_the_check():
    near, there = ExpectedTool(name="near", arguments={"lat": 21.0}), call("near", {"lat": 21.3}, "ok")
    assert calls(there, items=tool_items([near])) == [False]
    assert calls(there, items=tool_items([near], tolerance=Tolerance(degrees=0.5))) == [True]


def test_items_from_data_travel_between_processes():
    back = pickle.loads(pickle.dumps(items_from_data(DATA)))
    assert calls(FIND, items=back[3:]) == [True]


# --- what breaks ---------------------------------------------------------------------------------------------------


def test_a_predicate_that_raises_names_its_item():
    broken = ChecklistItem(name="broken", check=lambda trajectory: {}["price"])
    with pytest.raises(EnvError, match=r"checklist item 'broken': KeyError: 'price'") as caught:
        asyncio.run(Checklist([item("a", True), broken]).run(ANSWERED))
    assert isinstance(caught.value.__cause__, KeyError)


def reward(name: str, value: float | None, weight: float = 1.0) -> Reward:
    async def function(trajectory: Trajectory, state: EpisodeState) -> float | None:
        return value

    return Reward(name=name, function=function, weight=weight)


def test_rewards_are_graded_and_may_abstain():
    assert score(reward("a", 0.25), item("b", True)) == 0.625
    assert score(reward("a", 0.25, weight=3.0), item("b", True)) == 0.4375
    assert score(reward("a", None, weight=9.0), item("b", True)) == 1.0
    assert score(reward("a", None)) is None


def test_a_reward_reads_what_the_episode_left_behind(tmp_path: Path):
    (tmp_path / "done.txt").write_text("yes")

    async def wrote(trajectory: Trajectory, state: EpisodeState) -> float | None:
        return float(state.read("done.txt") == "yes")

    checklist = Checklist([Reward(name="wrote", function=wrote)])
    assert asyncio.run(checklist.run(ANSWERED, EpisodeState(tmp_path))) == {"wrote": 1.0}


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan")])
def test_a_reward_outside_its_range_is_a_fault(value: float):
    with pytest.raises(EnvError, match=r"reward 'a' gave .*; it must be in \[0, 1\]"):
        asyncio.run(Checklist([reward("a", value)]).run(ANSWERED))
