"""Reference files: what is written is read again exactly, and what does not fit is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracking_samples import MESSAGES, TASK, make_episode, make_group

from arenarl.errors import ConfigError
from arenarl.jsonl import dumps
from arenarl.references import FORMAT, read_references, references_for, write_references
from arenarl.tracking import episode_record
from arenarl.types import Episode, Outcome, Task

OTHER = Task(task_id="t2", kind="search", prompt="Find a park.")


def bare(episode: Episode) -> Episode:
    """What a reference keeps: everything but tokens and timings."""
    return replace(episode, segments=(), timing={})


def at(task: Task, member: int = 0) -> Episode:
    return replace(make_episode(member), task=task)


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_the_round_trip_is_exact_and_each_line_stands_by_itself(tmp_path):
    path = tmp_path / "refs.jsonl"
    episodes = [
        make_episode(0),
        at(OTHER, 1),
        replace(make_episode(2), score=None, outcome=Outcome.TRUNCATED, detail="turns"),
    ]
    write_references(path, episodes, taskset="travel", model="m/1")
    assert [r.episode for r in read_references(path)] == [bare(e) for e in episodes]
    assert {(r.taskset, r.model) for r in read_references(path)} == {("travel", "m/1")}
    lines = path.read_text().splitlines()
    path.write_text("\n\n".join([lines[2], lines[0]]))
    assert [r.episode.member for r in read_references(path)] == [2, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["refs.jsonl"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50)
@given(
    data=st.dictionaries(st.text(), JSON, max_size=3), text=st.text(), score=st.none() | st.floats(0, 1),
    met=st.none() | st.booleans() | st.floats(0, 1), outcome=st.sampled_from(Outcome), structured=JSON,
)  # fmt: skip
def test_any_attempt_survives(tmp_path_factory, data, text, score, met, outcome, structured):
    sample = make_episode(1)
    event = sample.trajectory.events[0]
    event = replace(event, result=replace(event.result, text=text, structured=structured))
    episode = replace(
        bare(sample), task=replace(TASK, prompt=text, data=data), score=score, checklist={text: met}, outcome=outcome,
        trajectory=replace(sample.trajectory, answer=text, events=(event,)),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("refs") / "any.jsonl"
    write_references(path, [episode], taskset=text, model=text)
    (found,) = read_references(path)
    assert found.episode == episode and repr(found.episode.checklist) == repr(episode.checklist)


def test_text_that_utf_8_cannot_hold_survives(tmp_path):
    episode = bare(make_episode(0, answer="\ud800 torn"))
    write_references(tmp_path / "r", [episode], taskset="", model="")
    assert read_references(tmp_path / "r")[0].episode == episode


def test_a_line_written_by_hand_needs_the_task_and_the_messages_only(tmp_path):
    task = {"task_id": "t1", "prompt": TASK.prompt}
    words = [{"role": "user", "content": TASK.prompt}, {"role": "assistant", "content": "The Museu."}]
    path = write_lines(
        tmp_path / "r", {"task": task, "messages": words}, {"task": task, "messages": words[:1], "answer": None}
    )
    first, second = (r.episode for r in read_references(path))
    assert (first.trajectory.answer, first.outcome, first.score, first.task.kind) == ("The Museu.", "scored", None, "")
    assert second.trajectory.answer is None


def test_lines_of_a_run_are_read_and_take_the_task_from_the_task_set(tmp_path):
    path = tmp_path / "episodes.jsonl"
    path.write_text("".join(dumps(episode_record(make_group(), k, step=3)) + "\n" for k in range(3)))
    found = references_for(path, [TASK], "travel")
    assert [e.task for e in found.attempts[0]] == [TASK] * 3
    assert [replace(e, episode_id="") for e in found.attempts[0]] == [
        replace(bare(make_episode(k)), episode_id="") for k in range(3)
    ]


def test_attempts_are_found_by_task_and_prompt_and_gaps_are_counted(tmp_path):
    path = tmp_path / "r"
    changed = replace(TASK, prompt="Find another museum.")
    write_references(path, [at(TASK), at(changed), at(TASK, 1)], taskset="travel", model="big")
    found = references_for(path, [OTHER, TASK], "travel")
    assert [len(task) for task in found.attempts] == [0, 2]
    assert (found.models, found.unused) == (("big",), 1)
    assert [e.episode_id for e in found.attempts[1]] == ["reference/t1/0", "reference/t1/1"]


@pytest.mark.parametrize(
    ("name", "says"), [("memory", "task set 'memory'.*plays 'travel'"), ("travel", "none of them at one of the 1")]
)
def test_a_file_of_another_task_set_is_refused(tmp_path, name, says):
    write_references(tmp_path / "r", [at(OTHER)], taskset=name, model="")
    with pytest.raises(ConfigError, match=says):
        references_for(tmp_path / "r", [TASK], "travel")


OK = {"kind": "ok", "text": "found"}
GOOD = {"task": {"task_id": "t1", "prompt": "p"}, "messages": [dict(MESSAGES[0])]}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"task": ', "Expecting value"),
        ([1], "a line is a JSON object, this is list"),
        ({"messages": []}, "it has no 'task_id'"),
        ({"task": GOOD["task"]}, "it has no 'messages'"),
        ({**GOOD, "task": {"task_id": "t1"}}, "it has no 'prompt'"),
        ({**GOOD, "task": {**GOOD["task"], "colour": 1}}, "colour"),
        ({**GOOD, "messages": [{"role": "robot", "content": ""}]}, "a message needs a role"),
        ({**GOOD, "outcome": "won"}, "'won' is not a valid Outcome"),
        ({**GOOD, "score": 11}, "in .0, 1. or null, not 11"),
        ({**GOOD, "score": float("nan")}, "not nan"),
        ({**GOOD, "checklist": {"a": "yes"}}, "not 'yes'"),
        ({**GOOD, "format": "arenarl-reference/2"}, f"'arenarl-reference/2', this version reads '{FORMAT}'"),
        ({**GOOD, "events": [{"call": {}}]}, "id"),
        ({**GOOD, "events": [{"call": {"id": "c", "name": "n", "arguments": [1]}, "result": OK}]}, "an object, not .1."),
        ({**GOOD, "events": [{"call": {"id": "c", "name": "n"}, "result": {**OK, "text": 5}}]}, "text is a text, not 5"),
        ({**GOOD, "answer": 42}, "answer is a text, not 42"),
        ({**GOOD, "task": {"task_id": ["t1"], "prompt": "p"}}, "task_id is a text, not"),
        ({**GOOD, "task": {"task_id": "t1", "prompt": 7}}, "prompt is a text, not 7"),
        ({"task_id": 1, "messages": []}, "task_id is a text, not 1"),
    ],
)  # fmt: skip
def test_a_broken_line_is_named_by_its_number(tmp_path, line, says):
    path = write_lines(tmp_path / "r.jsonl", GOOD, "", line)
    with pytest.raises(ConfigError, match=f"r.jsonl', line 3 is no attempt: .*{says}.*; mend or remove the line"):
        read_references(path)


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read: .*arenarl eval --save"):
        read_references(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot be written: .*name another"):
        write_references(tmp_path / "no" / "folder", [], taskset="", model="")
