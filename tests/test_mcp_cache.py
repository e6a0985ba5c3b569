"""What stands between the model and the servers: one name for the directory, kept results, recorded results."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.errors import ConfigError, EnvError, McpServerError
from arenarl.mcp import ServerSpec, Tape
from arenarl.mcp.cache import ResultCache
from arenarl.mcp.paths import PathMap
from arenarl.types import ToolResult
from tests.processes import descendants
from tests.workspaces import FILES, PYTHON, a_hub, files, say, until
from tests.workspaces import clean_folder as clean_folder

ROOT = Path("/tmp/arenarl-a b/workspace")
PATHS = PathMap(ROOT)


def logged(tmp_path: Path, **changes: Any) -> tuple[Path, ServerSpec]:
    """A server of files, and where it notes its calls."""
    return tmp_path / "log", files(env={"FILES_LOG": str(tmp_path / "log")}, **changes)


def calls(log: Path, tool: str) -> int:
    return sum(line.split()[0] == tool for line in log.read_text().splitlines())


# --- paths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, real",
    [
        ("/workspace", f"{ROOT}"),
        ("/workspace/a.txt", f"{ROOT}/a.txt"),
        ("cat '/workspace/a' >/workspace/b;ls /workspace.", f"cat '{ROOT}/a' >{ROOT}/b;ls {ROOT}."),
        ("PATH=/bin:/workspace/bin", f"PATH=/bin:{ROOT}/bin"),
        ("file:///workspace/a%20b", f"file://{quote(str(ROOT))}/a%20b"),
        ("file://localhost/workspace", f"file://localhost{quote(str(ROOT))}"),
        *(
            (text, text)
            for text in ("/workspaces", "/workspace-old/a", "/workspace.txt", "x/workspace", "../workspace")
        ),
        *(
            (text, text)
            for text in ("http://host/workspace", "~/workspace", "$(pwd)/workspace", "workspace", "é/workspace")
        ),
    ],
)
def test_only_a_whole_path_is_that_of_the_directory(text: str, real: str):
    assert PATHS.inward({"deep": [text], text: 1}) == {"deep": [real], real: 1}
    assert PATHS.outward(PATHS.inward([text, 1, None, True])) == [text, 1, None, True]


def test_no_part_of_the_real_directory_comes_out():
    for form in ("/tmp/arenarl-a b", "/tmp/arenarl-a%20b"):
        shown = PATHS.outward(f"{form}/workspace/x in {form}, not {form}/other, see file://{form}/workspace")
        assert shown == "/workspace/x in /, not /other, see file:///workspace"
    assert PATHS.outward("/tmp/arenarl-a bc/workspace") == "/tmp/arenarl-a bc/workspace"  # another's


@given(
    st.lists(st.sampled_from(["/workspace", "/", "a", ".", " ", "file://", "s", "\n", "'", "=", ":", "~"])).map("".join)
)
def test_a_path_comes_out_as_it_went_in(text: str):
    assert PATHS.outward(PATHS.inward(text)) == text


# --- results that are kept ---------------------------------------------------------------------------------------


async def test_reads_are_made_once_until_something_is_written(tmp_path: Path):
    log, spec = logged(tmp_path, cache_tools=("read_file", "list"))
    async with a_hub() as hub:
        workspace = await hub.open([spec], fill=lambda root: (root / "a").write_text("old") and None)
        read = [await workspace.call("files", "read_file", {"path": "/workspace/a"}, timeout=20.0) for _ in range(3)]
        assert [(r.text, r.cached) for r in read] == [("old", False), ("old", True), ("old", True)]
        assert calls(log, "read_file") == 1
        await say(workspace, "write_file", path="a", text="new")
        assert await say(workspace, "read_file", path="/workspace/a") == "new"
        assert await say(workspace, "list") == await say(workspace, "list") == "a" and calls(log, "list") == 1
        await say(workspace, "peek")  # not declared: it may write
        assert await say(workspace, "list") == "a" and calls(log, "list") == 2


async def test_hints_of_a_server_count_only_if_it_is_trusted(tmp_path: Path):
    for trusted, made in ((False, 2), (True, 1)):
        log, spec = logged(tmp_path, trust_annotations=trusted)
        async with a_hub() as hub:
            workspace = await hub.open([spec])
            assert [await say(workspace, tool) for tool in ("peek", "peek", "count", "count")] == ["0", "0", "1", "2"]
            assert calls(log, "peek") == made
        log.unlink()


async def test_failures_are_not_kept(tmp_path: Path):
    log, spec = logged(tmp_path, trust_annotations=True)
    async with a_hub() as hub:
        workspace = await hub.open([spec])
        for _ in range(2):
            result = await workspace.call("files", "read_file", {"path": "none"}, timeout=20.0)
            assert result.kind == "tool_error" and not result.cached
    assert calls(log, "read_file") == 2


@pytest.mark.parametrize("scope, made", [("episode", 3), ("pool", 3), ("shared", 1)])
async def test_results_are_kept_across_episodes_only_of_a_shared_server(tmp_path: Path, scope: str, made: int):
    log, spec = logged(tmp_path, scope=scope, trust_annotations=True, args=(*PYTHON[1:], FILES))
    async with a_hub() as hub:
        for _ in range(3):
            workspace = await hub.open([spec])
            assert await say(workspace, "peek") == "0"
            hub.put(workspace)
        assert calls(log, "peek") == made
        one, two = await hub.open([spec]), await hub.open([spec])
        await say(one, "count")
        assert await say(two, "peek") == ("1" if scope == "shared" else "0")
        await say(two, "crash")
        if scope == "shared":
            assert await say(one, "count") == "1" and await say(one, "peek") == "1"


async def test_nothing_is_kept_after_a_write_that_may_still_go_on(tmp_path: Path):
    log, spec = logged(tmp_path, cache_tools=("read_file",))
    async with a_hub() as hub:
        workspace = await hub.open([spec], fill=lambda root: (root / "a").write_text("old") and None)
        late = await workspace.call("files", "slow_write", {"path": "a", "text": "late"}, timeout=0.1)
        assert late.kind == "timeout"
        for _ in range(2):
            await say(workspace, "read_file", path="a")
    assert calls(log, "read_file") == 2


async def test_equal_reads_at_the_same_time_are_one_call(tmp_path: Path):
    log, spec = logged(tmp_path, trust_annotations=True)
    async with a_hub() as hub:
        workspace = await hub.open([spec])
        results = await asyncio.gather(*(workspace.call("files", "peek", {}, timeout=20.0) for _ in range(8)))
        assert [(r.text, r.cached) for r in results] == [("0", False)] + [("0", True)] * 7
    assert calls(log, "peek") == 1


class Server:
    """Answers when it is told to; ``made`` counts the calls."""

    def __init__(self) -> None:
        self.made, self.go_on, self.results = 0, asyncio.Event(), [ToolResult(kind="ok", text="result")]

    async def call(self) -> ToolResult:
        self.made += 1
        await self.go_on.wait()
        return self.results[min(self.made, len(self.results)) - 1]


async def waiting(
    cache: ResultCache, server: Server, number: int, deadline: float = 1e12
) -> list[asyncio.Task[ToolResult]]:
    """That many reads of one key under way."""
    tasks = [asyncio.create_task(cache.read("key", server.call, deadline)) for _ in range(number)]
    await asyncio.sleep(0)
    return tasks


async def test_a_leader_that_is_cancelled_does_not_take_the_others_along():
    cache, server = ResultCache(), Server()
    leader, *others = await waiting(cache, server, 4)
    leader.cancel()
    await asyncio.wait({leader})
    server.go_on.set()
    assert [(r.kind, r.cached) for r in await asyncio.gather(*others)] == [("ok", False)] * 3 and server.made == 4
    assert (await cache.read("key", server.call, 1e12)).cached


async def test_after_a_leader_that_fails_the_others_call_at_once():
    cache, server = ResultCache(), Server()
    server.results = [ToolResult(kind="tool_error", text="not found")]
    first, later = asyncio.Event(), asyncio.Event()

    async def call() -> ToolResult:
        server.made += 1
        await (first if server.made == 1 else later).wait()
        return server.results[0]

    reads = [asyncio.create_task(cache.read("key", call, 1e12)) for _ in range(5)]
    await asyncio.sleep(0)
    assert server.made == 1
    first.set()
    await until(lambda: server.made == 5)  # all four of them are under way together
    later.set()
    assert [(r.kind, r.cached) for r in await asyncio.gather(*reads)] == [("tool_error", False)] * 5


async def test_a_result_that_is_stored_twice_takes_its_room_once():
    cache, server = ResultCache(max_bytes=20), Server()  # one result takes 10: "result" and "null"
    leader, *others = await waiting(cache, server, 4)
    leader.cancel()
    server.go_on.set()
    await asyncio.gather(*others)
    assert not (await cache.read("other", server.call, 1e12)).cached
    assert (await cache.read("key", server.call, 1e12)).cached and (await cache.read("other", server.call, 1e12)).cached


class Inbox:
    def __init__(self, owner: str) -> None:
        self.owner = owner

    def read(self) -> str:
        return f"mail of {self.owner}"


async def test_servers_that_are_made_alike_share_no_results():
    alike = [(name, lambda name=name: Inbox(name)) for name in ("alice", "bob")]
    specs = [ServerSpec(name=n, transport="inproc", factory=make, cache_tools=("read",)) for n, make in alike]
    assert specs[0].fingerprint == specs[1].fingerprint
    async with a_hub() as hub:
        workspace = await hub.open(specs)
        assert [await say(workspace, "read", name) for name in ("alice", "bob")] == ["mail of alice", "mail of bob"]


class Board:
    """One value; ``entered`` and ``go_on`` let a test hold a write."""

    entered: asyncio.Event
    go_on: asyncio.Event

    def __init__(self) -> None:
        self.value = "0"

    async def put(self, value: str) -> str:
        Board.entered.set()
        await Board.go_on.wait()
        self.value = value
        return "done"

    async def get(self) -> str:
        return self.value


BOARD = ServerSpec(name="files", transport="inproc", factory=Board, scope="shared", cache_tools=("get",))


async def test_a_replaced_shared_server_leaves_no_results_behind():
    Board.entered, Board.go_on = asyncio.Event(), asyncio.Event()
    spec = replace(BOARD, max_calls=4, call_timeout=0.5)
    async with a_hub() as hub:
        old = await hub.open([spec])
        Board.go_on.set()
        await say(old, "put", value="old")
        Board.go_on.clear()
        for _ in range(2):  # it seems to hang
            assert (await old.call("files", "put", {"value": "late"}, timeout=20.0)).kind == "timeout"
        new = await hub.open([spec])
        assert [await say(old, "get"), await say(new, "get"), await say(old, "get")] == ["old", "0", "old"]


async def test_a_write_that_leases_a_new_shared_server_ends_that_ones_results():
    Board.entered, Board.go_on = asyncio.Event(), asyncio.Event()
    async with a_hub() as hub:
        one, two = [await hub.open([BOARD]) for _ in "12"]
        async with hub.lease(BOARD) as session:
            await session.close()
            session.dead = McpServerError("it has died")
        writing = asyncio.create_task(one.call("files", "put", {"value": "new"}, timeout=20.0))
        await Board.entered.wait()
        assert await say(two, "get") == "0"
        Board.go_on.set()
        assert (await writing).ok and await say(two, "get") == "new"


async def test_nothing_is_kept_after_a_write_whose_answer_could_not_be_delivered(tmp_path: Path):
    log, spec = logged(tmp_path, cache_tools=("peek",), max_message_bytes=60_000)
    async with a_hub() as hub:
        workspace = await hub.open([spec], fill=lambda root: (root / "big").write_text("x" * 70_000) and None)
        assert (await workspace.call("files", "read_file", {"path": "big"}, timeout=20.0)).kind == "too_large"
        for _ in range(2):
            await say(workspace, "peek")
    assert calls(log, "peek") == 2


async def test_who_waits_for_another_has_a_deadline_too():
    cache, server = ResultCache(), Server()
    (leader,) = await waiting(cache, server, 1)
    late = ToolResult(kind="timeout", text="late")

    async def no_time_left() -> ToolResult:
        return late

    assert await cache.read("key", no_time_left, asyncio.get_running_loop().time() + 0.01) is late
    server.go_on.set()
    assert (await leader).ok


@pytest.mark.parametrize("begin, end", [(0, 1), (0, 2), (1, 1), (1, 2)])
async def test_a_read_that_overlaps_a_write_is_not_kept(begin: int, end: int):
    cache, server = ResultCache(), Server()
    steps = {begin: [cache.begin_write]}
    steps.setdefault(end, []).append(lambda: cache.end_write(certain=True))
    for step in steps.get(0, []):
        step()
    (read,) = await waiting(cache, server, 1)
    for step in steps.get(1, []):
        step()
    server.go_on.set()
    assert not (await read).cached
    for step in steps.get(2, []):
        step()
    assert [(await cache.read("key", server.call, 1e12)).cached for _ in range(2)] == [False, True]
    assert server.made == 2


async def test_what_was_used_longest_ago_goes_first():
    cache = ResultCache(max_bytes=30)  # "null" for no structured content counts 4

    async def read(key: str, size: int = 6) -> bool:
        async def call() -> ToolResult:
            return ToolResult(kind="ok", text="x" * size)

        return (await cache.read(key, call, 1e12)).cached

    assert [await read(key) for key in "abcacdaba"] == [False, False, False, True, True, False, True, False, True]
    assert not await read("big", 27) and not await read("big", 27)  # never kept, and it drives nothing out
    assert await read("a")


@given(st.lists(st.tuples(st.sampled_from(["read", "write", "lost"]), *[st.integers(0, 6)] * 3), max_size=20))
def test_a_read_sees_the_world_as_it_was_during_the_read(steps: list[tuple[str, int, int, int]]):
    async def play() -> None:
        cache, world = ResultCache(), 0

        async def turns(number: int) -> None:
            for _ in range(number):
                await asyncio.sleep(0)

        async def ask(before: int, after: int) -> ToolResult:
            await turns(before)
            seen = world
            await turns(after)
            return ToolResult(kind="ok", text=str(seen))

        async def one(kind: str, start: int, before: int, after: int) -> None:
            nonlocal world
            await turns(start)
            if kind == "read":
                first = world
                result = await cache.read("key", lambda: ask(before, after), 1e12)
                assert first <= int(result.text) <= world
                return
            cache.begin_write()
            await turns(before)
            if kind == "lost":  # nobody waits any longer, and it is done all the same
                cache.end_write(certain=False)
            await turns(after)
            world += 1
            if kind == "write":
                cache.end_write(certain=True)

        await asyncio.gather(*(one(*step) for step in steps))

    asyncio.run(play())


# --- results that are recorded -----------------------------------------------------------------------------------


async def episode(tape: Tape, spec: ServerSpec, key: str = "task 1", **options: Any) -> list[Any]:
    """All that an episode can see."""
    async with a_hub(tape=tape) as hub:
        workspace = await hub.open([spec], key=key, fill=lambda root: (root / "a").write_text(key) and None, **options)
        seen: list[Any] = [workspace.tools]
        for tool, arguments in (
            ("read_file", {"path": "/workspace/a"}), ("peek", {}), ("peek", {}), ("count", {}), ("peek", {}),
            ("write_file", {"path": "/workspace/b", "text": "caf\ud800é"}), ("where", {}), ("read_file", {"path": "c"}),
        ):  # fmt: skip
            result = await workspace.call("files", tool, arguments, timeout=20.0)
            seen.append((result.kind, result.text, result.structured, result.cached))
        hub.put(workspace)
    return seen


async def test_a_tape_gives_the_same_without_servers(tmp_path: Path):
    path = tmp_path / "tape.jsonl"
    log, spec = logged(tmp_path, cache_tools=("peek",))
    recorded = [await episode(Tape(path, "record"), spec, key) for key in ("task 1", "task 2")]
    assert recorded[0] != recorded[1] and calls(log, "start") == 2
    replayed = [await episode(Tape(path), spec, key) for key in ("task 2", "task 1", "task 1")]
    assert replayed == [recorded[1], recorded[0], recorded[0]] and calls(log, "start") == 2
    size = path.stat().st_size
    assert await episode(Tape(path, "record"), spec) == recorded[0] and path.stat().st_size == size


async def test_a_tape_holds_on_another_machine_and_no_secret(tmp_path: Path, folder: Path):
    path, elsewhere = tmp_path / "tape.jsonl", tmp_path / "other" / "files.py"
    elsewhere.parent.mkdir()
    shutil.copy(FILES, elsewhere)
    recorded = await episode(Tape(path, "record"), files(env={"TOKEN": "hunter2"}))
    moved = files(command="/no/such/python", args=(*PYTHON[1:], str(elsewhere), "${WORKDIR}"), env={"TOKEN": "other"})
    assert await episode(Tape(path), moved) == recorded
    for secret in ("hunter2", str(folder), FILES):
        assert secret not in path.read_text()


async def test_a_call_that_is_not_on_the_tape_is_an_error(tmp_path: Path):
    path = tmp_path / "tape.jsonl"
    await episode(Tape(path, "record"), files())
    async with a_hub(tape=Tape(path)) as hub:
        workspace = await hub.open([files()], key="task 1")
        assert workspace.root is None and await say(workspace, "read_file", path="/workspace/a") == "task 1"
        with pytest.raises(EnvError, match=r"no answer of 'count' of server 'files' here \(key [0-9a-f]{16}\)"):
            await say(workspace, "count")
        with pytest.raises(EnvError, match="does not know this list of servers"):
            await hub.open([files(deny=("peek",))])
        other = await hub.open([files()], key="another task")
        with pytest.raises(EnvError, match="no answer of 'read_file'"):
            await say(other, "read_file", path="/workspace/a")
        await hub.prewarm([files(scope="pool")], 2)
        assert not descendants()


def test_repeated_calls_and_states_are_told_apart(tmp_path: Path):
    def marks(*steps: str, key: str = "", seed: int = 0, **changes: Any) -> list[str]:
        reel = Tape(tmp_path / "tape", "record").reel([files(**changes)], key, seed)
        return [reel.advance("files", step, {"b": 1, "a": [2]}, reads=step == "read") for step in steps]

    first = marks("read", "read", "write", "read", "write", "read")
    assert len(set(first)) == 6 and first == marks("read", "read", "write", "read", "write", "read")
    assert marks("write", "read")[1] == first[3]  # reads do not change the state
    assert marks("read", key="other") != first[:1] and marks("read", name="other") != first[:1]
    assert marks("read", seed=1) == first[:1]  # nobody has asked for the seed
    assert marks("read", seed=1, env={"S": "${SEED}"}) != marks("read", seed=2, env={"S": "${SEED}"})


async def test_a_lost_server_is_lost_on_the_tape_too(tmp_path: Path):
    for mode in ("record", "replay"):
        async with a_hub(tape=Tape(tmp_path / "tape", mode)) as hub:
            workspace = await hub.open([files()])
            assert not workspace.lost("files")
            assert (await workspace.call("files", "crash", {}, timeout=20.0)).kind == "server_dead"
            assert workspace.lost("files")


async def test_a_torn_tape_is_mended_by_recording(tmp_path: Path):
    path = tmp_path / "tape"
    recorded = await episode(Tape(path, "record"), files())
    whole = path.read_bytes()
    path.write_bytes(whole[: whole[:-1].rindex(b"\n") + 30])  # killed in the middle of the last call
    with pytest.raises(EnvError, match="no answer of 'read_file'"):
        await episode(Tape(path), files())
    assert await episode(Tape(path, "record"), files()) == recorded
    assert path.read_bytes() == whole and len([json.loads(line) for line in whole.splitlines()]) == 9


def test_tapes_that_cannot_be_used_are_refused(tmp_path: Path):
    (tmp_path / "notes").write_text("a\nb\n")
    (tmp_path / "folder").mkdir()
    for path, mode, problem in (
        ("none", "replay", "mode 'record', or with `arenarl env record`"), ("folder", "replay", "is a directory"),
        ("folder", "record", "folder' cannot be used: is a directory"), ("no/tape", "record", "there is no folder .*no'"),
        ("notes/tape", "record", "not a directory"),
        ("notes", "replay", "is not a tape"), ("none", "both", "use 'record' or 'replay'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            Tape(tmp_path / path, mode)


def test_a_folder_that_goes_away_during_a_recording_is_named(tmp_path: Path):
    (tmp_path / "a").mkdir()
    reel = Tape(tmp_path / "a" / "tape", "record").reel([files()], "", 0)
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"tape .*a/tape' cannot be used: there is no folder"):
        reel.record_listing([])
