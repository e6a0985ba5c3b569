"""How many servers may be starting at once: one for each CPU, where those that only wait do not count.

Python and Node servers start by computing; more of them at once than there are CPUs only makes all of them late. A server
that waits while it starts, for its network or for a lock, keeps no CPU busy, so the next one need not wait for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_LOOK_SECONDS = 0.02  # two clock ticks of /proc/PID/stat


class SpawnGate:
    """Hands out ``width`` places on one event loop."""

    def __init__(self, width: int) -> None:
        self._places = asyncio.Semaphore(width)

    @asynccontextmanager
    async def place(self, pid: Callable[[], int | None]) -> AsyncIterator[None]:
        """A place for the length of the block, given up earlier if the process and all below it rest.

        Args:
            pid: of the process that starts, or None as long as there is none.
        """
        await self._places.acquire()
        watch = asyncio.create_task(_until_it_rests(pid))
        watch.add_done_callback(lambda _: self._places.release())
        try:
            yield
        finally:
            watch.cancel()


async def _until_it_rests(pid: Callable[[], int | None]) -> None:
    before: int | None = None
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        number = pid()
        ticks = None if number is None else resting_ticks(number)
        if ticks is not None and ticks == before:
            return
        before = ticks


def resting_ticks(pid: int) -> int | None:
    """Clock ticks that a process and its descendants have computed so far; None if one of them runs now, or is gone."""
    ticks, pending = 0, [pid]
    try:
        while pending:
            number = pending.pop()
            with open(f"/proc/{number}/stat") as file:
                state, *fields = file.read().rpartition(")")[2].split()
            if state != "S":
                return None
            ticks += int(fields[10]) + int(fields[11])
            for thread in os.listdir(f"/proc/{number}/task"):
                with open(f"/proc/{number}/task/{thread}/children") as file:
                    pending += map(int, file.read().split())
    except OSError:
        return None
    return ticks
