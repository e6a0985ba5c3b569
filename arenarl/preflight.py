"""What can be checked before an engine starts: resources, servers, tools. Fails in seconds, with one line."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from arenarl.async_env import AsyncToolEnv
from arenarl.comparison import check_compares, close_judges
from arenarl.config import AgentConfig
from arenarl.env_runner import load_renderer
from arenarl.errors import ConfigError
from arenarl.mcp import ToolSet
from arenarl.taskset import TaskSet, check_tools, draw_tasks
from arenarl.types import Message, Task
from arenarl.vllm_settings import engine_args, installed_device


@dataclass(frozen=True)
class Listing:
    """The tool schemas of an environment, as a chat template takes them, and the tokens they cost in every prompt."""

    schemas: list[dict[str, Any]]
    tokens: int


def preflight(config: AgentConfig, taskset: TaskSet) -> Listing:
    """Build the judge and close it, ask for tasks, start each tool server once, and see that engine and cluster are large enough.

    Raises:
        ConfigError: no judge, no tasks, a cache too small for one request, resources that the cluster does not have, or
            tools that cost more than ``max_tools_tokens``.
        McpServerError: a server that does not start, with the command and its last words.
    """
    check_parts(config)
    task = training_tasks(config, taskset)[0]
    tools = _in_a_thread(_list_tools(taskset, task))
    check_tools(taskset, tools)
    prompt = [Message(role="system", content=taskset.system_prompt), Message(role="user", content=task.prompt)]
    for term in config.extra_streams:
        term.check(load_renderer(config.model_path), prompt, tools.schemas)
    return check_listing(config, taskset, tools.schemas)


def check_parts(config: AgentConfig) -> None:
    """All of `preflight` that needs no server. Raises ConfigError."""
    check_resources(config)
    check_engine(config)
    if not isinstance(config.judge_config, Mapping):
        raise ConfigError(f"judge_config={config.judge_config!r} must be a mapping of the judge's arguments")
    judge, executor = config.build_judge(), config.build_executor()
    _in_a_thread(close_judges([judge]))
    check_compares(judge, config.judge)
    if executor is not None:
        _in_a_thread(executor.aclose())


def check_engine(config: AgentConfig) -> None:
    """Raises ConfigError for a model that is none, or a cache too small for one request."""
    engine_args(config.engine_config(), installed_device())


def check_listing(config: AgentConfig, taskset: TaskSet, schemas: list[dict[str, Any]]) -> Listing:
    """Count the tokens that the tools add to a prompt; above the budget, every server must have an allow-list.

    Raises:
        ConfigError: naming the servers without one.
    """
    renderer, message = load_renderer(config.model_path), Message(role="user", content="?")
    tokens = len(renderer.prompt([message], schemas)) - len(renderer.prompt([message], []))
    open_ended = [spec.name for spec in taskset.servers() if spec.allow is None]
    if tokens > config.max_tools_tokens and open_ended:
        raise ConfigError(
            f"the {len(schemas)} tools cost {tokens} tokens in every prompt, max_tools_tokens is {config.max_tools_tokens}; "
            f"choose tools with an allow-list (x-env.allow) for {', '.join(open_ended)}, or raise max_tools_tokens"
        )
    return Listing(schemas, tokens)


def training_tasks(config: AgentConfig, taskset: TaskSet) -> list[Task]:
    """The training tasks of a run. Raises ConfigError if the task set has none."""
    return draw_tasks(taskset, "train", config.num_train_tasks, config.seed or 0)


def wanted_resources(config: AgentConfig) -> dict[str, float]:
    """CPUs and GPUs of all workers together; the driver's own process is not counted."""
    runners, learners = config.num_env_runners, config.num_learners
    return {
        "CPU": runners * config.num_cpus_per_env_runner + learners * _per_learner(config.num_cpus_per_learner, 1),
        "GPU": runners * config.num_gpus_per_env_runner + learners * _per_learner(config.num_gpus_per_learner, 0),
    }


def _per_learner(value: float | str, auto: float) -> float:
    return auto if isinstance(value, str) else value


def check_resources(config: AgentConfig) -> None:
    """Compare the demand with the cluster's total, if Ray runs already; a demand that cannot be met would wait for ever."""
    import ray

    if not ray.is_initialized():
        return
    supply = ray.cluster_resources()
    for name, demand in wanted_resources(config).items():
        if demand > supply.get(name, 0.0):
            raise ConfigError(
                f"the workers want {demand:g} {name}, the cluster has {supply.get(name, 0.0):g}; lower num_env_runners="
                f"{config.num_env_runners} or num_learners={config.num_learners}, or add nodes"
            )


async def _list_tools(taskset: TaskSet, task: Task) -> ToolSet:
    env = AsyncToolEnv(taskset)
    try:
        await env.reset(options={"task": task})
        return env.toolset
    finally:
        await env.aclose()


def _in_a_thread(coroutine: Any) -> Any:
    """Run a coroutine to its end on a loop of its own, also if the caller's thread has a running loop (notebooks)."""
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(asyncio.run(coroutine))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return result.result()
