"""What one episode has for itself, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from arenarl.errors import ConfigError, EnvError, McpServerError
from arenarl.mcp import ServerHub
from arenarl.mcp.claim import clear_tree
from arenarl.mcp.workdir import WorkDirectory
from tests.processes import descendants
from tests.workspaces import (
    FILES,
    PYTHON,
    SERVERS,
    a_hub,
    episode,
    files,
    left,
    say,
    server,
    until,
)
from tests.workspaces import clean_folder as clean_folder

# --- workspaces --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [8, 64])
async def test_concurrent_workspaces_share_neither_files_nor_memory(number: int):
    async with a_hub() as hub:  # what a first use keeps open is not counted
        await episode(hub, files(), "count")
    before, descriptors = asyncio.all_tasks(), psutil.Process().num_fds()
    hub = ServerHub()

    async def one(n: int) -> tuple[list[str], str]:
        workspace = await hub.open([files()], fill=lambda root: (root / "task.txt").write_text(f"task {n}") and None)
        counts = [await say(workspace, "count") for _ in range(1 + n % 3)]
        await say(workspace, "write_file", path=f"/workspace/{n}.txt", text="mine")
        seen = await say(workspace, "list") + "|" + await say(workspace, "read_file", path="task.txt")
        hub.put(workspace)
        return counts, seen

    found = await asyncio.gather(*map(one, range(number)))
    assert [counts for counts, _ in found] == [[str(k + 1) for k in range(1 + n % 3)] for n in range(number)]
    assert [seen for _, seen in found] == [f"{n}.txt\ntask.txt|task {n}" for n in range(number)]
    await hub.aclose()
    assert asyncio.all_tasks() == before and psutil.Process().num_fds() == descriptors


async def test_neighbours_of_servers_that_crash_go_on():
    async with a_hub() as hub:

        async def one(n: int) -> list[str]:
            workspace = await hub.open([files()])
            said = [await say(workspace, "count"), await say(workspace, "count" if n % 3 else "crash")]
            said.append(await say(workspace, "count"))
            assert workspace.lost("files") == (n % 3 == 0)
            assert isinstance(workspace.error, McpServerError) == (n % 3 == 0)
            hub.put(workspace)
            return said

        stopped = "Error: the tool server has stopped."
        found = await asyncio.gather(*map(one, range(24)))
    assert found == [["1", "2", "3"] if n % 3 else ["1", stopped, stopped] for n in range(24)]


async def test_servers_of_a_workspace_start_at_the_same_time(tmp_path: Path):
    both = {"FILES_LOG": str(tmp_path / "log"), "FILES_WAIT": "2"}  # each waits for the other
    specs = [files(name=name, env=both, start_timeout=20.0) for name in ("one", "two")]
    async with a_hub(spawn_width=2) as hub:
        workspace = await hub.open(specs)
        assert [tool.server for tool in workspace.tools] == ["one"] * 14 + ["two"] * 14


async def test_a_server_that_does_not_start_takes_its_neighbours_along(folder: Path):
    async with a_hub(spawn_width=2) as hub:
        with pytest.raises(McpServerError, match="missing API key"):
            await hub.open([files(), server("--start", "exit"), server("--start", "slow", name="slow")])
        await hub.aclose()
        assert not left(folder)


@pytest.mark.parametrize("moment", ["fill", "start", "width", "shared"])
async def test_cancelled_open_leaves_nothing(moment: str, folder: Path):
    began, go_on, before = threading.Event(), threading.Event(), asyncio.all_tasks()

    def fill(root: Path) -> None:
        began.set()
        assert moment != "fill" or go_on.wait(20)
        (root / "late.txt").write_text("late")

    slow = server("--start", "slow", scope="shared" if moment == "shared" else "episode", close_grace=0.1)
    hub = ServerHub(spawn_width=1)
    opening = [asyncio.create_task(hub.open([files(), slow], fill=fill)) for _ in range(1 + (moment == "width"))]
    await asyncio.to_thread(began.wait, 20)
    if moment != "fill":
        await until(lambda: any("slow" in process.cmdline() for process in descendants()))
    for task in opening:
        task.cancel()
    assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*opening, return_exceptions=True))
    go_on.set()
    await hub.aclose()
    assert not left(folder) and asyncio.all_tasks() == before


async def test_open_may_be_cancelled_at_any_time(folder: Path):
    before, hub = asyncio.all_tasks(), ServerHub()
    for n in range(15):
        specs = [
            files(name="kept", scope="pool"),
            files(name="own"),
            files(name="all", scope="shared", args=(*PYTHON[1:], FILES)),
        ]
        opening = asyncio.create_task(hub.open(specs, fill=lambda root: (root / "a").write_text("a") and None))
        await asyncio.wait({opening}, timeout=0.008 * n)
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled():
            workspace = opening.result()
            assert await say(workspace, "list", "own") == "a"
            hub.put(workspace)
    await hub.aclose()
    assert not left(folder) and asyncio.all_tasks() == before


async def test_files_that_cannot_be_written_are_named_without_the_real_directory(folder: Path):
    async with a_hub() as hub:
        with pytest.raises(EnvError, match=r"FileNotFoundError: .*'missing/a.txt'") as error:
            await hub.open([files()], fill=lambda root: (root / "missing" / "a.txt").write_text("") and None)
        assert str(folder) not in str(error.value)


async def test_variables_and_working_directory():
    async with a_hub() as hub:
        known = {"SEED": "${SEED}", "EPISODE": "${EPISODE}", "HERE": "${WORKDIR}"}
        by_variable = files(args=(*PYTHON[1:], FILES), env=known)  # lives there because a variable names it
        assert (await episode(hub, by_variable, "variables", "where", seed=7, episode="e1"))[1] == [
            "7 e1", "/workspace and /workspace"
        ]  # fmt: skip
        first, second = [(await episode(hub, by_variable, "variables"))[1] for _ in range(2)]
        assert first != second and first[0].startswith("0 ")  # episodes without a name get one each
        elsewhere = files(args=(*PYTHON[1:], FILES), env=known, cwd="/")
        assert (await episode(hub, elsewhere, "where"))[1] == ["/ and /"]
        assert (await episode(hub, server()))[0] is None


async def test_specs_that_cannot_share_a_workspace_are_refused():
    async with a_hub() as hub:
        for specs, problem in (
            ([files(), files()], "two servers .* 'files'"),
            ([files(scope="pool", args=(), cwd="/")], r"names \$\{WORKDIR\}"),
        ):
            with pytest.raises(ConfigError, match=problem):
                await hub.open(specs)


async def test_what_was_given_back_answers_no_more():
    async with a_hub() as hub:
        workspace = await hub.open([files(scope="pool")])
        hub.put(workspace)
        hub.put(workspace)
        result = await workspace.call("files", "count", {}, timeout=20.0)
        assert result.kind == "server_dead" and workspace.lost("files")
        again = await hub.open([files(scope="pool")])
        assert again.root == workspace.root and await say(again, "count") == "1"
    with pytest.raises(McpServerError, match="closed"):
        await hub.open([files()])


async def test_shared_server_is_leased_again_and_no_call_is_made_twice(tmp_path: Path):
    log = tmp_path / "log"
    async with a_hub() as hub:
        one, two = [
            await hub.open([files(scope="shared", args=(*PYTHON[1:], FILES), env={"FILES_LOG": str(log)})])
            for _ in "12"
        ]
        assert [await say(one, "count"), await say(two, "count")] == ["1", "2"] and one.root is None
        assert await say(one, "crash") == "Error: the tool server has stopped." and not one.lost("files")
        assert sorted(await asyncio.gather(*(say(w, "count") for w in (one, one, two)))) == ["1", "2", "3"]
    lines = [line for line in log.read_text().split("\n") if line != "tools/list"]
    assert lines == ["start", "count", "count", "crash", "start", *["count"] * 3, ""]


@pytest.mark.parametrize("scope", ["episode", "pool", "shared"])
async def test_a_write_whose_server_dies_is_never_repeated(scope: str, tmp_path: Path):
    log = tmp_path / "log"
    spec = files(scope=scope, args=(*PYTHON[1:], FILES), env={"FILES_LOG": str(log)})
    async with a_hub() as hub:
        workspace = await hub.open([spec])
        assert (await workspace.call("files", "crash", {}, timeout=20.0)).kind == "server_dead"
        hub.put(workspace)
        await episode(hub, spec, "count")
    assert log.read_text().split().count("crash") == 1


async def test_aclose_ends_workspaces_in_every_state(folder: Path):
    before, hub = asyncio.all_tasks(), ServerHub()
    pool = files(scope="pool", reset="respawn")
    kept, back = [await hub.open([pool, files(name="own")]) for _ in "12"]
    calling = asyncio.create_task(kept.call("own", "hang", {}, timeout=20.0))
    starting = asyncio.create_task(hub.open([server("--start", "slow", close_grace=0.1)]))
    ahead = asyncio.create_task(hub.prewarm([pool], 3))
    await asyncio.sleep(0)
    hub.put(back)
    await asyncio.gather(hub.aclose(), hub.aclose())
    assert not left(folder)
    results = await asyncio.gather(calling, starting, ahead, return_exceptions=True)
    assert results[0].kind == "server_dead" and [type(r) for r in results[1:]] == [McpServerError] * 2
    assert asyncio.all_tasks() == before


def test_interpreter_that_ends_without_closing_leaves_nothing(folder: Path):
    code = f"""
import asyncio
from arenarl.mcp import ServerHub, ServerSpec
async def main():
    workspace = await ServerHub().open([ServerSpec(name="files", command={PYTHON[0]!r}, args={(*PYTHON[1:], FILES, "${WORKDIR}")!r})])
    await workspace.call("files", "write_file", {{"path": "/workspace/a/b", "text": "x"}}, timeout=20)
    print(workspace.root, workspace.root.exists())
asyncio.run(main())
"""
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(SERVERS.parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.startswith(str(folder)) and done.stdout.endswith("True\n"), done.stderr
    assert not list(folder.iterdir())


# --- directories -------------------------------------------------------------------------------------------------


@pytest.fixture
def nobody(folder: Path) -> Iterator[None]:
    """For root every file is writable: be somebody else."""
    if os.geteuid() != 0:
        yield
        return
    place = tempfile.tempdir
    with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:
        os.chmod(open_to_all, 0o777)
        tempfile.tempdir = open_to_all
        os.seteuid(65534)
        yield
        os.seteuid(0)
        tempfile.tempdir = place
        assert not os.listdir(open_to_all)


def test_directory_is_emptied_of_what_is_read_only(nobody: None):
    directory = WorkDirectory()
    root, inode = directory.path, directory.path.stat().st_ino
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_text("x")
    for path, mode in ((root / "a" / "b" / "file", 0o400), (root / "a" / "b", 0o500), (root / "a", 0), (root, 0o500)):
        path.chmod(mode)
    directory.empty()
    assert root.stat().st_ino == inode and not list(root.iterdir())
    (root / "c").mkdir(mode=0)
    root.parent.chmod(0o500)
    directory.remove()
    assert not root.parent.exists()


def test_links_are_removed_and_never_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o555)
    directory = WorkDirectory()
    for name, target in (("dir", outside), ("file", __file__), ("broken", "nowhere"), ("loop", "loop")):
        (directory.path / name).symlink_to(target)
    directory.empty()
    assert not list(directory.path.iterdir())
    directory.path.rmdir()
    directory.path.symlink_to(outside)
    with pytest.raises(EnvError, match="removed or replaced"):
        directory.empty()
    directory.remove()
    assert outside.stat().st_mode & 0o777 == 0o555 and Path(__file__).exists()


def test_a_link_in_the_place_of_a_folder_is_never_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True, mode=0o555)
    (tmp_path / "link").symlink_to(outside)
    for top in (tmp_path / "link", tmp_path / "link" / "inner"):  # as a server may put one there between two looks
        with pytest.raises(NotADirectoryError):
            clear_tree(top)
    assert (outside / "inner").stat().st_mode & 0o777 == 0o555


def test_what_a_killed_process_left_is_removed_only_if_it_is_ours(tmp_path: Path, folder: Path):
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o755)
    (precious / "thesis.txt").write_text("x")
    ours, theirs = (folder / f"arenarl-{digit * 16}.lock" for digit in "01")
    for lock in (ours, theirs):
        lock.touch()
        (folder / f"{lock.stem}-own").mkdir()
        (folder / f"{lock.stem}-own" / "file").touch()
    (folder / f"{ours.stem}-link").symlink_to(precious)
    (folder / f"{ours.stem}-file").touch()
    if os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
        (folder / f"{ours.stem}-other").mkdir()
        os.chown(folder / f"{ours.stem}-other", 65534, 65534)
    WorkDirectory().remove()
    assert precious.stat().st_mode & 0o777 == 0o755 and os.listdir(precious) == ["thesis.txt"]
    kept = [f"{ours.stem}-file"]
    if os.geteuid() == 0:
        kept += [f"{ours.stem}-other", f"{theirs.stem}-own", theirs.name]
    assert sorted(os.listdir(folder)) == sorted(kept)
    shutil.rmtree(folder)
    folder.mkdir()


def test_deep_and_long_paths_are_removed():
    directory = WorkDirectory()
    path = str(directory.path)
    for _ in range(1200):  # deeper than Python's own recursion
        path += "/d"
        os.mkdir(path)
    directory.empty()
    assert not list(directory.path.iterdir())
    folder = os.open(directory.path, os.O_RDONLY)
    for _ in range(20):  # longer than a path may be
        os.mkdir("x" * 250, dir_fd=folder)
        inner = os.open("x" * 250, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    with pytest.raises(EnvError, match=r"cannot be emptied: (x{250}/)+x{250}: File name too long"):
        directory.empty()
    directory.remove()


OWNER = """
import os, sys, time
from arenarl.mcp.workdir import WorkDirectory
directory = WorkDirectory()
(directory.path / "locked").mkdir(mode=0)
print(directory.path.parent, flush=True)
time.sleep(1000)
"""


def test_directories_of_a_killed_process_are_removed_and_those_of_a_living_one_stay(tmp_path: Path):
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent.parent)}
    begin = {"args": [sys.executable, "-c", OWNER], "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(**begin) as dead, subprocess.Popen(**begin) as alive:
        left, kept = (Path(process.stdout.readline().strip()) for process in (dead, alive))
        dead.kill()
        dead.wait()
        assert left.exists() and kept.exists()
        with subprocess.Popen(**begin) as third:
            new = Path(third.stdout.readline().strip())
            assert not left.exists() and kept.exists() and new.exists()
            third.terminate()
        alive.kill()
    ended = subprocess.run([sys.executable, "-c", OWNER.replace("time.sleep(1000)", "")], env=environment, text=True)
    assert ended.returncode == 0 and not list(tmp_path.glob("arenarl-*"))


def test_a_fork_neither_removes_nor_shares_its_parents_directories():
    directory = WorkDirectory()
    child = os.fork()
    if child == 0:
        mine = WorkDirectory()
        apart = mine.path.parent.name.rpartition("-")[0] != directory.path.parent.name.rpartition("-")[0]
        mine.remove()
        os._exit(0 if apart and directory.path.exists() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert directory.path.exists()
    directory.remove()
    assert not directory.path.parent.exists()
