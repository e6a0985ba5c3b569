"""Files in the format of ECR-Bench: what is read, what is refused, and how attempts at their tasks are scored."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.ecr import TRAVEL_KINDS, ecr_scores, load_ecr, passed
from arenarl.envs.rubric_tasks import EMBEDDED
from arenarl.envs.travel import KINDS, TravelTasks
from arenarl.envs.travel_rubrics import read_assertion, world_truth
from arenarl.errors import ConfigError
from arenarl.rubric import items_from_data
from arenarl.types import Episode, Outcome, Task, Trajectory
from experiments.ecr.make_ecr_travel import lines

CALL = {"name": "poi_search", "arguments": {"city": "Oslo", "category": "cafe"}}
TRAVEL = {
    "query": "A cafe in Oslo?",
    "metadata": {
        "rubrics": ["The cafe is Lotus.", "The cafe costs 12 usd."],
        "expected_tools": [CALL],
        "task_type": "search_around",
    },
}
RESEARCH = {"query": "Why is the sky blue?", "metadata": {"rubrics": ["It names Rayleigh.", "It cites a source."]}}


def write(folder: Path, *records: Any, name: str = "tasks.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return path


# --- reading -----------------------------------------------------------------------------------------------------


def test_a_file_of_lines_is_read_in_its_order(tmp_path: Path):
    travel, research = load_ecr(write(tmp_path, TRAVEL, "", RESEARCH))
    assert (travel.kind, travel.prompt, research.kind) == ("search", "A cafe in Oslo?", "research")
    assert travel.data == {
        "rubrics": [{"text": "The cafe is Lotus."}, {"text": "The cafe costs 12 usd."}],
        "expected_tools": [CALL],
    }
    assert [item.name for item in items_from_data(travel.data)] == ["r1", "r2", "tool1:poi_search"]
    assert research.data["expected_tools"] == []


def test_a_json_list_holds_the_same_tasks(tmp_path: Path):
    listed = write(tmp_path, " \n" + json.dumps([TRAVEL, RESEARCH], indent=2), name="tasks.json")
    assert load_ecr(listed) == load_ecr(write(tmp_path, TRAVEL, RESEARCH))


def test_an_id_depends_on_the_record_alone(tmp_path: Path):
    first = [task.task_id for task in load_ecr(write(tmp_path, TRAVEL, RESEARCH))]
    assert first == [task.task_id for task in load_ecr(write(tmp_path, RESEARCH, TRAVEL))][::-1]
    (named,) = load_ecr(write(tmp_path, TRAVEL | {"id": "mine"}))
    assert named.task_id == "mine"


@pytest.mark.parametrize(
    ("task_type", "kind"),
    [
        ("direction", "direction"), ("compare_itinerary", "compare"), ("search_around", "search"),
        ("one_day_travel", "one_day"), ("multi_day_travel", "multi_day"), ("multi_day", "multi_day"), ("essay", "essay"),
    ],
)  # fmt: skip
def test_task_types_of_the_release_have_our_names(tmp_path: Path, task_type: str, kind: str):
    inside = {"query": "q", "metadata": {"rubrics": ["a"], "task_type": task_type}}
    beside = {"query": "q", "task_type": task_type, "metadata": {"rubrics": ["a"]}}
    assert [load_ecr(write(tmp_path, record))[0].kind for record in (inside, beside)] == [kind, kind]


@pytest.mark.parametrize("key", ["text", "rubric", "criterion", "description"])
def test_a_rubric_may_be_an_object_with_a_weight(tmp_path: Path, key: str):
    rubrics = [{key: "It cites a source.", "weight": 5, "axis": "citations"}, {key: "It rambles.", "weight": -2.5}]
    (task,) = load_ecr(write(tmp_path, {"query": "q", "metadata": {"rubrics": rubrics}}))
    items = items_from_data(task.data)
    assert [(item.text, item.weight, item.scope) for item in items] == [
        ("It cites a source.", 5, "answer"), ("It rambles.", -2.5, "answer"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("{", "Expecting property name"),
        ("5", "a task must be an object, got int"),
        ({"metadata": {"rubrics": ["a"]}}, "query must be a text that is not empty, got ''"),
        ({"query": " ", "metadata": {"rubrics": ["a"]}}, "query must be a text that is not empty"),
        ({"query": "q", "metadata": ["a"]}, "metadata must be an object, got list"),
        ({"query": "q", "metadata": {"rubrics": "a"}}, "rubrics must be a list, got str"),
        ({"query": "q", "metadata": {"rubrics": ["a", " "]}}, "r2, has text=' '; give an assertion in words"),
        ({"query": "q", "metadata": {"rubrics": [{"weight": 1}]}}, "r1, has text=None"),
        ({"query": "q", "metadata": {"rubrics": [7]}}, "r1, is '7'"),
        ({"query": "q", "metadata": {"rubrics": [{"text": "a", "weight": 0}]}}, "r1, has weight=0"),
        ({"query": "q", "metadata": {"expected_tools": [{"arguments": {}}]}}, "expected_tools, entry 1"),
        ({"query": "q", "metadata": {"rubrics": [{"text": "a", "weight": 10**400}]}}, "r1, has weight=100"),
        ({"query": "q", "metadata": {"rubrics": ["a"], "expected_tools": {}}}, "expected_tools is a dict; give a list"),
        ({"query": "q", "metadata": {"rubrics": ["a"], "expected_tools": ""}}, "expected_tools is a str; give a list"),
        ({"query": "q", "metadata": {}}, "neither rubrics nor expected_tools"),
        ({"query": "q", "id": 3, "metadata": {"rubrics": ["a"]}}, "id must be a text that is not empty, got 3"),
        ({"query": "q", "task_type": None, "metadata": {"rubrics": ["a"]}}, "task_type must be a text"),
        (TRAVEL, "'search_around-.*' was there before"),
    ],
)
def test_a_faulty_record_is_refused_with_its_line(tmp_path: Path, record: Any, says: str):
    with pytest.raises(ConfigError, match=rf"tasks\.jsonl', line 3: .*{says}"):
        load_ecr(write(tmp_path, TRAVEL, "", record))
    if isinstance(record, dict):
        listed = write(tmp_path, json.dumps([TRAVEL, record]), name="tasks.json")
        with pytest.raises(ConfigError, match=rf"tasks\.json', entry 2: .*{says}"):
            load_ecr(listed)


def test_a_file_without_tasks_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"missing\.jsonl' cannot be read: No such file"):
        load_ecr(tmp_path / "missing.jsonl")
    for text, says in (("\n", "holds no task"), ("[]", "holds no task"), ("[{]", "is no JSON list")):
        with pytest.raises(ConfigError, match=says):
            load_ecr(write(tmp_path, text))
    (tmp_path / "tasks.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_ecr(tmp_path / "tasks.jsonl")


def test_a_record_of_many_levels_is_refused_and_null_tools_are_none(tmp_path: Path):
    deep = '{"query": "q", "metadata": {"rubrics": ["a"]}, "x": ' + "[" * 900 + "]" * 900 + "}"
    with pytest.raises(ConfigError, match="line 2: it is nested too deeply"):
        load_ecr(write(tmp_path, TRAVEL, deep))
    (task,) = load_ecr(write(tmp_path, {"query": "q", "metadata": {"rubrics": ["a"], "expected_tools": None}}))
    assert task.data["expected_tools"] == []


def test_half_a_surrogate_pair_does_not_reach_a_tokenizer(tmp_path: Path):
    (task,) = load_ecr(write(tmp_path, '{"query": "a \\ud800 b", "metadata": {"rubrics": ["\\udc00"]}}'))
    assert (task.prompt, task.data["rubrics"]) == ("a \ufffd b", [{"text": "\ufffd"}])


KEYS = ("query", "metadata", "rubrics", "expected_tools", "task_type", "text", "weight", "name")
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=8,
)  # fmt: skip


@given(record=JSON)
def test_any_record_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, record: Any):
    path = write(tmp_path_factory.getbasetemp(), json.dumps(record), name="any.jsonl")
    try:
        assert all(task.prompt.strip() for task in load_ecr(path))
    except ConfigError as error:
        assert "any.jsonl" in str(error)


# --- the embedded set --------------------------------------------------------------------------------------------


def test_the_embedded_set_is_what_the_script_writes():
    assert EMBEDDED.read_bytes() == lines().encode()


def test_the_embedded_set_has_24_tasks_of_each_kind_about_held_out_cities():
    tasks, world = load_ecr(EMBEDDED), TravelTasks().world
    assert Counter(task.kind for task in tasks) == dict.fromkeys(KINDS, 24)
    assert len({task.prompt for task in tasks}) == 120
    said = {word.strip(".,:?") for task in tasks for word in task.prompt.split()}
    assert not said & set(world.split("train")) and len(said & set(world.split("heldout"))) == 24


def test_the_embedded_rubrics_are_true_sentences_of_the_language():
    tasks, world = load_ecr(EMBEDDED), TravelTasks().world
    assert {len(task.data["rubrics"]) for task in tasks} == {3, 5, 7}
    assert all(read_assertion(rubric["text"]) for task in tasks for rubric in task.data["rubrics"])
    assert [task.task_id for task in tasks if not world_truth(task, world)] == []


# --- scoring -----------------------------------------------------------------------------------------------------


def episode(
    kind: str, met: Mapping[str, bool | None], score: float | None = None, outcome: Outcome = Outcome.SCORED
) -> Episode:
    data = {"rubrics": [{"text": "good"}, {"text": "bad", "weight": -1.0}], "expected_tools": [CALL]}
    return Episode(
        episode_id="e", task=Task(task_id="t", kind=kind, prompt="", data=data), member=0, greedy=False, segments=(),
        trajectory=Trajectory(messages=(), events=(), answer=None), outcome=outcome, checklist=met, score=score,
    )  # fmt: skip


GOOD: dict[str, bool | None] = {"r1": True, "r2": False, "tool1:poi_search": True}
TOOL = "tool1:poi_search"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True), ({"r1": False}, False), ({"r2": True}, False), ({TOOL: False}, False),
        ({"r1": None}, None), ({"r2": None}, None),
        ({"r1": None, TOOL: False}, False), ({"tools:no_more": False}, True),
    ],
)  # fmt: skip
def test_a_travel_task_is_passed_if_all_rubrics_and_tools_are_met(
    change: dict[str, bool | None], expected: bool | None
):
    assert passed(episode("search", GOOD | change)) is expected
    assert passed(episode("search", GOOD | change, outcome=Outcome.TRUNCATED)) is expected


def test_a_failed_episode_is_undecided():
    assert passed(episode("search", {}, outcome=Outcome.FAILED)) is None
    assert passed(episode("search", {"r1": False}, outcome=Outcome.FAILED)) is None
    assert passed(episode("search", {})) is None


def test_pass_rates_by_subtask_leave_undecided_attempts_out():
    bad = GOOD | {"r1": False}
    episodes = [episode("search", met) for met in (GOOD, bad, bad, GOOD | {"r1": None})]
    episodes += [episode("compare", GOOD), episode("compare", {}, outcome=Outcome.FAILED)]
    assert ecr_scores(episodes) == {
        "ecr_travel/compare": 1.0, "ecr_travel/search": 1 / 3, "ecr_travel/mean": 2 / 3,
        "ecr_travel/episodes": 6, "ecr_travel/undecided": 2,
    }  # fmt: skip


def test_a_subtask_that_nobody_decided_leaves_the_mean_unknown():
    scores = ecr_scores([episode("search", GOOD), episode("one_day", {}, outcome=Outcome.FAILED)])
    assert (scores["ecr_travel/search"], scores["ecr_travel/one_day"], scores["ecr_travel/mean"]) == (1.0, None, None)
    assert ecr_scores([]) == {}


def test_research_is_the_mean_share_of_rubrics_met():
    episodes = [episode("research", {}, score) for score in (0.25, 0.75, None, 1.0)]
    assert ecr_scores(episodes) == {
        "ecr_research/share": pytest.approx(2 / 3), "ecr_research/episodes": 4, "ecr_research/undecided": 1,
    }  # fmt: skip
    assert list(ecr_scores([*episodes, episode("search", GOOD)])) == [
        "ecr_travel/search", "ecr_travel/mean", "ecr_travel/episodes", "ecr_travel/undecided",
        "ecr_research/share", "ecr_research/episodes", "ecr_research/undecided",
    ]  # fmt: skip


def test_the_subtasks_are_the_kinds_of_the_travel_environment():
    assert set(TRAVEL_KINDS) == set(KINDS)
