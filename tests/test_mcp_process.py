"""Server processes: how they start, what they share, and that none is left, whoever is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from arenarl.errors import McpServerError
from arenarl.mcp import McpSession, ServerHub, ServerSpec
from arenarl.mcp.nursery import hold
from tests.processes import descendants

ROOT = Path(__file__).resolve().parent.parent
SERVERS = ROOT / "tests" / "servers"


def server(*args: str, script: str = "faulty.py", **changes: Any) -> ServerSpec:
    values = {"name": "s", "command": sys.executable, "args": ("-I", "-S", str(SERVERS / script), *args)}
    return ServerSpec(**(values | {"call_timeout": 20.0} | changes))


@contextlib.asynccontextmanager
async def running(*specs: ServerSpec):
    sessions = [McpSession(spec) for spec in specs]
    try:
        await asyncio.gather(*(session.start() for session in sessions))
        yield sessions
    finally:
        await asyncio.gather(*(session.close() for session in sessions))


def links(pid: int) -> dict[int, str]:
    """The open descriptors of a process."""
    return {int(fd.name): os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}


def status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def nursery() -> psutil.Process:
    """The one process that this one has started for all its servers."""
    (found,) = [process for process in descendants() if process.ppid() == os.getpid()]
    return found


def processes(script: str) -> list[psutil.Process]:
    return [process for process in descendants() if script in " ".join(process.cmdline())]


# --- what a server gets ------------------------------------------------------------------------------------------


async def test_counters_of_32_concurrent_servers_never_mix():
    hub = ServerHub()
    spec = server(script="plain.py")
    sessions = await asyncio.gather(*(hub.acquire(spec) for _ in range(32)))

    async def count(session: McpSession, calls: int) -> list[str]:
        return [(await session.call("count", {})).text for _ in range(calls)]

    counts = await asyncio.gather(*(count(session, n % 7) for n, session in enumerate(sessions)))
    assert counts == [[str(i + 1) for i in range(n % 7)] for n in range(32)]
    await hub.aclose()
    assert not descendants()


async def test_server_holds_its_three_pipes_and_nothing_else():
    async with running(*[server(script="plain.py")] * 3):
        ends = [links(process.pid) for process in processes("plain.py")]
        above = [links(process.pid) for process in processes("supervise.py")]
    assert [set(held) for held in ends] == [{0, 1, 2}] * 3
    pipes = [link for held in ends for link in held.values()]
    assert len(set(pipes)) == 9 and all(link.startswith("pipe:") for link in pipes)
    assert not [link for held in above for link in held.values() if link in pipes]
    assert [len(held) for held in above] == [
        6 + 3,
        6,
        6,
        6,
    ]  # standard, wake (2), channel; the nursery: 3 control sockets
    assert not descendants()


async def test_server_runs_where_and_as_its_client_says(tmp_path: Path):
    (tmp_path / "inner").mkdir()
    held = hold()  # it runs before the folder changes
    with contextlib.chdir(tmp_path):
        async with running(server(script="plain.py"), server(script="plain.py", cwd="inner", env={"A": "é\udc80"})):
            here, inner = sorted(processes("plain.py"), key=lambda process: process.cwd())
            assert (here.cwd(), inner.cwd()) == (str(tmp_path), str(tmp_path / "inner"))
            assert set(inner.environ()) - {"A"} == set(here.environ()) <= {*"HOME LOGNAME PATH SHELL TERM USER".split()}
            assert inner.environ()["A"] == "é\udc80"
            assert here.nice() == psutil.Process().nice()
            assert os.getpgid(here.pid) == here.pid and os.getsid(here.pid) == here.ppid()
    await held.release()
    assert not descendants()


async def test_large_launch_arrives_and_a_too_large_one_is_refused():
    env = {f"V{n}": "x" * 100_000 for n in range(8)}
    async with running(server(script="plain.py", env=env)) as (session,):
        assert (await session.call("count", {})).text == "1"
    with pytest.raises(McpServerError, match=r"cannot run its command \(\[Errno 7\] Argument list too long\)"):
        await McpSession(server(env={"V": "x" * 200_000})).start()
    assert not descendants()


async def test_limit_of_open_files_is_named_and_leaves_nothing():
    async with running(server(script="plain.py")):
        limits, files = resource.getrlimit(resource.RLIMIT_NOFILE), os.listdir("/proc/self/fd")
        os.close(free := os.dup(0))  # the lowest number that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 6, limits[1]))
        try:
            with pytest.raises(McpServerError, match=r"a server takes 4 of them; raise the limit \(ulimit -n\)"):
                await McpSession(server(script="plain.py")).start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert os.listdir("/proc/self/fd") == files
    assert not descendants()


async def test_nursery_may_open_what_the_system_allows_and_servers_what_their_client_may():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))  # as it is before a program raises it
    try:
        held = hold()
        async with running(server(script="plain.py")):
            (child,), own = processes("plain.py"), nursery().pid
            assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (100, limits[1])
            assert resource.prlimit(own, resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await held.release()
    assert not descendants()


@pytest.mark.parametrize("room", [1, 3, 6])
async def test_nursery_that_can_open_no_more_files_refuses_a_server_and_keeps_the_others(room: int):
    async with running(server(script="plain.py")) as (session,):
        own = nursery().pid
        free = sorted(set(range(100)) - set(links(own)))
        limit = free[room]  # a request brings 6, and takes one more
        resource.prlimit(own, resource.RLIMIT_NOFILE, (limit, limit))
        with pytest.raises(McpServerError, match=r"no room for another server: .*Too many open files"):
            await McpSession(server(script="plain.py")).start()
        assert (await session.call("count", {})).text == "1" and nursery().pid == own
    assert not descendants()


# --- the nursery -------------------------------------------------------------------------------------------------


async def test_one_nursery_serves_all_and_lives_while_it_is_held():
    held = hold()
    try:
        pid = nursery().pid
        for _ in range(3):
            async with running(server(script="plain.py")):
                assert nursery().pid == pid and len(descendants()) == 3
            assert [process.pid for process in descendants()] == [pid]
    finally:
        await held.release()
    assert not descendants()


def test_threads_with_loops_of_their_own_share_the_nursery():
    pids, both = [], threading.Barrier(2)

    async def use() -> None:
        async with running(server(script="plain.py")) as (session,):
            await asyncio.to_thread(both.wait)
            pids.append(nursery().pid)
            assert (await session.call("count", {})).text == "1"
            await asyncio.to_thread(both.wait)

    threads = [threading.Thread(target=asyncio.run, args=(use(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pids) == 2 and pids[0] == pids[1]
    assert not descendants()


async def test_server_outlives_the_thread_that_started_the_nursery():
    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM})
        hold()

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    async with running(server(script="plain.py")) as (session,):
        pid = nursery().pid
        (plain,) = processes("plain.py")
        assert "SigBlk:\t0000000000000000\n" in status(plain.pid)
        assert (await session.call("count", {})).text == "1"
        held = hold()
        await held.release()
        assert nursery().pid == pid
    held = hold()
    await held.release()
    await held.release()  # the thread's
    assert not descendants()


FORK = """
import asyncio, os, sys
from arenarl.mcp import McpSession, ServerSpec
spec = ServerSpec(name="p", command=sys.executable, args=("-I", "-S", sys.argv[1]))

async def parent():
    session = await McpSession(spec).start()
    await session.call("count", {})
    child = os.fork()
    if child == 0:
        asyncio.events._set_running_loop(None)
        asyncio.run(alone())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (await session.call("count", {})).text == "2"
    await session.close()

async def alone():
    session = await McpSession(spec).start()
    assert (await session.call("count", {})).text == "1"
    await session.close()
    assert not os.popen(f"ps -o pid= --ppid {os.getpid()}").read().split()[1:]  # the one is ps's shell

asyncio.run(parent())
print("both lived and left nothing")
"""


def test_forked_copy_gets_a_nursery_of_its_own():
    command = [sys.executable, "-c", FORK, str(SERVERS / "plain.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert (done.returncode, done.stdout) == (0, "both lived and left nothing\n"), done.stderr


async def test_killed_nursery_ends_its_servers_with_a_reason_and_the_next_works():
    async with running(server("--start", "family"), server()) as sessions:
        family = descendants()
        assert len(family) == 1 + 4 + 2
        nursery().kill()
        answers = await asyncio.gather(*(session.call("hang", {}) for session in sessions))
        assert [answer.kind for answer in answers] == ["server_dead"] * 2
        async with running(server(script="plain.py")) as (fresh,):
            assert (await fresh.call("count", {})).text == "1"
    for session in sessions:
        assert "'s' was ended: the process that looks after all tool servers is gone" in str(session.dead)
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert not descendants()


async def test_killed_supervisor_ends_its_family_only():
    async with running(server("--start", "family")) as (session,):
        (supervisor,) = nursery().children()
        family = supervisor.children(recursive=True)
        assert len(family) == 3  # server, grandchild, daemon
        async with running(server(script="plain.py")) as (neighbour,):
            supervisor.kill()
            assert (await session.call("hang", {})).kind == "server_dead"
            assert (await neighbour.call("count", {})).text == "1"
    assert "was ended: its supervisor ended with code -9" in str(session.dead)
    assert not [process for process in family if process.is_running()]
    assert not descendants()


async def test_supervisor_that_hangs_is_killed_with_its_family():
    async with running(server("--start", "family", close_grace=0.1)):
        family = descendants()
        family[1].suspend()
    assert not [process for process in family if process.is_running()]


# --- ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["ignore_eof", "ignore_all", "family"])
async def test_close_leaves_no_process_whatever_the_server_ignores(fault: str):
    session = await McpSession(server("--start", fault, close_grace=0.2)).start()
    family = descendants()
    assert len(family) == {"ignore_eof": 3, "ignore_all": 3, "family": 5}[fault]  # nursery, supervisor, server, ...
    await session.close()
    await session.close()
    assert not [process for process in family if process.is_running()]


async def test_server_that_closes_stdout_and_lives_is_ended():
    async with running(server(close_grace=0.1)) as (session,):
        assert (await session.call("close_stdout", {})).kind == "server_dead"
    assert "was killed by signal 15" in str(session.dead)
    assert not descendants()


async def test_64_sessions_of_which_two_thirds_misbehave_leave_nothing():
    async with running(server()):
        pass  # what the first session of a process opens for good
    files, tasks = os.listdir("/proc/self/fd"), asyncio.all_tasks()

    async def use(session: McpSession, fault: str) -> list[str]:
        first = await session.call("count", {})
        await session.call(fault, {})
        return [result.text if result.ok else result.kind for result in (first, await session.call("count", {}))]

    faults = [["count", "exit", "not_utf8", "count", "close_stdout", "bad_json"][n % 6] for n in range(64)]
    async with running(*[server(close_grace=0.2)] * 64) as sessions:
        counts = await asyncio.gather(*(use(session, fault) for session, fault in zip(sessions, faults, strict=True)))
        assert len(descendants()) <= 1 + 2 * 64
    after = {"count": "3", "exit": "server_dead", "close_stdout": "server_dead", "not_utf8": "2", "bad_json": "2"}
    assert counts == [["1", after[fault]] for fault in faults]
    assert [session.dead is not None for session in sessions] == [after[fault] == "server_dead" for fault in faults]
    assert not descendants()
    assert asyncio.all_tasks() == tasks
    assert os.listdir("/proc/self/fd") == files


async def test_session_lives_and_ends_in_any_task_and_leaks_nothing():
    rng, complaints = random.Random(0), []
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    loop.set_exception_handler(lambda _, context: complaints.append(context))

    async def torment() -> None:
        session = McpSession(server(call_timeout=rng.random() * 0.2, close_grace=0.1))

        async def use() -> None:
            await session.start()
            while True:
                await session.call(rng.choice(["echo", "hang", "exit", "close_stdout"]), {})

        user = asyncio.create_task(use())
        await asyncio.wait({user}, timeout=rng.random() * rng.choice([0.2, 2]))
        user.cancel()
        closers = [asyncio.create_task(session.close()) for _ in range(3)]
        await asyncio.sleep(0)
        closers[0].cancel()
        await asyncio.wait({user, *closers})
        assert user.cancelled() and closers[0].cancelled() and closers[1].exception() is None

    for _ in range(4):
        await asyncio.gather(*(torment() for _ in range(6)))
    loop.set_exception_handler(None)
    assert complaints == []
    assert not descendants()
    assert asyncio.all_tasks() == before


def test_loop_that_ends_with_sessions_open_leaves_no_process():
    async def forget() -> list[psutil.Process]:
        for _ in range(2):
            await McpSession(server("--start", "family")).start()
        return descendants()

    family = asyncio.run(forget())
    assert len(family) == 1 + 2 * 4
    assert not psutil.wait_procs(family, timeout=20)[1]


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_no_descendant_survives_a_killed_parent(how: str):
    command = [sys.executable, str(SERVERS / "parent.py"), "16", how]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        told = json.loads(parent.stdout.readline())
        family = [psutil.Process(pid) for pid in told["family"]]
        parent.send_signal(signal.SIGKILL)
    try:
        assert len(family) == 1 + 16 * 5  # the nursery; supervisor, shell, server, grandchild, daemon
        assert not psutil.wait_procs(family, timeout=5)[1]
    finally:
        if told["copy"]:
            os.kill(told["copy"], signal.SIGKILL)
