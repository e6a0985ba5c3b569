"""MLflow beside the record: what must arrive, and what must never stop a run."""

from __future__ import annotations

import contextlib
import math
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracking_samples import TOOL, make_episode, make_group

from arenarl.errors import ConfigError
from arenarl.traces import column_text
from arenarl.tracking import FAMILIES, MLflowTracker, RunFolder, clean_name, metric_family, ui_command

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

ANY_TEXT = st.text(st.characters(exclude_categories=()))

# ---------------------------------------------------------------------------------------------- names and text


def test_a_metric_belongs_to_a_family() -> None:
    assert [metric_family(f"{name}/x/y") for name in FAMILIES] == [
        "reward",
        "group",
        "task",
        "lesson",
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
@settings(max_examples=200)
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
    tracker.log_tournaments([group], step=3)
    tracker.log_tournaments([make_group(games=())], step=4)
    assert tracker.close(timeout=120.0) and tracker.lost == 0
    return tracker


def client_of(tracker: MLflowTracker) -> MlflowClient:
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


def test_the_tournaments_of_a_step_are_one_page_among_the_artifacts(tracked: MLflowTracker, tmp_path: Path) -> None:
    client = client_of(tracked)
    assert [f.path for f in client.list_artifacts(tracked.run_id, "arena")] == ["arena/step-00003.html"]
    page = Path(client.download_artifacts(tracked.run_id, "arena/step-00003.html", str(tmp_path))).read_text("utf-8")
    assert "Arena, step 3" in page and "judge timed out" in page


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
        "reward": 0.9, "advantage": 1.25, "score": 0.5, "task: museum named": True, "task: price grounded": False}  # fmt: skip


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
