"""Solvers that try tasks on behalf of a generator (ARISE, arXiv 2609.01058: the executor service).

    RunnerExecutor     a model folder, on an engine in this process or on Ray actors; its weights can follow a solver in training
    EndpointExecutor   a model behind an OpenAI-compatible chat URL

Both play episodes of a task set and score them by its checklist; which attempts pass is the caller's affair. Nothing that
happens to them raises: what is missing is missing, and `Attempts.outage` says why. A kind of outage is "budget", "timeout",
"unavailable", "refused" (it can never succeed), or another of an endpoint's.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arenarl.async_env import AsyncToolEnv
from arenarl.endpoint import Endpoint, OpenAIEndpoint, Outage
from arenarl.endpoint_budget import check_positive
from arenarl.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    EnvError,
    InvalidRequest,
    McpServerError,
    near_name,
)
from arenarl.mcp.hub import ServerHub
from arenarl.player import Job, derive_seed
from arenarl.scoring import Attempts
from arenarl.solver_pool import Place, build_local, build_remote
from arenarl.taskset import load_taskset, taskset_path
from arenarl.tool_calls import HERMES
from arenarl.types import Episode, Message, Outcome, Task

if TYPE_CHECKING:
    import torch

    from arenarl.config import AgentConfig

TOOLS_PROMPT = """

You can call tools. Write each call as one JSON object between these tags:
<tool_call>
{"name": "NAME", "arguments": {"KEY": "VALUE"}}
</tool_call>
The results come with the next message. A message without a call is your final answer. The tools, one JSON schema a line:
"""


@dataclass
class _Step:
    started: int = 0


class _Ledger:
    """What a step may start, and what became of it over all steps.

    Attributes:
        counts: attempts that were begun ("attempted"), that ended without any verdict for want of a working part ("failed"),
            and that were not begun ("refused_by_budget").
    """

    def __init__(self, episodes_per_step: int | None) -> None:
        if episodes_per_step is not None:
            check_positive(int, episodes_per_step=episodes_per_step)
        self.limit, self.closed = episodes_per_step, False
        self.counts = {"attempted": 0, "failed": 0, "refused_by_budget": 0}
        self._version: int | None = None
        self._step = _Step()

    def begin_step(self, version: int) -> None:
        if version != self._version:
            self._version, self._step = version, _Step()

    async def attempts(self, runs: int, play: Callable[[int], Awaitable[Attempts]]) -> Attempts:
        """What ``play`` brings back for the runs 0, 1, ... that the budget has room for, as one."""
        if self.closed:
            return Attempts(outage="unavailable: the executor is closed")
        step, over = self._step, 0
        if self.limit is not None:
            over = max(0, runs - (self.limit - step.started))
        step.started += runs - over
        self.counts["attempted"] += runs - over
        self.counts["refused_by_budget"] += over
        played = await asyncio.gather(*map(play, range(runs - over)))
        episodes = tuple(episode for one in played for episode in one.episodes)
        self.counts["failed"] += runs - over - sum(episode.rankable for episode in episodes)
        reasons = [one.outage for one in played if one.outage]
        if over:
            reasons.append(
                f"budget: {over} of {runs} runs not started, episodes_per_step={self.limit} used in this step"
            )
        return Attempts(episodes=episodes, outage="; ".join(dict.fromkeys(reasons)))


# --- on engines of our own -----------------------------------------------------------------------------------------


class RunnerExecutor:
    """A model folder as solver.

    The engines start with the first attempt: once, whatever the number of attempts that wait for them. An attempt waits no longer
    than its deadline, and a start goes on without it. An engine or actor that died is replaced, and the runs that it took with it
    are played once more; three starts or lives in a row without an episode, and it stays down until the next step.

    A run with the same task, seed and weights samples the same tokens, unless an earlier one is in flight or was given up.

    Attributes:
        counts: of attempts, over all steps: "attempted", "failed", "refused_by_budget". A run played once more counts twice.

    Args:
        env: the task set that plays and scores the tasks, as in ``AgentConfig.environment``; e.g. one that checks tasks by their
            data, "arenarl.envs.rubric_tasks:RubricTasks".
        env_config: its arguments.
        num_runners: 0: one engine, in this process (``engine_core="thread"`` on CPU shares it, "process" gives its core one of
            its own). Else so many Ray actors, each with an engine, to which runs are dealt in turn.
        episodes_per_step: budget from one `begin_step` to the next; None for no limit. What is over is not started.
        deadline_s: for one call of `attempt`, all its runs and the start of engines included.
        agent: fields of `arenarl.config.AgentConfig` by name: model_path, temperature, max_tokens, max_turns, max_model_len ...;
            max_episodes (at once in each runner; 64), and with actors num_cpus_per_env_runner and num_gpus_per_env_runner.

    Raises:
        ConfigError: an argument is refused.
    """

    def __init__(
        self, env: str, env_config: Mapping[str, Any] | None = None, *, num_runners: int = 0,
        episodes_per_step: int | None = None, deadline_s: float = 300.0, **agent: Any,
    ) -> None:  # fmt: skip
        check_positive(deadline_s=deadline_s)
        self._config = solver_config(env, env_config, num_runners, agent)
        self._ledger = _Ledger(episodes_per_step)
        self.counts = self._ledger.counts
        self._num_runners, self._deadline_s = num_runners, deadline_s
        build = build_remote if num_runners else build_local
        self._places = [Place(lambda: build(self._config)) for _ in range(max(1, num_runners))]
        self._turns = itertools.cycle(self._places)
        self._taken: set[str] = set()  # names of runs; one that was given up may still be known to an engine

    async def attempt(self, task: Task, runs: int, *, seed: int) -> Attempts:
        """``runs`` independent attempts at a task. A cancelled call ends its episodes; on actors, their deadline does."""
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        return await self._ledger.attempts(runs, lambda number: self._try(task, number, seed, deadline))

    def begin_step(self, version: int) -> None:
        self._ledger.begin_step(version)
        for place in self._places:
            place.begin_step(version)

    def set_weights(self, weights: Mapping[str, torch.Tensor], version: int, timeout_s: float) -> None:
        """Play on with these weights, as do engines that start later: the weights are kept for them.

        From any thread but that of the attempts. An engine that does not take them is replaced by one that has them.

        Args:
            weights: every parameter by its Hugging Face name; never changed afterwards.
            version: above the last one.
        """
        shared: Any = weights
        if self._num_runners:
            import ray

            shared = ray.put(weights)
        with ThreadPoolExecutor(len(self._places)) as pool:
            list(pool.map(lambda place: place.set_weights(shared, version, timeout_s), self._places))

    async def aclose(self) -> None:
        """Take down what was started, and what is starting when it has started. Later attempts are outages."""
        self._ledger.closed = True
        await asyncio.gather(*(place.aclose() for place in self._places))

    async def _try(self, task: Task, number: int, seed: int, deadline: float) -> Attempts:
        name = f"{task.task_id}:{seed}:{number}"
        while name in self._taken:
            name += "+"
        self._taken.add(name)
        job = Job(group_id=name, task=task, group_size=1, sampling=self._config.sampling_params(), seed=seed)
        place = next(self._turns)
        try:
            async with asyncio.timeout_at(deadline):
                episode = await self._play(place, job, deadline)
        except TimeoutError as error:
            where = "" if place.running else ", the engine has not started"
            said = str(error) or f"unfinished after deadline_s={self._deadline_s:g}"
            return Attempts(outage=f"timeout: {said}{where}")
        except Exception as error:
            self._taken.discard(name)
            kind = "refused" if isinstance(error, ConfigError | InvalidRequest) else "unavailable"
            return Attempts(outage=f"{kind}: {str(error) or type(error).__name__}")
        self._taken.discard(name)
        return Attempts(episodes=(replace(episode, member=number),))

    async def _play(self, place: Place, job: Job, deadline: float) -> Episode:
        """The episode of a job; its second chance if the runner dies."""
        loop = asyncio.get_running_loop()
        for last in (False, True):
            runner = await place.runner()
            try:
                episode = await runner.play(job, max(0.0, deadline - loop.time()))
            except (InvalidRequest, DeadlineExceeded):
                raise
            except EngineError as error:
                place.lose(runner, error)
                if last:
                    raise
                self.counts["attempted"] += 1
                self.counts["failed"] += 1
            else:
                place.proven()
                return episode
        raise AssertionError("unreachable")


def solver_config(
    env: str, env_config: Mapping[str, Any] | None, num_runners: int, settings: Mapping[str, Any]
) -> AgentConfig:
    """A validated configuration of a worker that only plays.

    Raises:
        ConfigError: naming the setting, with the nearest name for an unknown one.
    """
    from arenarl.algorithm import AgentAlgorithm
    from arenarl.config import AgentConfig
    from arenarl.vllm_settings import engine_args, installed_device

    if type(num_runners) is not int or num_runners < 0:
        raise ConfigError(
            f"num_runners={num_runners!r} must be 0 (an engine in this process) or a number of Ray actors"
        )
    known = {*AgentConfig.SECTIONS["agent"], "max_episodes", "dtype"} - {"max_tools_tokens"}
    if num_runners:
        known |= {"num_cpus_per_env_runner", "num_gpus_per_env_runner"}
    _check_names(settings, known, "RunnerExecutor")
    config = AgentConfig(algo_class=AgentAlgorithm).environment(env, env_config=dict(env_config or {}))
    config.update_from_dict({"max_episodes": 64, **settings})
    config.update_from_dict({"group_size": 1, "groups_per_step": 1, "max_staleness": 0, "num_env_runners": num_runners})
    config.validate()
    config.build_taskset()
    engine_args(config.engine_config(), installed_device())
    return config


def _check_names(settings: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in settings:
        if name not in known:
            raise ConfigError(f"{where} has no setting {name!r}; {near_name(name, sorted(known))}")


# --- behind an endpoint --------------------------------------------------------------------------------------------


class EndpointExecutor:
    """A solver behind an OpenAI-compatible chat URL. Its episodes have no token records, so nobody can train on them.

    The endpoint needs no support for tools: their schemas, and how to call them (as Hermes does, in the text), are put behind the
    system prompt, and results come back in a user message between ``<tool_response>`` tags. Neither is in the trajectory, which
    is that of any episode. An outage of the endpoint fails the episode. Used on one event loop.

    Attributes:
        counts: of attempts, over all steps: "attempted", "failed", "refused_by_budget".

    Args:
        env, env_config, episodes_per_step: as of `RunnerExecutor`.
        endpoint: where the model is; None builds an `arenarl.endpoint.OpenAIEndpoint` from ``settings``, of which ``base_url`` and
            ``model`` must be there.
        deadline_s: for one call of `attempt`, waits included.
        max_concurrency: episodes at once; each has one request in flight at most.
        max_turns: assistant messages; the task set's if None.
        max_tokens: of one message. A longer one ends the episode as truncated.

    Raises:
        ConfigError: an argument is refused.
    """

    def __init__(
        self, env: str, env_config: Mapping[str, Any] | None = None, *, endpoint: Endpoint | None = None,
        episodes_per_step: int | None = None, deadline_s: float = 300.0, max_concurrency: int = 16,
        max_turns: int | None = None, max_tokens: int = 1024, temperature: float = 0.7, **settings: Any,
    ) -> None:  # fmt: skip
        check_positive(deadline_s=deadline_s, **({"temperature": temperature} if temperature != 0 else {}))
        check_positive(int, max_concurrency=max_concurrency, max_tokens=max_tokens)
        if max_turns is not None:
            check_positive(int, max_turns=max_turns)
        if endpoint is None:
            settings = {"max_concurrency": max_concurrency, "deadline_s": deadline_s, **settings}
            endpoint = _open_endpoint(settings)
        elif settings:
            raise ConfigError(f"{next(iter(settings))!r} is a setting of an endpoint, and one is given; set it there")
        self._endpoint, self._taskset = endpoint, load_taskset(taskset_path(env), env_config)
        self._ledger = _Ledger(episodes_per_step)
        self.counts = self._ledger.counts
        self._hub, self._slots = ServerHub(), asyncio.Semaphore(max_concurrency)
        self._deadline_s, self._max_turns = deadline_s, max_turns
        self._max_tokens, self._temperature = max_tokens, temperature

    async def attempt(self, task: Task, runs: int, *, seed: int) -> Attempts:
        """``runs`` independent attempts at a task."""
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        return await self._ledger.attempts(runs, lambda number: self._try(task, number, seed, deadline))

    def begin_step(self, version: int) -> None:
        self._ledger.begin_step(version)
        self._endpoint.begin_step(version)
        if begin_step := getattr(self._taskset, "begin_step", None):
            begin_step(version)

    async def aclose(self) -> None:
        """Close the endpoint and end the tool servers. Later attempts are outages."""
        self._ledger.closed = True
        closing = [self._hub.aclose(), self._endpoint.aclose()]
        if aclose := getattr(self._taskset, "aclose", None):
            closing.append(aclose())
        await asyncio.gather(*closing)

    async def _try(self, task: Task, number: int, seed: int, deadline: float) -> Attempts:
        env = AsyncToolEnv(
            self._taskset, hub=self._hub, max_turns=self._max_turns, episode_timeout=self._deadline_s, parser=HERMES
        )
        failure, outage = "", ""
        try:
            async with asyncio.timeout_at(deadline), self._slots:
                lost = await self._play(env, task, seed, number)
            if lost is not None:
                failure, outage = f"endpoint: {lost.kind}", f"{lost.kind}: {lost.detail}"
        except TimeoutError:
            failure, outage = "deadline", f"timeout: unfinished after deadline_s={self._deadline_s:g}"
        except (McpServerError, EnvError) as error:
            failure = f"reset: {error}"
        except Exception as error:
            kind = "refused" if isinstance(error, ConfigError) else "unavailable"
            failure, outage = kind, f"{kind}: {str(error) or type(error).__name__}"
        finally:
            await env.aclose()
        episode = Episode(
            episode_id=f"{task.task_id}:{seed}:{number}", task=task, member=number, greedy=False, segments=(),
            trajectory=env.trajectory(), outcome=Outcome.FAILED if failure else env.outcome, detail=failure or env.detail,
            checklist=env.checklist_results, score=None if failure else env.score,
        )  # fmt: skip
        return Attempts(episodes=(episode,), outage=outage)

    async def _play(self, env: AsyncToolEnv, task: Task, seed: int, number: int) -> Outage | None:
        """Play to the end of the episode, or to an outage."""
        _, info = await env.reset(options={"task": task})
        for turn in itertools.count():
            reply = await self._endpoint.complete(
                as_chat(env.trajectory().messages, info["tools"]), max_tokens=self._max_tokens,
                temperature=self._temperature, seed=derive_seed(seed, task.task_id, number, turn),
            )  # fmt: skip
            if isinstance(reply, Outage):
                return reply
            if reply.finish_reason == "length":
                await env.truncate("length")
            else:
                await env.step(reply.text)
            if env.outcome is not None:
                break
        return None


def as_chat(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """A conversation for an endpoint that knows no tools: `TOOLS_PROMPT` ends the system message, results are the user's."""
    chat: list[dict[str, str]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system" and tools:
            content += TOOLS_PROMPT + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if chat[-1]["role"] == "user":  # several results in one turn: roles must alternate
                content = f"{chat.pop()['content']}\n{content}"
        chat.append({"role": role, "content": content})
    return chat


def _open_endpoint(settings: Mapping[str, Any]) -> OpenAIEndpoint:
    for name, example in (("base_url", "'http://localhost:8000/v1'"), ("model", "a name that the server knows")):
        if name not in settings:
            raise ConfigError(f"{name} is missing: give {name}, such as {example}")
    _check_names(settings, set(inspect.signature(OpenAIEndpoint).parameters), "EndpointExecutor")
    return OpenAIEndpoint(**settings)
