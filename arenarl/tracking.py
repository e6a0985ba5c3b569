"""The record of a run. JSON lines on disk are the truth; MLflow reads along and can never kill or hang a run.

A run folder holds:

| file | written | content |
|---|---|---|
| `config.json` | once, at the start | the resolved configuration |
| `episodes.jsonl` | a line per episode | `episode_record`: tokens, messages, tool events, checklist, reward, advantage |
| `groups.jsonl` | a line per group | `group_record`: the task, the members, the games of the tournament, the tasks that were written, the coach's note |
| `metrics.jsonl` | a line per step | `{"step": 3, "reward/score_mean": 0.41, ...}` |
| `summary.json` | once, at the end | what the run achieved |

Floats survive the round trip exactly; numbers that are not finite become null; lone surrogates become JSON escapes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import queue
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from arenarl.drawing import step_page
from arenarl.errors import ConfigError
from arenarl.jsonl import dumps, plain, read_jsonl
from arenarl.traces import EpisodeTrace, column_text, lean, write_trace
from arenarl.types import Episode, EpisodeGroup, Game

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

THREAD_NAME = "arenarl-mlflow"
PAGE_WORDS = 200_000
"""Characters of what judges wrote that the page of a step's tournaments shows; `groups.jsonl` has all of it."""

FAMILIES: Mapping[str, str] = {
    "reward": "what the policy earned: rewards, checklist scores, win rates; of training and of evaluation",
    "group": "health of the groups: share that is flat or incomplete, games lost to outages, size",
    "task": "what a generator wrote: valid and refused shares, the solver's pass rate, distinct tasks",
    "lesson": "distillation: what a coach's note was worth, share of groups distilled, lambda",
    "policy": "the update: loss, ratio, clipped share, KL, entropy, gradient norm, lag of the weights",
    "tokens": "how many tokens: sampled, trained, cached, truncated; per second and as shares",
    "time": "seconds of a step, by phase",
    "cost": "what was consumed: judge games, tool calls, CPU or accelerator seconds, money",
}


def metric_family(name: str) -> str:
    """The family of a metric, which is the part of its name before the first slash.

    Raises:
        ConfigError: if the name belongs to none of `FAMILIES`.
    """
    family, slash, rest = name.partition("/")
    if family not in FAMILIES or not slash or not rest:
        raise ConfigError(
            f"metric {name!r} belongs to no family; begin its name with one of {', '.join(FAMILIES)} and a /"
        )
    return family


def episode_record(group: EpisodeGroup, index: int, *, step: int) -> dict[str, Any]:
    """The line of ``group.episodes[index]``: its own fields, with those of its trajectory beside them, and what the group
    made of it. ``mask`` is written as 0 and 1; ``version`` is the weight version at admission; ``reward`` and
    ``advantage`` are null where the episode has none.
    """
    episode = group.episodes[index]
    own = plain(episode)
    del own["task"], own["trajectory"], own["segments"]
    return {
        "step": step,
        "group_id": group.group_id,
        "version": group.version,
        "task_id": episode.task.task_id,
        "task_kind": episode.task.kind,
        "reward": group.rewards[index] if group.rewards else None,
        "advantage": group.advantages[index] if group.advantages else None,
        **own,
        **plain(episode.trajectory),
        "segments": [plain(s) | {"mask": [int(m) for m in s.mask]} for s in episode.segments],
    }


def group_record(group: EpisodeGroup, *, step: int) -> dict[str, Any]:
    """The line of a group: as `EpisodeGroup`, with the ids of its episodes in place of the episodes.

    What a judge's answer leaves empty (no words, no tokens, no halves) is left out of it. Of the attempts that saw a coach's
    note there is what they achieved and answered: nobody trains on their tokens.
    """
    record = {"step": step, **plain(group), "episodes": [e.episode_id for e in group.episodes]}
    record["games"] = [_lean_game(game) for game in group.games]
    record["marks"] = [[lean(mark) for mark in given] for given in group.marks]
    if group.lesson:
        record["lesson"] = plain(group.lesson) | {"episodes": [_achieved(e) for e in group.lesson.episodes]}
    return record


def _achieved(episode: Episode) -> dict[str, Any]:
    names = ("episode_id", "outcome", "detail", "checklist", "score")
    return {**{name: getattr(episode, name) for name in names}, "answer": episode.trajectory.answer}


def _lean_game(game: Game) -> dict[str, Any]:
    halves = {"halves": [lean(half) for half in game.halves]} if game.halves else {}
    return {
        "i": game.i,
        "j": game.j,
        "round": game.round,
        "result": lean(game.result),
        "seconds": game.seconds,
    } | halves


class RunFolder:
    """Owns the folder of one run.

    A line is one write. A line that cannot be written (disk full) is lost with one warning and counted in ``lost``; the
    run goes on. `write_config` and `write_summary` raise OSError instead, as scripts rely on those files.

    Raises:
        ConfigError: if ``path`` cannot be created or already holds something.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lost = 0
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            taken = next(self.path.iterdir(), None)
        except OSError as error:
            raise ConfigError(
                f"run folder {str(path)!r} cannot be used: {error.strerror}; name another folder"
            ) from error
        if taken is not None:
            raise ConfigError(
                f"run folder {str(path)!r} is not empty (it holds {taken.name!r}); name another or remove it"
            )

    def append_group(self, group: EpisodeGroup, *, step: int) -> None:
        """A line per member to `episodes.jsonl`, then one line to `groups.jsonl`."""
        self._append("episodes.jsonl", [episode_record(group, k, step=step) for k in range(len(group.episodes))])
        self._append("groups.jsonl", [group_record(group, step=step)])

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", [{"step": step, **metrics}])

    def write_config(self, config: Mapping[str, Any]) -> None:
        self._write("config.json", config)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._write("summary.json", summary)

    def read_episodes(self) -> Iterator[dict[str, Any]]:
        return read_jsonl(self.path / "episodes.jsonl")

    def _append(self, name: str, records: list[dict[str, Any]]) -> None:
        data = "".join(dumps(r) + "\n" for r in records).encode("utf-8", "backslashreplace")
        try:
            with open(self.path / name, "ab", buffering=0) as file:
                start = file.seek(0, os.SEEK_END)
                try:
                    if (written := file.write(data)) != len(data):
                        raise OSError(f"{written} of {len(data)} bytes were written")
                except OSError:
                    with suppress(OSError):
                        file.truncate(start)
                    raise
        except OSError as error:
            if not self.lost:
                log.warning("%s: lines are being lost (%s); the run goes on", self.path / name, error)
            self.lost += len(records)

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        scratch = self.path / f".{name}.tmp"
        scratch.write_bytes((dumps(value, indent=2) + "\n").encode("utf-8", "backslashreplace"))
        scratch.replace(self.path / name)


def clean_name(name: str) -> str:
    """A metric or parameter name that MLflow takes. A name that must change gets a hash, so names stay distinct."""
    part = r"[\w\- ][\w.\- ]*"  # a leading dot could resolve to another path
    if re.fullmatch(f"{part}(/{part})*", name) and len(name) <= 250:
        return name
    parts = [p.lstrip(".") for p in re.sub(r"[^\w.\- /]", "_", name).split("/")]
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{'/'.join(p for p in parts if p)[:240]}-{digest}"


def ui_command(tracking_uri: str) -> str:
    """The shell command that opens the MLflow pages of a store. Paths under the working directory are shortened.

    MLflow's server would also start seven processes that wait for evaluation jobs; they are left out.
    """
    here = f"{Path.cwd()}{os.sep}"
    python = shlex.quote(sys.executable.removeprefix(here))
    if tracking_uri.startswith(("http://", "https://")):
        return f"{python} -m webbrowser {shlex.quote(tracking_uri)}"
    store = tracking_uri.replace(f"sqlite:///{here}", "sqlite:///")
    command = f"{python} -m mlflow ui --workers 1 --backend-store-uri {shlex.quote(store)}"
    return f"MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false {command}"


class MLflowTracker:
    """Writes to MLflow from one daemon thread behind a bounded queue.

    No method raises or waits, except `close`, which waits no longer than it is told. Whatever goes wrong (a server that is
    down or hangs, a read-only or locked database, a full queue) costs the items concerned: the first loss is logged as a
    warning, all are counted in ``lost``. MLflow is imported in the thread, with its usage statistics turned off and its
    retries shortened unless the environment says otherwise.

    Args:
        root: folder of all runs; by default it holds the store, `mlflow.db`, and the artifacts, `mlartifacts/`.
        params: any values; nested ones are written as JSON, long ones are cut.
        tracking_uri: another MLflow store or server, whose own artifact location is then used.
    """

    QUEUE_SIZE = 256

    def __init__(
        self,
        *,
        root: str | Path,
        experiment: str,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        tracking_uri: str | None = None,
    ) -> None:
        root = Path(root).resolve()
        self.tracking_uri = tracking_uri or f"sqlite:///{root / 'mlflow.db'}"
        self.experiment, self.run_name = experiment, run_name
        self.experiment_id: str | None = None
        self.run_id: str | None = None
        self.lost = 0
        self._artifacts = None if tracking_uri else (root / "mlartifacts").as_uri()
        self._tags = dict(tags)
        self._client: MlflowClient | None = None
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        self._thread.start()
        values = dict(params)
        self._put(lambda: self._write_params(values))

    @property
    def page(self) -> str | None:
        """The run's page, to be appended to the address of the MLflow pages; None until the run is known to MLflow."""
        return None if self.run_id is None else f"/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One `log_batch`. Values that are not finite are missing values, and are left out."""
        now, values = int(time.time() * 1000), dict(metrics)
        self._put(lambda: self._write_metrics(values, now, step))

    def log_model_folder(self, path: str | Path) -> None:
        """Copies a folder in Hugging Face format to the run's artifacts, under `model/`. Keep it until `close`."""
        self._put(lambda: self._open().log_artifacts(str(self.run_id), str(path), "model"))

    def log_tournaments(self, groups: Sequence[EpisodeGroup], *, step: int) -> None:
        """One page with the drawings of the step's tournaments, among the artifacts of the run; nothing without games.

        Where judges wrote much its texts are cut, so that it stays at a few MB: all of them are in `groups.jsonl`.
        """
        if any(group.games for group in groups):
            records = [group_record(group, step=step) for group in groups]  # no episodes: the queue may be long
            self._put(lambda: self._write_tournaments(records, step))

    def log_episode_trace(
        self, episode: Episode, group: EpisodeGroup, *, reward: float | None, advantage: float | None, step: int
    ) -> None:
        """One trace, shown among the traces of the run; score, reward, advantage and checklist are its assessments."""
        trace = EpisodeTrace(
            episode=episode, group=group, reward=reward, advantage=advantage, step=step, ended_ns=time.time_ns()
        )
        self._put(lambda: self._write_trace(trace))

    def close(self, timeout: float = 10.0, *, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> bool:
        """Drains the queue for at most ``timeout`` seconds; True if everything arrived. What is logged later is lost."""
        if not self._stop.is_set():
            self._put(lambda: self._open().set_terminated(str(self.run_id), status))
            self._queue.put(None)
            self._thread.join(timeout)
            self._stop.set()
            if self._thread.is_alive():
                waiting = self._queue.qsize()
                self._lose(f"{waiting} items had not arrived {timeout:g} s after the end", items=waiting)
        return self.lost == 0

    # -- the rest runs in the thread, except _put and _lose

    def _put(self, job: Callable[[], object]) -> None:
        if self._stop.is_set():
            self._lose("the tracker is closed")
        elif self._queue.qsize() >= self.QUEUE_SIZE:
            self._lose(f"{self.QUEUE_SIZE} items are waiting already")
        else:
            self._queue.put(job)

    def _lose(self, why: object, items: int = 1) -> None:
        with self._lock:
            first, self.lost = not self.lost, self.lost + items
        if first:
            message = re.sub(r"//[^/@ ]*@", "//", f"MLflow at {self.tracking_uri}: {why}")  # no passwords
            log.warning("%s; the run goes on, its own record is complete; more losses are only counted", message)

    def _work(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        while (job := self._queue.get()) is not None and not self._stop.is_set():
            try:
                job()
            except Exception as error:
                self._lose(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _open(self) -> MlflowClient:
        """The client, with the experiment and the run created. Every item tries again until it has succeeded once."""
        if self._client is None:
            from mlflow.tracking import MlflowClient

            _quiet()
            self._client = MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is None:
            self.experiment_id = self._find_or_create_experiment(self._client)
            tags = {clean_name(k): column_text(v, 5000) for k, v in self._tags.items()}
            self.run_id = self._client.create_run(self.experiment_id, run_name=self.run_name, tags=tags).info.run_id
        return self._client

    def _find_or_create_experiment(self, client: MlflowClient) -> str:
        from mlflow.exceptions import MlflowException

        if (found := client.get_experiment_by_name(self.experiment)) is not None:
            return found.experiment_id
        try:
            return client.create_experiment(self.experiment, artifact_location=self._artifacts)
        except MlflowException:
            if (found := client.get_experiment_by_name(self.experiment)) is not None:  # another process was faster
                return found.experiment_id
            raise

    def _write_params(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        client, rows = self._open(), [Param(clean_name(k), column_text(v, 6000)) for k, v in params.items()]
        for k in range(0, len(rows), 100):  # MLflow's limit for one request
            client.log_batch(str(self.run_id), params=rows[k : k + 100])

    def _write_metrics(self, values: dict[str, float], now: int, step: int) -> None:
        from mlflow.entities import Metric

        rows = [Metric(clean_name(k), float(v), now, step) for k, v in values.items() if math.isfinite(v)]
        self._open().log_batch(str(self.run_id), metrics=rows)

    def _write_tournaments(self, records: Sequence[Mapping[str, Any]], step: int) -> None:
        page = step_page(records, words=PAGE_WORDS)
        self._open().log_text(str(self.run_id), page, f"arena/step-{step:05d}.html")

    def _write_trace(self, trace: EpisodeTrace) -> None:
        self._open()
        write_trace(
            trace, tracking_uri=self.tracking_uri, experiment_id=str(self.experiment_id), run_id=str(self.run_id)
        )


def _wanted(record: logging.LogRecord) -> bool:
    """False for what MLflow and its libraries log in our threads: a traceback per failure, where one warning is due."""
    return record.threadName != THREAD_NAME or record.name.partition(".")[0] not in ("mlflow", "alembic", "urllib3")


def _quiet() -> None:
    for name in ("mlflow", "alembic"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_wanted)
    logging.getLogger("urllib3.connectionpool").addFilter(_wanted)
