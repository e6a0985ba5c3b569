"""Rubrics of travel tasks as code: a grader of a small language of assertions, and what is true of them in the world.

    The cafe is Lotus.    The cafe is not Elm.     The cafe costs 12 usd.    The total is at most 40 usd.
    The way is metro.     The weather is 21 celsius.    The answer names a cafe.    The answer takes the train.
    poi_search was called.

A label is a category of places, ``flight``, ``train``, ``weather``, ``event``, or ``way`` for the line ``go by``. Names
are written as the tools write them: places with a capital, flight and train numbers in capitals, ways and skies in
small letters. What the answer says is read by `arenarl.envs.travel.parse_answer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from arenarl.envs.travel import WISHES, Claim, parse_answer, parse_table
from arenarl.envs.travel_world import CATEGORIES, DAYS, MODES, SKIES, World, query_words
from arenarl.expected_tools import ExpectedTool, tools_from_data
from arenarl.rubric import ChecklistItem, items_from_data
from arenarl.types import Task, ToolEvent, Trajectory

LABELS_BY_TOOL = {
    "poi_search": "",  # the category that was asked for
    "around_search": "",
    "direction": "go by",
    "weather": "weather",
    "search_flights": "flight",
    "search_train_tickets": "train",
    "web_search": "event",
}
RIDES = ("flight", "train")
_PRICED = {*CATEGORIES, *RIDES, "event", "go by"}
_COLUMNS = {"best": ("rating", -1), "cheap": ("usd", 1), "fast": ("minutes", 1)}

Kind = Literal["is", "is_not", "costs", "celsius", "names", "total", "takes", "called"]
Claims = Mapping[str, Claim | None]
Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Assertion:
    """One sentence of the language. ``label`` is that of the answer's line; ``name`` may also be that of a tool."""

    kind: Kind
    label: str = ""
    name: str = ""
    number: int = 0

    @property
    def joint(self) -> bool:
        """Whether it is about more than one line of an answer."""
        return self.kind in ("total", "takes")


_LABEL = rf"(?P<label>{'|'.join((*CATEGORIES, *RIDES, 'weather', 'event', 'way'))})"
_NAME = rf"(?P<name>[A-Z][a-z]{{1,39}}|[A-Z]{{1,3}}\d{{1,4}}|{'|'.join((*MODES, *SKIES))})"
_USD = r"(?P<number>\d{1,6}) usd"
_PATTERNS: dict[Kind, str] = {
    "is": rf"The {_LABEL} is {_NAME}",
    "is_not": rf"The {_LABEL} is not {_NAME}",
    "costs": rf"The {_LABEL} costs {_USD}",
    "celsius": r"The (?P<label>weather) is (?P<number>\d{1,3}) celsius",
    "names": rf"The answer names an? {_LABEL}",
    "total": rf"The total is at most {_USD}",
    "takes": rf"The answer takes the {_LABEL}",
    "called": rf"(?P<name>{'|'.join(LABELS_BY_TOOL)}) was called",
}
_SENTENCES = {kind: re.compile(pattern + r"\.?") for kind, pattern in _PATTERNS.items()}


def read_assertion(text: str) -> Assertion | None:
    """A sentence of the language; None for any other. Runs of blanks count as one."""
    sentence = " ".join(text.split())
    for kind, pattern in _SENTENCES.items():
        if match := pattern.fullmatch(sentence):
            parts = match.groupdict()
            label = {"way": "go by"}.get(parts.get("label", ""), parts.get("label", ""))
            return Assertion(kind=kind, label=label, name=parts.get("name", ""), number=int(parts.get("number", 0)))
    return None


def holds(assertion: Assertion, claims: Claims, called: set[str]) -> bool:
    """Whether an assertion is true of an answer.

    An assertion about a line needs the line to be there, also one that says what it is not. The total needs a price in
    some line and in every line that can have one.

    Args:
        claims: the lines of the answer by label; None for a line that does not count.
        called: tools that were called and answered.
    """
    claim = claims.get(assertion.label)
    match assertion.kind:
        case "called":
            return assertion.name in called
        case "takes":
            taken = claims.get("take")
            return taken is not None and taken.name.lower() == assertion.label
        case "total":
            prices = [c.numbers.get("usd") if c else None for label, c in claims.items() if label in _PRICED]
            return bool(prices) and None not in prices and sum(p or 0 for p in prices) <= assertion.number
        case "names":
            return claim is not None
        case "is":
            return claim is not None and claim.name.lower() == assertion.name.lower()
        case "is_not":
            return claim is not None and claim.name.lower() != assertion.name.lower()
        case "costs" | "celsius":
            unit = "usd" if assertion.kind == "costs" else "celsius"
            return claim is not None and claim.numbers.get(unit) == assertion.number


def label_of(tool: str, arguments: Mapping[str, Any]) -> str:
    """The label of the line that a call of a travel tool finds the facts of; "" for a call that finds none."""
    return LABELS_BY_TOOL.get(tool, "") or str(arguments.get("category", "")).strip().lower()


def _name(row: Row) -> str:
    return next(iter(row.values()))


def _bears_out(row: Row, claim: Claim) -> bool:
    """Whether a row of a table has the name and every number of a claim."""
    numbers_hold = all(row.get(unit) == str(number) for unit, number in claim.numbers.items())
    return _name(row).lower() == claim.name.lower() and numbers_hold


def grounded_claims(answer: str | None, events: Sequence[ToolEvent]) -> dict[str, Claim | None]:
    """The lines of an answer; None for those whose name or numbers no tool result of the episode bears out.

    The choice ``take`` is a decision, not a fact: it needs no support.
    """
    rows: dict[str, list[Row]] = {}
    for event in events:
        if event.result.ok:
            rows.setdefault(label_of(tool_of(event), event.call.arguments), []).extend(parse_table(event.result.text))
    return {
        label: claim if label == "take" or any(_bears_out(row, claim) for row in rows.get(label, [])) else None
        for label, claim in parse_answer(answer).items()
    }


def tool_of(event: ToolEvent) -> str:
    """The tool of a call, whatever name the model called it by."""
    return event.result.tool or event.call.name


class TravelGrader:
    """Grades the assertions of travel tasks without a model. A sentence outside the language is undecided.

    The scope of an item is not looked at: the sentence itself says what it is about.

    Args:
        grounded: a line that no tool result of the episode bears out does not count, so that nothing is gained by
            inventing a cafe, or a price that keeps the total low. If False, the answer is taken at its word, as the
            judge of research tasks does in the release of ARISE (arXiv 2609.01058).
    """

    def __init__(self, *, grounded: bool = True) -> None:
        self.grounded = grounded

    async def grade(self, items: Sequence[ChecklistItem], trajectory: Trajectory, task: Task) -> list[bool | None]:
        events = trajectory.events
        claims: Claims = parse_answer(trajectory.answer)
        if self.grounded:
            claims = grounded_claims(trajectory.answer, events)
        called = {tool_of(event) for event in events if event.result.ok}
        assertions = [read_assertion(item.text) for item in items]
        return [None if found is None else holds(found, claims, called) for found in assertions]


# --- what is true in the world -----------------------------------------------------------------------------------

_WISH = re.compile(rf"({'|'.join(WISHES.values())}) (\w{{1,20}})(?: and (\w{{1,20}}))?")
_BUDGET = re.compile(r"[Bb]udget (\d{1,6}) usd")


def world_truth(task: Task, world: World) -> bool:
    """Whether a generated travel task can be passed by an honest answer: an oracle for reports, not for training.

    The honest answers are those in which each line is a row that the expected tools give in this world, the best one
    where the query wishes for one ("cheapest cafe"), the cheaper ride is taken, and the total keeps the budget of the
    query. True if all rubrics hold of one of them (rubrics of negative weight: do not hold). False also if a rubric is
    outside the language, if an expected call is refused by its tool, or asks for a city, day or place that the query
    does not name. An event needs no expected call, since a search of the web is free text: that of any city of the
    query will do.

    Raises:
        ConfigError: for data that `items_from_data` refuses.
    """
    items = [item for item in items_from_data(task.data, task_id=task.task_id) if item.judged]
    rubrics = [(read_assertion(item.text), item.weight > 0) for item in items]
    if (budget := _BUDGET.search(task.prompt)) is not None:
        rubrics.append((Assertion(kind="total", number=int(budget[1])), True))
    choices = _choices(task, world)
    if choices is None or any(assertion is None for assertion, _ in rubrics):
        return False
    if any(assertion and assertion.label == "event" for assertion, _ in rubrics):
        choices.setdefault("event", _events(task.prompt, world))
    joint = [(a, good) for a, good in rubrics if a and a.joint]
    alone = [(a, good) for a, good in rubrics if a and not a.joint]
    lines = {
        label: [line for line in map(_claim, rows) if _meets({label: line}, [r for r in alone if r[0].label == label])]
        for label, rows in choices.items()
    }
    absent = [rubric for rubric in alone if rubric[0].label not in lines]
    return _meets({}, absent) and any(_meets(claims, joint) for claims in _answers(lines))


def _meets(claims: Claims, rubrics: Sequence[tuple[Assertion, bool]]) -> bool:
    """Whether the assertions of an honest answer are what they should be, all tools having been called."""
    return all(holds(assertion, claims, {*LABELS_BY_TOOL}) == good for assertion, good in rubrics)


def _choices(task: Task, world: World) -> dict[str, list[Row]] | None:
    """The rows that an honest answer may take for each label; None if the expected calls do not fit the query."""
    wishes = _wishes(task.prompt)
    choices: dict[str, list[Row]] = {}
    for tool in tools_from_data(task.data, task_id=task.task_id):
        if not _named(tool.arguments, task.prompt, world) or (rows := _table(tool, world)) is None:
            return None
        label = label_of(tool.name, tool.arguments)
        choices.setdefault(label, []).extend(_wished(rows, wishes.get(label, "")))
    return choices


def _wishes(query: str) -> dict[str, str]:
    """What the query wishes for, by label: "cheapest flight and train" wishes for both to be cheap."""
    names = {words: wish for wish, words in WISHES.items()}
    return {
        {"way": "go by"}.get(label, label): names[words]
        for words, *labels in _WISH.findall(query)
        for label in labels
        if label
    }


def _wished(rows: list[Row], wish: str) -> list[Row]:
    column, sign = _COLUMNS.get(wish, ("", 1))
    if not rows or column not in rows[0]:
        return rows
    best = min(sign * int(row[column]) for row in rows)
    return [row for row in rows if sign * int(row[column]) == best]


def _named(arguments: Mapping[str, Any], query: str, world: World) -> bool:
    """Whether the query names what a call asks about, apart from the category, which it may paraphrase."""
    said = query_words(query)
    proper = {name.lower() for name in (*world.cities, *DAYS)}
    asked = {
        word
        for key, value in arguments.items()
        if key != "category"
        for word in query_words(str(value))
        if key != "query" or word in proper
    }
    return asked <= said


def _events(query: str, world: World) -> list[Row]:
    """The events of the cities that a query names."""
    said = query_words(query)
    events = [world.event(city) for city in world.cities if city.lower() in said]
    return [{"event": event.name, "usd": str(event.usd)} for event in events]


def _table(tool: ExpectedTool, world: World) -> list[Row] | None:
    """What a tool answers in the world; None if it refuses."""
    from mcp.server.mcpserver.exceptions import ToolError

    from arenarl.envs.travel_server import TravelTools

    if tool.name not in LABELS_BY_TOOL or not all(isinstance(value, str) for value in tool.arguments.values()):
        return None
    try:
        return [*parse_table(getattr(TravelTools(world.seed), tool.name)(**tool.arguments))]
    except (ToolError, TypeError):  # what it is asked is up to whoever wrote the task
        return None


def _claim(row: Row) -> Claim:
    return Claim(name=_name(row), numbers={unit: int(row[unit]) for unit in ("usd", "celsius") if unit in row})


def _answers(lines: Mapping[str, Sequence[Claim]]) -> Iterator[dict[str, Claim]]:
    """Answers of one claim for each label, the cheaper ride taken if there are two.

    One for each price of the rides and sum of the rest, since these are all that `Assertion.joint` looks at: their number grows
    with the sums, not with the combinations.
    """
    answers: dict[tuple[int, ...], dict[str, Claim]] = {(): {}}
    for label, claims in lines.items():
        longer = [{**answer, label: claim} for answer in answers.values() for claim in claims]
        answers = {_prices(answer): answer for answer in longer}
    for answer in answers.values():
        if all(ride in answer for ride in RIDES):
            answer["take"] = Claim(name=min(RIDES, key=lambda ride: answer[ride].numbers["usd"]), numbers={})
        yield answer


def _prices(answer: Mapping[str, Claim]) -> tuple[int, ...]:
    rides = [answer[ride].numbers["usd"] for ride in RIDES if ride in answer]
    return *rides, sum(claim.numbers.get("usd", 0) for label, claim in answer.items() if label not in RIDES)
