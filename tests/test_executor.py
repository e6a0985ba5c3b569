"""Executors with a real engine, real tool servers, a real Ray cluster and a scripted endpoint: what comes back, and what is said of the rest."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from arenarl.envs.shared import call
from arenarl.envs.travel import TravelTasks
from arenarl.errors import ConfigError
from arenarl.executor import EndpointExecutor, RunnerExecutor, as_chat
from arenarl.mcp import ServerSpec
from arenarl.scoring import Attempts
from arenarl.types import Episode, Outcome, Task
from tests.processes import descendants
from tests.servers.fault_endpoint import Exchange, FaultEndpoint, Step, reply, stall, status
from tests.test_travel import oracle

MODEL = "experiments/tiny_agent/model"
TRAVEL = "arenarl.envs.travel:TravelTasks"
AGENT = {
    "model_path": MODEL, "max_model_len": 768, "max_tokens": 48, "max_turns": 6, "kv_cache_bytes": 32 << 20,
    "engine_core": "thread",
}  # fmt: skip
TASKS = TravelTasks().tasks("train", 5, seed=1)


class Plain(TravelTasks):
    """Travel tasks with a tool server that knows nothing and starts at once."""

    def servers(self) -> tuple[ServerSpec, ...]:
        path = Path(__file__).parent / "servers" / "plain.py"
        return (ServerSpec(name="plain", command=sys.executable, args=("-I", "-S", str(path))),)


def runner(env: str = "tests.test_executor:Plain", **settings: object) -> RunnerExecutor:
    return RunnerExecutor(env, **{**AGENT, **settings})


def sampled(attempts: Attempts) -> list[list[tuple[int, ...]]]:
    return [[segment.token_ids for segment in episode.segments] for episode in attempts.episodes]


def versions(attempts: Attempts) -> set[int]:
    return {v for e in attempts.episodes for s in e.segments for v, m in zip(s.versions, s.mask, strict=True) if m}


async def begun(executor: RunnerExecutor, task: Task, runs: int) -> asyncio.Task[Attempts]:
    """A call whose runs are in the engine, if it runs."""
    call = asyncio.create_task(executor.attempt(task, runs, seed=1))
    for _ in range(9):
        await asyncio.sleep(0)  # let it submit first
    return call


def threads() -> list[threading.Thread]:
    """Threads of rollouts and engines; those that put something away are waited for."""
    for thread in threading.enumerate():
        if thread.name == "solver":
            thread.join()
    return [thread for thread in threading.enumerate() if thread.name in ("rollouts", "EngineCore")]


# --- an engine in this process -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def solver() -> AsyncIterator[RunnerExecutor]:
    executor = runner(TRAVEL)
    yield executor
    await executor.aclose()


async def test_many_calls_share_one_start_and_all_attempts_come_back(solver: RunnerExecutor):
    together = await asyncio.gather(*(solver.attempt(task, 4, seed=3) for task in TASKS))
    assert sum(thread.name == "rollouts" for thread in threading.enumerate()) == 1
    for task, attempts in zip(TASKS, together, strict=True):
        assert attempts.outage == "" and [e.member for e in attempts.episodes] == [0, 1, 2, 3]
        assert all(e.task == task for e in attempts.episodes)
        assert len({str(ids) for ids in sampled(attempts)}) > 1, "the runs are copies of one another"
        for episode in attempts.episodes:
            assert episode.outcome is Outcome.SCORED and 0 <= episode.score <= 1 and set(episode.checklist)
    assert solver.counts == {"attempted": 20, "failed": 0, "refused_by_budget": 0}


async def test_one_seed_samples_one_set_of_attempts(solver: RunnerExecutor):
    first, again, other = [await solver.attempt(TASKS[0], 3, seed=seed) for seed in (7, 7, 8)]
    assert sampled(first) == sampled(again) != sampled(other)
    twins = await asyncio.gather(*(solver.attempt(TASKS[0], 3, seed=7) for _ in range(2)))
    assert sampled(twins[0]) == sampled(first) != sampled(twins[1])
    assert not any(attempts.outage for attempts in twins)


async def test_a_cancelled_call_raises_and_leaves_the_rest_alone(solver: RunnerExecutor):
    before = await solver.attempt(TASKS[2], 2, seed=1)
    lost = await begun(solver, TASKS[1], 16)
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    after = await solver.attempt(TASKS[2], 2, seed=1)
    assert sampled(after) == sampled(before) and not after.outage
    assert len((await solver.attempt(TASKS[1], 16, seed=1)).episodes) == 16


async def test_a_budget_is_of_one_step_and_says_what_it_left_out():
    executor = runner(episodes_per_step=3)
    got = [await executor.attempt(TASKS[0], 2, seed=seed) for seed in (0, 1, 2)]
    assert [len(a.episodes) for a in got] == [2, 1, 0]
    assert [a.outage for a in got] == [
        "",
        "budget: 1 of 2 runs not started, episodes_per_step=3 used in this step",
        "budget: 2 of 2 runs not started, episodes_per_step=3 used in this step",
    ]
    executor.begin_step(1)
    assert len((await executor.attempt(TASKS[0], 2, seed=3)).episodes) == 2
    executor.begin_step(1)
    assert len((await executor.attempt(TASKS[0], 2, seed=4)).episodes) == 1
    assert executor.counts == {"attempted": 6, "failed": 0, "refused_by_budget": 4}
    await executor.aclose()


async def test_weights_follow_before_and_after_the_start():
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    executor = runner()
    await asyncio.to_thread(executor.set_weights, weights, 4, 30.0)
    assert versions(await executor.attempt(TASKS[0], 2, seed=0)) == {4}
    await asyncio.to_thread(executor.set_weights, weights, 5, 30.0)
    assert versions(await executor.attempt(TASKS[0], 2, seed=0)) == {5}

    running = await begun(executor, TASKS[3], 32)
    await asyncio.to_thread(executor.set_weights, weights, 5, 30.0)  # refused: its engine is replaced, with them
    attempts = await running
    assert len(attempts.episodes) == 32 and not attempts.outage and versions(attempts) == {5}
    assert 0 < executor.counts["failed"] <= 32 and executor.counts["attempted"] == 36 + executor.counts["failed"]
    await executor.aclose()


async def test_weights_that_do_not_fit_leave_no_solver_until_others_come():
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    executor = runner()
    executor.set_weights({name: w[..., :1] for name, w in weights.items()}, 1, 30.0)
    outages = [(await executor.attempt(TASKS[0], 2, seed=0)).outage for _ in range(4)]
    assert all(outage.startswith("unavailable: solver: update to version 1") for outage in outages[:3]), outages
    assert outages[3].startswith("unavailable: down until the next step after 3 failures in a row: solver: update")
    assert executor.counts == {"attempted": 8, "failed": 8, "refused_by_budget": 0}
    executor.set_weights(weights, 2, 30.0)
    assert versions(await executor.attempt(TASKS[0], 2, seed=0)) == {2}
    await executor.aclose()


async def test_an_engine_that_does_not_start_is_an_outage_and_is_tried_again_in_the_next_step(tmp_path: Path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(b"nothing")
    executor = runner(model_path=str(folder))
    outages = {(await executor.attempt(TASKS[0], 3, seed=0)).outage for _ in range(3)}
    assert all(outage.startswith("unavailable: solver did not start") for outage in outages)
    (folder / "model.safetensors").write_bytes(weights)
    assert "down until the next step" in (await executor.attempt(TASKS[0], 3, seed=0)).outage
    executor.begin_step(1)
    assert len((await executor.attempt(TASKS[0], 3, seed=0)).episodes) == 3
    await executor.aclose()


async def test_a_deadline_is_an_outage_and_the_end_waits_for_the_start():
    before = threads()
    executor = runner(deadline_s=0.01)
    attempts = await executor.attempt(TASKS[0], 2, seed=0)
    assert attempts == Attempts(outage="timeout: unfinished after deadline_s=0.01, the engine has not started")
    await executor.aclose()
    assert threads() == before
    assert (await executor.attempt(TASKS[0], 2, seed=0)).outage == "unavailable: the executor is closed"
    assert executor.counts == {"attempted": 2, "failed": 2, "refused_by_budget": 0}


def test_an_event_loop_may_end_while_the_engine_starts_and_nothing_is_left():
    executor = runner()

    async def begin() -> None:
        (await begun(executor, TASKS[0], 2)).cancel()

    async def end() -> int:
        attempts = await executor.attempt(TASKS[0], 2, seed=0)
        await executor.aclose()
        return len(attempts.episodes)

    asyncio.run(begin())
    assert asyncio.run(end()) == 2


async def test_closing_ends_attempts_in_flight():
    executor = runner()
    await executor.attempt(TASKS[0], 1, seed=0)
    running = await begun(executor, TASKS[0], 16)
    await executor.aclose()
    assert "unavailable: the executor is closed" in (await running).outage


async def test_a_tool_server_that_does_not_start_fails_the_episodes_without_an_outage():
    executor = runner("tests.tasksets:MissingCommand")
    attempts = await executor.attempt(TASKS[0], 2, seed=0)
    assert [e.outcome for e in attempts.episodes] == [Outcome.FAILED] * 2 and attempts.outage == ""
    assert all(e.score is None and e.detail.startswith("reset: ") for e in attempts.episodes)
    assert executor.counts == {"attempted": 2, "failed": 2, "refused_by_budget": 0}
    await executor.aclose()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temprature": 0.7}, "RunnerExecutor has no setting 'temprature'; did you mean 'temperature'"),
        ({"max_tools_tokens": 9}, "has no setting 'max_tools_tokens'"),
        ({"num_gpus_per_env_runner": 1}, "has no setting 'num_gpus_per_env_runner'"),
        ({"model_path": "/no/such/folder"}, "model folder '/no/such/folder' does not exist"),
        ({"model_path": ""}, "no model_path is set"),
        ({"temperature": 0}, "temperature=0 must be a positive number"),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes=1000 cannot hold"),
        ({"num_runners": -1}, "num_runners=-1 must be 0"),
        ({"episodes_per_step": 0}, "episodes_per_step=0 must be a whole number above 0"),
        ({"deadline_s": -1.0}, "deadline_s=-1.0 must be a number above 0"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(settings: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        runner(**settings)


async def test_an_executor_on_actors_is_checked_without_ray():
    executor = runner(num_runners=2)  # as preflight builds it, before a cluster is there
    await executor.aclose()
    assert executor.counts["attempted"] == 0


def test_an_environment_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="cannot be built"):
        RunnerExecutor("arenarl.envs.travel:Nothing", **AGENT)
    with pytest.raises(ConfigError, match="cannot be built"):
        RunnerExecutor(TRAVEL, {"sed": 1}, **AGENT)


# --- on Ray ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    yield
    ray.shutdown()


def actors() -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):  # servers of a killed actor are ending: look again
        return [p for p in descendants() if "AgentEnvRunner" in " ".join(p.cmdline())]
    return actors()


@pytest.mark.timeout(900)
async def test_actors_share_the_runs_and_a_killed_one_is_replaced_with_its_weights(cluster: None):
    import torch
    from transformers import AutoModelForCausalLM

    executor = runner(num_runners=2, num_cpus_per_env_runner=1, engine_core="thread")
    first = await executor.attempt(TASKS[0], 4, seed=3)
    assert len(first.episodes) == 4 and len(actors()) == 2
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    await asyncio.to_thread(executor.set_weights, {n: p.detach() for n, p in model.named_parameters()}, 3, 60.0)
    executor.begin_step(3)

    victim, survivor = actors()
    victim.kill()
    victim.wait()
    attempts = await executor.attempt(TASKS[0], 4, seed=3)
    assert len(attempts.episodes) == 4 and attempts.outage == "" and versions(attempts) == {3}
    assert sampled(attempts) == sampled(first)  # the weights are the same
    assert executor.counts == {"attempted": 10, "failed": 2, "refused_by_budget": 0}
    assert len(actors()) == 2 and survivor in actors()

    await executor.aclose()
    assert not psutil.wait_procs(actors(), timeout=20)[1]
    assert (await executor.attempt(TASKS[0], 1, seed=3)).outage == "unavailable: the executor is closed"


async def test_an_actor_that_cannot_start_says_why_in_a_line(cluster: None, tmp_path: Path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"nothing")
    executor = runner(num_runners=1, model_path=str(folder))
    outage = (await executor.attempt(TASKS[0], 2, seed=0)).outage
    assert outage.startswith("unavailable: the solver's actor: ") and "did not start" in outage and "\n" not in outage
    await executor.aclose()
    assert not psutil.wait_procs(actors(), timeout=20)[1]


# --- behind an endpoint ------------------------------------------------------------------------------------------


def solve(task: Task) -> list[str]:
    """All calls that the task needs in one message, then the best answer."""
    calls = [call(need["tool"], **need["arguments"]) for need in task.data["needs"]]
    return ["\n".join(calls), oracle(task).answer]


def saying(messages: list[str]) -> Step:
    """Answers with the message whose turn it is in the conversation."""

    def step(exchange: Exchange) -> None:
        said = sum(message["role"] == "assistant" for message in exchange.asked["messages"])
        reply(messages[said])(exchange)

    return step


@pytest.fixture
async def endpoint_solver() -> AsyncIterator[Callable[..., EndpointExecutor]]:
    opened: list[EndpointExecutor] = []

    def build(server: FaultEndpoint, env: str = "tests.test_executor:Plain", **settings: object) -> EndpointExecutor:
        opened.append(EndpointExecutor(env, base_url=server.url, model="m", **settings))
        return opened[-1]

    yield build
    for executor in opened:
        await executor.aclose()


COMPARE = TASKS[2]


async def test_a_chat_model_solves_a_task_with_the_tools_in_its_prompt(endpoint_solver):
    with FaultEndpoint(saying(solve(COMPARE))) as server:
        attempts = await endpoint_solver(server, TRAVEL).attempt(COMPARE, 3, seed=5)
    assert attempts.outage == "" and [e.member for e in attempts.episodes] == [0, 1, 2]
    for episode in attempts.episodes:
        assert (episode.outcome, episode.score, episode.segments) == (Outcome.SCORED, 1.0, ())
        assert [m["role"] for m in episode.trajectory.messages][:2] == ["system", "user"]
        assert episode.trajectory.messages[0]["content"] == TravelTasks.system_prompt
    first, last = server.requests[0], server.requests[-1]
    assert (
        '"name": "poi_search"' in first["messages"][0]["content"] and "<tool_call>" in first["messages"][0]["content"]
    )
    assert [m["role"] for m in last["messages"]] == ["system", "user", "assistant", "user"]
    assert last["messages"][3]["content"].count("<tool_response>\n") == len(COMPARE.data["needs"]) == 2
    assert (first["max_tokens"], first["temperature"]) == (1024, 0.7)
    assert len({request["seed"] for request in server.requests}) == len(server.requests) == 6


@pytest.mark.parametrize(
    ("step", "settings", "kind", "says"),
    [
        (status(503, "no room"), {"max_attempts": 1}, "unavailable", "503"),
        (status(400, "bad model"), {}, "refused", "bad model"),
        (stall, {"request_timeout_s": 0.2, "max_attempts": 1}, "timeout", "request_timeout_s=0.2"),
    ],
)
async def test_an_endpoint_that_is_down_fails_the_episode_and_says_why(endpoint_solver, step, settings, kind, says):
    with FaultEndpoint(step) as server:
        executor = endpoint_solver(server, **settings)
        attempts = await executor.attempt(COMPARE, 2, seed=0)
    assert attempts.outage.startswith(f"{kind}: ") and says in attempts.outage
    assert [(e.outcome, e.score, e.detail) for e in attempts.episodes] == [
        (Outcome.FAILED, None, f"endpoint: {kind}")
    ] * 2
    assert executor.counts == {"attempted": 2, "failed": 2, "refused_by_budget": 0}


async def test_nobody_there_and_a_budget_of_tokens_are_outages(endpoint_solver):
    with FaultEndpoint(saying(solve(COMPARE))) as server:
        executor = endpoint_solver(server, tokens_per_step=10)
        assert (await executor.attempt(COMPARE, 1, seed=0)).outage.startswith("budget: ")
        executor.begin_step(1)
        assert (await executor.attempt(COMPARE, 1, seed=0)).outage.startswith("budget: ")
        assert len(server.requests) == 2  # the first of each step is always let through
    gone = await endpoint_solver(server, max_attempts=1).attempt(COMPARE, 1, seed=0)
    assert gone.outage.startswith("unavailable: ") and gone.episodes[0].detail == "endpoint: unavailable"


async def test_a_deadline_ends_what_stalls_and_what_waits_for_its_turn(endpoint_solver):
    with FaultEndpoint(stall) as server:
        executor = endpoint_solver(server, deadline_s=0.5, max_concurrency=1)
        attempts = await executor.attempt(COMPARE, 3, seed=0)
        assert server.most_at_once <= 1
    assert attempts.outage.startswith("timeout: ") and len(attempts.episodes) == 3
    assert {e.outcome for e in attempts.episodes} == {Outcome.FAILED}


async def test_no_more_episodes_at_once_than_asked_for(endpoint_solver):
    with FaultEndpoint(saying(solve(COMPARE))) as server:
        executor = endpoint_solver(server, max_concurrency=3, episodes_per_step=10)
        both = await asyncio.gather(*(executor.attempt(COMPARE, 6, seed=seed) for seed in (0, 1)))
    assert server.most_at_once <= 3 and [len(a.episodes) for a in both] == [6, 4]
    assert both[1].outage == "budget: 2 of 6 runs not started, episodes_per_step=10 used in this step"
    assert executor.counts == {"attempted": 10, "failed": 0, "refused_by_budget": 2}


async def test_limits_of_the_policy_truncate_and_are_no_outage(endpoint_solver):
    calls = solve(COMPARE)[0]
    with FaultEndpoint(reply("cut", "length")) as cut, FaultEndpoint(reply(calls)) as endless:
        one = await endpoint_solver(cut).attempt(COMPARE, 1, seed=0)
        two = await endpoint_solver(endless, max_turns=2).attempt(COMPARE, 1, seed=0)
    ends = [(e.outcome, e.detail, a.outage) for a in (one, two) for e in a.episodes]
    assert ends == [(Outcome.TRUNCATED, "length", ""), (Outcome.TRUNCATED, "turns", "")]
    assert len(endless.requests) == 2


async def test_a_cancelled_call_hangs_up_and_the_next_one_works(endpoint_solver):
    with FaultEndpoint(stall, saying(solve(COMPARE))) as server:
        executor = endpoint_solver(server)
        lost = asyncio.create_task(executor.attempt(COMPARE, 1, seed=0))
        await asyncio.to_thread(server.arrived.acquire)
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost
        assert (await executor.attempt(COMPARE, 1, seed=1)).episodes[0].outcome is Outcome.SCORED


async def test_a_closed_one_ends_its_servers_and_plays_no_more():
    before = set(descendants())
    with FaultEndpoint(saying(solve(COMPARE))) as server:
        executor = EndpointExecutor(TRAVEL, base_url=server.url, model="m")  # its server is shared by all episodes
        assert (await executor.attempt(COMPARE, 1, seed=0)).episodes[0].score == 1.0
        assert set(descendants()) > before
        await executor.aclose()
        await executor.aclose()
        assert (await executor.attempt(COMPARE, 1, seed=0)).outage == "unavailable: the executor is closed"
    assert set(descendants()) == before


async def test_a_server_that_does_not_start_is_no_outage_of_the_endpoint():
    executor = EndpointExecutor("tests.tasksets:MissingCommand", base_url="http://127.0.0.1:9/v1", model="m")
    attempts = await executor.attempt(COMPARE, 1, seed=0)
    (episode,) = attempts.episodes
    assert isinstance(episode, Episode) and attempts.outage == "" and episode.detail.startswith("reset: ")
    await executor.aclose()


def test_results_become_one_user_message_and_nothing_else_changes():
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    said = [
        {"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"},
        {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}, {"role": "assistant", "content": "B"},
    ]  # fmt: skip
    chat = as_chat(said, [tool])
    assert chat[0]["content"].startswith("S\n\nYou can call tools.") and chat[0]["content"].endswith(
        json.dumps(tool["function"])
    )
    assert chat[1:] == [
        {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"},
        {"role": "user", "content": "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"},
        {"role": "assistant", "content": "B"},
    ]  # fmt: skip
    assert as_chat(said[:2], []) == said[:2]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "m"}, "base_url is missing: give base_url, such as 'http://localhost:8000/v1'"),
        ({"base_url": "http://localhost:8000/v1"}, "model is missing"),
        ({"base_url": "http://localhost:8000/v1", "model": "m", "max_atempts": 1}, "did you mean 'max_attempts'"),
        ({"base_url": "nowhere", "model": "m"}, "base_url='nowhere' is no address"),
        ({"base_url": "http://localhost:8000/v1", "model": "m", "max_concurrency": 0}, "max_concurrency=0"),
        ({"base_url": "http://localhost:8000/v1", "model": "m", "max_turns": 0}, "max_turns=0"),
        ({"base_url": "http://localhost:8000/v1", "model": "m", "temperature": -1}, "temperature=-1"),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused(settings: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        EndpointExecutor(TRAVEL, **settings)
