"""A store of generated tasks with where each came from and how a solver did on it, in one Parquet file.

A file is written whole or not at all, and says in its metadata which version of the columns it has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from arenarl.errors import ConfigError
from arenarl.jsonl import clean_json, dumps
from arenarl.novelty import Novelty
from arenarl.types import Task

if TYPE_CHECKING:
    import pyarrow

VERSION = 1
_KEY = b"arenarl.task_pool"


@dataclass(frozen=True, kw_only=True)
class PoolTask:
    """A generated task with its provenance.

    Attributes:
        task: as a solver gets it.
        seed_id: id of the task that asked for it.
        episode_id: of the episode that wrote it.
        observations: texts of the tool results of that episode, in order; what the evidence of its rubric counts.
        generator_version: weight version that wrote it.
        cycle: of co-evolution, from 0.
        successes: solver runs that met all of it; None if not known.
        runs: solver runs that ended with a verdict.
        created: time in UTC, as ISO 8601.
    """

    task: Task
    seed_id: str
    episode_id: str
    observations: tuple[str, ...] = ()
    generator_version: int = 0
    cycle: int = 0
    successes: int | None = None
    runs: int = 0
    created: str = ""

    def __post_init__(self) -> None:
        if self.runs < 0 or not 0 <= (self.successes or 0) <= self.runs:
            raise ValueError(f"task {self.task.task_id!r} has {self.successes} successes in {self.runs} runs")

    @property
    def known(self) -> bool:
        """Whether a solver was ever seen on it."""
        return self.successes is not None and self.runs > 0

    @property
    def pass_rate(self) -> float | None:
        """Share of the runs that met all of it; None if not known."""
        return self.successes / self.runs if self.successes is not None and self.runs else None

    def posterior(self, prior: tuple[float, float] = (1.0, 1.0)) -> float:
        """Mean of the pass rate p given the runs, for p ~ Beta(a, b): (a + successes) / (a + b + runs)."""
        a, b = prior
        return (a + (self.successes or 0)) / (a + b + (self.runs if self.known else 0))


class Added(NamedTuple):
    """How many tasks a pool took, and how many it did not, being duplicates."""

    kept: int
    dropped: int


class TaskPool:
    """Generated tasks by their id, in the order in which they came."""

    def __init__(self, tasks: Iterable[PoolTask] = ()) -> None:
        """Raises ConfigError if an id is there twice."""
        self._tasks: dict[str, PoolTask] = {}
        for entry in tasks:
            if entry.task.task_id in self._tasks:
                raise ConfigError(f"task {entry.task.task_id!r} is in the pool twice; give each task an id of its own")
            self._tasks[entry.task.task_id] = entry

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[PoolTask]:
        return iter(self._tasks.values())

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._tasks

    def __getitem__(self, task_id: str) -> PoolTask:
        return self._tasks[task_id]

    def add(self, tasks: Iterable[PoolTask], novelty: Novelty) -> Added:
        """Take the tasks whose request is new: to ``novelty``, which learns all that is taken, and to the pool itself.

        A task whose id the pool has is a duplicate too.
        """
        for entry in self:
            novelty.add(entry.task.prompt)
        kept = dropped = 0
        for entry in tasks:
            if entry.task.task_id in self._tasks or novelty.is_duplicate(entry.task.prompt):
                dropped += 1
                continue
            novelty.add(entry.task.prompt)
            self._tasks[entry.task.task_id] = entry
            kept += 1
        return Added(kept, dropped)

    def record(self, task_id: str, successes: int, runs: int) -> None:
        """Count further solver runs of a task.

        Raises:
            ConfigError: the pool has no such task.
            ValueError: more successes than runs, or a negative number.
        """
        if task_id not in self._tasks:
            raise ConfigError(f"task {task_id!r} is not in the pool, so its runs cannot be recorded; add it first")
        if not 0 <= successes <= runs:
            raise ValueError(f"task {task_id!r} cannot have {successes} successes in {runs} runs")
        old = self._tasks[task_id]
        before = (old.successes or 0, old.runs) if old.known else (0, 0)
        self._tasks[task_id] = replace(old, successes=before[0] + successes, runs=before[1] + runs)

    def band(
        self, low: float, high: float, *, prior: tuple[float, float] = (1.0, 1.0), unknown: bool = False
    ) -> TaskPool:
        """The tasks whose `PoolTask.posterior` is at least ``low`` and at most ``high``.

        Args:
            prior: a and b of the Beta prior of a pass rate.
            unknown: whether the tasks that no solver was seen on are among them, whatever the band.

        Raises:
            ConfigError: for a band that is none.
        """
        if not 0 <= low <= high <= 1:
            raise ConfigError(f"the band [{low}, {high}] is none; give 0 <= low <= high <= 1")
        if not (prior[0] > 0 and prior[1] > 0):
            raise ConfigError(f"prior={prior} is no Beta distribution; give two positive numbers")
        return TaskPool(e for e in self if (low <= e.posterior(prior) <= high if e.known else unknown))

    def save(self, path: str | Path) -> None:
        """Write the pool as Parquet, in place of what is there: all of it, or nothing. Lone surrogates become U+FFFD.

        Raises:
            ConfigError: the file cannot be written there.
        """
        import pyarrow
        from pyarrow import parquet

        rows = [clean_json(_row(entry)) for entry in self]
        table = pyarrow.Table.from_pylist(rows, schema=_schema().with_metadata({_KEY: str(VERSION)}))
        scratch = Path(path).with_name(f".{Path(path).name}.tmp")
        try:
            parquet.write_table(table, scratch, compression="zstd", write_page_checksum=True)
            scratch.replace(path)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink()
            raise ConfigError(f"the pool '{path}' cannot be written: {error}; name another file") from error

    @classmethod
    def load(cls, path: str | Path) -> TaskPool:
        """The pool of a file.

        Raises:
            ConfigError: no such file, one that is no pool, is damaged, or was written by a newer arenarl.
        """
        import pyarrow
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                schema = file.schema_arrow
                _check_version(path, (schema.metadata or {}).get(_KEY))
                table = file.read()
            if not schema.equals(_schema()):
                raise ConfigError(f"'{path}' has not the columns of a pool; write it anew with TaskPool.save")
            return cls(_entry(row) for row in table.to_pylist())
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"the pool '{path}' cannot be read: {reason}; give a file of TaskPool.save") from error
        except (pyarrow.ArrowException, ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"'{path}' is no sound pool ({error}); give a file of TaskPool.save") from error


def _check_version(path: str | Path, version: bytes | None) -> None:
    if version is None:
        raise ConfigError(f"'{path}' is Parquet, but no pool of tasks; give a file of TaskPool.save")
    if version != str(VERSION).encode():
        raise ConfigError(
            f"the pool '{path}' has version {version.decode(errors='replace')!r}, and this arenarl reads {VERSION}; "
            "update arenarl, or write the pool anew"
        )


def _schema() -> pyarrow.Schema:
    import pyarrow

    text, number = pyarrow.string(), pyarrow.int64()
    columns = {"task_id": text, "kind": text, "prompt": text, "seed": number, "data": text}
    columns |= {"seed_id": text, "episode_id": text, "observations": pyarrow.list_(text), "generator_version": number}
    columns |= {"cycle": number, "successes": number, "runs": number, "created": text}
    return pyarrow.schema([pyarrow.field(name, kind, nullable=name == "successes") for name, kind in columns.items()])


def _row(entry: PoolTask) -> dict[str, Any]:
    row = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name != "task"}
    task = {f.name: getattr(entry.task, f.name) for f in fields(entry.task)}
    return row | task | {"data": dumps(clean_json(entry.task.data))}


def _entry(row: dict[str, Any]) -> PoolTask:
    data = json.loads(row.pop("data"))
    if not isinstance(data, dict):
        raise ValueError(f"the data of task {row['task_id']!r} is no object")
    task = Task(data=data, **{name: row.pop(name) for name in ("task_id", "kind", "prompt", "seed")})
    return PoolTask(task=task, observations=tuple(row.pop("observations")), **row)
