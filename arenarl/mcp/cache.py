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


def result_key(fingerprint: str, tool: str, arguments: Mapping[str, Any]) -> str:
    """What two calls must have in common for one result to serve both: server, tool and arguments."""
    return hashlib.sha256(canonical([fingerprint, tool, arguments]).encode()).hexdigest()


class ResultCache:
    """The successful reads of one state of the world. A write ends it, at its start and again at its end.

    So a read that overlaps a write is never kept. Equal reads that overlap share one call; if that call fails or is
    cancelled, each of the others makes its own. What was used longest ago goes first when there is no room.

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
        while not self._writing:
            if key in self._stored:
                self._stored.move_to_end(key)
                return replace(self._stored[key][0], cached=True, seconds=clock() - began)
            if (flight := self._flights.get(key)) is None:
                return await self._lead(key, call)
            await asyncio.wait({flight}, timeout=max(deadline - clock(), 0.0))
            if not flight.done():
                break
            if (result := flight.result()) is not None:
                return replace(result, cached=True, seconds=clock() - began)
        return await call()

    async def _lead(self, key: str, call: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        epoch = self._epoch
        flight = self._flights[key] = asyncio.get_running_loop().create_future()
        kept: ToolResult | None = None
        try:
            result = await call()
            if result.ok and epoch == self._epoch:
                kept = result
                self._store(key, result)
            return result
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.set_result(kept)

    def _store(self, key: str, result: ToolResult) -> None:
        size = len(result.text.encode("utf-8", "replace")) + len(canonical(result.structured))
        if size > self._max_bytes:
            return
        self._stored[key] = (result, size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._stored.popitem(last=False)[1][1]

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._stored.clear()
        self._flights.clear()
        self._bytes = 0
