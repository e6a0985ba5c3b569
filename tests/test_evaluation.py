"""`arenarl eval` from end to end on real parts, what it prints, and what it refuses before anything is played."""

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from arenarl.cli import load_config, main
from arenarl.comparison import NamedJudge, valid
from arenarl.envs.travel import TravelTasks
from arenarl.errors import McpServerError
from arenarl.evaluate import bootstrap_mean
from arenarl.evaluation import (
    EvaluationPlan,
    assess,
    mean_score,
    measure_mean,
    measure_share,
    other_side,
    passes,
    plan_evaluation,
    run_evaluation,
)
from arenarl.evaluation_tables import print_evaluation
from arenarl.judge import RubricJudge
from arenarl.references import References, read_references, write_references
from arenarl.types import Episode, Outcome, Task, Trajectory, Verdict

QUICKSTART = "experiments/quickstart.py"
MODEL = "experiments/tiny_agent/model"
SMALL = ["evaluation_duration=10", "num_env_runners=0", "engine_core=thread", f"model_path={MODEL}"]


TWICE = """
import json, sys
from arenarl.cli import main
sys.exit(main(json.loads(sys.argv[1])) or main(json.loads(sys.argv[2])))
"""


def test_a_model_meets_what_it_stored(tmp_path):
    stored, again, report = (tmp_path / name for name in ("refs.jsonl", "again.jsonl", "report.json"))
    save = ["eval", QUICKSTART, *SMALL, "--attempts", "2", "--save", str(stored)]
    extra = ["--judge", 'arenarl.judge:RubricJudge{"noise": 0.3}', "--out", str(report)]
    meet = ["eval", QUICKSTART, *SMALL, "--reference", str(stored), "--save", str(again), *extra]
    command = [sys.executable, "-c", TWICE, json.dumps(save), json.dumps(meet)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    references, found = read_references(stored), json.loads(report.read_text())
    assert len(references) == 20 and {(r.taskset, r.model) for r in references} == {("travel", MODEL)}
    tasks = TravelTasks().tasks("heldout", 10, seed=0)
    assert [r.episode.task for r in references[::2]] == tasks
    assert [r.episode.member for r in references[:2]] == [0, 1]
    assert "checklist score" in done.stdout and "travel verifier" in done.stdout
    assert found["theirs"]["model"] == f"{stored} ({MODEL})"
    # the first attempts repeat themselves token by token, but for what a busy machine loses
    pairs = [(a.episode, b.episode) for a, b in zip(references[::2], read_references(again), strict=True)]
    kept = [(a, b) for a, b in pairs if Outcome.FAILED not in (a.outcome, b.outcome)]
    assert kept and all(a.trajectory.answer == b.trajectory.answer and a.score == b.score for a, b in kept)
    assert (found["ours"]["attempts"], found["theirs"]["attempts"]) == (10, 20)
    means = [mean_score([r.episode for r in references[n : n + 2]]) for n in range(0, 20, 2)]
    assert found["measures"]["checklist score"]["theirs"]["mean"] == pytest.approx(bootstrap_mean(means).mean)
    assert [r["name"] for r in found["rulings"]] == ["RubricJudge", "travel verifier", "RubricJudge 2"]
    noisy = found["rulings"][2]["all_queries"]
    assert noisy["wins"] + noisy["losses"] + noisy["missing"] == 10 and found["rulings"][2]["games"] <= 20
    assert set(found["measures"]) == {"checklist score", "valid generations", "pass@1", "pass@2", "pass^2"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against", "a", "--reference", "b"], ["--against 'a'", "--reference 'b'", "give one of them"]),
        (["--against", "no/such/model"], ["'no/such/model' does not exist", "give the path"]),
        (["--reference", "nowhere.jsonl"], ["'nowhere.jsonl' cannot be read", "arenarl eval --save"]),
        (["--attempts", "0"], ["--attempts 0", "1 or more"]),
        (["--success", "1.5"], ["--success 1.5", "at most 1"]),
        (["--judge", "arenarl.judge:RubricJudge"], ["nothing to compare", "--against MODEL or --reference FILE"]),
        (["--against", MODEL, "--judge", "nowhere:Judge"], ["'nowhere:Judge'", "give 'module:Name'"]),
        (["--against", MODEL, "--judge", "arenarl.judge:RubricJudge{1"], ["'arenarl.judge:RubricJudge{1'", "no JSON object"]),
        (["--save", "no/folder/refs.jsonl"], ["--save 'no/folder/refs.jsonl'", "make 'no/folder' first"]),
        (["--out", "README.md"], ["--out 'README.md' exists already", "name another file"]),
        (["--save", "a" * 300], ["--save 'aaa", "cannot be a file", "name too long"]),
        (["--save", "x.json", "--out", "./x.json"], ["--save and --out are both './x.json'", "name two files"]),
        (["--attempts", "x"], ["--attempts", "'x'", "arenarl eval --help"]),
        (["--frobnicate"], ["--frobnicate", "--help"]),
        (["--against", MODEL, "judge=os:getcwd"], ["'os:getcwd'", "no method compare", "'module:Class'"]),
        (["judge_config=3"], ["judge_config=3", "mapping"]),
        (["env=tests.tasksets:NoTasks"], ["no task in its 'heldout' split"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_with_the_remedy(arguments, says, capsys):
    assert main(["eval", QUICKSTART, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(part.lower() in error.lower() for part in says), error


# -- what is reported, on attempts made by hand ---------------------------------------------------------------------------


def attempt(task: Task, score: float | None, answer: str | None, outcome: Outcome = Outcome.SCORED, detail: str = ""):
    return Episode(
        episode_id=f"{task.task_id}/{answer}", task=task, member=0, greedy=False, segments=(), outcome=outcome,
        trajectory=Trajectory(messages=(), events=(), answer=answer), score=score, detail=detail,
        checklist={} if score is None else {"called:a": score >= 0.5, "called:b": score, "kept": None if score < 0.1 else True},
    )  # fmt: skip


TASKS = [Task(task_id=f"t{n}", kind=kind, prompt=str(n)) for n, kind in enumerate(["far", "far", "near", "near"])]
OURS = [
    [attempt(TASKS[0], 1.0, "long answer"), attempt(TASKS[0], 0.5, "long answer")],
    [attempt(TASKS[1], 0.0, None, Outcome.TRUNCATED, "turns"), attempt(TASKS[1], None, None, Outcome.FAILED, "dead")],
    [attempt(TASKS[2], 1.0, "x"), attempt(TASKS[2], 1.0, "x")],
    [attempt(TASKS[3], 0.75, "xx"), attempt(TASKS[3], 0.75, "xx")],
]
THEIRS = [[attempt(TASKS[0], 0.5, "answer")], [attempt(TASKS[1], 0.25, "yes")], [attempt(TASKS[2], 0.5, "xyz")], []]


class Length:
    """Likes long answers; its second dimension likes short ones."""

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict:
        x, y = (float(len(e.trajectory.answer or "")) for e in (a, b))
        dimensions = {"answer/depth": (x, y), "answer/clarity": (-x, -y)}
        return Verdict(score_a=x, score_b=y, dimensions=dimensions, calls=1, prompt_tokens=300, completion_tokens=50)


def plan() -> EvaluationPlan:
    judges = [
        NamedJudge(name="rubric", about="\x1b[31mred", judge=RubricJudge()),
        NamedJudge(name="length", about="length", judge=Length()),
    ]
    return EvaluationPlan(
        config=load_config(QUICKSTART, []), taskset="made", tasks=TASKS, attempts=2, success=1.0, judges=judges, against=None,
        reference="file", references=None, save=None, out=None,
    )  # fmt: skip


def test_the_report_in_numbers():
    found = assess(plan(), ("m", OURS), ("file", THEIRS))
    rubric, length = found.rulings
    # rubric: tasks 0 and 2 won, 1 a walkover for them, 3 without a reference; length: 0 won, 2 lost, 1 the same walkover
    assert (rubric.valid_pairs.rate, rubric.all_queries.rate) == (1.0, pytest.approx(2 / 3))
    assert (length.valid_pairs.rate, length.all_queries.rate) == (0.5, pytest.approx(1 / 3))
    assert rubric.all_queries.missing == 1
    assert (found.win.valid_pairs.mean, found.win.all_queries.mean) == (0.75, 0.5)
    assert (found.agreements["rubric and length"].share.met, found.agreements["rubric and length"].share.total) == (
        1,
        2,
    )
    assert found.agreements["rubric and length"].kappa == 0.0
    assert [(name, d.wins, d.losses) for name, d in length.dimensions.items()] == [
        ("answer/depth", 1, 1),
        ("answer/clarity", 1, 1),
    ]
    assert (length.games, length.calls, length.prompt_tokens) == (4, 8, 2400)
    assert (found.ours.attempts, found.ours.failed, found.ours.invalid) == (8, 1, {"truncated: turns": 1})
    assert (found.theirs.attempts, found.theirs.tasks) == (3, 3)
    generations = found.measures["valid generations"]
    assert (generations.ours.met, generations.ours.total, generations.theirs.rate) == (6, 7, 1.0)
    assert found.measures["pass@1"].ours.mean == pytest.approx((0.5 + 0 + 1 + 0) / 4)
    assert (found.measures["pass@2"].ours.mean, found.measures["pass^2"].ours.mean) == pytest.approx((2 / 3, 1 / 3))
    assert found.measures["pass@2"].theirs.count == 0
    assert found.kinds["far"].win.all_queries.mean == 0.5 and math.isnan(found.kinds["near"].score.difference.low)
    one = 1.96**2  # Wilson's interval of half a success in one trial
    assert found.kinds["near"].score.theirs.low == pytest.approx(
        0.5 - 1.96 / 2 / (1 + one) * (1 + one) ** 0.5, abs=1e-4
    )
    assert (found.checklist["called:b"].ours.met, found.checklist["kept"].ours.total) == (5.0, 6)
    assert list(found.checklist_groups) == ["called:*", "kept"]
    assert (found.checklist_groups["called:*"].ours.met, found.checklist_groups["called:*"].ours.total) == (11.0, 14)


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_and_show_each_number_with_its_interval(width):
    console = Console(width=width, file=io.StringIO(), force_terminal=True, record=True)
    print_evaluation(assess(plan(), ("m", OURS), ("file", THEIRS)), console)
    text = console.export_text()
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= width
    for part in (
        "made, 4 held-out tasks", "8 attempts at 4 tasks, 1 not valid (truncated: turns), 1 lost to failures",
        "100% (34, 100)", "2-0-0", "67% (21, 94)", "2-1-0", "75% (20, 97)", "50% (13, 87)", "86% (38, 98)", "pass^2",
        "rubric and length decide 1 of 2 tasks alike: 50% (9, 91), Cohen's kappa 0.00", "called:*", "11/14", "far",
        "length: 8 calls, 2,800 tokens for 4 games", "length answer/clarity 50% (9, 91) 1-1-0 0",
    ):  # fmt: skip
        assert part in " ".join(text.split()), part


def test_a_reference_file_cannot_move_the_cursor():
    cut = attempt(TASKS[0], None, None, Outcome.TRUNCATED, "turns\x1b[2J")
    console = Console(width=200, file=io.StringIO())
    print_evaluation(assess(plan(), ("m", OURS), ("file\x1b[2J", [[cut], [cut], [cut], [cut]])), console)
    assert "4 not valid (truncated: turns·[2J)" in console.file.getvalue() and "\x1b" not in console.file.getvalue()


def test_one_side_alone_is_measured_without_judges():
    found = assess(replace(plan(), judges=()), ("m", OURS), None)
    assert found.theirs is None and found.win is None and found.measures["pass@1"].difference is None
    console = Console(width=80, file=io.StringIO(), record=True)
    print_evaluation(found, console)
    text = console.export_text()
    assert "win" not in text and "theirs" not in text and "valid generations" in text
    assert not Path("file").exists()


# -- each side by itself --------------------------------------------------------------------------------------------------

WHOLE, CUT = attempt(TASKS[0], 0.5, "a"), attempt(TASKS[0], 0.5, "a", Outcome.TRUNCATED, "turns")
LOST = attempt(TASKS[0], None, None, Outcome.FAILED, "dead")


def test_shares_count_attempts_and_difference_pairs_tasks():
    ours = [[WHOLE, CUT], [WHOLE, LOST], [LOST]]
    theirs = [[CUT], [WHOLE], [WHOLE]]
    measure = measure_share(lambda e: [] if e is LOST else [float(valid(e))], ours, theirs)
    assert (measure.ours.met, measure.ours.total, measure.theirs.met, measure.theirs.total) == (2, 3, 2, 3)
    assert (measure.difference.mean, measure.difference.count, measure.difference.missing) == (0.25, 2, 1)


def test_pass_rates_of_each_task_and_their_mean():
    side = [[attempt(TASKS[0], s, "a") for s in scores] for scores in ([1.0, 0.5, 1.0], [0.0, 0.0, 0.9], [1.0])]
    assert [passes(2, 1.0, every=False)(task) for task in side] == [1.0, 0.0, None]
    assert [passes(2, 1.0, every=True)(task) for task in side] == [pytest.approx(1 / 3), 0.0, None]
    assert [passes(1, 0.9, every=True)(task) for task in side] == pytest.approx([2 / 3, 1 / 3, 1.0])
    mean = measure_mean(passes(2, 1.0, every=False), side).ours
    assert (mean.mean, mean.count, mean.missing) == (0.5, 2, 1)
    assert mean_score([LOST, attempt(TASKS[0], 0.2, "a"), attempt(TASKS[0], 0.4, "a")]) == pytest.approx(0.3)
    assert mean_score([LOST]) is None


# -- judges, and what is left of them -------------------------------------------------------------------------------------


class Held:
    """Writes down in a file that it was built, and that it was closed."""

    def __init__(self, log: str) -> None:
        self.log = Path(log)
        self._note("built")

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict:
        return Verdict(score_a=1.0, score_b=1.0)

    async def aclose(self) -> None:
        self._note("closed")

    def _note(self, word: str) -> None:
        with self.log.open("a") as log:
            log.write(f"{word} ")


def test_an_evaluation_that_cannot_play_closes_its_judges(tmp_path):
    log = tmp_path / "log"
    broken = load_config(QUICKSTART, ["env=tests.tasksets:ExitsAtStart"])
    request = replace(plan(), config=broken, judges=[NamedJudge(name="held", about="", judge=Held(str(log)))])
    with pytest.raises(McpServerError, match="missing API key"):
        run_evaluation(request, Console(file=io.StringIO()))
    assert log.read_text() == "built closed "


def test_a_plan_holds_the_judges_that_it_will_ask_and_no_other_is_left_open(tmp_path):
    refs, log = tmp_path / "refs.jsonl", tmp_path / "log"
    tasks = TravelTasks().tasks("heldout", 2, seed=0)
    write_references(refs, [attempt(t, 1.0, "a") for t in tasks], taskset="travel", model="m")
    held = f"judge_config={{'log': {str(log)!r}}}"
    config = load_config(QUICKSTART, ["evaluation_duration=3", "judge=tests.test_evaluation:Held", held])
    made = plan_evaluation(config, reference=str(refs), judges=["arenarl.judge:RubricJudge"])
    assert [j.name for j in made.judges] == ["Held", "travel verifier", "RubricJudge"]
    assert log.read_text() == "built closed built "  # the first is that of the preflight
    assert [len(task) for task in made.references.attempts] == [1, 1, 0]


def test_one_judge_alone_and_references_to_other_tasks_are_pointed_out():
    stored = References(models=("m",), attempts=tuple(map(tuple, THEIRS)), unused=3)
    request = replace(plan(), judges=plan().judges[:1], references=stored)
    name, attempts = other_side(request, Console())
    assert name == "file (m, 3 of its attempts at other tasks)"
    console = Console(width=200, file=io.StringIO())
    print_evaluation(assess(request, ("m", OURS), (name, attempts)), console)
    assert "one judge alone" in console.file.getvalue()
