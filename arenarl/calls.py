"""The tool calls of one assistant message: checked, run side by side, and answered, each with a result for the model to read."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from arenarl.mcp.config import ServerSpec
from arenarl.mcp.pool import Workspace
from arenarl.mcp.results import TokenOffsets, shorten
from arenarl.mcp.schema import ToolSet
from arenarl.types import INFRASTRUCTURE_KINDS, ToolCall, ToolResult

MAX_CALLS_PER_TURN = 16
_MAX_FAILURES_IN_A_ROW = 2


class CallRunner:
    """Runs the calls of one episode. Two servers work side by side; how many calls one takes at once, its spec says.

    What the model does wrong is answered with the reason; what the infrastructure does wrong is answered too, and
    `failure` says when the episode cannot go on.

    Attributes:
        unresolved: servers whose last call failed for no fault of the model's, and the kind of failure: a verdict on the
            episode would not be one on the policy.

    Args:
        specs: of the workspace's servers.
        max_result_tokens: a longer result is cut in the middle.
        token_offsets: gives the (start, end) of every token of a text.
        deadline: the event loop's time at which the episode must be over.
    """

    def __init__(
        self, workspace: Workspace, specs: Sequence[ServerSpec], *, max_result_tokens: int,
        token_offsets: TokenOffsets, deadline: float,
    ) -> None:  # fmt: skip
        self.tools = ToolSet(workspace.tools)
        self._workspace = workspace
        self._limits = {spec.name: spec.call_timeout for spec in specs}
        self._max_result_tokens, self._token_offsets = max_result_tokens, token_offsets
        self._deadline = deadline
        self.unresolved: dict[str, str] = {}
        self._failures = 0
        self._repeats: Counter[tuple[str, str]] = Counter()

    async def run(self, calls: Sequence[ToolCall]) -> tuple[list[ToolResult], str]:
        """(a result per call in the calls' order, the kind of failure if the episode must end, else "").

        Results after the one that ends the episode are left out.

        Raises:
            EnvError: if a tape that is replayed does not hold a call.
        """
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._run(call, n)) for n, call in enumerate(calls)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        results: list[ToolResult] = []
        for call, task in zip(calls, running, strict=True):
            result = self._note_repeat(call, task.result())
            results.append(shorten(result, self._max_result_tokens, self._token_offsets))
            if result.kind not in INFRASTRUCTURE_KINDS:
                self._failures = 0 if result.server else self._failures
                self.unresolved.pop(result.server, None)
                continue
            self._failures += 1
            if result.kind != "too_large":  # that much was asked for
                self.unresolved[result.server] = result.kind
            if self._failures >= _MAX_FAILURES_IN_A_ROW or self._is_over(result.server):
                return results, result.kind
        return results, ""

    async def _run(self, call: ToolCall, number: int) -> ToolResult:
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
        if left <= 0:
            text = "Error: the episode has run out of time."
            return ToolResult(kind="timeout", text=text, server=tool.server, tool=tool.name)
        limit = min(left, self._limits[tool.server])
        return await self._workspace.call(tool.server, tool.name, call.arguments, timeout=limit)

    def _note_repeat(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """Tell the model when it makes the same mistake again."""
        if result.ok or result.kind in INFRASTRUCTURE_KINDS:
            return result
        said = call.raw if call.error else json.dumps(call.arguments, sort_keys=True, default=str)
        self._repeats[call.name, said] += 1
        if (times := self._repeats[call.name, said]) == 1:
            return result
        return replace(result, text=f"{result.text}\nThis same call has failed {times} times; change it.")

    def _is_over(self, server: str) -> bool:
        return self._workspace.lost(server) or asyncio.get_running_loop().time() >= self._deadline
