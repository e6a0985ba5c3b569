"""Multi-turn tool use as an environment: the asyncio core that `arenarl.env` wraps for Gymnasium.

An action is an assistant message. Its tool calls are run and answered by tool messages, in the calls' order; a message
without a call is the answer and ends the episode. What the model does wrong becomes a message that says so. What the
infrastructure does wrong ends the episode as failed, which is not a reward of zero: nobody trains on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arenarl.calls import CallRunner
from arenarl.errors import ConfigError, EnvError
from arenarl.jsonl import clean_json
from arenarl.mcp import ServerHub, ToolSet
from arenarl.mcp.pool import Workspace
from arenarl.mcp.results import TokenOffsets, four_characters
from arenarl.state import EpisodeState
from arenarl.taskset import TaskSet, draw_tasks, servers_of, setup_of
from arenarl.tool_calls import HERMES, ToolParser
from arenarl.types import Message, Outcome, Task, ToolCall, ToolEvent, Trajectory

_log = logging.getLogger(__name__)


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
        hub: hands out workspaces; one of its own if None, closed with the environment.
        max_turns: assistant messages before the episode is truncated; the task set's if None.
        max_result_tokens: a longer tool result is cut in the middle.
        token_offsets: gives the (start, end) of every token of a text, as the policy's tokenizer sees it.
        parser: finds the tool calls in an assistant message.
        episode_timeout: seconds from the end of `reset`; a call that is not answered by then fails the episode.
        verdict_timeout: seconds until the checklist must have decided; the episode has failed otherwise.
        split: which tasks `reset` draws from.

    Raises:
        ConfigError: if a limit is not positive or the split is unknown.
    """

    def __init__(
        self, taskset: TaskSet, *, hub: ServerHub | None = None, max_turns: int | None = None,
        max_result_tokens: int = 2048, token_offsets: TokenOffsets = four_characters, parser: ToolParser = HERMES,
        episode_timeout: float = 600.0, verdict_timeout: float = 60.0, split: str = "train",
    ) -> None:  # fmt: skip
        self.taskset = taskset
        self.max_turns = taskset.max_turns if max_turns is None else max_turns
        self.max_result_tokens, self.token_offsets = max_result_tokens, token_offsets
        self.parser = parser
        self.episode_timeout, self.verdict_timeout = episode_timeout, verdict_timeout
        for key in ("max_turns", "max_result_tokens", "episode_timeout", "verdict_timeout"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"{key}={getattr(self, key)!r} is refused; give a positive number")
        if split not in ("train", "heldout"):
            raise ConfigError(f"split={split!r} is refused; use 'train' or 'heldout'")
        self.split = split
        self._hub = hub
        self._owns_hub = hub is None
        self._random = random.Random()
        self._workspace: Workspace | None = None
        self._clear(None)

    # --- the episode so far --------------------------------------------------------------------------------------

    def _clear(self, task: Task | None) -> None:
        self.task = task
        self.outcome: Outcome | None = None
        self.detail = ""
        self.checklist_results: dict[str, float | None] = {}
        self.score: float | None = None
        self.error: BaseException | None = None
        self._runner: CallRunner | None = None
        self._messages: list[Message] = []
        self._events: list[ToolEvent] = []
        self._answer: str | None = None
        self._turns = 0

    @property
    def toolset(self) -> ToolSet:
        """The tools of the episode under the names that the model uses."""
        return self._runner.tools if self._runner else ToolSet([])

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tool schemas of the episode, as a chat template takes them."""
        return self.toolset.schemas

    @property
    def ending(self) -> str:
        """How the episode ended, in a word or two for people; "" while it runs."""
        return f"{self.outcome or ''} {self.detail}".strip()

    def trajectory(self) -> Trajectory:
        """The readable record of the episode up to now."""
        return Trajectory(messages=tuple(self._messages), events=tuple(self._events), answer=self._answer)

    # --- reset and step ------------------------------------------------------------------------------------------

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Begin an episode in a fresh workspace.

        Args:
            seed: picks the task; the same seed, the same task. Without one, the last seed's stream goes on.
            options: ``{"task": Task}`` plays that task instead.

        Returns:
            (system and user message, info with the chat template's ``tools`` and the ``task_id``).

        Raises:
            McpServerError: if a server does not start; the episode then has the outcome FAILED.
            ConfigError: if the split has no task, or a configuration cannot work.
            EnvError: if the task set cannot write the task's starting state.
        """
        self._release()
        task = self._pick(seed, dict(options or {}))
        self._clear(task)
        self._messages = [
            {"role": "system", "content": self.taskset.system_prompt},
            {"role": "user", "content": task.prompt},
        ]
        try:
            self._runner = await self._open(task)
        except BaseException as error:
            self.error = error
            self._finish(Outcome.FAILED, "start_failed")
            raise
        return list(self._messages), {"task_id": task.task_id, "tools": self.tools}

    async def _open(self, task: Task) -> CallRunner:
        if self._hub is None:
            self._hub = ServerHub()
        specs = servers_of(self.taskset)
        self._workspace = await self._hub.open(
            specs, fill=setup_of(self.taskset, task), seed=task.seed, episode=task.task_id, key=task.task_id
        )
        return CallRunner(
            self._workspace, specs, max_result_tokens=self.max_result_tokens, token_offsets=self.token_offsets,
            deadline=asyncio.get_running_loop().time() + self.episode_timeout,
        )  # fmt: skip

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
        return draw_tasks(self.taskset, self.split, 1, self._random.getrandbits(31) if seed is None else seed)[0]

    async def step(self, action: str | Mapping[str, Any]) -> StepResult:
        """Take an assistant message: run its calls, or, if it has none, end and score the episode.

        Args:
            action: the raw text, calls included as the parser reads them; or a parsed message with ``content`` and
                ``tool_calls`` (`ToolCall`, or dictionaries in the OpenAI form).

        Raises:
            EnvError: if no episode is running.
        """
        if self._runner is None or self.outcome is not None:
            raise EnvError("no episode is running; call reset()")
        text = clean_json(action if isinstance(action, str) else _as_text(action, self.parser))
        prose, calls = self.parser.parse(text, first_id=len(self._events), tools=self.tools)
        self._messages.append({"role": "assistant", "content": text})
        turn, self._turns = self._turns, self._turns + 1
        if not calls:
            self._answer = prose
            await self._judge(Outcome.SCORED, "")
            return self._result([], [])
        try:
            results, failure = await self._runner.run(calls)
        except asyncio.CancelledError:
            self._finish(Outcome.FAILED, "cancelled")  # a call may be half done: nobody may go on from here
            raise
        first = len(self._messages)
        for call, result in zip(calls, results, strict=False):
            self._events.append(ToolEvent(call=call, result=result, turn=turn))
            self._messages.append({"role": "tool", "content": result.text, "tool_call_id": call.id, "name": call.name})
        if failure:
            self.error = self._workspace.error if self._workspace else None
            self._finish(Outcome.FAILED, failure)
        elif self._turns >= self.max_turns:
            await self.truncate("turns")
        return self._result(self._messages[first:], [result.kind for result in results])

    async def truncate(self, detail: str) -> None:
        """End the episode at a limit of the policy's making ("turns", "length", "context") and score what is there.

        Does nothing if the episode has ended.
        """
        if self.task is not None and self.outcome is None:
            await self._judge(Outcome.TRUNCATED, detail)

    async def aclose(self) -> None:
        """Give the workspace back; close the hub if it is our own. May be called twice."""
        self._release()
        if self._owns_hub and self._hub is not None:
            hub, self._hub = self._hub, None
            await hub.aclose()

    # --- the end -------------------------------------------------------------------------------------------------

    async def _judge(self, outcome: Outcome, detail: str) -> None:
        """Score what is there. A checklist that cannot decide abstains; one that breaks is not the policy's failure, nor
        is an episode that ends on a tool that did not answer.
        """
        assert self.task is not None
        if self._runner and self._runner.unresolved:
            self._finish(Outcome.FAILED, next(iter(self._runner.unresolved.values())))
            return
        state = self._workspace.state() if self._workspace else EpisodeState()
        try:
            async with asyncio.timeout(self.verdict_timeout):
                checklist = self.taskset.checklist(self.task)
                self.checklist_results = await checklist.run(self.trajectory(), state)
                self.score = checklist.score(self.checklist_results)
        except asyncio.CancelledError:
            self._finish(Outcome.FAILED, "cancelled")
            raise
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

    def _release(self) -> None:
        """Give the workspace back; a verdict has been reached, or never will be."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None and self._hub is not None:
            self._hub.put(workspace)

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


def _as_text(action: Mapping[str, Any], parser: ToolParser) -> str:
    """A parsed assistant message as the raw text that says the same.

    Raises:
        ConfigError: if it is not an assistant message.
    """
    content = action.get("content") or ""
    calls = action.get("tool_calls") or []
    if not isinstance(content, str) or not isinstance(calls, Sequence):
        raise ConfigError("an action is a text, or a message with a text content and a list of tool_calls")
    if parser.parse(content)[1]:
        return content
    spoken = [content] if content else []
    return "\n".join(spoken + [_call_text(call, parser) for call in calls])


def _call_text(call: ToolCall | Mapping[str, Any], parser: ToolParser) -> str:
    if isinstance(call, ToolCall):
        if call.error is not None:
            return call.raw if "<tool_call>" in call.raw else f"<tool_call>\n{call.raw}\n</tool_call>"
        return parser.render(call.name, clean_json(call.arguments))
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # as it came from the model; if it is broken, the parser says so
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return (
                f'<tool_call>\n{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}\n</tool_call>'
            )
    return parser.render(function.get("name") or "", clean_json(arguments))
