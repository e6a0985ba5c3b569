"""Reward-gated self-distillation as a stream: who is asked, what is measured, and which tokens weigh how much. No engine."""

import asyncio
import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from arenarl.algorithm import AgentAlgorithm, Scores
from arenarl.algorithms.arena_rl import ArenaRL, ArenaRLConfig
from arenarl.algorithms.arise_solver import ARISESolver, ARISESolverConfig
from arenarl.algorithms.rg_sed import RGSED, last_turn, splice_of
from arenarl.endpoint import Outage
from arenarl.env_runner import AgentEnvRunner, scorer
from arenarl.errors import ConfigError, JudgeError
from arenarl.jsonl import dumps
from arenarl.judge import RubricJudge
from arenarl.metrics import lesson_metrics, stream_metrics
from arenarl.rubric import Checklist, ChecklistItem
from arenarl.tracking import group_record
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


class Odd(Coach):
    """Raises what it was built with, or says it, whatever it is."""

    async def advise(self, group, items):
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


async def test_a_coach_of_broken_code_is_an_error_with_its_name_and_a_late_one_an_outage():
    for says, why in ((KeyError("prompt"), "KeyError: 'prompt'"), (None, "advise.. gave None")):
        odd = RGSED(coach="tests.test_rg_sed:Odd", coach_config={"says": says})
        with pytest.raises(JudgeError, match=f"coach tests.test_rg_sed:Odd on g: .*{why}"):
            await odd.extend(group(0.0, 0.5), ARISESolverConfig(), services(1.0)[0])
    late = RGSED(coach="tests.test_rg_sed:Odd", coach_config={"says": TimeoutError("no answer")})
    taught = await late.extend(group(0.0, 0.5), ARISESolverConfig(), services(1.0)[0])
    assert taught.lesson.outage == "coach timeout: no answer"


async def test_a_copy_leaves_the_coach_and_its_connections_behind():
    built = term(gate="open")
    await built.extend(group(0.0, 0.5), ARISESolverConfig(), services(1.0)[0])
    config = ARISESolverConfig().training(extra_streams=[built])
    assert built._coach is not None
    for twin in (pickle.loads(pickle.dumps(config)), config.copy(copy_frozen=False)):
        assert twin.extra_streams == [term(gate="open")] and twin.extra_streams[0]._coach is None
    assert config.to_dict()["extra_streams"] == [term(gate="open")]


class Counting(ARISESolver):
    """Keeps how many groups it has scored, and pays that."""

    @staticmethod
    async def score_group(group, config, services):
        services.kept["count"] = services.kept.get("count", 0) + 1
        paid = (float(services.kept["count"]),) * len(group.episodes)
        return Scores(rewards=paid, advantages=(0.0,) * len(paid))


async def test_a_rehearsal_knows_what_was_known_before_its_group_and_leaves_no_trace():
    config = ARISESolverConfig(algo_class=Counting).training(extra_streams=[term()])
    worker, jobs = services(1.0, 1.0)
    score = scorer(config, worker, terms=config.extra_streams)
    first, second = await score(group(0.0, 0.5)), await score(group(0.0, 0.5))
    assert (first.rewards, first.lesson.rewards, second.rewards, second.lesson.rewards) == (
        (1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (2.0, 2.0)
    )  # fmt: skip
    assert worker.kept == {"count": 2} and len(jobs) == 2


class Loop:
    """Has played the groups that it is given."""

    def run(self, groups, timeout_s, *, score=None):
        return [asyncio.run(score(g)) if score else g for g in groups]


def test_groups_apart_from_training_have_no_lesson_and_leave_no_trace():
    config = ARISESolverConfig(algo_class=Counting).training(extra_streams=[term()])
    worker, jobs = services(1.0)
    worker.kept["count"] = 7
    runner = SimpleNamespace(config=config, services=worker, loop=Loop())
    bare = AgentEnvRunner.play(runner, [group(0.0), group(0.5)], 1.0, scored=True)
    assert [(g.rewards, g.lesson) for g in bare] == [((1.0,), None), ((2.0,), None)]
    assert worker.kept == {"count": 7} and jobs == []
    assert AgentEnvRunner.play(runner, [group(0.3)], 1.0) == [group(0.3)]


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


async def test_a_greedy_or_failed_attempt_says_nothing_about_the_note():
    plain = group(1.0, 0.2, 0.4, 0.9)
    first, *rest, last = plain.episodes
    odd = (replace(first, greedy=True), *rest, replace(last, outcome=Outcome.FAILED))
    taught = await term().extend(replace(plain, episodes=odd), ArenaRLConfig(), services(0.5, 0.9)[0])
    assert taught.lesson.gap == pytest.approx(0.7 - 0.3)


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
    assert stream_metrics([[], []]) == {"lesson/distilled_share": 0.0, "lesson/lambda_mean": 0.0}  # not left out


def test_the_last_turn_alone_may_be_distilled():
    stream = term(warmup=0, tokens="answer").stream(group(0.0, 0.5, lesson=LESSON), 0)
    assert np.round(stream.weights[0][0], 3).tolist() == [0, 0, 0, 0, 0, 0, 0, 0.5, 0.5, 0.5]
    silent = Segment(token_ids=(1, 2), mask=(False, False), logprobs=(0.0, 0.0), versions=(-1, -1))
    assert (last_turn(segment()), last_turn(silent)) == (7, 2)
    bare = group(0.5, lesson=LESSON)
    bare = replace(bare, episodes=(replace(bare.episodes[0], segments=()),))
    assert term(warmup=0, tokens="answer").stream(bare, 0).weights == ((),)


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
        ({"memory_rollouts": 0, "gate": "open"}, "memory_rollouts=0"), ({"memory_rollouts": 1}, "memory_rollouts=1 .* at least 2"),
        ({"warmup": -1}, "warmup=-1"), ({"decay": 0.5}, r"decay=0\.5"), ({"coefficient": 0}, "coefficient=0"), ({"temperature": -1}, "temperature=-1"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        term(**settings)


@pytest.mark.parametrize(
    ("streams", "said"),
    [
        (term(), "must be a list of terms"), (None, "extra_streams=None"), ([TASK], "must be a list of terms"),
        ([term(), term()], "extra_streams has 2 terms"),
    ],
)  # fmt: skip
def test_what_is_no_single_term_of_the_loss_is_refused_before_anything_starts(streams, said):
    config = (
        ARISESolverConfig()
        .environment("arenarl.envs.travel:TravelTasks")
        .agent(model_path="experiments/tiny_agent/model")
    )
    with pytest.raises(ConfigError, match=said):
        config.training(extra_streams=streams).validate()


def test_a_coach_that_cannot_advise_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"'tests\.test_rg_sed:Renderer' has no method advise"):
        RGSED(coach="tests.test_rg_sed:Renderer").check(None, [], [])


# -- what is written down -----------------------------------------------------------------------------------------------


async def test_the_record_of_a_group_has_the_note_and_what_it_was_worth_without_tokens():
    taught = await term().extend(group(0.0, 0.5), ARISESolverConfig(), services(1.0, 0.5)[0])
    lesson = json.loads(dumps(group_record(taught, step=1)))["lesson"]
    assert lesson["memory"] == {"text": "try harder", "place": "system"} and lesson["rewards"] == pytest.approx(
        [1.0, 0.4]
    )
    assert lesson["gap"] == pytest.approx(0.45) and lesson["outage"] == ""
    assert lesson["episodes"][0] == {
        "episode_id": "g/0", "outcome": "scored", "detail": "", "checklist": {"done": True}, "score": 1.0, "answer": "a",
    }  # fmt: skip


def test_the_record_of_a_run_names_the_term_and_its_settings():
    shown = ARISESolverConfig().training(extra_streams=[term(gate="open")]).public_fields()["extra_streams"]
    (row,) = json.loads(dumps(shown))
    assert (row["term"], row["gate"], row["coach_config"]) == ("RGSED", "open", {"says": "try harder"})
    assert "_coach" not in row and row["memory_rollouts"] == 8
