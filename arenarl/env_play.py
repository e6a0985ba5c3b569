"""``arenarl env play``: a person is the agent."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from arenarl.async_env import AsyncToolEnv
from arenarl.errors import near_name
from arenarl.mcp import ServerHub
from arenarl.mcp.tape import Tape
from arenarl.taskset import TaskSet
from arenarl.types import Message

_HELP = """\
TOOL {"argument": 1}     call a tool; also TOOL argument=value, values as JSON or as text
any other text           the answer, which ends the episode
/answer TEXT             the same, for an answer that begins with the name of a tool
/tools   /tool NAME      the tools, or one with its arguments
/quit                    end the episode with what is there"""
_PATIENCE_S = 86_400.0  # a person thinks longer than a policy


class Puzzled(Exception):
    """What was typed is neither a call nor an answer; the message says why."""


def play(taskset: TaskSet, console: Console, *, split: str = "train", seed: int = 0, replay: str | None = None) -> bool:
    """Play the task that the seed picks, with lines from stdin. True if the episode was scored.

    The event loop rests while the person thinks; so Ctrl-C at the prompt ends the servers too.

    Raises:
        McpServerError: if a server does not start.
        EnvError: if a replayed tape does not hold a call.
    """
    hub = ServerHub(tape=Tape(replay)) if replay else ServerHub()
    env = AsyncToolEnv(taskset, hub=hub, split=split, episode_timeout=_PATIENCE_S)
    with asyncio.Runner() as runner:
        try:
            messages, _ = runner.run(env.reset(seed=seed))
            console.print(Text(_HELP, style="dim"))
            _show_messages(messages, console)
            _show_tools(env.tools, console)
            while env.outcome is None:
                action = _next_action(env.tools, console)
                if action is None:
                    runner.run(env.truncate("quit"))
                else:
                    _show_messages(runner.run(env.step(action)).messages, console)
            _show_end(env, console)
            return env.score is not None
        finally:
            runner.run(_close(env, hub))


async def _close(env: AsyncToolEnv, hub: ServerHub) -> None:
    await env.aclose()
    await hub.aclose()


def _next_action(tools: Sequence[dict[str, Any]], console: Console) -> dict[str, Any] | None:
    """What the person says next, as an assistant message; None to quit."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        command, _, rest = line.partition(" ")
        try:
            match command:
                case "":
                    continue
                case "/quit":
                    return None
                case "/tools":
                    _show_tools(tools, console)
                case "/tool":
                    _show_tool(_schema(tools, rest.strip()), console)
                case "/answer":
                    return {"content": rest.strip()}
                case _ if command.startswith("/"):
                    console.print(Text(_HELP, style="dim"))
                case _:
                    return parse_line(line, tools)
        except Puzzled as error:
            console.print(Text(str(error), style="yellow"))


def parse_line(line: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A typed line as an assistant message: a call if it begins with a tool's name, else the answer.

    Raises:
        Puzzled: for arguments that cannot be read, or what looks like a call of a tool that there is not.
    """
    name, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if name not in [tool["function"]["name"] for tool in tools]:
        if rest.startswith("{"):
            _schema(tools, name)
        return {"content": line.strip()}
    properties = _schema(tools, name)["parameters"].get("properties", {})
    arguments = _json_arguments(rest) if rest.startswith("{") else _word_arguments(name, rest, properties)
    return {"content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def _json_arguments(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise Puzzled(f"the arguments are not JSON: {error}") from None


def _word_arguments(name: str, text: str, properties: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise Puzzled(f"the arguments cannot be read: {error}") from None
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise Puzzled(f'write {name} argument=value or {name} {{"argument": 1}}; /answer TEXT for an answer')
        arguments[key] = value
        if properties.get(key, {}).get("type") != "string":
            try:
                arguments[key] = json.loads(value)
            except ValueError:
                continue
    return arguments


def _schema(tools: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    by_name = {tool["function"]["name"]: tool["function"] for tool in tools}
    if name not in by_name:
        raise Puzzled(f"no tool is called {name!r}; {near_name(name, by_name)}")
    return by_name[name]


# -- what is shown --------------------------------------------------------------------------------------------------------


def _safe(text: str) -> str:
    """Text of tools that cannot move the cursor or colour the screen."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text.expandtabs(4))


def _show_messages(messages: Sequence[Message], console: Console) -> None:
    for message in messages:
        console.print(Text.assemble((f"{message['role']:>9} ", "dim"), _safe(message["content"])))


def _show_tools(tools: Sequence[dict[str, Any]], console: Console) -> None:
    """A line for each tool: name, arguments, and as much of its description as fits."""
    rows = []
    for tool in tools:
        function = tool["function"]
        required = function["parameters"].get("required", [])
        words = [name if name in required else f"[{name}]" for name in function["parameters"].get("properties", {})]
        rows.append((function["name"], " ".join(words), " ".join(_safe(function["description"]).split())))
    names, arguments = (max((len(row[n]) for row in rows), default=0) for n in (0, 1))
    room = max(console.width - names - arguments - 5, 20)
    for name, words, about in rows:
        about = about if len(about) <= room else f"{about[: room - 1]}…"
        console.print(Text.assemble((f"{name:{names}}", "bold"), f"  {words:{arguments}}  {about}"))


def _show_tool(function: Mapping[str, Any], console: Console) -> None:
    console.print(Text.assemble((function["name"], "bold"), "\n", _safe(function["description"])))
    console.print(Text(json.dumps(function["parameters"], indent=2, ensure_ascii=False)))


def _show_end(env: AsyncToolEnv, console: Console) -> None:
    score = "none" if env.score is None else f"{env.score:.2f}"
    console.print(Text(f"outcome {env.ending}, score {score}", style="bold"))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, met in env.checklist_results.items():
        mark = "?" if met is None else "yes" if met == 1 else "no" if met == 0 else f"{met:.2f}"
        table.add_row(f"  {mark}", Text(name))
    console.print(table)
    if env.error is not None:
        console.print(Text(f"error: {env.error}", style="red"))
