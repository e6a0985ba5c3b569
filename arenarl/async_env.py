"""Multi-turn tool use as an environment: the asyncio core that `arenarl.env` wraps for Gymnasium.

An action is an assistant message. Its tool calls are run in order and answered by tool messages; a message without a
call is the answer and ends the episode. What the model does wrong becomes a message that says so. What the
infrastructure does wrong ends the episode as failed, which is not a reward of zero: nobody trains on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from arenarl.chat import parse_tool_calls
from arenarl.errors import ArenaError, ConfigError, EnvError
from arenarl.mcp import McpSession, ServerHub, ServerSpec, ToolSet, ToolSpec
from arenarl.mcp.schema import clean_json, shorten
from arenarl.rubric import Checklist
from arenarl.types import (
    INFRASTRUCTURE_KINDS,
    Message,
    Outcome,
    Task,
    ToolCall,
    ToolEvent,
    ToolResult,
    ToolResultKind,
    Trajectory,
)

MAX_CALLS_PER_TURN = 16
_MAX_FAILURES_IN_A_ROW = 2

_log = logging.getLogger(__name__)


class TaskSet(Protocol):
    """What makes an environment of the generic one: tasks, tools, and how an episode is judged."""

    name: str
    system_prompt: str
    max_turns: int

    def servers(self) -> Sequence[ServerSpec]:
        """The tool servers of an episode."""
        ...

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """``count`` tasks of "train" or "heldout"; the same for the same arguments."""
        ...

    def checklist(self, task: Task) -> Checklist:
        """What a good episode of this task does."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Gymnasium's step, with messages for an observation.

    Attributes:
        messages: only those that are new.
        reward: the checklist score at the end of a scored or truncated episode, else 0.0.
        info: plain data without wall times, process ids or paths: the same actions give the same info.
    """

    messages: list[Message]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class AsyncToolEnv:
    """One episode at a time, on one event loop. Many of these share a loop and a hub.

    Attributes:
        outcome: None while the episode runs; with ``detail``, ``checklist_results`` and ``score`` as in `Episode`.
        error: what made the episode fail, if an exception tells it.

    Args:
        taskset: tasks, servers and checklists.
        hub: hands out server sessions; one of its own if None, closed with the environment.
        max_turns: assistant messages before the episode is truncated; the task set's if None.
        max_result_chars: a longer tool result is cut in the middle.
        episode_timeout: seconds from the end of `reset`; a call that is not answered by then fails the episode.
        split: which tasks `reset` draws from.

    Raises:
        ConfigError: if a limit is not positive or the split is unknown.
    """

    def __init__(
        self, taskset: TaskSet, *, hub: ServerHub | None = None, max_turns: int | None = None,
        max_result_chars: int = 8000, episode_timeout: float = 600.0, split: str = "train",
    ) -> None:  # fmt: skip
        self.taskset = taskset
        self.max_turns = taskset.max_turns if max_turns is None else max_turns
        self.max_result_chars = max_result_chars
        self.episode_timeout = episode_timeout
        for key in ("max_turns", "max_result_chars", "episode_timeout"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"{key}={getattr(self, key)!r} is refused; give a positive number")
        if split not in ("train", "heldout"):
            raise ConfigError(f"split={split!r} is refused; use 'train' or 'heldout'")
        self.split = split
        self._hub = hub
        self._owns_hub = hub is None
        self._random = random.Random()
        self._sessions: dict[str, McpSession] = {}
        self._clear(None)

    # --- the episode so far --------------------------------------------------------------------------------------

    def _clear(self, task: Task | None) -> None:
        self.task = task
        self.tools = ToolSet([])
        self.outcome: Outcome | None = None
        self.detail = ""
        self.checklist_results: dict[str, bool | None] = {}
        self.score: float | None = None
        self.error: BaseException | None = None
        self._messages: list[Message] = []
        self._events: list[ToolEvent] = []
        self._answer: str | None = None
        self._turns = 0
        self._failures = 0
        self._deadline = 0.0

    def trajectory(self) -> Trajectory:
        """The readable record of the episode up to now."""
        return Trajectory(messages=tuple(self._messages), events=tuple(self._events), answer=self._answer)

    # --- reset and step ------------------------------------------------------------------------------------------

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Begin an episode with fresh servers.

        Args:
            seed: picks the task; the same seed, the same task. Without one, the last seed's stream goes on.
            options: ``{"task": Task}`` plays that task instead.

        Returns:
            (system and user message, info with the chat template's ``tools`` and the ``task_id``).

        Raises:
            McpServerError: if a server does not start; the episode then has the outcome FAILED.
            EnvError: if the task set has no task.
        """
        self._release()
        self._clear(self._pick(seed, dict(options or {})))
        assert self.task is not None
        self._messages = [
            {"role": "system", "content": self.taskset.system_prompt},
            {"role": "user", "content": self.task.prompt},
        ]
        try:
            self.tools = ToolSet(await self._start_servers())
            self._deadline = asyncio.get_running_loop().time() + self.episode_timeout
        except BaseException as error:
            self.error = error
            self._finish(Outcome.FAILED, "start_failed")
            raise
        return list(self._messages), {"task_id": self.task.task_id, "tools": self.tools.schemas}

    async def _start_servers(self) -> list[ToolSpec]:
        tools = []
        for spec in self.taskset.servers():
            if spec.name in self._sessions:
                raise ConfigError(f"two servers of {self.taskset.name!r} are called {spec.name!r}; rename one")
            session = self._sessions[spec.name] = await self._lease(spec)
            tools += await session.list_tools()
        return tools

    def _pick(self, seed: int | None, options: dict[str, Any]) -> Task:
        task = options.pop("task", None)
        if options:
            raise ConfigError(f"reset option {next(iter(options))!r} is unknown; the only one is 'task'")
        if seed is not None:
            self._random = random.Random(seed)
        if isinstance(task, Task):
            return task
        if task is not None:
            raise ConfigError(f"reset option task={task!r} is refused; give an arenarl.types.Task")
        drawn = self.taskset.tasks(self.split, 1, self._random.getrandbits(31) if seed is None else seed)
        if not drawn:
            raise EnvError(f"task set {self.taskset.name!r} has no task in its {self.split} split")
        return drawn[0]

    async def step(self, action: str | Mapping[str, Any]) -> StepResult:
        """Take an assistant message: run its calls, or, if it has none, end and score the episode.

        Args:
            action: the raw text, Hermes-style calls included; or a parsed message with ``content`` and ``tool_calls``
                (`ToolCall`, or dictionaries in the OpenAI form).

        Raises:
            EnvError: if no episode is running.
        """
        if self.task is None or self.outcome is not None:
            raise EnvError("no episode is running; call reset()")
        text = clean_json(action if isinstance(action, str) else _as_text(action))
        prose, calls = parse_tool_calls(text, first_id=len(self._events))
        self._messages.append({"role": "assistant", "content": text})
        turn, self._turns = self._turns, self._turns + 1
        if not calls:
            self._answer = prose
            self._judge(Outcome.SCORED, "")
            return self._result([], [])
        first = len(self._messages)
        try:
            failure = await self._run_calls(calls, turn)
        except asyncio.CancelledError:
            self._finish(Outcome.FAILED, "cancelled")  # a call may be half done: nobody may go on from here
            raise
        if failure:
            self._finish(Outcome.FAILED, failure)
        elif self._turns >= self.max_turns:
            self.truncate("turns")
        return self._result(self._messages[first:], [event.result.kind for event in self._events if event.turn == turn])

    def truncate(self, detail: str) -> None:
        """End the episode at a limit of the policy's making ("turns", "length", "context") and score what is there.

        Does nothing if the episode has ended.
        """
        if self.task is not None and self.outcome is None:
            self._judge(Outcome.TRUNCATED, detail)

    async def aclose(self) -> None:
        """Give every session back; close the hub if it is our own. May be called twice."""
        self._release()
        if self._owns_hub and self._hub is not None:
            hub, self._hub = self._hub, None
            await hub.aclose()

    # --- calls ---------------------------------------------------------------------------------------------------

    async def _run_calls(self, calls: Sequence[ToolCall], turn: int) -> str:
        """Run the calls of one message in order; the kind of failure if the episode must end, else ""."""
        for n, call in enumerate(calls):
            result = shorten(await self._run_call(call, n), self.max_result_chars)
            self._events.append(ToolEvent(call=call, result=result, turn=turn))
            self._messages.append({"role": "tool", "content": result.text, "tool_call_id": call.id, "name": call.name})
            if result.kind in INFRASTRUCTURE_KINDS:
                self._failures += 1
                session = self._sessions.get(result.server)
                self.error = self.error or (session.dead if session else None)
                if self._failures >= _MAX_FAILURES_IN_A_ROW or self._is_lost(session):
                    return result.kind
            elif result.server:
                self._failures = 0
        return ""

    async def _run_call(self, call: ToolCall, number: int) -> ToolResult:
        if call.error is not None:
            return ToolResult(kind="parse_error", text=f"Error: {call.error}.", tool=call.name)
        tool = self.tools.resolve(call.name)
        if tool is None:
            near = ", ".join(self.tools.near(call.name)) or "there are none"
            text = f"Error: no tool is called {call.name!r}; tools: {near}."
            return ToolResult(kind="unknown_tool", text=text, tool=call.name)
        problem = self.tools.problem(call.name, call.arguments)
        if number >= MAX_CALLS_PER_TURN:
            problem = f"one message may hold at most {MAX_CALLS_PER_TURN} calls; this one was not run"
        if problem is not None:
            return ToolResult(kind="invalid_args", text=f"Error: {problem}.", tool=tool.name)
        left = self._deadline - asyncio.get_running_loop().time()
        session = await self._session(tool.server) if left > 0 else None
        if session is None:
            kind: ToolResultKind = "server_dead" if left > 0 else "timeout"
            return ToolResult(kind=kind, text="Error: the tool cannot be reached.", server=tool.server, tool=tool.name)
        return await session.call(tool.name, call.arguments, timeout=min(session.spec.call_timeout, left))

    async def _session(self, server: str) -> McpSession | None:
        """The session to call; a shared server that died since is leased again. The failed call is not repeated."""
        session = self._sessions.get(server)
        if session is not None and session.spec.scope == "shared" and session.dead is not None:
            self._hub_or_new().release(self._sessions.pop(server))
            try:
                session = self._sessions[server] = await self._lease(session.spec)
            except ArenaError as error:
                self.error = error
                return None
        return session

    def _is_lost(self, session: McpSession | None) -> bool:
        if session is None or asyncio.get_running_loop().time() >= self._deadline:
            return True
        return session.spec.scope == "episode" and session.dead is not None

    # --- sessions ------------------------------------------------------------------------------------------------

    def _hub_or_new(self) -> ServerHub:
        if self._hub is None:
            self._hub = ServerHub()
        return self._hub

    async def _lease(self, spec: ServerSpec) -> McpSession:
        return await self._hub_or_new().acquire(spec)

    def _release(self) -> None:
        while self._sessions:
            self._hub_or_new().release(self._sessions.popitem()[1])

    # --- the end -------------------------------------------------------------------------------------------------

    def _judge(self, outcome: Outcome, detail: str) -> None:
        """Score what is there. A checklist that cannot decide abstains; one that breaks is not the policy's failure."""
        assert self.task is not None
        try:
            checklist = self.taskset.checklist(self.task)
            self.checklist_results = checklist.run(self.trajectory())
            self.score = checklist.score(self.checklist_results)
        except Exception as error:  # boundary: a task set's own code
            _log.exception("checklist of task %s of %r broke", self.task.task_id, self.taskset.name)
            self.error, self.checklist_results, self.score = error, {}, None
            outcome, detail = Outcome.FAILED, "checklist"
        if self.score is None and outcome is Outcome.SCORED:
            outcome, detail = Outcome.ABSTAINED, "checklist"
        self._finish(outcome, detail)

    def _finish(self, outcome: Outcome, detail: str) -> None:
        self.outcome, self.detail = outcome, detail
        self._release()

    def _result(self, messages: list[Message], kinds: list[str]) -> StepResult:
        info: dict[str, Any] = {"turn": self._turns - 1, "results": kinds}
        if self.outcome is None:
            return StepResult(messages=messages, info=info)
        info |= {"outcome": self.outcome.value, "detail": self.detail}
        info |= {"score": self.score, "checklist": self.checklist_results}
        if self.outcome is Outcome.FAILED:
            info["env_failure"] = self.detail
        ended_itself = self.outcome in (Outcome.SCORED, Outcome.ABSTAINED)
        return StepResult(
            messages=messages, reward=self.score or 0.0, terminated=ended_itself, truncated=not ended_itself, info=info
        )


def _as_text(action: Mapping[str, Any]) -> str:
    """A parsed assistant message as the raw text that says the same.

    Raises:
        ConfigError: if it is not an assistant message.
    """
    content = action.get("content") or ""
    calls = action.get("tool_calls") or []
    if not isinstance(content, str) or not isinstance(calls, Sequence):
        raise ConfigError("an action is a text, or a message with a text content and a list of tool_calls")
    if "<tool_call>" in content:
        return content
    spoken = [content] if content else []
    return "\n".join(spoken + [f"<tool_call>\n{_call_json(call)}\n</tool_call>" for call in calls])


def _call_json(call: ToolCall | Mapping[str, Any]) -> str:
    if isinstance(call, ToolCall):
        return call.raw or json.dumps({"name": call.name, "arguments": clean_json(call.arguments)}, ensure_ascii=False)
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # as it came from the model; if it is broken, the parser says so
        return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments or "{}"}}}'
    return json.dumps({"name": function.get("name"), "arguments": clean_json(arguments)}, ensure_ascii=False)
