"""Who gets which session, and how a server is made clean again for the next."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path
from typing import Any

import psutil
import pytest

from arenarl.errors import ConfigError, EnvError, McpServerError
from arenarl.mcp import ServerHub, ServerSpec
from tests.processes import descendants
from tests.workspaces import (
    FILES,
    PYTHON,
    a_hub,
    episode,
    files,
    say,
    server,
    until,
)
from tests.workspaces import clean_folder as clean_folder

# --- hub ---------------------------------------------------------------------------------------------------------


async def test_concurrent_episodes_do_not_see_each_other():
    hub = ServerHub()

    async def episode(calls: int) -> list[str]:
        async with hub.lease(server()) as session:
            return [(await session.call("count", {})).text for _ in range(calls)]

    lengths = [1 + n % 5 for n in range(32)]
    assert await asyncio.gather(*map(episode, lengths)) == [[str(k + 1) for k in range(n)] for n in lengths]
    await hub.aclose()
    assert not descendants()


async def test_shared_server_is_one_and_is_restarted_once_for_all_who_wait(tmp_path: Path):
    log = tmp_path / "log"
    spec, hub = server(scope="shared", env={"FAULTY_LOG": str(log)}), ServerHub()

    async def once(tool: str) -> str:
        async with hub.lease(spec) as session:
            return (await session.call(tool, {})).text

    assert sorted(await asyncio.gather(*(once("count") for _ in range(8)))) == [str(n + 1) for n in range(8)]
    assert await once("exit") == "Error: the tool server has stopped."
    assert sorted(await asyncio.gather(*(once("count") for _ in range(4)))) == ["1", "2", "3", "4"]
    await hub.aclose()
    assert log.read_text().split() == ["start", *["count"] * 8, "exit", "start", *["count"] * 4]  # no call twice
    assert not descendants()


async def test_shared_server_that_never_starts_is_given_up(tmp_path: Path):
    log = tmp_path / "log"
    spec, hub = server("--start", "exit", scope="shared", env={"FAULTY_LOG": str(log)}), ServerHub()
    for _ in range(3):
        with pytest.raises(McpServerError, match="missing API key"):
            await hub.acquire(spec)
    with pytest.raises(McpServerError, match=r"failed 3 times in a row and is not started again.*missing API key"):
        await hub.acquire(spec)
    await hub.aclose()
    assert log.read_text().split() == ["start"] * 3


async def test_hanging_shared_server_is_replaced_for_the_next_lease():
    spec, hub = server(scope="shared", call_timeout=0.3, close_grace=0.1), ServerHub()
    async with hub.lease(spec) as old:
        for _ in range(2):
            assert (await old.call("hang", {})).kind == "timeout"
        async with hub.lease(spec) as new:
            assert new is not old
            assert (await new.call("count", {})).text == "1"
    await hub.aclose()
    assert not descendants()


async def test_aclose_ends_starts_in_flight_and_refuses_new_ones():
    before, hub = asyncio.all_tasks(), ServerHub(spawn_width=1)
    waiting = [asyncio.create_task(hub.acquire(server("--start", "slow", close_grace=0.1))) for _ in range(3)]
    await asyncio.wait(waiting, timeout=0.2)  # the first is starting, the others wait for it
    assert descendants()
    await hub.aclose()
    await hub.aclose()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [McpServerError] * 3
    with pytest.raises(McpServerError, match="closed"):
        await hub.acquire(server())
    assert not descendants() and asyncio.all_tasks() == before


async def test_cancelled_waiter_does_not_stop_a_shared_start_for_the_others():
    spec, hub = server(scope="shared"), ServerHub()
    first, second = (asyncio.create_task(hub.acquire(spec)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await (await second).call("count", {})).text == "1"
    assert first.cancelled()
    await hub.aclose()
    assert not descendants()


def test_hub_belongs_to_one_loop():
    hub = ServerHub()

    async def use() -> None:
        async with hub.lease(ServerSpec(name="c", transport="inproc", factory=make_counter)):
            pass

    asyncio.run(use())
    with pytest.raises(EnvError, match="one hub per loop"):
        asyncio.run(use())


def make_counter() -> Any:
    from mcp.server import MCPServer

    return MCPServer("counter")


# --- the pool ----------------------------------------------------------------------------------------------------


async def test_no_file_of_an_episode_is_seen_by_the_next(tmp_path: Path):
    log, drawn = tmp_path / "log", random.Random(5)
    spec = files(scope="pool", env={"FILES_LOG": str(log)})
    async with a_hub() as hub:

        async def worker(n: int) -> None:
            for k in range(10):
                task = f"task {n}.{k}"
                workspace = await hub.open(
                    [spec], fill=lambda root, task=task: (root / "task").write_text(task) and None
                )
                assert await say(workspace, "list") == "task"
                assert workspace.root is not None and os.listdir(workspace.root.parent) == ["workspace"]
                assert await say(workspace, "read_file", path="/workspace/task") == task
                for _ in range(drawn.randrange(4)):
                    path = "/".join(drawn.choices(["a", "..a", ".b", "ü", "task.d"], k=drawn.randint(1, 4)))
                    await say(workspace, "write_file", path=path, text=task)
                if drawn.random() < 0.3:
                    (workspace.root / "link").symlink_to("/")
                    (workspace.root.parent / "beside").write_text(task)
                hub.put(workspace)

        await asyncio.gather(*map(worker, range(4)))
    assert log.read_text().split().count("start") == 4  # the fifth episode found the first one's server


async def test_pooled_server_keeps_its_memory_unless_it_is_reset_too(tmp_path: Path):
    log = tmp_path / "log"
    starts = {"files": (["1", "2", "3"], 1), "tool": (["1"] * 3, 1), "respawn": (["1"] * 3, 4)}
    for reset, (counts, started) in starts.items():
        log.write_text("")
        spec = files(
            scope="pool", reset=reset, reset_tool="reset" if reset == "tool" else None, env={"FILES_LOG": str(log)}
        )
        async with a_hub() as hub:
            done = [await episode(hub, spec, "count") for _ in range(3)]
            await hub.open([spec])  # what is in the pool is ready
            assert log.read_text().split().count("start") == started
        assert [said for _, said in done] == [[count] for count in counts] and len({root for root, _ in done}) == 1


@pytest.mark.parametrize("reset, seen", [("files", "task"), ("respawn", "started\ntask")])
async def test_the_first_episode_of_a_pooled_server_sees_what_later_ones_do(reset: str, seen: str):
    spec = files(scope="pool", reset=reset, env={"FILES_AT_START": "started"})
    async with a_hub() as hub:
        for _ in range(3):
            _, said = await episode(hub, spec, "list", fill=lambda root: (root / "task").write_text("") and None)
            assert said == [seen]


@pytest.mark.parametrize("ahead", [None, "empty", "filled"])
async def test_a_server_that_is_started_anew_always_starts_in_the_filled_directory(tmp_path: Path, ahead: str | None):
    log = tmp_path / "log"
    known = {"FILES_LOG": str(log), "FILES_NOTE_AT_START": "yes", "FILES_AT_START": "started"}
    spec = files(scope="pool", reset="respawn", env=known)

    def fill(root: Path) -> None:
        (root / "task").write_text("")

    async with a_hub() as hub:
        if ahead is not None:
            await hub.prewarm([spec], 1, fill=fill if ahead == "filled" else None)
        roots = {(await episode(hub, spec, "list", fill=fill))[0] for _ in range(3)}
    found = [line for line in log.read_text().splitlines() if line.startswith("finds")]
    assert found == ["finds []"] * (ahead == "empty") + ["finds ['task']"] * 3 and len(roots) == 1


async def test_names_of_tools_that_a_server_does_not_have_are_refused():
    async with a_hub() as hub:
        for changes, problem in (
            ({"scope": "pool", "reset": "tool", "reset_tool": "rest"}, "reset_tool names 'rest'.*did you mean 'reset'"),
            ({"cache_tools": ("peek", "lisst")}, "cache_tools names 'lisst'.*did you mean 'list'"),
            ({"cache_tools": ("peak",), "scope": "shared", "args": (*PYTHON[1:], FILES)}, "did you mean 'peek'"),
        ):
            with pytest.raises(ConfigError, match=problem):
                await hub.open([files(**changes)])
        await hub.open([files(cache_tools=("peek", "git_status"))])  # a profile's, of another version


async def test_tool_that_resets_is_not_offered_and_its_failure_ends_the_server():
    spec = files(scope="pool", reset="tool", reset_tool="reset")
    async with a_hub() as hub:
        workspace = await hub.open([spec])
        assert "reset" not in [tool.name for tool in workspace.tools] and len(workspace.tools) == 13
        await say(workspace, "fail_reset")
        hub.put(workspace)
        root, said = await episode(hub, spec, "count", "count")
        assert root != workspace.root and said == ["1", "2"]


@pytest.mark.parametrize("tool", ["crash", "add_tool", "detach"])
async def test_pooled_server_in_doubt_is_not_handed_on(tool: str):
    spec = files(scope="pool")
    async with a_hub() as hub:
        first, _ = await episode(hub, spec, "count", tool)
        second, said = await episode(hub, spec, "count", "list")
        assert second != first and said == ["1", ""]


async def test_pooled_server_that_may_still_be_writing_is_not_handed_on():
    spec = files(scope="pool", close_grace=0.1)
    async with a_hub() as hub:
        workspace = await hub.open([spec])
        assert (await workspace.call("files", "hang", {}, timeout=0.2)).kind == "timeout"
        hub.put(workspace)
        other = await hub.open([spec])
        calling = asyncio.create_task(other.call("files", "hang", {}, timeout=20.0))
        await asyncio.sleep(0)
        hub.put(other)
        root, said = await episode(hub, spec, "count")
        assert said == ["1"] and len({root, workspace.root, other.root}) == 3
        assert (await calling).kind == "server_dead"


async def test_pooled_server_is_replaced_when_it_is_worn_out():
    async with a_hub() as hub:
        done = [await episode(hub, files(scope="pool", max_uses=2), "count") for _ in range(5)]
    assert [said for _, said in done] == [["1"], ["2"], ["1"], ["2"], ["1"]]
    assert len({root for root, _ in done}) == 3


async def test_pooled_server_that_died_at_rest_is_replaced():
    async with a_hub() as hub:
        workspace = await hub.open([files(scope="pool")])
        hub.put(workspace)
        again = await hub.open([files(scope="pool")])
        hub.put(again)
        assert again.slot is not None and again.root == workspace.root
        for process in descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        session = again.slot.sessions["files"]
        await until(lambda: session.dead is not None)
        assert (await episode(hub, files(scope="pool"), "count"))[1] == ["1"]


def test_pooled_server_lists_its_tools_again_after_a_long_rest(tmp_path: Path):
    class Clock(asyncio.SelectorEventLoop):
        ahead = 0.0

        def time(self) -> float:
            return super().time() + self.ahead

    log = tmp_path / "log"
    spec = files(scope="pool", env={"FILES_LOG": str(log)})

    async def rest() -> list[Path | None]:
        loop, roots = asyncio.get_running_loop(), []
        async with a_hub() as hub:
            for seconds in (59.0, 61.0, 61.0):
                workspace = await hub.open([spec])
                roots.append(workspace.root)
                tasks = asyncio.all_tasks()
                hub.put(workspace)
                await until(lambda: asyncio.all_tasks() == tasks)  # noqa: B023 until it is clean
                assert isinstance(loop, Clock)
                loop.ahead += seconds
            roots.append((await episode(hub, spec))[0])
        return roots

    with asyncio.Runner(loop_factory=Clock) as runner:
        assert len(set(runner.run(rest()))) == 1
    assert log.read_text().split() == ["start", *["tools/list"] * 3]


async def test_who_stops_waiting_for_a_slot_leaves_it_to_the_next(tmp_path: Path):
    log = tmp_path / "log"
    spec = files(scope="pool", env={"FILES_LOG": str(log)})
    async with a_hub() as hub:
        root, _ = await episode(hub, spec, "count")
        opening = asyncio.create_task(hub.open([spec]))
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        assert opening.cancelled() and await episode(hub, spec, "count") == (root, ["2"])


async def test_pooled_and_own_servers_work_in_one_directory():
    specs = [files(name="kept", scope="pool"), files(name="own")]
    async with a_hub() as hub:
        roots = []
        for n in range(2):
            workspace = await hub.open(specs)
            await say(workspace, "write_file", "kept", path="a.txt", text="from kept")
            assert await say(workspace, "read_file", "own", path="/workspace/a.txt") == "from kept"
            assert [await say(workspace, "count", name) for name in ("kept", "own")] == [str(n + 1), "1"]
            roots.append(workspace.root)
            hub.put(workspace)
    assert roots[0] == roots[1]


async def test_prewarmed_servers_are_handed_out_clean(tmp_path: Path):
    log = tmp_path / "log"
    spec = files(scope="pool", env={"FILES_LOG": str(log)})
    async with a_hub() as hub:
        await hub.prewarm([spec], 3, fill=lambda root: (root / "needed").write_text("x") and None)
        assert log.read_text().split().count("start") == 3
        workspaces = [await hub.open([spec]) for _ in range(3)]
        assert [await say(w, "list") for w in workspaces] == [""] * 3 and len({w.root for w in workspaces}) == 3
        assert log.read_text().split().count("start") == 3
        with pytest.raises(McpServerError, match="missing API key"):
            await hub.prewarm([server("--start", "exit", scope="pool")], 2)
