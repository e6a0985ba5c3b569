"""Work on a small git repository through the public MCP git server; the verdict is read from the repository.

## Description
``/workspace`` is a repository of small files of lines ``key = number``, with side branches and tags. A task is of one
of seven kinds: ``commit`` (some of the changed files), ``split`` (a commit for each of some files), ``move`` (commit
some on a new branch), ``branch`` (new branches at old versions), ``unstage`` (some of the staged files), ``find`` (the
commit that brought a line) and ``compare`` (the files in which two branches differ).

Three axes of difficulty, each 1 to 3 and drawn apart: ``commits`` on main (4, 9, 16), ``files`` (7, 10, 13, with 1, 2, 3
side branches), and ``steps``: how many files, commits or branches are asked for; for ``find``, whether the line is
there still, was replaced, or is on another branch.

## Actions
The text of an assistant message: tool calls, or the final answer (any text without a call).

## Observations
The new chat messages: system and user at reset, tool results after each step.

## Rewards
0 until the end, then *share of the wanted changes made* x 0.5 ^ *other things changed*, in [0, 1] (`GitTasks`).

## Starting state
The repository of a task of the split, picked by the seed. The words of the held-out split never occur in training.

## Episode end
Terminated by an answer; truncated after 14 assistant turns.

## Arguments
``split``: "train" or "heldout". ``max_turns``: see above. ``seed``: another seed gives other tasks.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from arenarl.envs.git_repository import Files, Repository, blob
from arenarl.envs.shared import Facts, call, distinct_tasks, share, stated
from arenarl.mcp.catalogue import find
from arenarl.mcp.config import ServerSpec
from arenarl.rubric import Checklist, Reward
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory

KINDS = ("commit", "split", "move", "branch", "unstage", "find", "compare")
AXES = ("commits", "files", "steps")
# All but git_diff_staged: git_status names what is staged, and no task asks what is in it.
TOOLS = (
    "git_status", "git_diff_unstaged", "git_diff", "git_log", "git_show", "git_branch",
    "git_add", "git_reset", "git_commit", "git_create_branch", "git_checkout",
)  # fmt: skip
SYSTEM_PROMPT = (
    "You work on the git repository /workspace with tools. Do what is asked and change nothing else, one step at a "
    "time. Then answer 'done'. To a question, answer with one line such as 'answer: 1a2b3c4' or 'answer: a.cfg, b.cfg'."
)
COMMITS = {1: 4, 2: 9, 3: 16}
FILES = {1: 7, 2: 10, 3: 13}

_WORDS = {
    "train": {
        "file": "parser cache router queue mailer logger timer socket loader filter indexer sampler packer printer",
        "key": "timeout retries depth width offset margin budget quota",
        "verb": "Tune Adjust Rework Refresh",
        "branch": "spike draft trial nightly preview sandbox",
        "author": "Ann Ben Cleo Dina",
        "tag": "v",
    },
    "heldout": {
        "file": "engine turbine valve pump boiler gauge rotor piston clutch gearbox nozzle lever hopper damper",
        "key": "pressure torque angle speed load voltage current level",
        "verb": "Calibrate Revise Correct Retouch",
        "branch": "bench pilot outdoor winter endurance workshop",
        "author": "Emil Fred Gina Hugo",
        "tag": "r",
    },
}


# --- the starting state ----------------------------------------------------------------------------------------------


def _pick(rng: random.Random, split: str, what: str, count: int = 1) -> list[str]:
    return rng.sample(_WORDS[split][what].split(), count)


def _new_branches(rng: random.Random, split: str, count: int) -> list[str]:
    """Names that no side branch has: those have two digits."""
    return [f"{stem}-{rng.randint(100, 999)}" for stem in _pick(rng, split, "branch", count)]


def _edit(rng: random.Random, repository: Repository, text: str, key: str = "") -> str:
    """The text with a number at one key that no file ever had: a line is brought by one commit only."""
    key = key or rng.choice(_keys(text))
    every = [*repository.changed.values(), *(t for commit in repository.commits for t in commit["files"].values())]
    numbers = iter(partial(rng.randrange, 100, 1000), None)
    value = next(number for number in numbers if not any(f"= {number}\n" in old for old in every))
    return re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)


def _keys(text: str) -> list[str]:
    return re.findall(r"^\w+", text, re.MULTILINE)


def _repository(rng: random.Random, split: str, axes: Mapping[str, int]) -> Repository:
    """A first commit of every file, then small ones; four tags on main; side branches leave main at its end."""
    keys, stems = _pick(rng, split, "key", 4), _pick(rng, split, "file", FILES[axes["files"]])
    texts = ["".join(f"{key} = {rng.randint(100, 999)}\n" for key in keys) for _ in stems]
    repository = Repository()

    def commit(branch: str, parent: int | None, files: Files, message: str) -> int:
        author = _pick(rng, split, "author")[0]
        entry = {"branch": branch, "parent": parent, "message": message, "author": author, "files": files}
        repository.commits.append(entry)
        return len(repository.commits) - 1

    tip = commit("main", None, {f"{stem}.cfg": text for stem, text in zip(stems, texts, strict=True)}, "Add all files")
    places = [(f"{stem}.cfg", rng.choice(keys)) for stem in rng.sample(stems, 3)]
    for n in range(1, COMMITS[axes["commits"]]):  # the second commit's line does not last
        path, key = places[0] if n in (1, COMMITS[axes["commits"]] - 1) else rng.choice(places)
        text = _edit(rng, repository, repository.tree(tip)[path], key)
        tip = commit("main", tip, {path: text}, f"{_pick(rng, split, 'verb')[0]} {path[:-4]}")
    marked = sorted(rng.sample(range(tip + 1), 4))
    repository.tags.update({f"{_WORDS[split]['tag']}{n}": at for n, at in enumerate(marked, 1)})
    for word in _pick(rng, split, "branch", axes["files"]):
        branch, at = f"{word}-{rng.randint(10, 99)}", tip - rng.randint(0, 1)
        for path in rng.sample(sorted(repository.tree(0)), axes["steps"]):
            text = _edit(rng, repository, repository.tree(at)[path])
            at = commit(branch, at, {path: text}, f"{_pick(rng, split, 'verb')[0]} {path[:-4]}")
    return repository


def _change(rng: random.Random, repository: Repository, count: int, key: str = "") -> list[str]:
    """Change files in the working directory: ``count`` of them, at the key if one is given, and three others elsewhere.

    Returns:
        the names of the first.
    """
    tree = repository.tree(repository.tips()["main"])
    paths = rng.sample(sorted(tree), count + 3)
    for n, path in enumerate(paths):
        others = [name for name in _keys(tree[path]) if name != key]
        repository.changed[path] = _edit(rng, repository, tree[path], key if key and n < count else rng.choice(others))
    return paths[:count]


# --- what is asked ---------------------------------------------------------------------------------------------------


def _message(rng: random.Random, split: str) -> str:
    return f"{_pick(rng, split, 'verb')[0]} {_pick(rng, split, 'key')[0]} {rng.randint(100, 999)}"


def _commit(rng: random.Random, split: str, repository: Repository, steps: int) -> dict[str, Any]:
    key = rng.choice(_keys(next(iter(repository.tree(0).values())))) if steps > 1 else ""
    files, message = _change(rng, repository, steps, key), _message(rng, split)
    which = f"only those changed files in which {key} changed" if key else f"only the change of {files[0]}"
    prompt = f"Commit {which}, on main, in one commit with the message '{message}'."
    acts = [["git_diff_unstaged", {}], ["git_add", {"files": files}], ["git_commit", {"message": message}]]
    return {"prompt": prompt, "acts": acts, "branch": "main", "plan": [[message, files]]}


def _split(rng: random.Random, split: str, repository: Repository, steps: int) -> dict[str, Any]:
    plan = [[_message(rng, split), [path]] for path in _change(rng, repository, steps + 1)]
    wishes = ", then ".join(f"{path} with the message '{message}'" for message, (path,) in plan)
    acts = [["git_status", {}]]
    for message, files in plan:
        acts += [["git_add", {"files": files}], ["git_commit", {"message": message}]]
    return {"prompt": f"Make these commits on main: {wishes}.", "acts": acts, "branch": "main", "plan": plan}


def _move(rng: random.Random, split: str, repository: Repository, steps: int) -> dict[str, Any]:
    files, message = _change(rng, repository, steps), _message(rng, split)
    (name,) = _new_branches(rng, split, 1)
    prompt = f"Make the branch {name} from main, switch to it, and there commit only {', '.join(files)} in one commit"
    acts = [
        ["git_create_branch", {"branch_name": name, "base_branch": "main"}], ["git_checkout", {"branch_name": name}],
        ["git_add", {"files": files}], ["git_commit", {"message": message}],
    ]  # fmt: skip
    return {
        "prompt": f"{prompt} with the message '{message}'.",
        "acts": acts,
        "branch": name,
        "plan": [[message, files]],
    }


def _branch(rng: random.Random, split: str, repository: Repository, steps: int) -> dict[str, Any]:
    """Branches at tags; from two on, the last tag is told by a line that only its version of a file has."""
    trees = {tag: repository.tree(at) for tag, at in repository.tags.items()}
    lines = {
        tag: {(path, line) for path, text in tree.items() for line in text.splitlines()} for tag, tree in trees.items()
    }
    own = {tag: sorted(lines[tag].difference(*(lines[other] for other in lines if other != tag))) for tag in lines}
    last = rng.choice([tag for tag in own if own[tag]])
    tags = [*rng.sample([tag for tag in trees if tag != last], steps - 1), last]
    names = _new_branches(rng, split, steps)
    wishes, acts = [f"{name} at the tag {tag}" for name, tag in zip(names, tags, strict=True)], []
    if steps > 1:
        path, line = rng.choice(own[last])
        wishes[-1] = f"{names[-1]} at the tag at which {path} has the line '{line}'"
        acts += [["git_show", {"revision": f"{tag}:{path}"}] for tag in trees]
    pairs = list(zip(names, tags, strict=True))
    acts += [["git_create_branch", {"branch_name": name, "base_branch": tag}] for name, tag in pairs]
    new = {name: repository.hashes()[repository.tags[tag]] for name, tag in pairs}
    return {"prompt": f"Stay on main and make these branches: {'; '.join(wishes)}.", "acts": acts, "new": new}


def _unstage(rng: random.Random, split: str, repository: Repository, steps: int) -> dict[str, Any]:
    out = _change(rng, repository, steps)
    repository.staged.extend(sorted(repository.changed))
    prompt = f"Take {', '.join(out)} out of the staging area. All else that is staged must be staged in the end."
    kept = [path for path in repository.staged if path not in out]
    acts = [["git_status", {}], ["git_reset", {}], ["git_add", {"files": kept}]]
    return {"prompt": prompt, "acts": acts, "unstaged": out}


def _find(rng: random.Random, split: str, repository: Repository, steps: int) -> dict[str, Any]:
    """A line that is there (1), that a later commit replaced (2), or that a side branch brought (3)."""
    main, chances = repository.tree(repository.tips()["main"]), []
    for n, commit in enumerate(repository.commits[1:], 1):
        ((path, text),) = commit["files"].items()
        (line,) = set(text.splitlines()).difference(repository.tree(commit["parent"])[path].splitlines())
        place = 3 if commit["branch"] != "main" else 1 if line in main[path] else 2
        chances += [(n, path, line)] * (place == steps)
    at, path, line = rng.choice(chances)
    branch, name = repository.commits[at]["branch"], repository.hashes()[at]
    acts = [["git_checkout", {"branch_name": branch}]] if steps == 3 else []
    acts += [["git_log", {"max_count": 50}], ["git_show", {"revision": name}]]
    where = f", on the branch {branch}" if steps == 3 else ""
    prompt = f"Which commit brought the line '{line}' into {path}{where}? Give the first 7 characters of its hash."
    return {"prompt": prompt, "acts": acts, "answer": [name]}


def _compare(rng: random.Random, split: str, repository: Repository, steps: int) -> dict[str, Any]:
    tips = repository.tips()
    name = rng.choice([branch for branch in tips if branch != "main"])
    main, other = repository.tree(tips["main"]), repository.tree(tips[name])
    files = [path for path in sorted(main) if main[path] != other[path]]
    prompt = f"In which files do the last commits of main and {name} differ?"
    return {"prompt": prompt, "acts": [["git_diff", {"target": name}]], "answer": files}


_PLANS = dict(zip(KINDS, (_commit, _split, _move, _branch, _unstage, _find, _compare), strict=True))


# --- the verdict -----------------------------------------------------------------------------------------------------


def _start_and_goal(data: Mapping[str, Any]) -> tuple[Facts, Facts]:
    repository = Repository(**data["repository"])
    hashes = repository.hashes()
    start: Facts = {("ref", f"refs/heads/{branch}"): hashes[at] for branch, at in repository.tips().items()}
    start |= {("ref", f"refs/tags/{tag}"): hashes[at] for tag, at in repository.tags.items()}
    start |= {("staged", path): blob(repository.changed[path]) for path in repository.staged}
    if "answer" in data:
        return start, start
    start["head",] = "refs/heads/main"
    goal = start | {("ref", f"refs/heads/{name}"): at for name, at in data.get("new", {}).items()}
    for path in data.get("unstaged", ()):
        del goal["staged", path]
    if "plan" in data:
        target, base = f"refs/heads/{data['branch']}", start["ref", "refs/heads/main"]
        if ("ref", target) in start:
            start["ref", target] = "any"
        start["base",] = goal["base",] = base
        goal |= {("ref", target): "any", ("head",): target}
        for n, (message, files) in enumerate(data["plan"]):
            goal["commit", n, "message"] = message
            goal |= {("commit", n, path): blob(repository.changed[path]) for path in files}
    return start, goal


def _raw(text: str | None) -> dict[str, str]:
    """Paths and new blobs of git's raw diff format."""
    rows = (line.split("\t") for line in (text or "").split("\n") if line.startswith(":"))
    return {path: fields.split(" ")[3] for fields, path in rows}


def _now(state: EpisodeState, data: Mapping[str, Any], base: str) -> Facts:
    """What the repository is like; of the branch to be committed on, its commits since ``base``."""
    lines = (state.git("for-each-ref", "--format=%(refname) %(objectname) %(HEAD)") or "").split("\n")
    refs = {name: (at, head) for name, at, head in (line.split(" ", 2) for line in lines if line)}
    now: Facts = {("ref", name): at for name, (at, _) in refs.items()}
    planned = {path for _, files in data.get("plan", ()) for path in files}
    staged = _raw(state.git("diff", "--cached", "--raw", "--no-abbrev", "--no-renames"))
    now |= {("staged", path): new for path, new in staged.items() if path not in planned}
    if "answer" in data:
        return now
    now["head",] = next((name for name, (_, head) in refs.items() if head == "*"), "")
    target = f"refs/heads/{data.get('branch')}"
    if "plan" not in data or target not in refs:
        return now
    now |= {("ref", target): "any", ("base",): base}
    form = ("--reverse", "--first-parent", "--raw", "--no-abbrev", "--no-renames", "--format=%x00%P%x00%B%x00")
    parts = (state.git("log", *form, f"{base}..{target}") or "").split("\0")[1:]
    for n, (parents, message, changes) in enumerate(zip(*[iter(parts)] * 3, strict=True)):
        if n == 0:
            now["base",] = parents
        now["commit", n, "message"] = message.strip()
        now |= {("commit", n, path): new for path, new in _raw(changes).items()}
    return now


def answered(text: str | None, expected: Sequence[str], files: Sequence[str]) -> float:
    """How right an answer is, in [0, 1].

    A hash: 1 if it is stated, with 7 characters at least, and no other one; else 0. Files: the share of them that is
    stated x 0.5 ^ other files that are stated.
    """
    if expected[0] not in files:
        said = set(re.findall(r"\b[0-9a-f]{7,40}\b", stated(text).lower()))
        return float(len(said) == 1 and expected[0].startswith(min(said)))
    named = set(re.findall(r"[\w-]+\.\w+", stated(text).lower())) & set(files)
    return len(named & set(expected)) / len(expected) * 0.5 ** len(named - set(expected))


def _verdict(data: Mapping[str, Any], answer: str | None, state: EpisodeState) -> float:
    start, goal = _start_and_goal(data)
    files = list(data["repository"]["commits"][0]["files"])
    right = answered(answer, data["answer"], files) if "answer" in data else 1.0
    return right * share(start, goal, _now(state, data, str(start.get(("base",)))))


class GitTasks:
    """The task set: what to ask, with which server, and how it is checked.

    The score compares three states: as it was, as it should be, and as it is. They are sets of facts: where each branch
    and tag is, which branch is checked out, what is staged, and, for the branch to be committed on, the message and each
    changed file of each new commit, and where they begin. With W the facts in which the first two states differ, and H
    those outside W in which the last two differ (planned files that are still staged are not counted):

        score = |{w in W: as it should be}| / |W| x 0.5 ^ |H|

    A question has no W, may check out what it likes, and takes `answered` for the share.

    Args:
        seed: another seed gives other tasks.
    """

    name = "git"
    system_prompt = SYSTEM_PROMPT
    max_turns = 14

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def servers(self) -> Sequence[ServerSpec]:
        return (find("git", allow=TOOLS),)

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """``count`` distinct tasks, the seven kinds in turn; equal arguments give equal tasks.

        Raises:
            ConfigError: for an unknown split.
        """
        key = f"git/{self.seed}/{seed}"
        return distinct_tasks(
            split, count, key, KINDS, self._task, lambda task: f"{task.prompt}{task.data['repository']}"
        )

    def _task(self, kind: str, split: str, rng: random.Random) -> Task:
        axes = {name: rng.randint(1, 3) for name in AXES}
        repository = _repository(rng, split, axes)
        plan = _PLANS[kind](rng, split, repository, axes["steps"])
        prompt = plan.pop("prompt")
        data = {"difficulty": axes, "repository": asdict(repository), **plan}
        return Task(task_id=f"{kind}-{rng.getrandbits(32):08x}", kind=kind, prompt=prompt, data=data)

    def setup(self, task: Task, workdir: Path) -> None:
        """Write the repository of a task.

        Raises:
            EnvError: if git cannot do it.
        """
        Repository(**task.data["repository"]).write(workdir)

    def checklist(self, task: Task) -> Checklist:
        async def result(trajectory: Trajectory, state: EpisodeState) -> float:
            return await asyncio.to_thread(_verdict, task.data, trajectory.answer, state)

        return Checklist([Reward(name="result", function=result)])

    def oracle(self, task: Task) -> list[str]:
        """Assistant messages that solve the task, one call each, and the answer."""
        calls = [call(tool, repo_path="/workspace", **arguments) for tool, arguments in task.data["acts"]]
        named = [item[:7] if task.kind == "find" else item for item in task.data.get("answer", ())]
        answer = f"answer: {', '.join(named)}" if named else "done"
        return [*calls, answer]
