"""``arenarl env ...``: look at an environment, check it, record it; any TARGET may be a desktop client's ``mcp.json``.

A random agent calls the tools with random arguments. So what the servers can reach outside of ``${WORKDIR}`` is at its
mercy: deny such tools in ``x-env``.
"""

from __future__ import annotations

import ast
import asyncio
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from arenarl.env import ADAPTER_MARGIN, ToolGymEnv, on_loop
from arenarl.errors import ArenaError, ConfigError, EnvError, McpServerError, boundary
from arenarl.isolation import Finding, probe_isolation
from arenarl.mcp import McpSession, ServerHub, ServerSpec, ToolSet, ToolSpec
from arenarl.mcp.paths import PathMap
from arenarl.mcp.pool import place
from arenarl.mcp.results import clean_text, four_characters
from arenarl.mcp.tape import Tape
from arenarl.mcp.workdir import WorkDirectory
from arenarl.random_agent import first_task, hub_of, play_oracle, play_random
from arenarl.taskset import TaskSet, check_tools, load_taskset, setup_of, taskset_path
from arenarl.types import Message

CountTokens = Callable[[str], int]


def load_target(target: str, tasks: str | None = None) -> TaskSet:
    """The task set behind a Gymnasium id, "module:Class", or the path of a client's configuration.

    Raises:
        ConfigError: if there is none.
    """
    if target.endswith((".json", ".jsonc")) or Path(target).is_file():
        return load_taskset("arenarl.envs.mcp:McpTasks", {"config": target, "tasks": tasks})
    if tasks is not None:
        raise ConfigError(f"--tasks {tasks!r} goes with the path of an mcp.json; {target!r} has tasks of its own")
    if "/" in target and ":" not in target:
        target = taskset_path(target)
    return load_taskset(target)


def token_counter(model: str | None) -> CountTokens:
    """Counts a text's tokens with the tokenizer of a model folder; without one, four characters count as one.

    Raises:
        ConfigError: if the folder has no tokenizer.
    """
    if model is None:
        return lambda text: len(four_characters(text))
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"model folder {model!r} has no tokenizer.json; give the path of a folder with one")
    import tokenizers

    with boundary(ConfigError, f"{str(file)!r} is no tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


# -- list -----------------------------------------------------------------------------------------------------------------


@dataclass
class Listing:
    """What one server said at its start; ``error`` if it did not start. ``seconds`` is nan on a replayed tape."""

    spec: ServerSpec
    era: str = ""
    seconds: float = float("nan")
    tools: list[ToolSpec] = field(default_factory=list)
    error: McpServerError | None = None


def list_shipped(console: Console) -> None:
    """The environments of ``arenarl/envs``, by their Gymnasium ids."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="environments", title_justify="left", title_style="bold")
    for heading in ("id", "task set", "about"):
        table.add_column(heading, no_wrap=heading == "id")
    for file in sorted((Path(__file__).parent / "envs").glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Tasks"):
                about = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
                table.add_row(f"arenarl/{node.name.removesuffix('Tasks')}-v0", f"{file.stem}:{node.name}", Text(about))
    console.print(table)


def list_target(taskset: TaskSet, console: Console, count: CountTokens, replay: str | None = None) -> bool:
    """Start each server once and show what it offers and costs. True if all start."""
    listings = asyncio.run(_listings(taskset, replay))
    tools = ToolSet(tool for listing in listings for tool in listing.tools)
    if not any(listing.error for listing in listings):
        check_tools(taskset, tools)
    costs = {schema["function"]["name"]: count(json.dumps(schema)) for schema in tools.schemas}
    for listing in listings:
        _show_listing(listing, tools, costs, console)
    names = f"{len(listings)} server{'s'[: len(listings) != 1]}, {len(costs)} tools"
    console.print(f"{names}: about {sum(costs.values()):,} tokens in every prompt")
    return not any(listing.error for listing in listings)


def _show_listing(listing: Listing, tools: ToolSet, costs: Mapping[str, int], console: Console) -> None:
    spec = listing.spec
    words = [spec.transport, listing.era, f"scope {spec.scope}", f"reset {spec.reset}"]
    if listing.error is not None:
        console.print(Text.assemble((spec.name, "bold"), "  ", "  ".join(w for w in words if w)))
        console.print(Text(f"  does not start: {listing.error}", style="red"))
        return
    if listing.seconds == listing.seconds:
        words.append(f"started in {listing.seconds:.2f} s")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=bool(listing.tools))
    names = {tool.name: tools.name_of(tool.server, tool.name) or tool.name for tool in listing.tools}
    widest = 2 + max(map(len, names.values()), default=0)
    room = max(console.width - widest - len("tokens reads only") - 8, 20)  # what is left for words, on one line
    for heading in ("  tool", "tokens", "reads only", "about"):
        table.add_column(heading, justify="right" if heading == "tokens" else "left", no_wrap=heading != "about")
    total = 0
    for tool in listing.tools:
        name = names[tool.name]
        total += costs[name]
        about = " ".join(clean_text(tool.description).split())
        about = about if len(about) <= room else f"{about[: room - 1]}…"
        table.add_row(Text(f"  {name}"), str(costs[name]), "yes" if tool.read_only else "", Text(about))
    words += [f"{len(listing.tools)} tools", f"{total:,} tokens"]
    console.print(Text.assemble((spec.name, "bold"), "  ", "  ".join(w for w in words if w)))
    if listing.tools:
        console.print(table)


async def _listings(taskset: TaskSet, replay: str | None) -> list[Listing]:
    specs = place(taskset.servers())
    task = first_task(taskset)
    if replay is not None:
        async with hub_of(replay) as hub:
            tools = (await hub.open(specs, key=task.task_id)).tools
        return [Listing(spec, tools=[tool for tool in tools if tool.server == spec.name]) for spec in specs]
    import mcp  # noqa: F401  (or its import would count as the first server's start)

    directory = WorkDirectory()
    try:
        if (fill := setup_of(taskset, task)) is not None:
            with boundary(EnvError, f"the files of task {task.task_id!r} cannot be written"):
                fill(directory.path)
        variables = {"WORKDIR": str(directory.path), "SEED": str(task.seed), "EPISODE": "list"}
        return [await _listing(spec, variables, PathMap(directory.path)) for spec in specs]
    finally:
        directory.remove()


async def _listing(spec: ServerSpec, variables: Mapping[str, str], paths: PathMap) -> Listing:
    began, session = time.monotonic(), McpSession(spec, variables)
    try:
        await session.start()
        took, found = time.monotonic() - began, await session.list_tools()
    except McpServerError as error:
        return Listing(spec, error=error)
    finally:
        await session.close()
    tools = [replace(tool, description=paths.outward(tool.description)) for tool in found]
    return Listing(spec, session.era, took, [tool for tool in tools if tool.name != spec.reset_tool])


# -- check ----------------------------------------------------------------------------------------------------------------


def check_environment(
    taskset: TaskSet,
    console: Console,
    *,
    episodes: int = 5,
    count: CountTokens | None = None,
    replay: str | None = None,
) -> bool:
    """Start, list, Gymnasium's own checker, a random agent, repeatability and isolation. True if no point fails.

    Args:
        episodes: of the random agent, at least 1.
        replay: path of a tape to play instead of starting servers; isolation then cannot be probed.

    Raises:
        ConfigError: for a number of episodes below 1.
        McpServerError: if a server does not start.
    """
    _check_episodes_count(episodes)
    if not list_target(taskset, console, count or token_counter(None), replay):
        return _conclude([Finding("servers", False, "not all start")], console)
    findings = [Finding("servers", True, "all start"), _check_gymnasium(taskset, replay, console)]
    findings += asyncio.run(_check_episodes(taskset, episodes, replay, console))
    findings += (
        [Finding("isolation", None, "not probed on a tape")] if replay else asyncio.run(probe_isolation(taskset))
    )
    return _conclude(findings, console)


def _check_episodes_count(episodes: int) -> None:
    if episodes < 1:
        raise ConfigError(f"episodes={episodes} is refused; give at least 1")


def _conclude(findings: Sequence[Finding], console: Console) -> bool:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    shown = {True: "[green]ok[/]", False: "[red]FAILED[/]", None: "[yellow]note[/]"}
    for finding in findings:
        table.add_row(shown[finding.ok], finding.point, Text(finding.words))
    console.print(table)
    return all(finding.ok is not False for finding in findings)


def _check_gymnasium(taskset: TaskSet, replay: str | None, console: Console) -> Finding:
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.utils.env_checker import check_env

    hub = ServerHub(tape=Tape(replay)) if replay else None
    env = ToolGymEnv(taskset, hub=hub)
    env.spec = EnvSpec("arenarl/Checked-v0", entry_point=lambda **kwargs: ToolGymEnv(taskset, hub=hub, **kwargs))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env)
        except ArenaError:
            raise
        except Exception as error:  # boundary: the checker asserts
            return Finding("gymnasium", False, f"check_env: {error}")
        finally:
            env.close()
            if hub is not None:
                on_loop(hub.aclose(), ADAPTER_MARGIN)
    for warning in caught:
        console.print(Text(f"warning: {warning.message}", style="yellow"))
    return Finding("gymnasium", not caught, f"check_env: {len(caught)} warnings")


async def _check_episodes(taskset: TaskSet, episodes: int, replay: str | None, console: Console) -> list[Finding]:
    failed, seconds, first = 0, [], None
    async with hub_of(replay) as hub:
        for seed in range(episodes):
            trajectory, env = await play_random(taskset, "train", seed, hub)
            first = first or trajectory
            failed += env.outcome == "failed"
            seconds += [event.result.seconds for event in trajectory.events if event.result.server]
            turns = f"{trajectory.num_turns} turns, {len(trajectory.events)} calls"
            console.print(f"random agent, seed {seed}: {env.ending}, {turns}", highlight=False)
    async with hub_of(replay) as hub:
        again, _ = await play_random(taskset, "train", 0, hub)
    findings = [Finding("episodes", not failed, f"{episodes} of a random agent, {failed} failed")]
    if replay is None:
        took = (
            f"median {1000 * statistics.median(seconds):.1f} ms of {len(seconds)} calls"
            if seconds
            else "no call reached a tool"
        )
        findings.append(Finding("latency", bool(seconds) or None, took))
    assert first is not None
    return [*findings, _compare(first.messages, again.messages)]


def _compare(first: Sequence[Message], again: Sequence[Message]) -> Finding:
    for n, (one, other) in enumerate(zip_longest(first, again)):
        if one != other:
            texts = ["nothing" if m is None else repr(m["content"][:60]) for m in (one, other)]
            return Finding(
                "deterministic", None, f"no: with the same seed, message {n} was {texts[0]}, then {texts[1]}"
            )
    return Finding("deterministic", True, f"the same seed gave the same {len(first)} messages again")


# -- record ---------------------------------------------------------------------------------------------------------------


def record_episodes(
    taskset: TaskSet, console: Console, *, out: str, episodes: int = 5, agent: Literal["random", "oracle"] = "random"
) -> bool:
    """Play the seeds from 0 on and put every tool result on a tape, which ``--replay`` reads. True if no episode failed.

    Raises:
        ConfigError: for a number of episodes below 1, an oracle that there is not, or a file that is no tape.
        McpServerError: if a server does not start.
    """
    _check_episodes_count(episodes)
    play = {"random": play_random, "oracle": play_oracle}[agent]

    async def run() -> bool:
        failed = 0
        async with hub_of(record=out) as hub:
            for seed in range(episodes):
                trajectory, env = await play(taskset, "train", seed, hub)
                failed += env.outcome == "failed"
                score = "none" if env.score is None else f"{env.score:.2f}"
                console.print(
                    f"{agent} agent, seed {seed}: {env.ending}, {len(trajectory.events)} calls, score {score}",
                    highlight=False,
                )
        return not failed

    done = asyncio.run(run())
    console.print(Text(f"tape: {out}"))
    return done
