"""How many servers start at once: those that compute are bounded, those that wait are not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from arenarl.mcp.spawn import SpawnGate, resting_ticks

BUSY, RESTING = "while True: pass", "import time; time.sleep(1000)"


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code])


async def second_place(first: int | None) -> bool:
    """Whether another start gets the only place while the first one's block is not left."""
    gate = SpawnGate(1)
    async with gate.place(lambda: first):
        waiting = asyncio.create_task(gate.place(os.getpid).__aenter__())
        await asyncio.wait({waiting}, timeout=20.0 if first else 0.3)
        got = waiting.done()
    waiting.cancel()
    return got


async def test_a_server_that_waits_gives_its_place_up():
    with start(RESTING) as process:
        assert await second_place(process.pid)
        process.kill()


async def test_a_place_is_kept_while_nothing_is_known_of_the_server():
    assert not await second_place(None)


def test_a_family_rests_only_if_all_of_it_does():
    shell = f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-S', '-c', {BUSY!r}])"
    with start(shell) as parent:
        try:
            while not (children := _children(parent.pid)):
                pass
            samples = {resting_ticks(parent.pid) for _ in range(200)}
        finally:
            for pid in _children(parent.pid):
                os.kill(pid, 9)
            parent.kill()
    assert len(children) == 1 and samples == {None}
    assert resting_ticks(parent.pid) is None  # gone


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(number) for number in file.read().split()]


async def test_places_are_given_back_whatever_happens():
    gate, had = SpawnGate(1), 0
    for _ in range(3):
        with pytest.raises(KeyError):
            async with asyncio.timeout(20.0), gate.place(lambda: None):
                had += 1
                raise KeyError
    async with asyncio.timeout(20.0), gate.place(lambda: None):
        waiting = asyncio.create_task(gate.place(lambda: None).__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
    async with asyncio.timeout(20.0), gate.place(lambda: None):
        had += 1
    assert had == 4 and waiting.cancelled()
