"""Work on a folder of small records through the public MCP filesystem server; the verdict is read from the disk.

## Description
``/workspace`` holds text files of lines ``field: value`` in nested folders. A task names a folder and one to three
conditions, and asks for something to be done with the files that meet them, of seven kinds: ``collect`` (move them
into one folder), ``sort`` (move each into the folder named by one of its fields), ``rename`` (each to its code),
``edit`` (set a field), ``merge`` (join their notes in the order of their codes), ``report`` (a table with a total) and
``ask`` (name their codes). About one file in three is meant; the others fail at least one condition.

Three axes of difficulty, each 1 to 3 and drawn apart: how many files there are (and how many are meant), how deep the
folders are, and how many conditions are asked (`Difficulty`).

## Actions
The text of an assistant message: tool calls, or the final answer (any text without a call).

## Observations
The new chat messages: system and user at reset, tool results after each step.

## Rewards
0 until the end, then *share of the changes made* x 0.5 ^ *files harmed*, in [0, 1] (`FilesystemTasks`).

## Starting state
The files of a task of the split, picked by the seed. The words and codes of the held-out split never occur in training.

## Episode end
Terminated by an answer; truncated after 20 assistant turns.

## Arguments
``split``: "train" or "heldout". ``max_turns``: see above. ``seed``: another seed gives other tasks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path, PurePosixPath

from arenarl.envs.shared import call, codes_right, distinct_tasks
from arenarl.mcp.catalogue import find
from arenarl.mcp.config import ServerSpec
from arenarl.rubric import Checklist, Reward
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory

KINDS = ("collect", "sort", "rename", "edit", "merge", "report", "ask")
# To look, to read, to write, to move: the six others repeat these in another form, or tell of images, sizes and dates.
TOOLS = (
    "list_directory", "search_files", "read_text_file", "read_multiple_files",
    "write_file", "edit_file", "create_directory", "move_file",
)  # fmt: skip
SYSTEM_PROMPT = (
    "You work on text files below /workspace with tools. Each file is a record of lines 'field: value'. "
    "Do what is asked and change nothing else. Then answer 'done'. "
    "To a question, answer with one line such as 'answer: AB123, CD456'."
)
FILES = {1: 6, 2: 9, 3: 12}

# Even words are for training, odd ones are held out.
_WORDS = {
    "owner": "ann ben cleo dina emil fred gina hugo iris jonas kira leo",
    "topic": "rain wind snow hail fog frost thunder drought tide storm heat mist",
    "status": "open ready draft final stale urgent pending blocked signed queued",
    "site": "oslo riga turin lyon porto gent brno cadiz malmo bari varna bergen",
    "folder": "cellar attic barn tower vault cabin lodge mill shed wharf den keep",
    "target": "parcel bundle harvest ledger digest basket outbox summary stack roster",
    "file": "heron otter badger lynx falcon raven marten weasel beaver stoat plover curlew hare vole robin wren "
    "crane stork ibex viper gecko newt toad carp perch",
    "note": "amber basalt cobalt dune ember flint garnet harbor ivory jade kelp lava marble nickel onyx pearl quartz "
    "resin slate topaz umber velvet willow zinc",
}
_LETTERS = {"train": "BCDFGHJK", "heldout": "LMNPQRST"}
_TEXT_FIELDS = ("owner", "topic", "status", "site")


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """Three axes, each 1 to 3.

    Attributes:
        files: 6, 9 or 12 files, of which a third is meant.
        depth: how many folders are nested.
        conditions: how many fields decide whether a file is meant.
    """

    files: int
    depth: int
    conditions: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One file: its path below the working directory, and its fields in the order of its lines."""

    path: str
    fields: Mapping[str, str]

    @property
    def text(self) -> str:
        return "".join(f"{field}: {value}\n" for field, value in self.fields.items())


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Files, the wish to be met by some of them, and unused words for what is to be made.

    Attributes:
        records, hits: all files, and those that meet every condition (a third of them, in the order of their codes).
        root: the folder that holds them all.
        where: the conditions in words.
        free: fields that no condition looks at.
        target: name of the file or folder to make.
        status: a status that no record has.
    """

    records: tuple[Record, ...]
    hits: tuple[Record, ...]
    root: str
    where: str
    free: tuple[str, ...]
    target: str
    status: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a task asks for: the text, the files at the end, which of them are moved (new path: old), codes to name."""

    prompt: str
    goal: Mapping[str, str]
    moves: Mapping[str, str]
    answer: tuple[str, ...] = ()


# --- the files of a task ---------------------------------------------------------------------------------------------


def _scene(rng: random.Random, split: str, difficulty: Difficulty) -> Scene:
    words = {name: text.split()[split == "heldout" :: 2] for name, text in _WORDS.items()}
    *statuses, new_status = rng.sample(words["status"], 4)
    pools = {field: rng.sample(words[field], 3) for field in _TEXT_FIELDS} | {"status": statuses}
    asked = rng.sample((*_TEXT_FIELDS, "amount"), difficulty.conditions)
    wish = {field: rng.choice(pools[field]) for field in asked if field != "amount"}
    least = rng.randint(30, 60)

    def fields(number: int, failing: Sequence[str]) -> dict[str, str]:
        """Fields that meet every condition but those on ``failing``."""
        found = {"code": f"{''.join(rng.choices(_LETTERS[split], k=2))}{number}"}
        for field in _TEXT_FIELDS:
            if field in wish and field not in failing:
                found[field] = wish[field]
            else:
                found[field] = rng.choice([value for value in pools[field] if value != wish.get(field)])
        low, high = (10, 99) if "amount" not in asked else (10, least) if "amount" in failing else (least + 1, 99)
        return found | {"amount": str(rng.randint(low, high)), "note": " ".join(rng.sample(words["note"], 2))}

    count = FILES[difficulty.files]
    folders = _folders(rng, words["folder"], difficulty.depth)
    places = [folders[-1], *rng.choices(folders, k=count - 1)]
    names, numbers = rng.sample(words["file"], count), rng.sample(range(100, 1000), count)
    failing = [[] if n < count // 3 else rng.sample(asked, rng.randint(1, len(asked))) for n in range(count)]
    records = [
        Record(path=f"{place}/{name}.txt", fields=fields(number, fails))
        for place, name, number, fails in zip(places, names, numbers, failing, strict=True)
    ]
    return Scene(
        records=tuple(sorted(records, key=lambda r: r.path)),
        hits=tuple(sorted(records[: count // 3], key=lambda r: r.fields["code"])),
        root=folders[0],
        where=" and ".join(f"{f} {wish[f]}" if f in wish else f"amount over {least}" for f in asked),
        free=tuple(field for field in _TEXT_FIELDS if field not in asked),
        target=rng.choice(words["target"]),
        status=new_status,
    )


def _folders(rng: random.Random, words: Sequence[str], depth: int) -> list[str]:
    """A top folder, and two folders for each level below it; the last one is ``depth`` deep."""
    top, *names = rng.sample(words, 2 * depth - 1)
    folders, level = [top], [top]
    while names:
        level = [f"{rng.choice(level)}/{names.pop()}" for _ in range(2)]
        folders += level
    return folders


# --- the kinds of tasks ----------------------------------------------------------------------------------------------


def _plan(kind: str, scene: Scene, rng: random.Random) -> Plan:
    files = {record.path: record.text for record in scene.records}
    those = f"every file below /workspace/{scene.root} with {scene.where}"
    if kind in ("collect", "sort", "rename"):
        return _moved(kind, scene, files, those, rng)
    if kind == "edit":
        edited = {r.path: Record(path=r.path, fields={**r.fields, "status": scene.status}).text for r in scene.hits}
        return Plan(prompt=f"Set the status to {scene.status} in {those}.", goal=files | edited, moves={})
    codes = [record.fields["code"] for record in scene.hits]
    if kind == "ask":
        prompt = f"What are the codes of the files below /workspace/{scene.root} with {scene.where}?"
        return Plan(prompt=prompt, goal=files, moves={}, answer=tuple(codes))
    path = f"{scene.target}.txt"
    if kind == "merge":
        lines = [record.fields["note"] for record in scene.hits]
        form = "with the note of"
        rest = "one a line without 'note:', in the order of the codes."
    else:
        amounts = [record.fields["amount"] for record in scene.hits]
        lines = [f"{code} {amount}" for code, amount in zip(codes, amounts, strict=True)]
        lines += [f"total {sum(map(int, amounts))}"]
        form = "with a line 'CODE AMOUNT' for"
        rest = "in the order of the codes, and a last line 'total SUM'."
    prompt = f"Write /workspace/{path} {form} {those}, {rest}"
    return Plan(prompt=prompt, goal=files | {path: "\n".join(lines) + "\n"}, moves={})


def _moved(kind: str, scene: Scene, files: dict[str, str], those: str, rng: random.Random) -> Plan:
    field = rng.choice(scene.free)
    moves, target = {}, scene.target
    for record in scene.hits:
        old = PurePosixPath(record.path)
        new = {
            "collect": f"{target}/{old.name}",
            "sort": f"{target}/{record.fields[field]}/{old.name}",
            "rename": str(old.with_name(f"{record.fields['code']}.txt")),
        }[kind]
        moves[new] = record.path
    prompt = {
        "collect": f"Move {those} into a new folder /workspace/{target}.",
        "sort": f"Move {those} into the folder /workspace/{target}/X, where X is its {field}.",
        "rename": f"Rename {those} to its code, such as AB123.txt, in the folder where it is.",
    }[kind]
    kept = {path: text for path, text in files.items() if path not in moves.values()}
    return Plan(prompt=prompt, goal=kept | {new: files[old] for new, old in moves.items()}, moves=moves)


# --- the verdict -----------------------------------------------------------------------------------------------------


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def lines_right(text: str, goal: str) -> float:
    """Lines found in order minus lines that do not belong, over the lines wanted, in [0, 1]; blanks at line ends are free."""
    have, want = _lines(text), _lines(goal)
    blocks = SequenceMatcher(None, have, want, autojunk=False).get_matching_blocks()
    return max(0, 2 * sum(block.size for block in blocks) - len(have)) / len(want)


def changes_made(task: Task, state: EpisodeState) -> list[float]:
    """How far each file that a task wants moved, edited or written is as it should be, each in [0, 1].

    A move counts when the text is at the new path and nothing at the old. Any other file counts by `lines_right`, from
    0 for what it was to 1 for what it should be.
    """
    files, goal, moves = task.data["files"], task.data["goal"], task.data["moves"]
    made = []
    for path in sorted(path for path in goal if files.get(path) != goal[path]):
        now, before = state.read(path) or "", files.get(path)
        if path in moves:
            made.append(float(lines_right(now, goal[path]) == 1 and state.read(moves[path]) is None))
        else:
            first = 0.0 if before is None else lines_right(before, goal[path])
            made.append(max(0.0, lines_right(now, goal[path]) - first) / (1 - first))
    return made


def files_harmed(task: Task, state: EpisodeState) -> int:
    """Files that had to stay as they were and did not, and files that nobody asked for."""
    files, goal = task.data["files"], task.data["goal"]
    lost = sum(state.read(path) != text for path, text in files.items() if goal.get(path) == text)
    return lost + sum(path not in files and path not in goal for path in state.paths())


# --- the task set ----------------------------------------------------------------------------------------------------


class FilesystemTasks:
    """The task set. An episode scores *share* x 0.5 ^ *harm*.

    *share* is the mean of `changes_made`; for a question it is `codes_right`. *harm* is `files_harmed`: each file that
    was lost, altered or left lying around without need halves the score. Doing nothing scores 0.

    Args:
        seed: another seed gives other tasks.
    """

    name = "filesystem"
    system_prompt = SYSTEM_PROMPT
    max_turns = 20

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def servers(self) -> Sequence[ServerSpec]:
        return (find("filesystem", allow=TOOLS),)

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """``count`` distinct tasks, the kinds in turn and each axis of difficulty drawn; equal arguments, equal tasks.

        Raises:
            ConfigError: for an unknown split.
        """
        key = f"filesystem/{self.seed}/{seed}"
        return distinct_tasks(split, count, key, KINDS, self._task, lambda task: json.dumps(task.data))

    def _task(self, kind: str, split: str, rng: random.Random) -> Task:
        difficulty = Difficulty(files=rng.randint(1, 3), depth=rng.randint(1, 3), conditions=rng.randint(1, 3))
        scene = _scene(rng, split, difficulty)
        plan = _plan(kind, scene, rng)
        data = {
            "difficulty": asdict(difficulty),
            "files": {record.path: record.text for record in scene.records},
            "goal": dict(plan.goal),
            "moves": dict(plan.moves),
            "answer": list(plan.answer),
        }
        return Task(task_id=f"{kind}-{rng.getrandbits(32):08x}", kind=kind, prompt=plan.prompt, data=data)

    def setup(self, task: Task, workdir: Path) -> None:
        """Write the files that the task begins with."""
        for path, text in task.data["files"].items():
            file = workdir / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def checklist(self, task: Task) -> Checklist:
        async def result(trajectory: Trajectory, state: EpisodeState) -> float:
            wanted = task.data["answer"]
            made = [codes_right(trajectory.answer, wanted)] if wanted else changes_made(task, state)
            return sum(made) / len(made) * 0.5 ** files_harmed(task, state)

        return Checklist([Reward(name="result", function=result)])

    def oracle(self, task: Task) -> list[str]:
        """Messages that solve the task: list, read, make folders, act, answer."""
        files, goal, moves = task.data["files"], task.data["goal"], task.data["moves"]
        changed = sorted(path for path in goal if files.get(path) != goal[path])
        new = {str(PurePosixPath(path).parent) for path in changed} - {
            str(PurePosixPath(path).parent) for path in files
        }
        messages = [
            [call("search_files", path="/workspace", pattern="**/*.txt")],
            [call("read_multiple_files", paths=[f"/workspace/{path}" for path in files])],
            [call("create_directory", path=f"/workspace/{folder}") for folder in sorted(new - {"."})],
            [_change(path, goal[path], files.get(path), moves.get(path)) for path in changed],
        ]
        answer = f"answer: {', '.join(task.data['answer'])}" if task.data["answer"] else "done"
        return ["\n".join(calls) for calls in messages if calls] + [answer]


def _change(path: str, goal: str, before: str | None, source: str | None) -> str:
    """The call that makes one file what it should be."""
    if source is not None:
        return call("move_file", source=f"/workspace/{source}", destination=f"/workspace/{path}")
    if before is None:
        return call("write_file", path=f"/workspace/{path}", content=goal)
    pairs = zip(before.splitlines(), goal.splitlines(), strict=True)
    edits = [{"oldText": old, "newText": new} for old, new in pairs if old != new]
    return call("edit_file", path=f"/workspace/{path}", edits=edits)
