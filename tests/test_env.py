"""The environment: what the model does wrong is an observation, what the infrastructure does wrong is no reward."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from arenarl.async_env import AsyncToolEnv
from arenarl.calls import MAX_CALLS_PER_TURN
from arenarl.env import ToolGymEnv, UnicodeText
from arenarl.errors import ConfigError, EnvError, McpServerError
from arenarl.mcp import ServerHub, ServerSpec
from arenarl.rubric import Checklist, ChecklistItem, Reward
from arenarl.state import EpisodeState
from arenarl.tool_calls import HERMES
from arenarl.types import Outcome, Task, ToolCall, Trajectory
from tests.processes import descendants

FAULTY = str(Path(__file__).parent / "servers" / "faulty.py")


def server(*args: str, **changes: Any) -> ServerSpec:
    values = {"name": "faulty", "command": sys.executable, "args": ("-I", "-S", FAULTY, *args), "call_timeout": 20.0}
    return ServerSpec(**(values | changes))


def counted(trajectory: Trajectory) -> bool:
    return any(event.call.name == "count" and event.result.ok for event in trajectory.events)


def answered(trajectory: Trajectory) -> bool | None:
    if trajectory.answer == "no idea":
        return None
    if trajectory.answer == "break":
        raise KeyError("a broken checklist")
    return trajectory.answer == "done"


class Counting:
    """Tasks "count to N"; half the score for counting, half for the answer "done"."""

    name, system_prompt, max_turns = "counting", "You count.", 4

    def __init__(self, *specs: ServerSpec, items: tuple[str, ...] = ("counted", "answered")) -> None:
        self.specs, self.items = specs or (server(),), items

    def servers(self) -> tuple[ServerSpec, ...]:
        return self.specs

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return [Task(task_id=f"{split}-{seed + n}", kind="count", prompt=f"Count to {seed + n}.") for n in range(count)]

    def checklist(self, task: Task) -> Checklist:
        checks = {"counted": counted, "answered": answered}
        return Checklist([ChecklistItem(name=name, check=checks[name]) for name in self.items])


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
async def hub():
    hub = ServerHub()
    yield hub
    await hub.aclose()
    assert not descendants()


# --- the course of an episode ------------------------------------------------------------------------------------


async def test_episode_from_task_to_score(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub)
    messages, info = await env.reset(seed=7)
    assert messages == [{"role": "system", "content": "You count."}, {"role": "user", "content": "Count to 7."}]
    assert info["task_id"] == "train-7" and info["tools"][0]["function"]["name"] == "echo"
    first = await env.step("Let me see. " + call("count") + call("echo", text="hi"))
    assert first.messages == [
        {"role": "tool", "content": "1", "tool_call_id": "call_0", "name": "count"},
        {"role": "tool", "content": "hi", "tool_call_id": "call_1", "name": "echo"},
    ]
    assert (first.reward, first.terminated, first.truncated) == (0.0, False, False)
    second = await env.step("<think>so</think>done")
    assert (second.messages, second.reward, second.terminated, second.truncated) == ([], 1.0, True, False)
    assert (env.outcome, env.detail, env.score) == (Outcome.SCORED, "", 1.0)
    assert env.checklist_results == {"counted": True, "answered": True}
    trajectory = env.trajectory()
    assert trajectory.answer == "done" and trajectory.num_turns == 2
    assert [(event.turn, event.call.id, event.result.server) for event in trajectory.events] == [
        (0, "call_0", "faulty"),
        (0, "call_1", "faulty"),
    ]
    with pytest.raises(EnvError, match="no episode is running"):
        await env.step("more")


async def test_every_episode_has_a_fresh_server(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub)
    for _ in range(2):
        await env.reset(seed=1)
        result = await env.step(call("count") + call("count"))
        assert [message["content"] for message in result.messages] == ["1", "2"]


async def test_episodes_in_flight_do_not_see_each_other(hub: ServerHub):
    async def episode(length: int) -> list[str]:
        env = AsyncToolEnv(Counting(), hub=hub, max_turns=9)
        await env.reset(seed=length)
        return [(await env.step(call("count"))).messages[0]["content"] for _ in range(length)]

    assert await asyncio.gather(*map(episode, range(1, 9))) == [[str(k + 1) for k in range(n)] for n in range(1, 9)]


async def test_task_may_be_given_and_options_are_checked(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub, split="heldout")
    assert (await env.reset(seed=3))[1]["task_id"] == "heldout-3"
    mine = Task(task_id="mine", kind="count", prompt="Mine.")
    assert (await env.reset(options={"task": mine}))[0][1]["content"] == "Mine."
    with pytest.raises(ConfigError, match="'tusk' is unknown"):
        await env.reset(options={"tusk": mine})


MISTAKES = [  # assistant text, kind, part of the observation
    ('<tool_call>\n{"name": "echo", \n</tool_call>', "parse_error", "not valid JSON"),
    ('<tool_call>\n["echo"]\n</tool_call>', "parse_error", "must be a JSON object"),
    ('<tool_call>\n{"name": "echo"', "parse_error", "not closed"),
    ('<tool_call>{"name": "echo", "arguments": {"n": NaN}}</tool_call>', "parse_error", "NaN"),
    (call("ecko", text="x"), "unknown_tool", "no tool is called 'ecko'; tools: echo"),
    (call("echo", text=5), "invalid_args", "5 is not of type 'string' (at text)"),
    (call("echo", deep=json.loads("[" * 300 + "]" * 300)), "parse_error", "nested more than 64 levels deep"),
    (call("bad_args"), "invalid_args", "text is missing"),
    (call("error_result"), "tool_error", "no such city"),
]


@pytest.mark.parametrize(("text", "kind", "words"), MISTAKES)
async def test_mistake_of_the_model_is_an_observation(hub: ServerHub, text: str, kind: str, words: str):
    env = AsyncToolEnv(Counting(), hub=hub)
    await env.reset(seed=1)
    result = await env.step(text)
    assert result.info["results"] == [kind] and not result.terminated and not result.truncated
    assert result.messages[0]["content"].startswith("Error: ") and words in result.messages[0]["content"]
    assert (await env.step(call("count"))).messages[0]["content"] == "1"


async def test_parsed_message_is_the_same_as_its_text(hub: ServerHub):
    forms: list[Any] = [
        ToolCall(id="x", name="echo", arguments={"text": "é"}),
        {"id": "x", "type": "function", "function": {"name": "echo", "arguments": '{"text": "é"}'}},
        {"name": "echo", "arguments": {"text": "é"}},
    ]
    env = AsyncToolEnv(Counting(), hub=hub)
    await env.reset(seed=1)
    result = await env.step({"role": "assistant", "content": "Well.", "tool_calls": forms})
    assert [message["content"] for message in result.messages] == ["é"] * 3
    said = env.trajectory().messages[2]["content"]
    assert said.startswith("Well.\n<tool_call>") and said.count('{"name": "echo", "arguments": {"text": "é"}}') == 3
    broken = await env.step({"content": None, "tool_calls": [{"function": {"name": "echo", "arguments": '{"text": '}}]})
    assert broken.info["results"] == ["parse_error"]


async def test_same_mistake_again_is_called_that(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub)
    await env.reset(seed=1)
    first, again = await env.step(call("ecko", text="x")), await env.step(call("ecko", text="x") * 2)
    other = await env.step(call("ecko", text="y"))
    assert "This same call" not in first.messages[0]["content"] + other.messages[0]["content"]
    said = [message["content"].splitlines()[-1] for message in again.messages]
    assert said == [f"This same call has failed {n} times; change it." for n in (2, 3)]


class Meeting:
    """A tool that returns only when as many calls as expected wait in it at once."""

    waiting: asyncio.Barrier

    async def meet(self) -> str:
        """Wait for the others."""
        await Meeting.waiting.wait()
        return "met"


async def test_calls_of_one_message_run_side_by_side_within_and_across_servers(hub: ServerHub):
    Meeting.waiting = asyncio.Barrier(4)
    specs = [
        ServerSpec(name=name, transport="inproc", factory=Meeting, call_timeout=20.0, max_calls=2) for name in "ab"
    ]
    env = AsyncToolEnv(Counting(*specs), hub=hub)
    await env.reset(seed=1)
    result = await env.step(call("a__meet") * 2 + call("b__meet") * 2)
    assert [message["content"] for message in result.messages] == ["met"] * 4


async def test_one_call_at_a_time_if_nothing_is_said(hub: ServerHub):
    Meeting.waiting = asyncio.Barrier(2)
    spec = ServerSpec(name="a", transport="inproc", factory=Meeting, call_timeout=0.3)
    env = AsyncToolEnv(Counting(spec), hub=hub)
    await env.reset(seed=1)
    result = await env.step(call("meet") * 2)
    assert result.info["env_failure"] == "timeout"


async def test_calls_beyond_the_limit_are_refused(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub)
    await env.reset(seed=1)
    result = await env.step(call("count") * (MAX_CALLS_PER_TURN + 2))
    assert result.info["results"] == ["ok"] * MAX_CALLS_PER_TURN + ["invalid_args"] * 2


async def test_long_result_is_cut_in_the_middle(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub, max_result_tokens=25)  # of four characters
    await env.reset(seed=1)
    text = (await env.step(call("big"))).messages[0]["content"]
    assert text == "x" * 72 + "\n[... 4999900 characters omitted ...]\n" + "x" * 28
    assert env.trajectory().events[0].result.truncated


# --- ends --------------------------------------------------------------------------------------------------------


async def test_turn_limit_truncates_and_scores_what_is_there(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub, max_turns=2)
    await env.reset(seed=1)
    assert not (await env.step(call("echo"))).truncated
    last = await env.step(call("count"))
    assert (last.messages[0]["content"], last.reward, last.terminated, last.truncated) == ("1", 0.5, False, True)
    assert (env.outcome, env.detail) == (Outcome.TRUNCATED, "turns") and "env_failure" not in last.info


async def test_rollout_may_truncate(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub)
    await env.reset(seed=1)
    await env.step(call("count"))
    await env.truncate("context")
    await env.truncate("length")
    assert (env.outcome, env.detail, env.score) == (Outcome.TRUNCATED, "context", 0.5)


async def test_undecided_checklist_abstains(hub: ServerHub):
    env = AsyncToolEnv(Counting(items=("answered",)), hub=hub)
    await env.reset(seed=1)
    result = await env.step("no idea")
    assert (result.reward, result.terminated, result.truncated) == (0.0, True, False)
    assert env.outcome is Outcome.ABSTAINED and env.score is None and result.info["outcome"] == "abstained"


async def test_broken_checklist_fails_the_episode(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub)
    await env.reset(seed=1)
    result = await env.step("break")
    assert (result.reward, result.terminated, result.truncated) == (0.0, False, True)
    assert result.info["env_failure"] == "checklist" and env.outcome is Outcome.FAILED
    assert isinstance(env.error, EnvError) and env.checklist_results == {}


async def test_dead_server_fails_the_episode_at_once(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub)
    await env.reset(seed=1)
    result = await env.step(call("count") + call("exit") + call("count"))
    assert result.info["results"] == ["ok", "server_dead"] and result.info["env_failure"] == "server_dead"
    assert (result.reward, result.terminated, result.truncated) == (0.0, False, True)
    assert (env.outcome, env.score) == (Outcome.FAILED, None) and isinstance(env.error, McpServerError)


@pytest.mark.parametrize(
    ("tools", "failure", "limit"), [("hang hang", "timeout", 0.5), ("huge bad_json", "protocol", 20.0)]
)
async def test_two_failures_in_a_row_fail_the_episode(hub: ServerHub, tools: str, failure: str, limit: float):
    env = AsyncToolEnv(Counting(server(call_timeout=limit, close_grace=0.1)), hub=hub)
    await env.reset(seed=1)
    first, second = tools.split()
    assert not (await env.step(call(first))).truncated
    result = await env.step(call("ecko") + call(second))  # a mistake between them does not make the server well
    assert result.truncated and result.info["env_failure"] == failure


async def test_single_failures_are_shown_and_forgiven(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub)
    await env.reset(seed=1)
    result = await env.step("".join(map(call, ["bad_json", "count", "huge", "count"])))
    assert result.info["results"] == ["protocol", "ok", "too_large", "ok"] and not result.truncated


async def test_shared_server_comes_back_without_repeating_the_call(hub: ServerHub):
    env = AsyncToolEnv(Counting(server(scope="shared")), hub=hub)
    await env.reset(seed=1)
    results = [await env.step(call(tool)) for tool in ("count", "exit", "count")]
    assert [result.info["results"] for result in results] == [["ok"], ["server_dead"], ["ok"]]
    assert results[-1].messages[0]["content"] == "1"


@pytest.mark.parametrize("ending", ["done", call("ecko")])
async def test_episode_that_ends_on_a_tool_that_did_not_answer_is_no_verdict_on_the_policy(hub: ServerHub, ending: str):
    env = AsyncToolEnv(Counting(server(call_timeout=0.3, close_grace=0.1)), hub=hub, max_turns=2)
    await env.reset(seed=1)
    assert (await env.step(call("hang"))).info["results"] == ["timeout"]
    result = await env.step(ending)
    assert (env.outcome, env.detail, env.score) == (Outcome.FAILED, "timeout", None)
    assert result.truncated and result.info["env_failure"] == "timeout"


async def test_answer_that_was_too_large_is_the_policys_affair(hub: ServerHub):
    env = AsyncToolEnv(Counting(), hub=hub)
    await env.reset(seed=1)
    assert (await env.step(call("huge"))).info["results"] == ["too_large"]
    assert (await env.step("done")).reward == 0.5


def test_hostile_nesting_leaves_an_episode_that_can_be_sent():
    for depth in (60, 600, 5000):
        text = '<tool_call>{"name": "x", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"
        _, calls = HERMES.parse(text)
        assert pickle.loads(pickle.dumps(calls)) == calls and (calls[0].error is None) == (depth == 60)


async def test_episode_deadline_fails_the_episode(hub: ServerHub):
    env = AsyncToolEnv(Counting(server(close_grace=0.1)), hub=hub, episode_timeout=1.0)
    await env.reset(seed=1)
    result = await env.step(call("hang"))
    assert result.info["env_failure"] == "timeout" and env.outcome is Outcome.FAILED


async def test_server_that_does_not_start_is_an_error_with_a_reason(hub: ServerHub):
    env = AsyncToolEnv(Counting(server("--start", "exit")), hub=hub)
    with pytest.raises(McpServerError, match="missing API key"):
        await env.reset(seed=1)
    assert (env.outcome, env.detail) == (Outcome.FAILED, "start_failed")


async def test_two_servers_share_an_episode_under_distinct_names(hub: ServerHub):
    env = AsyncToolEnv(Counting(server(name="a"), server(name="b")), hub=hub)
    _, info = await env.reset(seed=1)
    names = [schema["function"]["name"] for schema in info["tools"]]
    assert len(set(names)) == len(names) and "a__count" in names
    result = await env.step(call("a__count") + call("a__count") + call("b__count"))
    assert [message["content"] for message in result.messages] == ["1", "2", "1"]
    assert [event.result.server for event in env.trajectory().events] == ["a", "a", "b"]


async def test_cancelled_step_leaves_nothing_behind(hub: ServerHub):
    env = AsyncToolEnv(Counting(server(close_grace=0.1)), hub=hub)
    await env.reset(seed=1)
    step = asyncio.create_task(env.step(call("hang")))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert (env.outcome, env.detail) == (Outcome.FAILED, "cancelled")
    await env.aclose()
    await env.aclose()


async def test_environment_with_a_hub_of_its_own_closes_it():
    env = AsyncToolEnv(Counting())
    await env.reset(seed=1)
    await env.aclose()
    assert not descendants()


@pytest.mark.parametrize("arguments", [{"max_turns": 0}, {"episode_timeout": -1.0}, {"split": "test"}])
def test_bad_limits_are_refused(arguments: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        AsyncToolEnv(Counting(), **arguments)


# --- Gymnasium ---------------------------------------------------------------------------------------------------


class CountingEnv(ToolGymEnv):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(Counting(), **kwargs)


@pytest.fixture
def gym_env() -> Iterator[ToolGymEnv]:
    env = CountingEnv()
    yield env
    env.close()
    env.close()
    assert not descendants()


def test_check_env_has_no_complaint():
    gymnasium.register("arenarl-test/Counting-v0", entry_point=CountingEnv)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make("arenarl-test/Counting-v0", max_turns=3)
        check_env(env.unwrapped)
        env.close()
    del gymnasium.registry["arenarl-test/Counting-v0"]


def test_gym_episode(gym_env: ToolGymEnv):
    observation, info = gym_env.reset(seed=2)
    assert observation == "You count.\n\nCount to 2." and info["messages"][1]["role"] == "user"
    assert info["tools"][0]["type"] == "function"
    observation, reward, terminated, truncated, info = gym_env.step(call("count"))
    assert (observation, reward, terminated, truncated) == ("1", 0.0, False, False)
    assert info["messages"][0]["tool_call_id"] == "call_0"
    assert gym_env.step("done")[1:4] == (1.0, True, False)


def test_same_seed_same_transcript(gym_env: ToolGymEnv):
    def play() -> list[Any]:
        said = [gym_env.reset(seed=5)]
        said += [gym_env.step(text) for text in (call("count") + call("ecko"), call("echo", text=1), "done")]
        return [*said, gym_env.reset()]

    first, second = play(), play()
    assert json.dumps(first) == json.dumps(second)
    assert str(os.getpid()) not in json.dumps(first)


FORK = """
import os
from test_env import CountingEnv, call
env = CountingEnv()
env.reset(seed=1)
first = env.step(call("count"))[0]
child = os.fork()
if child == 0:
    env.reset(seed=1)
    fine = env.step(call("count"))[0] == "1"
    env.close()
    os._exit(0 if fine else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(first, code, env.step(call("count"))[0])
"""


def test_gym_env_survives_a_fork():
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}:{here.parent}"}
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split() == ["1", "0", "2"], done.stderr  # the parent's server is still its own


def test_gym_env_refuses_its_own_loop_thread(gym_env: ToolGymEnv):
    class Nested(Counting):
        def tasks(self, split: str, count: int, seed: int) -> list[Task]:
            gym_env.reset()
            return []

    with pytest.raises(EnvError, match="own event loop's thread"):
        ToolGymEnv(Nested()).reset()


def test_unicode_text_space():
    space = UnicodeText(max_length=8)
    space.seed(3)
    sample = space.sample()
    assert sample in space and sample.isprintable() and 1 <= len(sample) <= 8
    assert "é\n😀" in space and "x" * 9 not in space and 5 not in space
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(["a", "é"])))) == ["a", "é"]
    assert space == UnicodeText(8) and space != UnicodeText(9)


# --- the verdict from what is left behind ------------------------------------------------------------------------

FILES = str(Path(__file__).parent / "servers" / "files.py")


class Writing(Counting):
    """A task whose starting file must be changed; the verdict is read from the disk."""

    name = "writing"

    def setup(self, task: Task, workdir: Path) -> None:
        (workdir / "note.txt").write_text(f"start of {task.task_id}")

    def checklist(self, task: Task) -> Checklist:
        async def wrote(trajectory: Trajectory, state: EpisodeState) -> float | None:
            text = state.read("note.txt")
            return None if text == "unclear" else float(text == f"see /workspace/{task.task_id}")

        return Checklist([Reward(name="wrote", function=wrote)])


@pytest.mark.parametrize("scope", ["episode", "pool"])
async def test_verdict_is_read_from_the_disk_before_the_workspace_is_cleaned(hub: ServerHub, scope: Any):
    spec = ServerSpec(name="files", command=sys.executable, args=("-I", "-S", FILES, "${WORKDIR}"), scope=scope)
    env = AsyncToolEnv(Writing(spec), hub=hub)
    for seed, text, score in [
        (1, "see /workspace/train-1", 1.0),
        (2, "see /workspace/train-1", 0.0),
        (3, "unclear", None),
    ]:
        await env.reset(seed=seed)
        start = await env.step(call("read_file", path="/workspace/note.txt"))
        assert start.messages[0]["content"] == f"start of train-{seed}"
        await env.step(call("write_file", path="/workspace/note.txt", text=text))
        await env.step("done")
        assert (env.score, env.checklist_results) == (score, {"wrote": score})
        assert [event.result.server for event in env.trajectory().events] == ["files"] * 2
    assert env.outcome is Outcome.ABSTAINED


async def test_verdict_that_hangs_fails_the_episode(hub: ServerHub):
    class Hanging(Counting):
        def checklist(self, task: Task) -> Checklist:
            async def hang(trajectory: Trajectory, state: EpisodeState) -> float | None:
                await asyncio.Event().wait()
                return 1.0

            return Checklist([Reward(name="hang", function=hang)])

    env = AsyncToolEnv(Hanging(), hub=hub, verdict_timeout=0.1)
    await env.reset(seed=1)
    result = await env.step("done")
    assert result.truncated and result.info["env_failure"] == "checklist" and env.score is None


async def test_starting_state_that_cannot_be_written_fails_the_episode(hub: ServerHub):
    class Broken(Writing):
        def setup(self, task: Task, workdir: Path) -> None:
            (workdir / "missing" / "note.txt").write_text("x")

    env = AsyncToolEnv(Broken(), hub=hub)
    with pytest.raises(EnvError, match=r"missing/note\.txt"):
        await env.reset(seed=1)
    assert (env.outcome, env.detail) == (Outcome.FAILED, "start_failed")
