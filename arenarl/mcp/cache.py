"""Results of tools that only read, kept until something may have been written."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from arenarl.types import ToolResult

DEFAULT_BYTES = 16 << 20


def canonical(value: Any) -> str:
    """One text for equal JSON data."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def result_key(server: str, fingerprint: str, tool: str, arguments: Mapping[str, Any]) -> str:
    """What two calls must have in common for one result to serve both: server, tool and arguments.

    The server's name counts too: two of one command may each have a state of their own.
    """
    return hashlib.sha256(canonical([server, fingerprint, tool, arguments]).encode()).hexdigest()


class ResultCache:
    """The successful reads of one state of the world. A write ends it, at its start and again at its end.

    So a read that overlaps a write is never kept. Equal reads that overlap share one call; if that call fails or is
    cancelled, each of the others makes its own, at once. What was used longest ago goes first when there is no room.

    Args:
        max_bytes: of texts and structured contents.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, tuple[ToolResult, int]] = OrderedDict()
        self._bytes = 0
        self._flights: dict[str, asyncio.Future[ToolResult | None]] = {}
        self._epoch = 0
        self._writing = 0

    def begin_write(self) -> None:
        """A call is sent that may change what reads answer."""
        self._writing += 1
        self._next_epoch()

    def end_write(self, *, certain: bool) -> None:
        """That call has ended. If it is not ``certain`` that its server is done with it, nothing is kept from now on."""
        self._writing -= certain
        self._next_epoch()

    async def read(self, key: str, call: Callable[[], Awaitable[ToolResult]], deadline: float) -> ToolResult:
        """The result that is kept or on its way, else that of ``call``.

        Args:
            deadline: in the loop's time; ``call`` is expected to know it too.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        if self._writing:
            return await call()
        if key in self._stored:
            self._stored.move_to_end(key)
            return replace(self._stored[key][0], cached=True, seconds=clock() - began)
        if (flight := self._flights.get(key)) is None:
            return await self._lead(key, call)
        await asyncio.wait({flight}, timeout=max(deadline - clock(), 0.0))
        if flight.done() and (result := flight.result()) is not None:
            return replace(result, cached=True, seconds=clock() - began)
        return (await self._make(key, call))[0]

    async def _make(self, key: str, call: Callable[[], Awaitable[ToolResult]]) -> tuple[ToolResult, bool]:
        """(result, whether it is that of a world nobody wrote to meanwhile, and kept)."""
        epoch, quiet = self._epoch, not self._writing
        result = await call()
        kept = result.ok and quiet and epoch == self._epoch
        if kept:
            self._store(key, result)
        return result, kept

    async def _lead(self, key: str, call: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        flight = self._flights[key] = asyncio.get_running_loop().create_future()
        shown: ToolResult | None = None
        try:
            result, kept = await self._make(key, call)
            shown = result if kept else None
            return result
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.set_result(shown)

    def _store(self, key: str, result: ToolResult) -> None:
        size = len(result.text.encode("utf-8", "replace")) + len(canonical(result.structured))
        if size > self._max_bytes:
            return
        if key in self._stored:  # by another of the same key that made its own call
            self._bytes -= self._stored.pop(key)[1]
        self._stored[key] = (result, size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._stored.popitem(last=False)[1][1]

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._stored.clear()
        self._flights.clear()
        self._bytes = 0
