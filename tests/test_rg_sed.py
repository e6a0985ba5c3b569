"""Reward-gated self-distillation as a stream: who is asked, what is measured, and which tokens weigh how much. No engine."""

from dataclasses import replace

import numpy as np
import pytest

from arenarl.algorithm import AgentAlgorithm
from arenarl.algorithms.arena_rl import ArenaRL, ArenaRLConfig
from arenarl.algorithms.arise_solver import ARISESolver, ARISESolverConfig
from arenarl.algorithms.rg_sed import RGSED, last_turn, splice_of
from arenarl.endpoint import Outage
from arenarl.errors import ConfigError
from arenarl.judge import RubricJudge
from arenarl.metrics import lesson_metrics, stream_metrics
from arenarl.rubric import Checklist, ChecklistItem
from arenarl.types import Episode, EpisodeGroup, Lesson, Memory, Outcome, Segment, Task, Trajectory
from tests.judging import judged_by

TASK = Task(task_id="t", kind="k", prompt="p")
PROMPT, NOTE = (5, 6, 7, 8), (90, 91)


def segment(prompt: tuple[int, ...] = PROMPT) -> Segment:
    """Prompt, two sampled tokens, one of a tool, three sampled tokens."""
    ids = (*prompt, 20, 21, 30, 22, 23, 24)
    mask = (*[False] * len(prompt), True, True, False, True, True, True)
    return Segment(
        token_ids=ids, mask=mask, logprobs=tuple(-1.0 * m for m in mask), versions=tuple(0 if m else -1 for m in mask)
    )


def episode(member: int, score: float | None, *, prompt: tuple[int, ...] = PROMPT, greedy: bool = False) -> Episode:
    return Episode(
        episode_id=f"g/{member}", task=TASK, member=member, greedy=greedy, segments=(segment(prompt),), score=score,
        trajectory=Trajectory(messages=(), events=(), answer="a"), outcome=Outcome.SCORED, checklist={"done": score == 1.0},
    )  # fmt: skip


def group(*scores: float | None, lesson: Lesson | None = None) -> EpisodeGroup:
    known = tuple(None if s is None else s - 0.5 for s in scores)
    episodes = tuple(episode(n, s) for n, s in enumerate(scores))
    return EpisodeGroup(
        group_id="g", task=TASK, episodes=episodes, version=3, rewards=scores, advantages=known, lesson=lesson
    )


class Coach:
    """Says what it was built with; a word with a colon is an outage."""

    def __init__(self, says: str) -> None:
        self.says, self.closed = says, False

    async def advise(self, group, items):
        assert [item.name for item in items] == ["done"] and group.rewards
        kind, colon, detail = self.says.partition(":")
        return Outage(kind=kind, detail=detail) if colon else self.says


class Tasks:
    def checklist(self, task: Task) -> Checklist:
        return Checklist([ChecklistItem(name="done", check=lambda trajectory: True)])


class Renderer:
    def encode_foreign(self, text: str) -> list[int]:
        return list(NOTE)


def services(*scores: float | None):
    """A worker whose conditioned attempts have these scores and saw the note behind the third token of the prompt."""
    jobs = []

    async def play(job):
        jobs.append(job)
        prompt = (*PROMPT[:3], *NOTE, *PROMPT[3:])
        noted = tuple(episode(n, s, prompt=prompt) for n, s in enumerate(scores))
        return EpisodeGroup(group_id=job.group_id, task=job.task, episodes=noted, version=job.version)

    return judged_by(RubricJudge(), play=play, taskset=Tasks(), renderer=Renderer()), jobs


def term(says: str = "try harder", **settings) -> RGSED:
    return RGSED(coach="tests.test_rg_sed:Coach", coach_config={"says": says}, **settings)


async def test_the_note_is_measured_by_attempts_that_saw_it():
    worker, jobs = services(1.0, 0.5, 1.0, 0.5)
    taught = await term(memory_rollouts=4, place="user").extend(group(0.0, 0.5), ARISESolverConfig(), worker)
    lesson = taught.lesson
    assert (jobs[0].group_size, jobs[0].version, jobs[0].memory) == (4, 3, Memory(text="try harder", place="user"))
    assert lesson.rewards == pytest.approx((1.0, 0.4, 1.0, 0.4))  # paid as the Solver is
    assert lesson.gap == pytest.approx(0.7 - 0.25)  # the group's own rewards are 0.0 and 0.5
    # Welch: variances 0.125 / 2 and 0.12 / 4
    assert lesson.stderr == pytest.approx((0.0625 + 0.03) ** 0.5)
    assert (lesson.splice, lesson.memory_ids, lesson.outage) == (3, NOTE, "")


async def test_conditioned_attempts_are_in_no_baseline_and_not_trained_on():
    before = group(0.0, 0.5)
    taught = await term().extend(before, ARISESolverConfig(), services(1.0, 1.0)[0])
    assert (taught.episodes, taught.rewards, taught.advantages) == (before.episodes, before.rewards, before.advantages)
    stream = replace_gate(term(warmup=0)).stream(taught, step=0)
    assert len(stream.weights) == 2


def replace_gate(built: RGSED) -> RGSED:
    return replace(built, gate="open")


async def test_a_coach_that_is_down_costs_the_lesson_and_nothing_else():
    worker, jobs = services(1.0)
    before = group(0.0, 0.5)
    taught = await term("timeout: 180 s").extend(before, ARISESolverConfig(), worker)
    assert taught.lesson == Lesson(outage="coach timeout:  180 s") and replace(taught, lesson=None) == before
    assert jobs == [] and term().stream(taught, 0) is None
    assert lesson_metrics([taught])["lesson/outage_share"] == 1.0


async def test_nothing_to_say_is_no_lesson():
    taught = await term("").extend(group(1.0, 1.0), ARISESolverConfig(), services(1.0)[0])
    assert taught.lesson is None and term().stream(taught, 0) is None


async def test_conditioned_attempts_without_a_reward_give_no_gap_and_no_distillation():
    taught = await term().extend(group(0.0, 0.5), ARISESolverConfig(), services(None, None)[0])
    assert taught.lesson.gap is None and taught.lesson.outage.startswith("rewards")
    assert replace_gate(term(warmup=0)).stream(taught, 0) is None


async def test_ranks_of_two_groups_are_not_compared_but_checklist_scores_are():
    assert not ArenaRL.rewards_compare and ARISESolver.rewards_compare and AgentAlgorithm.rewards_compare
    ranked = replace(group(0.2, 0.4), rewards=(0.0, 1.0))
    taught = await term().extend(ranked, ArenaRLConfig(), services(0.5, 0.9)[0])
    assert taught.lesson.rewards == (0.5, 0.9) and taught.lesson.gap == pytest.approx(0.4)


LESSON = Lesson(memory=Memory(text="n"), memory_ids=NOTE, splice=3, gap=0.4, stderr=0.02)


def test_lambda_is_coefficient_times_gate_times_schedule():
    built = term(warmup=0, decay=120)
    assert built.weight(LESSON, 0) == pytest.approx(0.5, abs=1e-6)  # far above tau + 1.35 standard errors
    assert built.weight(replace(LESSON, gap=0.05 + 1.35 * 0.02), 0) == pytest.approx(0.25)  # at the gate: one half
    assert built.weight(LESSON, 120) == pytest.approx(0.05, abs=1e-6)  # a tenth at the end
    assert built.weight(replace(LESSON, stderr=None), 0) == 0.0
    assert built.weight(replace(LESSON, gap=-0.3), 0) == pytest.approx(0.0, abs=1e-6)
    assert replace_gate(built).weight(replace(LESSON, gap=-0.3), 0) == pytest.approx(0.5)
    assert replace_gate(built).weight(replace(LESSON, outage="rewards: none"), 0) == 0.0


def test_the_stream_weighs_the_students_sampled_tokens():
    taught = group(0.0, 0.5, None, lesson=LESSON)
    taught = replace(taught, episodes=(replace(taught.episodes[0], greedy=True), *taught.episodes[1:]))
    stream = term(warmup=0).stream(taught, 0)
    assert (stream.name, stream.memory_ids, stream.splice) == ("distillation", NOTE, 3)
    assert stream.weights[0] is None and stream.weights[2] is None  # greedy; without an advantage
    assert np.round(stream.weights[1][0], 3).tolist() == [0, 0, 0, 0, 0.5, 0.5, 0, 0.5, 0.5, 0.5]
    assert stream_metrics([[stream], []]) == pytest.approx({"lesson/distilled_share": 0.5, "lesson/lambda_mean": 0.25})


def test_the_last_turn_alone_may_be_distilled():
    stream = term(warmup=0, tokens="answer").stream(group(0.0, 0.5, lesson=LESSON), 0)
    assert np.round(stream.weights[0][0], 3).tolist() == [0, 0, 0, 0, 0, 0, 0, 0.5, 0.5, 0.5]
    silent = Segment(token_ids=(1, 2), mask=(False, False), logprobs=(0.0, 0.0), versions=(-1, -1))
    assert (last_turn(segment()), last_turn(silent)) == (7, 2)


def test_the_place_of_the_note_is_read_off_the_record():
    plain = [episode(0, 1.0)]
    noted = [replace(episode(0, 1.0, prompt=(5, *NOTE, 6, 7, 8)), member=1)]
    assert splice_of(plain, noted, NOTE) == 1
    cut = [episode(0, 1.0, prompt=(5, *NOTE, 7, 8))]
    assert splice_of(plain, cut, NOTE) is None and splice_of([], noted, NOTE) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gate": "shut"}, "gate='shut'"), ({"place": "end"}, "place='end'"), ({"tokens": "some"}, "tokens='some'"),
        ({"memory_rollouts": 0}, "memory_rollouts=0"), ({"coefficient": 0}, "coefficient=0"), ({"temperature": -1}, "temperature=-1"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        term(**settings)
