"""Checklists: weights, items that cannot be decided, and predicates that break."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from arenarl.errors import EnvError
from arenarl.rubric import Checklist, ChecklistItem, Reward
from arenarl.state import EpisodeState
from arenarl.types import Trajectory

ANSWERED = Trajectory(messages=(), events=(), answer="done")


def item(name: str, met: bool | None, weight: float = 1.0) -> ChecklistItem:
    return ChecklistItem(name=name, check=lambda trajectory: met, weight=weight)


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


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_that_is_not_positive_is_refused(weight: float):
    with pytest.raises(ValueError, match=f"'a' must be positive, got {weight}"):
        item("a", True, weight)


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
