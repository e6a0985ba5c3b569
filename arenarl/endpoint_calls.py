"""What every endpoint does around its requests, from the outside in: the deadline, the cache, the queue, the budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from arenarl.endpoint_budget import Budget, Usage, check_positive
from arenarl.reply_cache import ReplyCache

OutageKind = Literal["timeout", "rate_limited", "unavailable", "refused", "protocol", "budget"]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a model answered.

    Attributes:
        finish_reason: "length" says that the text is cut.
        prompt_tokens, completion_tokens, calls: what it took, over all requests; 0 if it cost nothing.
        seconds: of the whole call, waits and retries included.
        cached: from the cache, or from an identical request in flight.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0
    seconds: float = 0.0
    cached: bool = False


@dataclass(frozen=True, kw_only=True)
class Outage:
    """Why there is no reply.

    Attributes:
        kind: timeout (not in time), rate_limited (429 to the end), unavailable (5xx, no connection, or a local engine that
            does not run), refused (the request will never be answered), protocol (the answer is no chat completion), budget
            (that of the step is used up).
        detail: in words, with what the server said.
        prompt_tokens, completion_tokens, calls, seconds: as in `Reply`.
    """

    kind: OutageKind
    detail: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0
    seconds: float = 0.0


@dataclass
class _Here:
    """What belongs to the event loop that uses the endpoint."""

    loop: asyncio.AbstractEventLoop
    slots: asyncio.Semaphore
    flights: dict[str, asyncio.Future[Reply | Outage | None]] = field(default_factory=dict)
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # set once: the next wait has a new one


Send = Callable[[Usage, float], Awaitable[Reply | Outage]]  # books into the usage; ends by the loop time


class Calls:
    """Deadline, cache, queue and budget around the requests of one endpoint.

    A call waits for one of `max_concurrency` slots and keeps it until it has ended, the waits between its requests included: a
    server that asks for patience gets it. While the budget might still suffice a call waits for those in flight to settle.
    Calls for the same thing at the same time are one call if there is a cache, and only whole replies are kept in it.

    Raises:
        ConfigError: a number is not positive, or the cache cannot be where it should.
    """

    def __init__(self, *, max_concurrency: int, deadline_s: float, budget: Budget, cache: str | None) -> None:
        check_positive(deadline_s=deadline_s)
        check_positive(int, max_concurrency=max_concurrency)
        self._max_concurrency, self._deadline_s = max_concurrency, deadline_s
        self.budget = budget
        self.cache = None if cache is None else ReplyCache(cache)
        self._last: _Here | None = None

    async def run(self, key: str, most: Usage, send: Send) -> Reply | Outage:
        """What ``send`` answers, or the cache, with the account filled in.

        Args:
            key: two calls with one key are the same request.
            most: what one request may use.
        """
        began, used = time.perf_counter(), Usage()
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        try:
            async with asyncio.timeout_at(deadline):
                result = await self._once(key, most, lambda: send(used, deadline), used)
        except TimeoutError:
            where = "the last one unfinished" if used.calls else "still waiting for its turn"
            result = Outage(kind="timeout", detail=f"{used.calls} requests in {self._deadline_s} s, {where}")
        return replace(
            result,
            calls=used.calls,
            prompt_tokens=used.prompt_tokens,
            completion_tokens=used.completion_tokens,
            seconds=time.perf_counter() - began,
        )

    async def _once(
        self, key: str, most: Usage, send: Callable[[], Awaitable[Reply | Outage]], used: Usage
    ) -> Reply | Outage:
        here = self._here()
        if self.cache is None:
            return await self._in_turn(here, most, send, used)
        while key in here.flights:
            shared = await asyncio.shield(here.flights[key])
            if shared is not None:
                return replace(shared, cached=True) if isinstance(shared, Reply) else shared
        flight = here.flights[key] = here.loop.create_future()
        result: Reply | Outage | None = None  # a call that is cancelled leaves its place to one that waits for it
        try:
            known = self.cache.get(key)
            if known is not None:
                result = Reply(text=known, finish_reason="stop", cached=True)
            else:
                result = await self._in_turn(here, most, send, used)
                if isinstance(result, Reply) and result.finish_reason == "stop":
                    self.cache.put(key, result.text)
            return result
        finally:
            del here.flights[key]
            flight.set_result(result)

    async def _in_turn(
        self, here: _Here, most: Usage, send: Callable[[], Awaitable[Reply | Outage]], used: Usage
    ) -> Reply | Outage:
        async with here.slots:
            while (reservation := self.budget.reserve(most)) is None:
                if spent := self.budget.spent():
                    return Outage(kind="budget", detail=f"{spent} in this step")
                await here.settled.wait()
            try:
                return await send()
            finally:
                reservation.settle(used)
                here.settled.set()
                here.settled = asyncio.Event()

    def _here(self) -> _Here:
        loop = asyncio.get_running_loop()
        if self._last is None or self._last.loop is not loop:
            self._last = _Here(loop, asyncio.Semaphore(self._max_concurrency))
        return self._last

    def close(self) -> None:
        self._last = None
        if self.cache is not None:
            self.cache.close()
