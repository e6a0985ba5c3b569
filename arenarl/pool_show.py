"""``arenarl pool show FILE [TASK]``: the tasks of a pool on the terminal, or one task with what each assertion rests on."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from arenarl.errors import ConfigError, near_name
from arenarl.expected_tools import ExpectedTool, tools_from_data
from arenarl.rubric import ChecklistItem, items_from_data
from arenarl.task_pool import PoolTask, TaskPool

OBSERVATION_LINES = 12
"""Lines of a tool result that are shown at most."""
OBSERVATION_CHARS = 4000
"""Characters of it: a result may be one long line."""
QUERY_CHARS = 240
"""Characters of a request in the list of tasks."""


def show(path: str | Path, console: Console, *, limit: int = 20, task: str | None = None) -> int:
    """Print the first ``limit`` tasks of a pool, or all of one task.

    Args:
        task: its id, or the beginning of one if no other id begins so.

    Returns:
        0, the exit code.

    Raises:
        ConfigError: a file that is no pool, a limit below 1, an unknown task, or one whose data is malformed.
    """
    if limit < 1:
        raise ConfigError(f"limit={limit} shows nothing; give 1 or more")
    pool = TaskPool.load(path)
    if task is None:
        _show_pool(pool, console, limit)
    else:
        _show_task(_find(pool, task), console)
    return 0


def _find(pool: TaskPool, name: str) -> PoolTask:
    if name in pool:
        return pool[name]
    ids = [entry.task.task_id for entry in pool]
    found = [task_id for task_id in ids if name and task_id.startswith(name)]
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} tasks begin with {name!r}, such as {found[0]!r} and {found[1]!r}; give more of it"
        )
    if not found:
        hint = near_name(name, ids) if len(ids) <= 20 else "leave it out to list them"
        raise ConfigError(f"the pool has no task {name!r}; {hint if ids else 'it is empty'}")
    return pool[found[0]]


def _show_pool(pool: TaskPool, console: Console, limit: int) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("id", overflow="fold", max_width=max(12, console.width // 4))
    table.add_column("kind", overflow="fold")
    table.add_column("query", ratio=1, overflow="fold")
    for name in ("items", "passed", "cycle"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in list(pool)[:limit]:
        task, count = entry.task, len(items_from_data(entry.task.data, task_id=entry.task.task_id))
        query = task.prompt if len(task.prompt) <= QUERY_CHARS else task.prompt[:QUERY_CHARS] + "..."
        cells = [_line(task.task_id, console), _line(task.kind, console, "dim"), _line(query, console)]
        table.add_row(*cells, Text(str(count)), _passed(entry), Text(str(entry.cycle)))
    console.print(table)
    known = sum(entry.known for entry in pool)
    more = f", {len(pool) - limit} more than shown" if len(pool) > limit else ""
    console.print(Text(f"{len(pool)} tasks, {known} of them tried by a solver{more}", "dim"), soft_wrap=True)


def _show_task(entry: PoolTask, console: Console) -> None:
    task = entry.task
    tools = tools_from_data(task.data, task_id=task.task_id)
    items = [item for item in items_from_data(task.data, task_id=task.task_id) if item.judged]
    title = Text.assemble(_line(task.task_id, console, "bold"), "  ", _line(task.kind, console, "dim"))
    console.print(title, soft_wrap=True)
    console.print(_safe(task.prompt, console))
    console.print(Text.assemble(("passed ", "dim"), _passed(entry), (f", cycle {entry.cycle}", "dim")))
    origin = f"asked by {entry.seed_id}, written in episode {entry.episode_id} by weights {entry.generator_version}"
    when = f", {entry.created}" if entry.created else ""
    console.print(_line(origin + when, console, "dim"), soft_wrap=True)
    console.print(Text("\nrubric", "bold"))
    for item in items:
        _show_item(item, entry, console)
    console.print(Text("\nexpected tools", "bold"))
    for line in map(_call, tools):
        console.print(Padding(_line(line, console), (0, 0, 0, 2)))
    if not tools:
        console.print(Text("  none", "dim"))
    cited = {item.evidence.observation for item in items if item.evidence}
    for number, text in enumerate(entry.observations, 1):
        if number in cited:
            _show_observation(number, text, items, console)


def _show_item(item: ChecklistItem, entry: PoolTask, console: Console) -> None:
    notes: list[str] = [item.scope] if item.scope != "answer" else []
    notes += [f"weight {item.weight:g}"] if item.weight != 1 else []
    notes += ["gate"] if item.gate else []
    said = Text.assemble((f"{item.name}  ", "cyan"), _line(item.text, console), (f"  {', '.join(notes)}", "dim"))
    console.print(Padding(said, (0, 0, 0, 2)))
    evidence = item.evidence
    if evidence is None:
        source = Text("rests on nothing", "yellow")
    elif evidence.observation > len(entry.observations):
        source = Text(f"observation {evidence.observation} was not kept", "yellow")
    else:
        quote = _line(evidence.quote, console, "green")
        source = Text.assemble((f"observation {evidence.observation}: ", "dim"), quote)
    console.print(Padding(source, (0, 0, 0, 6)))


def _show_observation(number: int, text: str, items: list[ChecklistItem], console: Console) -> None:
    """A tool result, with the quotes of the items marked where they are to be found letter by letter."""
    lines = text.splitlines()
    kept = "\n".join(lines[:OBSERVATION_LINES])
    shown = _safe(kept[:OBSERVATION_CHARS], console)
    quotes = [_safe(i.evidence.quote.strip(), console).plain for i in items if i.evidence]
    shown.highlight_words([quote for quote in quotes if quote], "green", case_sensitive=False)
    if len(kept) > OBSERVATION_CHARS:
        shown.append(f"\n... {len(text) - OBSERVATION_CHARS} more characters", "dim")
    elif len(lines) > OBSERVATION_LINES:
        shown.append(f"\n... {len(lines) - OBSERVATION_LINES} more lines", "dim")
    console.print(Text(f"\nobservation {number}", "bold"))
    console.print(Padding(shown, (0, 0, 0, 2)))


def _passed(entry: PoolTask) -> Text:
    if entry.pass_rate is None:
        return Text("not tried", "dim")
    return Text(f"{entry.pass_rate:.0%} of {entry.runs}")


def _call(tool: ExpectedTool) -> str:
    return f"{tool.name}({', '.join(f'{key}={value!r}' for key, value in tool.arguments.items())})"


def _safe(text: str, console: Console) -> Text:
    """Text of models and tools, which can neither move the cursor nor be read as markup."""
    text = "".join(c if c.isprintable() or c == "\n" else "·" for c in text.expandtabs(4))
    if console.options.ascii_only:
        text = text.encode("ascii", "replace").decode()
    return Text(text, overflow="fold")


def _line(text: str, console: Console, style: str = "") -> Text:
    """The same on one line."""
    line = _safe(" ".join(text.split()), console)
    line.stylize(style)
    return line
