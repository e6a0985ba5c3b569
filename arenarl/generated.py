"""What a policy wrote as a task: read strictly, checked against what its tools said, and made a task (ARISE, arXiv 2609.01058, 2.1).

The answer of the episode is one JSON object, with a code fence round it or without::

    {"query": "Find the cheapest cafe in Hanoi.",
     "rubrics": [{"text": "The cafe is Lotus.", "observation": 1, "evidence": "Lotus 12 7"}, ...],
     "expected_tools": [{"name": "poi_search", "arguments": {"city": "Hanoi", "category": "cafe"}}, ...]}

``observation`` is the number of a tool result of the episode, 1 being the first and failed ones counted; ``evidence`` quotes it.
A rubric may have a ``scope`` ("answer" if left out); ``expected_tools`` may be left out; other keys are ignored.

Reasons to refuse it:

    no_answer       nothing was written           too_long        longer than any task, or than any request
    (and the kinds of `arenarl.strict_json`)      no_query        the query is missing or has no words
    items           count, length or shape of the rubrics, or two that say the same
    tools           count or shape of the expected tools
    no_observation  no tool gave a result         ungrounded      a rubric does not quote a result that there was
    unmatched_tool  an expected call was not made with success
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from arenarl.expected_tools import ExpectedTool, match_tools, tool_to_data
from arenarl.jsonl import clean_json
from arenarl.mcp.schema import MAX_ARGUMENT_DEPTH, deeper_than
from arenarl.rubric import Checklist, ChecklistItem, Evidence, Scope, item_to_data
from arenarl.strict_json import Unreadable, read_object
from arenarl.types import Task, ToolEvent, Trajectory

MIN_ITEMS, MAX_ITEMS = 3, 8
MAX_CHARS = 50_000
MAX_QUERY_CHARS = 4000  # a request that fills the solver's context would make any task hard
MAX_TEXT_CHARS = 1000  # of an assertion, as much as a grader is shown, and of a quote
MAX_TOOLS = 20


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A task as written: the request, the assertions that a good answer meets, and the calls that it needs."""

    query: str
    items: tuple[ChecklistItem, ...]
    expected_tools: tuple[ExpectedTool, ...] = ()


@dataclass(frozen=True)
class Refused:
    """Why what was written is no task: one of the kinds of the module, and what was found. As text, "kind: detail"."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class _No(Exception):
    """Arguments: kind and detail."""


def read_draft(answer: str | None, *, min_items: int = MIN_ITEMS, max_items: int = MAX_ITEMS) -> Draft | Refused:
    """R_fmt of the paper: the task that an answer holds, or why it holds none. Never raises, whatever the text."""
    try:
        data = _the_object(answer)
        items = _items(data, min_items, max_items)
        return Draft(query=_query(data), items=items, expected_tools=_tools(data))
    except _No as no:
        return Refused(*no.args)


def ungrounded(draft: Draft, events: Sequence[ToolEvent]) -> Refused | None:
    """R_tool of the paper: what in a task does not rest on what the tools said in the episode that wrote it, None if all does.

    Only results without an error count, which the released code does not ask for. Quotes are compared without regard to
    white space and upper or lower case, and hold whole words and numbers: a letter is to be found in any result. Each
    expected call needs a successful call of its own.
    """
    if not any(event.result.ok for event in events):
        return Refused("no_observation", f"none of {len(events)} calls gave a result")
    for item in draft.items:
        if fault := _fault(item, events):
            return Refused("ungrounded", f"{item.name} {fault}")
    for tool, event in zip(draft.expected_tools, match_tools(draft.expected_tools, events).matched, strict=True):
        if event is None:
            return Refused("unmatched_tool", f"no successful call of its own for {tool.name}({_short(tool.arguments)})")
    return None


def draft_task(draft: Draft, *, seed: Task, task_id: str) -> Task:
    """The task that a draft becomes: of the kind and the seed number of the task that asked for it.

    Its data has the assertions with their evidence under "rubrics", and "expected_tools".
    """
    data = {
        "rubrics": list(map(item_to_data, draft.items)),
        "expected_tools": list(map(tool_to_data, draft.expected_tools)),
    }
    return Task(task_id=task_id, kind=seed.kind, prompt=draft.query, seed=seed.seed, data=data)


def generator_checklist(*, min_items: int = MIN_ITEMS, max_items: int = MAX_ITEMS) -> Checklist:
    """What an episode that writes a task is checked for, by code: ``json``, ``items``, ``grounded`` and ``tools``."""

    def json_read(trajectory: Trajectory) -> None:
        _query(_the_object(trajectory.answer))

    def items_read(trajectory: Trajectory) -> tuple[ChecklistItem, ...]:
        return _items(_the_object(trajectory.answer), min_items, max_items)

    def grounded(trajectory: Trajectory) -> None:
        draft = Draft(query="", items=items_read(trajectory))
        _accept(ungrounded(draft, trajectory.events))

    def tools(trajectory: Trajectory) -> None:
        draft = Draft(query="", items=(), expected_tools=_tools(_the_object(trajectory.answer)))
        _accept(ungrounded(draft, trajectory.events))

    return Checklist(
        [
            _item("json", "The answer is one JSON object with a query.", "answer", json_read),
            _item("items", f"It has {min_items} to {max_items} different rubrics.", "answer", items_read),
            _item("grounded", "Each rubric quotes the tool result that it names.", "trajectory", grounded),
            _item("tools", "Each expected tool was called with success.", "trajectory", tools),
        ]
    )


def _item(name: str, text: str, scope: Scope, read: Callable[[Trajectory], object]) -> ChecklistItem:
    def check(trajectory: Trajectory) -> bool:
        try:
            read(trajectory)
        except _No:
            return False
        return True

    return ChecklistItem(name=name, text=text, scope=scope, check=check)


def _accept(refused: Refused | None) -> None:
    if refused is not None:
        raise _No(refused.kind, refused.detail)


# --- grounding ---------------------------------------------------------------------------------------------------


def _fault(item: ChecklistItem, events: Sequence[ToolEvent]) -> str:
    """What is wrong with the evidence of an item; empty if nothing is."""
    evidence = item.evidence
    if evidence is None or not any(map(str.isalnum, evidence.quote)):
        return "has no quote"
    if not 1 <= evidence.observation <= len(events):
        return f"names observation {evidence.observation} of {len(events)}"
    result = events[evidence.observation - 1].result
    if not result.ok:
        return f"names observation {evidence.observation}, a failed call ({result.kind})"
    if not _says(_folded(result.text), _folded(evidence.quote)):
        return f"quotes {_short(evidence.quote)}, which observation {evidence.observation} does not say"
    return ""


def _says(text: str, quote: str) -> bool:
    """Whether the quote is in the text, from the beginning of a word or number to the end of one."""
    start = text.find(quote)
    while start >= 0:
        end = start + len(quote)
        if not (_joined(text[max(0, start - 1) : start], quote[:1]) or _joined(quote[-1:], text[end : end + 1])):
            return True
        start = text.find(quote, start + 1)
    return False


def _joined(left: str, right: str) -> bool:
    """Whether two neighbours are of one word or number. Scripts that do not part words do not count."""
    both = left + right
    return len(both) == 2 and both.isascii() and (both.isalpha() or both.isdigit())


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


# --- reading -----------------------------------------------------------------------------------------------------


def _the_object(answer: str | None) -> dict[str, Any]:
    """The one JSON object of an answer; its texts have no lone surrogates."""
    text = (answer or "").strip()
    if not text:
        raise _No("no_answer", "the episode has no answer")
    if len(text) > MAX_CHARS:
        raise _No("too_long", f"{len(text)} characters, more than {MAX_CHARS}")
    try:
        value = read_object(text)
    except Unreadable as reason:
        raise _No(reason.kind, reason.detail) from None
    if deeper_than(value, MAX_ARGUMENT_DEPTH):
        raise _No("bad_json", f"it is nested more than {MAX_ARGUMENT_DEPTH} levels deep")
    return clean_json(value)


def _query(data: Mapping[str, Any]) -> str:
    query = data.get("query")
    if not isinstance(query, str) or not any(map(str.isalnum, query)):
        raise _No("no_query", f"query is {_short(query)}")
    if len(query) > MAX_QUERY_CHARS:
        raise _No("too_long", f"the query has {len(query)} characters, more than {MAX_QUERY_CHARS}")
    return query.strip()


def _items(data: Mapping[str, Any], low: int, high: int) -> tuple[ChecklistItem, ...]:
    rubrics = data.get("rubrics")
    if not isinstance(rubrics, list) or not low <= len(rubrics) <= high:
        found = len(rubrics) if isinstance(rubrics, list) else _short(rubrics)
        raise _No("items", f"rubrics must be a list of {low} to {high}, found {found}")
    items = tuple(_rubric(f"r{number}", rubric) for number, rubric in enumerate(rubrics, 1))
    names: dict[str, str] = {}
    for item in items:
        if (same := names.setdefault(_folded(item.text), item.name)) != item.name:
            raise _No("items", f"{same} and {item.name} say the same")
    return items


def _rubric(name: str, data: Any) -> ChecklistItem:
    if not isinstance(data, dict):
        raise _No("items", f"{name} must be an object, found {_short(data)}")
    text, number, quote = data.get("text"), data.get("observation"), data.get("evidence")
    if not isinstance(text, str) or not any(map(str.isalnum, text)):
        raise _No("items", f"the text of {name} is {_short(text)}")
    if type(number) is not int or number < 1:
        raise _No("items", f"the observation of {name} must be a whole number from 1, found {_short(number)}")
    if not isinstance(quote, str):
        raise _No("items", f"the evidence of {name} must be a quote, found {_short(quote)}")
    if (longest := max(len(text), len(quote))) > MAX_TEXT_CHARS:
        raise _No("items", f"text or evidence of {name} has {longest} characters, more than {MAX_TEXT_CHARS}")
    if (scope := data.get("scope", "answer")) not in get_args(Scope):
        raise _No("items", f"the scope of {name} must be one of {', '.join(get_args(Scope))}, found {_short(scope)}")
    return ChecklistItem(name=name, text=text.strip(), scope=scope, evidence=Evidence(observation=number, quote=quote))


def _tools(data: Mapping[str, Any]) -> tuple[ExpectedTool, ...]:
    tools = data.get("expected_tools", [])
    if not isinstance(tools, list):
        raise _No("tools", f"expected_tools must be a list, found {_short(tools)}")
    if len(tools) > MAX_TOOLS:
        raise _No("tools", f"expected_tools must be at most {MAX_TOOLS}, found {len(tools)}")
    return tuple(_tool(number, tool) for number, tool in enumerate(tools, 1))


def _tool(number: int, data: Any) -> ExpectedTool:
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise _No("tools", f"expected tool {number} has no name: {_short(data)}")
    if not isinstance(arguments := data.get("arguments", {}), dict):
        raise _No("tools", f"the arguments of expected tool {number} must be an object, found {_short(arguments)}")
    return ExpectedTool(name=name.strip(), arguments=arguments)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
