"""The run folder: what is written comes back, and what cannot be written does not stop a run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracking_samples import ANSWER, MESSAGES, TASK, TOOL, make_episode, make_group

from arenarl.errors import ConfigError
from arenarl.jsonl import dumps, read_jsonl
from arenarl.tracking import RunFolder, group_record
from arenarl.types import Game, Verdict


def test_an_episode_line_holds_tokens_messages_events_and_what_the_group_made_of_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.append_group(make_group(), step=3)
    lines = list(folder.read_episodes())
    assert [(x["step"], x["group_id"], x["episode_id"], x["member"], x["version"]) for x in lines] == [
        (3, "g7", "e0", 0, 5), (3, "g7", "e1", 1, 5), (3, "g7", "e2", 2, 5)]  # fmt: skip
    assert [(x["reward"], x["advantage"], x["greedy"]) for x in lines] == [
        (0.1, None, True), (0.9, 1.25, False), (None, None, False)]  # fmt: skip
    assert lines[1]["segments"] == [
        {"token_ids": [5, 6, 7], "mask": [0, 1, 1], "logprobs": [0.0, -0.1, -2.0], "versions": [-1, 4, 5]}
    ]
    assert lines[0]["messages"] == list(MESSAGES) and lines[0]["answer"] == ANSWER
    assert lines[0]["events"][0]["call"]["name"] == TOOL and lines[0]["events"][1]["result"]["kind"] == "parse_error"
    assert lines[0]["checklist"] == {"museum named": True, "price grounded": False, "city right": None}
    assert (lines[0]["outcome"], lines[0]["task_id"], lines[0]["task_kind"]) == ("scored", "t1", "search")


def test_a_group_line_holds_the_task_and_the_games(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.append_group(make_group(), step=3)
    (line,) = read_jsonl(folder.path / "groups.jsonl")
    assert line["task"]["data"] == {"city": "Évora"} and line["episodes"] == ["e0", "e1", "e2"]
    assert line["games"][0] == {
        "i": 0,
        "j": 1,
        "round": 0,
        "result": {"score_a": 0.25, "score_b": 0.75},
        "seconds": 0.2,
    }
    assert line["games"][2]["result"] == {"reason": "judge timed out"}
    assert line["rewards"] == [0.1, 0.9, None]


def test_a_group_without_rewards_writes_null(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.append_group(make_group(rewards=(), advantages=(), games=()), step=1)
    assert [(x["reward"], x["advantage"]) for x in folder.read_episodes()] == [(None, None)] * 3


ANY_TEXT = st.text(st.characters(exclude_categories=()))


def utf16(text: str) -> str:
    """JSON holds UTF-16 units: two lone surrogates in a row may come back as the character that they spell."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


@given(answer=ANY_TEXT, logprob=st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=60)
def test_text_and_floats_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, answer: str, logprob: float
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run") / "r")
    folder.append_group(make_group(episodes=(make_episode(0, answer=answer, logprob=logprob),)), step=0)
    (line,) = folder.read_episodes()
    assert line["answer"] == utf16(answer)
    assert line["segments"][0]["logprobs"][1] == logprob
    assert math.copysign(1.0, line["segments"][0]["logprobs"][1]) == math.copysign(1.0, logprob)


def test_text_is_kept_readable_and_line_breaks_stay_in_the_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.append_metrics(0, {"é\u2028\r\n": 1.0})
    raw = (folder.path / "metrics.jsonl").read_bytes()
    assert raw.count(b"\n") == 1 and "é".encode() in raw


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.append_metrics(2, {"a": math.nan, "b": -math.inf, "c": 0.1, "d": np.float32("nan"), "e": np.int64(3)})
    assert list(read_jsonl(folder.path / "metrics.jsonl")) == [
        {"step": 2, "a": None, "b": None, "c": 0.1, "d": None, "e": 3}
    ]


def test_any_configuration_can_be_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_config({"path": Path("a/b"), "set": {2, 1}, "task": TASK, 3: math.inf, "f": len, ("t", 1): None})
    config = json.loads((folder.path / "config.json").read_text())
    assert (config["path"], config["set"], config["3"], config["task"]["kind"]) == ("a/b", [1, 2], None, "search")


def test_a_torn_last_line_is_ignored_and_any_other_is_reported(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.append_group(make_group(), step=0)
    path = folder.path / "episodes.jsonl"
    path.write_bytes(path.read_bytes() + '{"step": 1, "answer": "É'.encode()[:-1])
    assert [x["member"] for x in folder.read_episodes()] == [0, 1, 2]
    path.write_bytes(path.read_bytes() + b"\n{}\n")
    with pytest.raises(ValueError, match="line 4"):
        list(folder.read_episodes())


def test_the_summary_is_replaced_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_summary({"win_rate": 0.5, "long": "x" * 100})
    folder.write_summary({"win_rate": 0.75})
    assert json.loads((folder.path / "summary.json").read_text()) == {"win_rate": 0.75}
    assert [p.name for p in folder.path.iterdir()] == ["summary.json"]


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt.*name another"):
        RunFolder(tmp_path / "old")
    with pytest.raises(ConfigError, match="cannot be used"):
        RunFolder(tmp_path / "old" / "notes.txt")
    assert RunFolder(tmp_path / "new" / "deep").path.is_dir()


FULL_DISK = """
import resource, sys
from arenarl.tracking import RunFolder
folder = RunFolder(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
for step in range(40):
    folder.append_metrics(step, {"time/step": 0.1 * step})
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
folder.append_metrics(40, {})
print(folder.lost)
"""


def test_a_full_disk_costs_whole_lines_and_one_warning(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path / "run")], capture_output=True, text=True)
    steps = [x["step"] for x in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert done.stderr.count("lines are being lost") == 1, done.stderr
    assert 10 < len(steps) < 40 and steps[-1] == 40
    assert len(steps) + int(done.stdout) == 41


def test_dumps_survives_the_group_record_of_anything() -> None:
    record = group_record(
        make_group(games=(Game(i=0, j=1, round=0, result=Verdict(score_a=math.inf, score_b=0.0)),)), step=1
    )
    assert json.loads(dumps(record))["games"][0]["result"] == {"score_a": None, "score_b": 0.0}
