"""Panels: several judges at once, and a quorum."""

import asyncio

import pytest

from arenarl.errors import ConfigError, JudgeError
from arenarl.judge import RubricJudge
from arenarl.panel import Panel
from arenarl.types import Abstention, Episode, Mark, Task, Verdict
from tests.judging import TASK, attempt

A, B = attempt("a"), attempt("b")


class Says:
    """A judge that says one thing, after all that it must meet have been asked, and remembers how it was treated."""

    def __init__(self, answer: object, *, name: str = "says", scale: float = 1.0, meet: asyncio.Barrier | None = None):
        self.answer, self.name, self.scale, self.meet = answer, name, scale, meet
        self.steps: list[int] = []
        self.closed = 0

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict | Abstention:
        if self.meet:
            await self.meet.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def mark(self, a: Episode, task: Task, repeat: int = 0) -> Mark | Abstention:
        return Mark(score=self.answer.score_a + repeat) if isinstance(self.answer, Verdict) else self.answer

    def begin_step(self, version: int) -> None:
        self.steps.append(version)

    async def aclose(self) -> None:
        self.closed += 1
        if isinstance(self.answer, Exception):
            raise self.answer


class Compares:
    """A judge that has nothing but `compare`."""

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict | Abstention:
        return verdict(1, 0)


def verdict(a: float, b: float, **more) -> Verdict:
    return Verdict(score_a=a, score_b=b, calls=1, prompt_tokens=100, completion_tokens=10, **more)


OUT = Abstention(reason="timeout: 60 s", calls=6, prompt_tokens=7, completion_tokens=1, seconds=60.0)


async def test_the_panel_takes_the_mean_on_a_scale_of_one():
    ten = Says(verdict(8, 5, seconds=2.0, raw="A!", dimensions={"path/breadth": (9, 1)}), name="ten", scale=10)
    one = Says(verdict(0.2, 0.9, seconds=3.0), name="one")
    result = await Panel([ten, one]).compare(A, B, TASK)
    assert result == Verdict(
        score_a=pytest.approx(0.5), score_b=pytest.approx(0.7), judge="panel", raw="[ten]\nA!", calls=2, prompt_tokens=200,
        completion_tokens=20, seconds=3.0,
        dimensions={"ten/overall": (8, 5), "ten/path/breadth": (9, 1), "one/overall": (0.2, 0.9)},
    )  # fmt: skip


async def test_the_quorum_is_enforced_and_the_reasons_are_named():
    lone = Panel(
        [Says(verdict(1, 0), name="x"), Says(OUT, name="y"), Says(Abstention(reason="nan: NaN", calls=2), name="z")]
    )
    lost = await lone.compare(A, B, TASK)
    assert lone.quorum == 2
    assert lost.reason == "quorum: 1 of 3 decided, 2 must (y: timeout: 60 s; z: nan: NaN)"
    assert (lost.kind, lost.calls, lost.prompt_tokens, lost.completion_tokens, lost.seconds) == (
        "quorum",
        9,
        107,
        11,
        60.0,
    )


async def test_with_a_quorum_who_abstains_has_no_voice_but_its_cost_counts():
    result = await Panel([Says(verdict(1, 0)), Says(OUT), Says(verdict(0.5, 0.5))], quorum=2).compare(A, B, TASK)
    assert (result.score_a, result.score_b, result.calls) == (0.75, 0.25, 8)
    assert set(result.dimensions) == {"says/overall", "says#3/overall"}


async def test_all_members_are_asked_at_once():
    meet = asyncio.Barrier(3)
    panel = Panel([Says(verdict(1, 0), meet=meet) for _ in range(3)])
    async with asyncio.timeout(30):
        assert (await panel.compare(A, B, TASK)).score_a == 1


async def test_a_member_that_raises_ends_the_panels_answer_with_its_error():
    never = asyncio.Barrier(2)
    panel = Panel([Says(verdict(1, 0), meet=never), Says(KeyError("bug"))])
    async with asyncio.timeout(30):
        with pytest.raises(KeyError, match="bug"):
            await panel.compare(A, B, TASK)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (JudgeError("no verdict"), "bad: failed: JudgeError: no verdict"),
        (TimeoutError("60 s"), "bad: failed: TimeoutError: 60 s"),
        (verdict(float("nan"), 1), "bad: nan: "),
        (verdict(0, float("inf")), "bad: nan: "),
    ],
)
async def test_a_member_that_fails_as_judges_may_abstains_and_the_quorum_decides(fault, reason):
    good, bad = Says(verdict(0.75, 0.25)), Says(fault, name="bad")
    assert (await Panel([good, bad], quorum=1).compare(A, B, TASK)).score_a == 0.75
    assert reason in (await Panel([good, bad], quorum=2).compare(A, B, TASK)).reason


async def test_a_mark_that_is_not_finite_has_no_voice():
    members = [Says(verdict(0.5, 0)), Says(verdict(float("nan"), 0))]
    assert await Panel(members, quorum=1).mark(A, TASK) == Mark(score=0.5, judge="panel")


def test_no_member_takes_the_place_of_another_by_its_name():
    assert list(Panel([Says(OUT, name=n) for n in ("x", "x#3", "x")]).judges) == ["x", "x#3", "x#2"]


async def test_marks_are_means_too_and_who_only_compares_abstains():
    ten, one = Says(verdict(6, 0), name="ten", scale=10), Says(verdict(0.2, 0))
    assert (await Panel([ten, one]).mark(A, TASK)).score == pytest.approx(0.4)
    assert (await Panel([ten, one]).mark(A, TASK, repeat=1)).score == pytest.approx((0.7 + 1.2) / 2)
    assert (await Panel([ten, Compares()], quorum=1).mark(A, TASK)).score == pytest.approx(0.6)
    assert "(Compares: no_mark: " in (await Panel([ten, Compares()]).mark(A, TASK)).reason


async def test_steps_and_the_end_reach_every_member_that_wants_them():
    members = [Says(OUT), Compares(), Says(ValueError("stuck")), Says(OUT)]
    panel = Panel(members)
    panel.begin_step(4)
    with pytest.raises(ValueError, match="stuck"):
        await panel.aclose()
    assert [m.steps for m in members if isinstance(m, Says)] == [[4]] * 3
    assert [m.closed for m in members if isinstance(m, Says)] == [1] * 3


def test_members_are_built_from_paths_and_may_be_alike():
    member = {"judge": "arenarl.judge:RubricJudge", "config": {"noise": 0.5, "seed": 3}}
    panel = Panel([member, {"judge": "arenarl.judge:RubricJudge"}])
    assert list(panel.judges) == ["RubricJudge", "RubricJudge#2"]
    assert [judge.noise for judge in panel.judges.values()] == [0.5, 0.0]
    assert panel.quorum == 2


@pytest.mark.parametrize(
    ("judges", "quorum", "match"),
    [
        ([], None, "at least one"),
        ([RubricJudge()], 2, "quorum=2"),
        ([RubricJudge()], 0, "quorum=0"),
        ([RubricJudge()] * 3, 1.5, "quorum=1.5"),
        ([{"judge": "arenarl.judge:NoJudge"}], None, "NoJudge"),
        ([{"judge": "no.such:Judge"}], None, "no.such"),
        ([{"judge": "arenarl.judge:RubricJudge", "config": {"nose": 1}}], None, "RubricJudge"),
        ([{"judge": "arenarl.judge:RubricJudge", "confg": {}}], None, "'confg'"),
        ([{"config": {}}], None, "module:Class"),
        (["arenarl.judge:RubricJudge"], None, "compare"),
        ([Says(OUT, scale=0.0)], None, "scale"),
        ([Says(OUT, scale=float("inf"))], None, "scale"),
    ],
)
def test_a_panel_that_cannot_meet_is_refused(judges, quorum, match):
    with pytest.raises(ConfigError, match=match):
        Panel(judges, quorum=quorum)
