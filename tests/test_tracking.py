"""The record on disk, and MLflow beside it: what must arrive, and what must never stop a run."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arenarl.errors import ConfigError
from arenarl.jsonl import dumps, read_jsonl
from arenarl.traces import EpisodeTrace, column_text, episode_spans
from arenarl.tracking import (
    FAMILIES,
    MLflowTracker,
    RunFolder,
    clean_name,
    group_record,
    metric_family,
    ui_command,
)
from arenarl.types import (
    Abstention,
    Episode,
    EpisodeGroup,
    Game,
    Message,
    Outcome,
    Segment,
    Task,
    ToolCall,
    ToolEvent,
    ToolResult,
    Trajectory,
    Verdict,
)

TASK = Task(task_id="t1", kind="search", prompt="Find a museum in Évora.", data={"city": "Évora"})
TOOL = "get(x)@v1/é"
CALL = '<tool_call>{"name": "poi", "arguments": {}}</tool_call>'
MESSAGES = (
    Message(role="user", content=TASK.prompt),
    Message(role="assistant", content=CALL),
    Message(role="tool", content="1. Museu de Évora", tool_call_id="c1", name=TOOL),
    Message(role="assistant", content="x" * len(CALL)),
)
EVENTS = (
    ToolEvent(
        call=ToolCall(id="c1", name=TOOL, arguments={"city": "Évora"}),
        result=ToolResult(kind="ok", text="1. Museu de Évora", server="travel", tool="poi", seconds=0.5),
        turn=0,
    ),
    ToolEvent(
        call=ToolCall(id="c2", name="", raw="{", error="not JSON"),
        result=ToolResult(kind="parse_error", text="say it again"),
        turn=0,
    ),
)
ANSWER = MESSAGES[-1]["content"]


def make_episode(member: int, *, answer: str = ANSWER, logprob: float = -0.1) -> Episode:
    segment = Segment(token_ids=(5, 6, 7), mask=(False, True, True), logprobs=(0.0, logprob, -2.0), versions=(-1, 4, 5))
    return Episode(
        episode_id=f"e{member}",
        task=TASK,
        member=member,
        greedy=member == 0,
        segments=(segment,),
        trajectory=Trajectory(messages=MESSAGES, events=EVENTS, answer=answer),
        outcome=Outcome.SCORED,
        checklist={"museum named": True, "price grounded": False, "city right": None},
        score=0.5,
        timing={"generate": 4.0, "tools": 0.5, "judge": 0.3},
    )


def make_group(**changes: object) -> EpisodeGroup:
    games = (
        Game(i=0, j=1, round=0, result=Verdict(score_a=0.25, score_b=0.75), seconds=0.2),
        Game(i=1, j=2, round=0, result=Verdict(score_a=1.0, score_b=0.0), seconds=9.0),
        Game(i=2, j=0, round=1, result=Abstention(reason="judge timed out"), seconds=0.1),
    )
    group = EpisodeGroup(
        group_id="g7",
        task=TASK,
        episodes=tuple(make_episode(m) for m in range(3)),
        version=5,
        rewards=(0.1, 0.9, None),
        advantages=(None, 1.25, None),
        games=games,
    )
    return replace(group, **changes)


# ---------------------------------------------------------------------------------------------- the run folder


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
@settings(max_examples=60, deadline=None)
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
    numpy = pytest.importorskip("numpy")
    folder = RunFolder(tmp_path / "run")
    folder.append_metrics(2, {"a": math.nan, "b": -math.inf, "c": 0.1, "d": numpy.float32("nan"), "e": numpy.int64(3)})
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


# ---------------------------------------------------------------------------------------------- names and text


def test_a_metric_belongs_to_a_family() -> None:
    assert [metric_family(f"{name}/x/y") for name in FAMILIES] == [
        "reward",
        "group",
        "policy",
        "tokens",
        "time",
        "cost",
    ]
    for bad in ("loss", "rewards/mean", "reward/", "/reward"):
        with pytest.raises(ConfigError, match="belongs to no family"):
            metric_family(bad)


@pytest.mark.parametrize("name", ["reward/mean", "a.b-c_d 1", "é"])
def test_a_name_that_mlflow_takes_is_unchanged(name: str) -> None:
    assert clean_name(name) == name


@given(st.lists(ANY_TEXT | st.text("./@ a:", max_size=6), min_size=2, max_size=2, unique=True))
@settings(max_examples=200, deadline=None)
def test_clean_names_are_valid_and_stay_distinct(names: list[str]) -> None:
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name

    cleaned = [clean_name(n) for n in names]
    for name in cleaned:
        _validate_metric_name(name)
        assert 0 < len(name) <= MAX_ENTITY_KEY_LENGTH and ":" not in name
        name.encode()
    assert cleaned[0] != cleaned[1]


def test_long_text_is_cut_with_a_mark() -> None:
    cut = column_text("y" * 9000, 6000)
    assert len(cut) == 6000 and cut.endswith("y ... (9000 characters)")
    assert column_text("a\0\ud800", 10) == "a\N{SYMBOL FOR NULL}?"
    assert column_text({"a": [1, math.nan]}, 50) == '{"a": [1, null]}'


def test_the_ui_command_names_the_store(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        words = shlex.split(ui_command(f"sqlite:///{tmp_path}/my runs/mlflow.db"))
    assert words[0] == "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false"
    assert words[2:] == ["-m", "mlflow", "ui", "--workers", "1", "--backend-store-uri", "sqlite:///my runs/mlflow.db"]
    assert shlex.split(ui_command("sqlite:////else/where.db"))[-1] == "sqlite:////else/where.db"
    assert ui_command("http://host:5000").endswith(" -m webbrowser http://host:5000")


def test_importing_the_module_does_not_import_mlflow() -> None:
    code = "import sys, arenarl.tracking; sys.exit(any(m in sys.modules for m in ('mlflow', 'rich', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---------------------------------------------------------------------------------------------- spans


def make_trace(group: EpisodeGroup, member: int) -> EpisodeTrace:
    episode, reward, advantage = group.episodes[member], group.rewards[member], group.advantages[member]
    return EpisodeTrace(episode=episode, group=group, reward=reward, advantage=advantage, step=3, ended_ns=10**18)


def test_spans_follow_each_other_and_share_the_generation_time_by_length() -> None:
    spans = episode_spans(make_trace(make_group(), 0))
    assert [(s.name, s.kind, s.parent) for s in spans] == [
        ("t1, member 0 (greedy)", "AGENT", None),
        ("turn 0", "CHAT_MODEL", 0),
        (TOOL, "TOOL", 0),
        ("malformed call", "TOOL", 0),
        ("turn 1", "CHAT_MODEL", 0),
        ("tournament", "CHAIN", 0),
        ("round 0: 0 vs 1", "EVALUATOR", 5),
        ("round 1: 2 vs 0", "EVALUATOR", 5),
    ]
    times = [(s.start, s.end) for s in spans]
    golden = [(0, 4.8), (0, 2), (2, 2.5), (2.5, 2.5), (2.5, 4.5), (4.5, 4.8), (4.5, 4.7), (4.7, 4.8)]
    assert times == [pytest.approx(t) for t in golden]


def test_spans_say_what_went_in_and_out() -> None:
    spans = episode_spans(make_trace(make_group(), 0))
    assert spans[0].inputs == {"task": TASK.prompt}
    assert spans[0].outputs["result"] | {"score": 0} == {
        "outcome": "scored", "detail": "", "score": 0, "reward": 0.1, "advantage": None}  # fmt: skip
    assert spans[4].inputs == {"messages": MESSAGES[:3]} and spans[4].outputs == {"choices": [{"message": MESSAGES[3]}]}
    assert (spans[2].inputs, spans[2].outputs, spans[2].error) == ({"city": "Évora"}, "1. Museu de Évora", "")
    assert (spans[3].inputs, spans[3].error) == ({"raw": "{", "error": "not JSON"}, "parse_error: say it again")
    assert spans[5].outputs == {"games": 2, "won": 0, "tied": 0, "lost": 1, "no verdict": 1}
    assert spans[6].outputs == {"score_a": 0.25, "score_b": 0.75, "member 0": "lost"}
    assert spans[7].error == "judge timed out"


def test_a_game_is_seen_from_the_member_of_the_trace() -> None:
    spans = episode_spans(make_trace(make_group(), 1))
    assert [s.outputs.get("member 1") for s in spans if s.kind == "EVALUATOR"] == ["won", "won"]


def test_an_episode_that_failed_before_its_first_turn_is_a_lone_error() -> None:
    lost = replace(
        make_episode(0),
        trajectory=Trajectory(messages=(), events=(), answer=None),
        outcome=Outcome.FAILED,
        detail="timeout",
    )
    (root,) = episode_spans(make_trace(make_group(episodes=(lost,), rewards=(None,), games=()), 0))
    assert (root.start, root.end, root.error, root.outputs["answer"]) == (0.0, 0.0, "timeout", None)


# ---------------------------------------------------------------------------------------------- MLflow, working


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> MLflowTracker:
    """A run that is over, in a store of its own."""
    root = tmp_path_factory.mktemp("runs")
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")
    params = {f"p{k}": k for k in range(700)} | {"long": "y" * 9000, "nested": {"a": [1]}, TOOL: "\ud800"}
    tracker = MLflowTracker(root=root, experiment="é", run_name="run 1", params=params, tags={"algorithm": "ArenaRL"})
    for step in range(3):
        tracker.log_metrics(step, {"reward/score_mean": 0.5 + step, f"cost/{TOOL}": 1.0, "policy/kl": math.nan})
    tracker.log_model_folder(model)
    group = make_group(episodes=(make_episode(0), make_episode(1, answer="lone \ud800 and \0"), make_episode(2)))
    for member in (0, 1):
        tracker.log_episode_trace(
            group.episodes[member], group, reward=group.rewards[member], advantage=group.advantages[member], step=3
        )
    assert tracker.close(timeout=120.0) and tracker.lost == 0
    return tracker


def client_of(tracker: MLflowTracker):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=tracker.tracking_uri)


def test_parameters_and_tags_arrive(tracked: MLflowTracker) -> None:
    run = client_of(tracked).get_run(tracked.run_id)
    assert (run.info.run_name, run.info.status, run.data.tags["algorithm"]) == ("run 1", "FINISHED", "ArenaRL")
    assert len(run.data.params) == 703 and run.data.params["p699"] == "699"
    assert len(run.data.params["long"]) == 6000 and run.data.params["nested"] == '{"a": [1]}'
    assert run.data.params[clean_name(TOOL)] == "?"


def test_metrics_arrive_by_step_and_missing_ones_are_left_out(tracked: MLflowTracker) -> None:
    client = client_of(tracked)
    history = client.get_metric_history(tracked.run_id, "reward/score_mean")
    assert [(m.step, m.value) for m in history] == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert set(client.get_run(tracked.run_id).data.metrics) == {"reward/score_mean", clean_name(f"cost/{TOOL}")}


def test_the_model_is_an_artifact_in_the_folder_of_the_runs(tracked: MLflowTracker) -> None:
    client = client_of(tracked)
    assert [f.path for f in client.list_artifacts(tracked.run_id, "model")] == ["model/config.json"]
    assert tracked.page == f"/#/experiments/{tracked.experiment_id}/runs/{tracked.run_id}"
    assert "/mlartifacts/" in client.get_run(tracked.run_id).info.artifact_uri


def test_traces_arrive_with_their_tree_and_belong_to_the_run(tracked: MLflowTracker) -> None:
    traces = client_of(tracked).search_traces(locations=[tracked.experiment_id], run_id=tracked.run_id)
    first, second = sorted(traces, key=lambda t: t.info.client_request_id)
    names = {s.span_id: s.name for s in first.data.spans}
    assert [(s.name, s.span_type, names.get(s.parent_id)) for s in first.data.spans] == [
        ("t1, member 0 (greedy)", "AGENT", None),
        ("turn 0", "CHAT_MODEL", "t1, member 0 (greedy)"),
        (TOOL, "TOOL", "t1, member 0 (greedy)"),
        ("malformed call", "TOOL", "t1, member 0 (greedy)"),
        ("turn 1", "CHAT_MODEL", "t1, member 0 (greedy)"),
        ("tournament", "CHAIN", "t1, member 0 (greedy)"),
        ("round 0: 0 vs 1", "EVALUATOR", "tournament"),
        ("round 1: 2 vs 0", "EVALUATOR", "tournament"),
    ]
    assert first.data.spans[2].inputs == {"city": "Évora"} and first.data.spans[2].outputs == "1. Museu de Évora"
    assert [s.status.status_code.value for s in first.data.spans[2:4]] == ["OK", "ERROR"]
    assert second.data.spans[0].outputs["answer"] == "lone ? and \0"


def test_a_trace_carries_tags_tokens_times_and_assessments(tracked: MLflowTracker) -> None:
    traces = client_of(tracked).search_traces(locations=[tracked.experiment_id], run_id=tracked.run_id)
    info = next(t.info for t in traces if t.info.client_request_id == "e1")
    assert {k: info.tags[k] for k in ("step", "version", "group", "task", "outcome")} == {
        "step": "3", "version": "5", "group": "g7", "task": "search", "outcome": "scored"}  # fmt: skip
    assert info.token_usage == {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
    assert (info.state.value, info.execution_duration) == ("OK", 13700)
    assert {a.name: a.value for a in info.assessments} == {
        "reward": 0.9, "advantage": 1.25, "score": 0.5, "item: museum named": True, "item: price grounded": False}  # fmt: skip


def test_the_process_wide_tracking_uri_is_left_alone(tracked: MLflowTracker) -> None:
    import mlflow

    assert mlflow.active_run() is None
    assert mlflow.get_tracking_uri() != tracked.tracking_uri


def test_two_writers_share_one_database(tracked: MLflowTracker) -> None:
    trackers = [again(tracked.tracking_uri, experiment="é") for _ in range(2)]
    for step in range(5):
        for tracker in trackers:
            tracker.log_metrics(step, {"time/step": step})
    assert [t.close(timeout=120.0) for t in trackers] == [True, True]
    assert trackers[0].run_id != trackers[1].run_id and trackers[0].experiment_id == tracked.experiment_id
    assert [len(client_of(tracked).get_metric_history(t.run_id, "time/step")) for t in trackers] == [5, 5]


# ---------------------------------------------------------------------------------------------- MLflow, failing


def again(tracking_uri: str, experiment: str = "x") -> MLflowTracker:
    return MLflowTracker(
        root="unused", experiment=experiment, run_name="r", params={"lr": 1.0}, tags={}, tracking_uri=tracking_uri
    )


def a_short_run(tracker: MLflowTracker, folder: RunFolder) -> None:
    for step in range(3):
        group = make_group(group_id=f"g{step}")
        folder.append_group(group, step=step)
        folder.append_metrics(step, {"time/step": 1.0})
        tracker.log_metrics(step, {"time/step": 1.0})
        tracker.log_episode_trace(group.episodes[0], group, reward=0.1, advantage=None, step=step)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name == "arenarl.tracking"]


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_store_that_does_not_exist_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker, folder = again("nonsense://nowhere"), RunFolder(tmp_path / "run")
    a_short_run(tracker, folder)
    assert not tracker.close(timeout=120.0)
    assert tracker.lost == 8  # parameters, three metrics, three traces, the end
    assert len(warnings_of(caplog)) == 1 and "nonsense://nowhere" in warnings_of(caplog)[0]
    assert len(list(folder.read_episodes())) == 9


def test_a_read_only_database_costs_one_warning(
    tracked: MLflowTracker,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow takes the path of this URI for a relative one and makes folders for it
    tracker = again(tracked.tracking_uri.replace("sqlite:///", "sqlite:///file:") + "?mode=ro&uri=true", experiment="é")
    folder = RunFolder(tmp_path / "run")
    a_short_run(tracker, folder)
    assert not tracker.close(timeout=120.0) and tracker.lost == 8
    assert len(warnings_of(caplog)) == 1 and "readonly database" in warnings_of(caplog)[0]
    assert "Traceback" not in capfd.readouterr().err
    assert len(list(folder.read_episodes())) == 9


class Gate:
    """A number that the tracker's thread has to wait for."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __float__(self) -> float:
        self.reached.set()
        assert self.opened.wait(30.0)
        return 1.0


def test_a_database_that_breaks_in_the_middle_of_a_run_costs_what_comes_after(
    tracked: MLflowTracker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "mlflow.db"
    store.write_bytes(Path(tracked.tracking_uri.removeprefix("sqlite:///")).read_bytes())
    tracker, gate = again(f"sqlite:///{store}", experiment="é"), Gate()
    tracker.log_metrics(0, {"time/step": gate})
    assert gate.reached.wait(60.0)
    store.write_bytes(b"not a database")
    gate.opened.set()
    tracker.log_metrics(1, {"time/step": 1.0})
    assert not tracker.close(timeout=120.0)
    assert tracker.run_id is not None and tracker.lost == 3 and len(warnings_of(caplog)) == 1


def test_a_password_in_the_address_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    tracker = again("nonsense://user:secret@nowhere/db")
    tracker.close(timeout=120.0)
    assert "nowhere" in caplog.text and "secret" not in caplog.text


@pytest.mark.timeout(15)
def test_a_server_that_does_not_exist_does_not_delay_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    tracker, folder = again(f"http://127.0.0.1:{port}"), RunFolder(tmp_path / "run")
    a_short_run(tracker, folder)
    assert not tracker.close(timeout=0.5)
    assert not tracker.close(timeout=600.0)  # a second time: nothing is left to wait for
    assert len(warnings_of(caplog)) == 1 and len(list(folder.read_episodes())) == 9


@pytest.mark.timeout(15)
def test_a_full_queue_drops_and_counts(silent_server: str, caplog: pytest.LogCaptureFixture) -> None:
    tracker = again(silent_server)
    for step in range(MLflowTracker.QUEUE_SIZE + 50):
        tracker.log_metrics(step, {"time/step": 1.0})
    assert 49 <= tracker.lost <= 51  # the thread may have taken one item by then
    assert not tracker.close(timeout=0.2)
    tracker.log_metrics(0, {"time/step": 1.0})
    assert tracker.lost >= MLflowTracker.QUEUE_SIZE + 50
    assert len(warnings_of(caplog)) == 1


HUNG = """
import sys
from arenarl.tracking import MLflowTracker
tracker = MLflowTracker(root="x", experiment="x", run_name="r", params={}, tags={}, tracking_uri=sys.argv[1])
sys.stdin.readline()
print(tracker.close(timeout=0.1))
"""


@pytest.mark.timeout(150)
def test_a_process_ends_although_it_waits_for_a_server_that_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", HUNG, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            connection, _ = listener.accept()  # by now the tracker's thread waits for an answer
            with connection:
                out, err = process.communicate("\n", timeout=30)
    assert (process.returncode, out) == (0, "False\n"), err


def test_metrics_of_any_kind_never_raise_here(caplog: pytest.LogCaptureFixture) -> None:
    tracker = again("nonsense://nowhere")
    tracker.log_metrics(0, {"a": None, "b": "text"})  # type: ignore[dict-item]
    tracker.log_model_folder("no/such/folder")
    assert not tracker.close(timeout=120.0) and tracker.lost == 4


def test_dumps_survives_the_group_record_of_anything() -> None:
    record = group_record(
        make_group(games=(Game(i=0, j=1, round=0, result=Verdict(score_a=math.inf, score_b=0.0)),)), step=1
    )
    assert json.loads(dumps(record))["games"][0]["result"] == {"score_a": None, "score_b": 0.0}
