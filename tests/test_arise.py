"""The ARISE algorithms on attempts made by hand: what is paid, what is missing, what is distilled. No engine."""

import json
from dataclasses import replace

import pytest

from arenarl.algorithms.arise_generator import ARISEGenerator, ARISEGeneratorConfig
from arenarl.algorithms.arise_solver import ARISESolver, ARISESolverConfig
from arenarl.batching import policy_gradient_stream
from arenarl.errors import ConfigError
from arenarl.judge import RubricJudge
from arenarl.metrics import task_metrics
from arenarl.novelty import Novelty
from arenarl.scoring import Attempts
from arenarl.types import Episode, EpisodeGroup, Outcome, Task, Trajectory
from tests.judging import call, judged_by

SEED = Task(task_id="s", kind="search", prompt="Write a search task for Oslo.")
ROW = "name usd rating\nLotus 12 7\nOtter 15 4"
CAFE = {"city": "Oslo", "category": "cafe"}


def episode(member: int, answer: str | None, *events, score: float | None = None, task: Task = SEED, failed=False):
    return Episode(
        episode_id=f"g/{member}", task=task, member=member, greedy=False, segments=(), score=score,
        trajectory=Trajectory(messages=(), events=tuple(events), answer=answer),
        outcome=Outcome.FAILED if failed else Outcome.SCORED,
    )  # fmt: skip


def group(*episodes: Episode, task: Task = SEED) -> EpisodeGroup:
    return EpisodeGroup(group_id="g", task=task, episodes=episodes, version=0)


def draft(query: str = "Find a cafe in Oslo.", quote: str = "Lotus 12 7", tools: list | None = None) -> str:
    texts = ("The cafe is Lotus.", "The cafe costs 12 usd.", "The cafe is not Otter.")
    rubrics = [{"text": text, "observation": 1, "evidence": quote} for text in texts]
    expected = [{"name": "poi_search", "arguments": CAFE}] if tools is None else tools
    return json.dumps({"query": query, "rubrics": rubrics, "expected_tools": expected})


def writer(member: int, answer: str | None, **about) -> Episode:
    return episode(member, answer, call("poi_search", CAFE, ROW), **about)


class Solver:
    """An executor that solves a task as often as its script says: query to the scores of its runs, or an outage."""

    def __init__(self, **scores: list[float | None] | str) -> None:
        self.scores, self.asked = scores, []

    async def attempt(self, task: Task, runs: int, *, seed: int) -> Attempts:
        self.asked.append((task.prompt, runs))
        scores = self.scores[task.prompt.split()[-1].strip(".")]
        if isinstance(scores, str):
            return Attempts(outage=scores)
        return Attempts(episodes=tuple(episode(n, "a", score=s, task=task) for n, s in enumerate(scores)))

    def begin_step(self, version: int) -> None: ...

    async def aclose(self) -> None: ...


def config(**settings) -> ARISEGeneratorConfig:
    return ARISEGeneratorConfig().generator(**{"executor": "x:y"} | settings)


async def scored(*episodes: Episode, executor: Solver, services=None, **settings):
    services = services or judged_by(RubricJudge(), executor=executor)
    return await ARISEGenerator.score_group(group(*episodes), config(**settings), services)


# -- the Solver -------------------------------------------------------------------------------------------------------


async def test_the_solver_is_paid_four_fifths_of_its_share_and_a_fifth_for_all():
    attempts = group(episode(0, "a", score=1.0), episode(1, "a", score=0.5), episode(2, "a", score=0.0))
    scores = await ARISESolver.score_group(attempts, ARISESolverConfig(), judged_by(RubricJudge()))
    assert scores.rewards == pytest.approx((1.0, 0.4, 0.0))
    assert sum(scores.advantages) == pytest.approx(0.0, abs=1e-6)


async def test_what_nobody_could_score_has_no_reward():
    attempts = group(episode(0, "a", score=0.5), episode(1, "a"), episode(2, None, score=0.9, failed=True))
    scores = await ARISESolver.score_group(attempts, ARISESolverConfig(), judged_by(RubricJudge()))
    assert scores.rewards == pytest.approx((0.4, None, None)) and scores.advantages == (0.0, None, None)


async def test_superfluous_calls_have_their_price():
    task = Task(task_id="t", kind="k", prompt="p", data={"expected_tools": [{"name": "poi_search", "arguments": CAFE}]})
    needed, twice = call("poi_search", CAFE, ROW), call("weather", {"city": "Oslo"}, "sun", turn=1)
    attempts = group(
        episode(0, "a", needed, score=1.0, task=task),
        episode(1, "a", needed, twice, twice, score=1.0, task=task),
        task=task,
    )
    priced = ARISESolverConfig().training(superfluous_price=0.15)
    assert (await ARISESolver.score_group(attempts, priced, judged_by(RubricJudge()))).rewards == pytest.approx(
        (1.0, 0.7)
    )
    free = await ARISESolver.score_group(attempts, ARISESolverConfig(), judged_by(RubricJudge()))
    assert free.rewards == (1.0, 1.0)


async def test_calls_for_a_task_that_expects_none_are_free():
    attempts = group(episode(0, "a", call("poi_search", CAFE, ROW), score=1.0), episode(1, "a", score=0.5))
    priced = ARISESolverConfig().training(superfluous_price=0.15)
    assert (await ARISESolver.score_group(attempts, priced, judged_by(RubricJudge()))).rewards == (1.0, 0.4)


def test_the_papers_settings_are_the_defaults_and_odd_ones_are_refused():
    c = ARISESolverConfig()
    assert (c.group_size, c.temperature, c.max_turns, c.bonus) == (16, 0.8, 41, 0.2)
    base = c.environment("arenarl.envs.travel:TravelTasks").agent(model_path="experiments/tiny_agent/model")
    with pytest.raises(ConfigError, match=r"bonus=1\.0"):
        base.copy(copy_frozen=False).training(bonus=1.0).validate()
    with pytest.raises(ConfigError, match="superfluous_price=-1"):
        base.copy(copy_frozen=False).training(superfluous_price=-1).validate()


# -- the Generator ----------------------------------------------------------------------------------------------------


async def test_a_task_that_half_of_the_runs_solve_earns_three_and_one_that_none_or_all_solve_earns_one():
    solver = Solver(Half=[1.0] * 4 + [0.9] * 4, None_=[0.5] * 8, All=[1.0] * 8, Quarter=[1.0] * 2 + [0.0] * 6)
    queries = ["Find a cafe in Half.", "See 3 parks of None_.", "Go by bus to All.", "Plan 9 days for Quarter."]
    scores = await scored(*(writer(n, draft(q)) for n, q in enumerate(queries)), executor=solver)
    assert scores.rewards == pytest.approx((3.0, 1.0, 1.0, 2.0))  # R_diff 2, 0, 0, 2 (1 - 2/4)
    assert [g.pass_rate for g in scores.generated] == [0.5, 0.0, 1.0, 0.25]
    assert [runs for _, runs in solver.asked] == [8] * 4


async def test_what_is_no_task_or_rests_on_nothing_earns_nothing_and_is_not_tried():
    solver = Solver(Oslo=[1.0] * 8)
    failed_call = episode(3, draft(), call("poi_search", CAFE, ROW, kind="tool_error"))
    unasked = writer(4, draft(tools=[{"name": "weather", "arguments": {"city": "Oslo"}}]))
    attempts = (writer(0, "junk"), writer(1, None), writer(2, draft(quote="Swan 3 3")), failed_call, unasked)
    scores = await scored(*attempts, executor=solver)
    assert scores.rewards == (0.0,) * 5 and scores.advantages == (0.0,) * 5 and solver.asked == []
    kinds = [g.refusal.partition(":")[0] for g in scores.generated]
    assert kinds == ["no_json", "no_answer", "ungrounded", "no_observation", "unmatched_tool"]


async def test_without_grounding_a_task_is_paid_that_quotes_nothing_real():
    solver = Solver(Oslo=[1.0] * 4 + [0.0] * 4)
    scores = await scored(writer(0, draft(quote="Swan 3 3")), writer(1, "junk"), executor=solver, grounding=False)
    assert scores.rewards == (3.0, 0.0)


async def test_a_solver_that_is_down_leaves_the_reward_missing():
    solver = Solver(
        Down="unavailable: gone", Few=[1.0] * 3, Some=[1.0, 0.0, 1.0, 0.0, None], Good=[1.0] * 4 + [0.0] * 4
    )
    queries = ["Find 1 cafe in Down.", "See 2 parks of Few.", "Go 3 ways by Some.", "Plan 4 days for Good."]
    attempts = [writer(n, draft(q)) for n, q in enumerate(queries)]
    scores = await scored(*attempts, episode(4, None, failed=True), executor=solver)
    assert scores.rewards == (None, None, 3.0, 3.0, None)  # 2 of 4 decided runs; 3 of 8 are too few
    assert scores.advantages == (None, None, 0.0, 0.0, None)
    assert scores.generated[0].outage == "unavailable: gone" and scores.generated[1].runs == 3


async def test_a_near_duplicate_earns_nothing_now_or_later_but_not_in_a_rehearsal():
    solver = Solver(Oslo=[1.0] * 4 + [0.0] * 4)
    services = judged_by(RubricJudge(), executor=solver)
    before = replace(services, kept=dict(services.kept))
    first = await scored(writer(0, draft()), writer(1, draft()), executor=solver, services=services)
    assert first.rewards == (3.0, 0.0) and first.generated[1].refusal.startswith("duplicate")
    rehearsal = await scored(writer(0, draft()), executor=solver, services=before)
    later = await scored(writer(0, draft()), executor=solver, services=services)
    assert (rehearsal.rewards, later.rewards) == ((3.0,), (0.0,))


async def test_the_posterior_counts_earlier_runs_of_such_tasks():
    solver = Solver(One=[1.0] * 4 + [0.0] * 4, Two=[1.0] * 8)
    services = judged_by(RubricJudge(), executor=solver)
    first = await scored(
        writer(0, draft("Find a cafe in One.")), executor=solver, services=services, difficulty="posterior"
    )
    # 4 E[min(p, 1 - p)] under Beta(5, 5) is 4 P(Binomial(10, 1/2) >= 6) = 4 * 386 / 1024
    assert first.rewards == pytest.approx((1 + 4 * 386 / 1024,), abs=1e-4)
    alone = await scored(writer(0, draft("See 5 parks of Two.")), executor=solver, difficulty="posterior")
    after = await scored(
        writer(0, draft("See 5 parks of Two.")), executor=solver, services=services, difficulty="posterior"
    )
    assert after.rewards[0] > alone.rewards[0] + 0.3  # 8 of 8, but 4 of 8 before: easier than half, less than certain


async def test_without_difficulty_a_valid_task_earns_one_whatever_the_solver():
    scores = await scored(
        writer(0, draft()), writer(1, "junk"), executor=Solver(Oslo="unavailable: x"), difficulty="none"
    )
    assert scores.rewards == (1.0, 0.0)


async def test_the_metrics_of_a_step_count_what_was_written():
    solver = Solver(Half=[1.0] * 4 + [0.0] * 4, Down="timeout: x", All=[1.0] * 8)
    queries = ["Find a cafe in Half.", "See 2 parks of Down.", "Go 3 ways by All."]
    attempts = [*(writer(n, draft(q)) for n, q in enumerate(queries)), writer(3, "junk"), episode(4, None, failed=True)]
    scores = await scored(*attempts, executor=solver)
    told = task_metrics([replace(group(*attempts), generated=scores.generated)])
    assert told["task/valid_share"] == 0.75  # of the four that were not lost to the infrastructure
    assert told["task/refused_no_json"] == 0.2 and told["task/outage_share"] == 0.4
    assert told["task/pass_rate"] == 0.75 and told["task/distance_from_half"] == 0.25 and told["cost/solver_runs"] == 16


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"difficulty": "hard"}, "difficulty='hard'"), ({"solver_runs": 0}, "solver_runs=0"),
        ({"gamma": 1.5}, "gamma=1.5"), ({"duplicate_similarity": 0}, "duplicate_similarity=0"), ({"bonus": -0.1}, "bonus=-0.1"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(setting, said):
    base = config().environment("arenarl.envs.travel:TravelTasks").agent(model_path="experiments/tiny_agent/model")
    with pytest.raises(ConfigError, match=said):
        base.generator(**setting).validate()


def test_a_generator_without_an_executor_says_what_to_set():
    with pytest.raises(ConfigError, match=r"no executor is set.*RunnerExecutor"):
        config(executor="").build_executor()
    assert config(executor="", difficulty="none").build_executor() is None


async def test_without_an_executor_valid_tasks_are_paid_alike_and_nobody_tries_them():
    scores = await scored(writer(0, draft()), writer(1, "junk"), executor=None, difficulty="none")
    assert scores.rewards == (1.0, 0.0) and scores.generated[0].runs == 0 and scores.generated[0].outage == ""


def test_what_is_no_executor_is_refused():
    with pytest.raises(ConfigError, match=r"'arenarl\.novelty:Novelty' has no method attempt"):
        config(executor="arenarl.novelty:Novelty").build_executor()
    with pytest.raises(ConfigError, match=r"executor_config=\['a'\] must be a mapping"):
        config(executor="arenarl.novelty:Novelty", executor_config=["a"]).build_executor()


def test_a_copy_of_the_memory_is_apart_from_the_original():
    seen = Novelty()
    seen.add("Find a cafe in Oslo.")
    other = seen.copy()
    other.add("Find a park in Rome.")
    assert len(seen) == 1 and len(other) == 2 and not seen.is_duplicate("Find a park in Rome.")


def test_a_group_without_advantages_has_no_stream():
    with pytest.raises(ConfigError, match="score the group first"):
        policy_gradient_stream(group(writer(0, draft())))
