"""Tasks that a policy wrote: what is read, what is refused and why, and what they must rest on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.generated import (
    MAX_CHARS,
    MAX_QUERY_CHARS,
    MAX_TEXT_CHARS,
    MAX_TOOLS,
    Draft,
    Refused,
    draft_task,
    generator_checklist,
    read_draft,
    ungrounded,
)  # fmt: skip
from arenarl.rubric import ChecklistItem, Evidence, items_from_data
from arenarl.types import Task, ToolCall, ToolEvent, ToolResult, Trajectory

CAFE = {"name": "poi_search", "arguments": {"city": "Hanoi", "category": "cafe"}}
TASK = {
    "query": "Find the cheapest cafe in Hanoi.",
    "rubrics": [
        {"text": "The cafe is Lotus.", "observation": 1, "evidence": "Lotus 12 7"},
        {"text": "The cafe costs 12 usd.", "observation": 1, "evidence": "lotus \n 12"},
        {"text": "The weather is 31 celsius.", "observation": 3, "evidence": "31"},
    ],
    "expected_tools": [CAFE, {"name": "weather", "arguments": {"city": "Hanoi", "day": "Monday"}}],
}
SEED = Task(task_id="seed", kind="search", prompt="Write a search task.", seed=7)
TABLE = "name usd rating\nLotus 12 7\nBlue 30 9"


def event(name: str, text: str, kind: Any = "ok", **arguments: str) -> ToolEvent:
    call = ToolCall(id="call_0", name=name, arguments=arguments)
    return ToolEvent(call=call, result=ToolResult(kind=kind, text=text, tool=name), turn=0)


EVENTS = (
    event("poi_search", TABLE, city="hanoi", category="cafe"),
    event("weather", "unknown day 'Moonday'", "tool_error", city="Hanoi", day="Moonday"),
    event("weather", "sky celsius\nclear 31", city="Hanoi", day="Monday"),
)


def written(**changes: Any) -> str:
    return json.dumps(TASK | changes)


def rubrics(*changes: Mapping[str, Any]) -> str:
    """The task with its rubrics changed, in their order."""
    return written(rubrics=[rubric | changed for rubric, changed in zip(TASK["rubrics"], changes, strict=False)])


def draft(answer: str) -> Draft:
    read = read_draft(answer)
    assert isinstance(read, Draft), str(read)
    return read


def test_a_task_is_read_with_its_evidence_and_tools():
    read = draft(written())
    assert read.query == "Find the cheapest cafe in Hanoi."
    assert [item.name for item in read.items] == ["r1", "r2", "r3"]
    first = ChecklistItem(
        name="r1", text="The cafe is Lotus.", scope="answer", evidence=Evidence(observation=1, quote="Lotus 12 7")
    )
    assert read.items[0] == first
    assert [(tool.name, tool.arguments) for tool in read.expected_tools] == [
        tuple(t.values()) for t in TASK["expected_tools"]
    ]


@pytest.mark.parametrize("form", ["{}", "\n {} \n", "```json\n{}\n```", "```\n{}```", "```JSON {} ```"])
def test_one_code_fence_is_allowed(form: str):
    assert read_draft(form.replace("{}", written())) == draft(written())


def test_tools_a_scope_and_further_keys_are_optional():
    short = {"query": " q ", "rubrics": [TASK["rubrics"][0] | {"scope": "turn", "id": 4}], "x": 1}
    read = read_draft(json.dumps(short), min_items=1)
    assert isinstance(read, Draft)
    assert (read.query, read.items[0].scope, read.expected_tools) == ("q", "turn", ())


REFUSED = [
    (None, "no_answer: the episode has no answer"),
    (" \n", "no_answer: the episode has no answer"),
    ("Here is it: " + written(), "no_json: it begins with 'Here is it"),
    ("[1]", "no_json: it begins with '[1]'"),
    ("```json\n```", "no_json: it begins with ''"),
    (written()[:-1], "bad_json: Expecting ',' delimiter"),
    (written(rubrics=float("nan")), "nan: NaN is no number"),
    (written(x=0.5).replace("0.5", "1e999"), "nan: 1e999 is no number"),
    ('{"query": "a", "query": "b"}', "duplicate_key: 'query'"),
    ('{"query": ' + "9" * 5000 + "}", "bad_json: Exceeds the limit"),
    ('{"query": ' + "[" * 20_000, "bad_json: it is nested too deeply"),
    ('{"query": ' + "[" * 70 + "]" * 70 + "}", "bad_json: it is nested more than 64 levels"),
    (written() + " Done.", "extra_text: 'Done.'"),
    (written() * 2, "two_objects: '{"),
    (written(query=None), "no_query: query is None"),
    (written(query=" ?! "), "no_query: query is ' ?! '"),
    (written(query="q" * (MAX_QUERY_CHARS + 1)), "too_long: the query has 4001 characters, more than 4000"),
    (rubrics({}, {"text": "a" * (MAX_TEXT_CHARS + 1)}, {}), "items: text or evidence of r2 has 1001 characters"),
    (rubrics({}, {}, {"evidence": "a" * 1001}), "items: text or evidence of r3 has 1001 characters, more than 1000"),
    (written(expected_tools=[CAFE] * (MAX_TOOLS + 1)), "tools: expected_tools must be at most 20, found 21"),
    (written(rubrics="none"), "items: rubrics must be a list of 3 to 8, found 'none'"),
    (written(rubrics=TASK["rubrics"][:2]), "items: rubrics must be a list of 3 to 8, found 2"),
    (written(rubrics=TASK["rubrics"] * 3), "items: rubrics must be a list of 3 to 8, found 9"),
    (written(rubrics=["a", "b", "c"]), "items: r1 must be an object, found 'a'"),
    (rubrics({}, {}, {"text": " "}), "items: the text of r3 is ' '"),
    (rubrics({}, {}, {"text": "the CAFE  is lotus."}), "items: r1 and r3 say the same"),
    (rubrics({"observation": True}, {}, {}), "items: the observation of r1 must be a whole number from 1, found True"),
    (rubrics({"observation": 1.0}, {}, {}), "items: the observation of r1 must be a whole number from 1, found 1.0"),
    (rubrics({}, {"observation": 0}, {}), "items: the observation of r2 must be a whole number from 1, found 0"),
    (rubrics({}, {"evidence": 12}, {}), "items: the evidence of r2 must be a quote, found 12"),
    (rubrics({}, {"scope": "world"}, {}), "items: the scope of r2 must be one of turn, trajectory, answer, found 'world'"),
    (rubrics({}, {"scope": []}, {}), "items: the scope of r2 must be one of turn, trajectory, answer, found []"),
    (written(expected_tools={}), "tools: expected_tools must be a list, found {}"),
    (written(expected_tools=[CAFE, "weather"]), "tools: expected tool 2 has no name: 'weather'"),
    (written(expected_tools=[{"name": ""}]), "tools: expected tool 1 has no name"),
    (written(expected_tools=[{"name": "f", "arguments": [1]}]), "tools: the arguments of expected tool 1 must be an object"),
    (" " * MAX_CHARS + written() + "x" * MAX_CHARS, "too_long: "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "reason"), REFUSED, ids=[f"{n}-{r.partition(':')[0]}" for n, (_, r) in enumerate(REFUSED)]
)
def test_what_is_no_task_is_refused_with_its_kind(answer: str | None, reason: str):
    refused = read_draft(answer)
    assert isinstance(refused, Refused)
    assert str(refused).startswith(reason)
    assert len(refused.detail) <= 200


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
tool = st.fixed_dictionaries(
    {"name": st.text(min_size=1)}, optional={"arguments": st.dictionaries(st.text(), anything, max_size=3)}
)
rubric = st.fixed_dictionaries(
    {"text": st.text(min_size=1), "observation": st.integers(1, 4), "evidence": st.text()},
    optional={"scope": st.sampled_from(["turn", "trajectory", "answer"])},
)
near = st.fixed_dictionaries(
    {"query": st.text(min_size=1), "rubrics": st.lists(rubric, min_size=3, max_size=5)},
    optional={"expected_tools": st.lists(tool, max_size=3)},
)
junk = st.fixed_dictionaries(
    {},
    optional={
        "query": anything,
        "rubrics": st.lists(rubric | anything, max_size=9) | anything,
        "expected_tools": st.lists(tool | anything, max_size=3) | anything,
    },
)


@given(near.map(json.dumps))
def test_a_task_of_any_words_can_be_stored_and_read_again(answer: str):
    read = read_draft(answer)
    if isinstance(read, Refused):
        assert read.kind in ("no_query", "items", "tools", "bad_json", "nan")
        return
    data = draft_task(read, seed=SEED, task_id="t").data
    assert json.loads(json.dumps(data, allow_nan=False, ensure_ascii=False).encode()) == data
    items = items_from_data(data)
    assert tuple(items[: len(read.items)]) == read.items
    assert len(items) == len(read.items) + len(read.expected_tools)


@given(
    st.text() | junk.map(json.dumps) | st.builds(lambda task, end: json.dumps(task)[:end], near, st.integers(0, 200))
)
async def test_whatever_was_written_nothing_raises(answer: str):
    read = read_draft(answer)
    if isinstance(read, Draft):
        ungrounded(read, EVENTS)
    results = await generator_checklist().run(Trajectory(messages=(), events=EVENTS, answer=answer))
    assert (results["json"] and results["items"]) or isinstance(read, Refused)


def test_a_task_of_its_own_observations_is_grounded():
    assert ungrounded(draft(written()), EVENTS) is None


def test_without_a_successful_observation_nothing_is_grounded():
    failed = (event("poi_search", TABLE, "timeout", city="Hanoi", category="cafe"),)
    assert ungrounded(draft(written()), failed) == Refused("no_observation", "none of 1 calls gave a result")
    assert ungrounded(draft(written(expected_tools=[])), ()) == Refused(
        "no_observation", "none of 0 calls gave a result"
    )


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"observation": 4}, "r2 names observation 4 of 3"),
        ({"observation": 2, "evidence": "Moonday"}, "r2 names observation 2, a failed call (tool_error)"),
        ({"observation": 3}, "r2 quotes 'lotus \\n 12', which observation 3 does not say"),
        ({"evidence": "Lotus 13"}, "r2 quotes 'Lotus 13', which observation 1 does not say"),
        ({"evidence": "Lotus 1"}, "r2 quotes 'Lotus 1', which observation 1 does not say"),
        ({"evidence": "o"}, "r2 quotes 'o', which observation 1 does not say"),
        ({"evidence": "2 7"}, "r2 quotes '2 7', which observation 1 does not say"),
        ({"evidence": " \n"}, "r2 has no quote"),
        ({"evidence": "..."}, "r2 has no quote"),
    ],
)
def test_each_rubric_must_quote_a_result_that_there_was(change: dict[str, Any], detail: str):
    assert ungrounded(draft(rubrics({}, change, {})), EVENTS) == Refused("ungrounded", detail)


@pytest.mark.parametrize(
    ("quote", "yes", "no"),
    [
        ("7", "17 7", "17 72"), ("a", "cafe a", "cafe"), ("12", "$12usd", "312"), ("lotus", "(Lotus)", "Lotuses"),
        ("咖啡", "河内咖啡馆", "河内"), ("$1", "x$1", "$12"), ("1, 2", "11, 2 1, 2", "1, 23"),
    ],
)  # fmt: skip
def test_a_quote_holds_whole_words_and_numbers(quote: str, yes: str, no: str):
    item = ChecklistItem(name="own", text="It is nice.", evidence=Evidence(observation=1, quote=quote))
    assert ungrounded(Draft(query="q", items=(item,)), [event("look", yes)]) is None
    refused = ungrounded(Draft(query="q", items=(item,)), [event("look", no)])
    assert refused == Refused("ungrounded", f"own quotes {quote!r}, which observation 1 does not say")


def test_a_rubric_without_evidence_is_not_grounded():
    item = ChecklistItem(name="own", text="It is nice.")
    assert ungrounded(Draft(query="q", items=(item,)), EVENTS) == Refused("ungrounded", "own has no quote")
    last = replace(item, evidence=Evidence(observation=0, quote="31"))
    assert ungrounded(Draft(query="q", items=(last,)), EVENTS) == Refused("ungrounded", "own names observation 0 of 3")


def test_each_expected_tool_needs_a_successful_call_of_its_own():
    moonday = {"name": "weather", "arguments": {"city": "Hanoi", "day": "Moonday"}}
    refused = ungrounded(draft(written(expected_tools=[moonday])), EVENTS)
    assert refused == Refused(
        "unmatched_tool", "no successful call of its own for weather({'city': 'Hanoi', 'day': 'Moonday'})"
    )
    twice = draft(written(expected_tools=[CAFE, CAFE]))
    assert str(ungrounded(twice, EVENTS)).startswith("unmatched_tool: no successful call of its own for poi_search")
    assert ungrounded(twice, (*EVENTS, EVENTS[0])) is None


def test_a_task_has_kind_and_seed_of_what_asked_for_it_and_the_common_format():
    task = draft_task(draft(rubrics({}, {"scope": "trajectory"}, {})), seed=SEED, task_id="t1")
    assert (task.task_id, task.kind, task.prompt, task.seed) == ("t1", "search", TASK["query"], 7)
    assert task.data["rubrics"][:2] == [
        {"text": "The cafe is Lotus.", "evidence": {"observation": 1, "quote": "Lotus 12 7"}},
        {
            "text": "The cafe costs 12 usd.",
            "scope": "trajectory",
            "evidence": {"observation": 1, "quote": "lotus \n 12"},
        },
    ]
    assert task.data["expected_tools"] == TASK["expected_tools"]


@pytest.mark.parametrize(
    ("answer", "met"),
    [
        (written(), "1111"),
        (None, "0000"),
        (written(query=""), "0111"),
        (written(rubrics=TASK["rubrics"][:2]), "1001"),
        (rubrics({}, {}, {"observation": 2}), "1101"),
        (written(expected_tools=[CAFE, CAFE]), "1110"),
        (written(expected_tools=[1]), "1110"),
        (written()[:-2], "0000"),
    ],
)
async def test_the_checklist_of_a_generator_says_what_is_right(answer: str | None, met: str):
    checklist = generator_checklist()
    results = await checklist.run(Trajectory(messages=(), events=EVENTS, answer=answer))
    assert list(results) == ["json", "items", "grounded", "tools"]
    assert "".join(str(int(bool(value))) for value in results.values()) == met
    assert checklist.score(results) == met.count("1") / 4


async def test_the_numbers_of_items_can_be_chosen():
    two = Trajectory(messages=(), events=EVENTS, answer=written(rubrics=TASK["rubrics"][:2]))
    assert (await generator_checklist(min_items=2, max_items=2).run(two))["items"] is True
    assert isinstance(read_draft(two.answer, min_items=2, max_items=2), Draft)
    assert isinstance(read_draft(written(), min_items=2, max_items=2), Refused)
