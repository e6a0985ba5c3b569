"""Servers behind a URL as transports of the MCP SDK: streamable HTTP, and the older pair of an event stream and posts.

As lenient as the one for stdio, for it reads through the same `arenarl.mcp.wire.Inbox`. The SDK's own turns one lone
surrogate into a failed call, logs what servers send, and takes headers per HTTP client instead of per session.
"""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urljoin, urlsplit

import anyio
import httpx2
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp.types import jsonrpc_message_adapter
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from arenarl.mcp.config import Launch, ServerSpec
from arenarl.mcp.transport import MAX_REPLIES, OneLifeTransport, Streams
from arenarl.mcp.wire import REFUSED, EventSplitter, Inbox, Message, is_demand

_log = logging.getLogger(__name__)
_NOTICE_SECONDS = 10.0  # for posts that no caller's deadline watches
_FAREWELL_SECONDS = 2.0
_LINGER_SECONDS = 1.0
_IDLE_SECONDS = 2.0  # well before servers hang up (5 s by default): a request that meets that moment would be lost
_MAX_REDIRECTS = 3
_SESSION, _VERSION = "mcp-session-id", "mcp-protocol-version"
_EVENTS, _JSON = "text/event-stream", "application/json"
_REMEDIES = {
    400: "check its url and its era", 401: "check its headers", 403: "check its headers", 404: "check its url",
    405: "check its url and its transport",
}  # fmt: skip


class RemoteTransport(OneLifeTransport):
    """A connection to the server at the launch's ``url``. Enter and leave in one task, once.

    A lost connection ends it, as a broken pipe ends a process: what a server did with a request that it did not answer
    cannot be told. An answer that cannot be read, or a status such as 500, fails only the call that it answers.

    Attributes:
        ended: the connection was lost before we ended it.
        problem: the last thing that went wrong, in words that hold no secret.
    """

    def __init__(self, spec: ServerSpec, launch: Launch, on_end: Callable[[], None] = lambda: None) -> None:
        self.spec = spec
        self.ended = False
        self.problem: str | None = None
        self._url, self._headers = launch.url or "", dict(launch.headers)
        self._on_end = on_end
        self._inbox = Inbox(spec.max_message_bytes)
        self._session: dict[str, str] = {}  # headers: the session's id and its protocol version
        self._scopes: dict[Any, anyio.CancelScope] = {}  # of the posts whose answers are awaited
        self._replies = 0  # that are being posted
        self._stopping = False
        super().__init__(self._run())

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[Streams]:
        self._to_client, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, to_server = anyio.create_memory_object_stream[SessionMessage](0)
        # A client of its own, because cookies are a session's; the costly part of it, the TLS context, is shared.
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS)
        try:
            async with (
                httpx2.AsyncClient(verify=_tls(), timeout=None, limits=limits) as self._http,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(self._send, to_server, tasks)
                try:
                    yield read, write
                finally:
                    self._stopping = True
                    read.close()
                    with anyio.CancelScope(shield=True):
                        await self._say_goodbye()
                    tasks.cancel_scope.cancel()
        finally:
            for stream in (self._to_client, read, write, to_server):
                stream.close()

    # --- to the server -------------------------------------------------------------------------------------------

    async def _send(self, to_server: MemoryObjectReceiveStream[SessionMessage], tasks: TaskGroup) -> None:
        if self.spec.transport == "sse":
            ready = anyio.Event()
            tasks.start_soon(self._listen, ready)
            await ready.wait()
        async for item in to_server:
            if self.ended:
                break
            data = item.message.model_dump(by_alias=True, exclude_unset=True)
            key, method = data.get("id"), data.get("method")
            extra = dict((item.metadata.headers if isinstance(item.metadata, ClientMessageMetadata) else None) or {})
            self._inbox.sent(data)
            if method == "initialize":
                self._session.pop(_VERSION, None)
            elif _VERSION in extra:
                self._session[_VERSION] = extra[_VERSION]
            modern = self._session.get(_VERSION) in MODERN_PROTOCOL_VERSIONS and self.spec.transport == "http"
            if method == "notifications/cancelled" and (scope := self._scopes.get(data["params"]["requestId"])):
                scope.cancel()  # in the 2026-07-28 protocol, to hang up is the notice itself
            if method is not None and key is not None:
                scope = self._scopes[key] = anyio.CancelScope()
                tasks.start_soon(self._post, data, extra, scope)
            elif method == "notifications/initialized":
                await self._post(data, extra)  # nothing may overtake it
                if _SESSION in self._session:
                    tasks.start_soon(self._listen)
            elif not modern:
                self._replies += 1
                tasks.start_soon(self._reply, data, extra)
        to_server.close()

    async def _post(self, data: Message, extra: Mapping[str, str], scope: anyio.CancelScope | None = None) -> None:
        """Send one message, and see to it that a request (those have a ``scope``) has its answer."""
        key = data["id"] if scope is not None else None
        body = json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")
        accepted = {"accept": f"{_JSON}, {_EVENTS}", "content-type": _JSON}
        headers = {**self._headers, **accepted, **self._session, **extra}
        seconds = None if scope is not None else _NOTICE_SECONDS
        try:
            with scope or anyio.CancelScope():
                for _ in range(_MAX_REDIRECTS):
                    sending = self._http.stream("POST", self._url, content=body, headers=headers, timeout=seconds)
                    async with sending as response:
                        if (moved := _moved(response)) is None:
                            return await self._take(response, key)
                        self._url = moved
                await self._fail(key, "redirects without end; check its url")
        except Exception as error:  # boundary: whatever the network, the server or a header's value did
            if scope is not None or not isinstance(error, httpx2.TimeoutException):
                self._lose(_reason(error))
        finally:
            self._scopes.pop(key, None)

    async def _reply(self, data: Message, extra: Mapping[str, str]) -> None:
        try:
            await self._post(data, extra)
        finally:
            self._replies -= 1

    async def _say_goodbye(self) -> None:
        """Let the server forget the session now, not after its idle timeout."""
        if _SESSION not in self._session or self.ended:
            return
        with suppress(Exception), anyio.move_on_after(_FAREWELL_SECONDS):
            await self._http.delete(self._url, headers={**self._headers, **self._session})

    # --- from the server -----------------------------------------------------------------------------------------

    async def _take(self, response: httpx2.Response, key: int | str | None) -> None:
        """What a post was answered with."""
        kind, status = _kind(response), response.status_code
        if status == 404 and _SESSION in self._session:
            self._lose("has forgotten the session (404)")
        elif status >= 300:
            body, size = await self._read(response)
            await self._deliver(self._inbox.receive(body, size) if kind == _JSON else ())
            await self._fail(key, "; ".join(filter(None, (_answered(response), _REMEDIES.get(status)))))
        elif self.spec.transport == "sse" or key is None:
            await self._read(response)  # an answer would come with the event stream
        elif kind not in (_EVENTS, _JSON):
            await self._fail(key, f"{_answered(response)} with {kind or 'nothing'} instead of JSON; check its url")
        else:
            if _SESSION in response.headers:
                self._session[_SESSION] = response.headers[_SESSION]
            if kind == _JSON:
                await self._deliver(self._inbox.receive(*await self._read(response), key))
            else:
                async for data, size in self._events(response):
                    await self._deliver(self._inbox.receive(data, size, key))
                    # It is read to its end, if that is near, so that the connection can be used again.
                    if key in self._scopes and not self._inbox.waits(key):
                        self._scopes[key].deadline = anyio.current_time() + _LINGER_SECONDS
            await self._fail(key, f"{_answered(response)} without the answer")

    async def _listen(self, ready: anyio.Event | None = None) -> None:
        """Hear what the server says of itself; for the older transport, all that it says.

        Args:
            ready: set as soon as it is known where to post to, or that this will never be. With it, a stream that cannot
                be had or that ends is a lost connection; without it, it is not missed.
        """
        try:
            headers = {**self._headers, **self._session, "accept": _EVENTS}
            async with self._http.stream("GET", self._url, headers=headers, follow_redirects=False) as response:
                if response.status_code != 200 or _kind(response) != _EVENTS:
                    raise _Refusal(response)
                async for data, size in self._events(response, ready):
                    await self._deliver(self._inbox.receive(data, size))
            problem = "closed the connection"
        except Exception as error:  # boundary: as in `_post`
            problem = _reason(error)
        if ready is not None:
            self._lose(problem)
            ready.set()

    async def _events(
        self, response: httpx2.Response, ready: anyio.Event | None = None
    ) -> AsyncIterator[tuple[bytes, int]]:
        """Yield (data, true size) of every message event. The event that names the place to post to is taken here."""
        events = EventSplitter(self.spec.max_message_bytes)
        async for chunk in _with_end(response.aiter_bytes()):
            for event, data, size in events.feed(chunk):
                if event == "message":
                    yield data, size
                elif event == "endpoint" and ready is not None:
                    url = urljoin(self._url, data.decode("utf-8", "replace"))
                    if _origin(url) != _origin(self._url):
                        raise httpx2.UnsupportedProtocol("its endpoint is on another host")
                    self._url = url
                    ready.set()

    async def _read(self, response: httpx2.Response) -> tuple[bytes, int]:
        """(body, its size), read no further than a little over the limit."""
        parts, size = [], 0
        async for chunk in response.aiter_bytes():
            size += len(chunk)
            parts.append(chunk)
            if size > self.spec.max_message_bytes:
                break
        return b"".join(parts), size

    async def _deliver(self, messages: Iterable[Message]) -> None:
        for data in messages:
            if is_demand(data) and self._replies >= MAX_REPLIES:
                continue
            try:
                message = SessionMessage(jsonrpc_message_adapter.validate_python(data, by_name=False))
            except ValueError:
                _log.debug("server %s: not a JSON-RPC message", self.spec.name)
                continue
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                await self._to_client.send(message)

    async def _fail(self, key: int | str | None, reason: str) -> None:
        """An answer of our own for a request that has none."""
        if self._inbox.waits(key) and not self.ended:
            self.problem = reason
            await self._deliver(self._inbox.fail(key, REFUSED, reason))

    def _lose(self, problem: str) -> None:
        if not self._stopping and not self.ended:
            self.problem, self.ended = problem, True
            self._to_client.close()
            self._on_end()


class _Refusal(Exception):
    def __init__(self, response: httpx2.Response) -> None:
        remedy = _REMEDIES.get(response.status_code, "check its url and its transport")
        super().__init__(f"{_answered(response)} with {_kind(response) or 'nothing'} instead of a stream; {remedy}")


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context()


async def _with_end(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk
    yield b"\n\n"  # a last event need not be closed


def _kind(response: httpx2.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()


def _answered(response: httpx2.Response) -> str:
    return f"answered {response.status_code} {response.reason_phrase}".strip()


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _moved(response: httpx2.Response) -> str | None:
    """Where a redirect of a post leads, if it stays on the host that the headers are meant for."""
    target = response.next_request
    if response.status_code not in (307, 308) or target is None:
        return None
    return str(target.url) if _origin(str(target.url)) == _origin(str(response.request.url)) else None


def _reason(error: Exception) -> str:
    """What a failed exchange means, in one line. Messages that may quote a header or the url are not repeated."""
    if isinstance(error, _Refusal):
        return str(error)
    if isinstance(error, httpx2.ConnectError):
        return f"cannot be reached ({' '.join(str(error).split())}); check its url and that it runs"
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.InvalidURL):
        return "cannot be reached: its url is not valid; write http://host/path"
    if isinstance(error, httpx2.LocalProtocolError | ValueError):
        return "cannot be asked: its url or headers hold characters that HTTP does not allow"
    return f"broke the connection ({type(error).__name__})"


class _MaskUrl(logging.Filter):
    """httpx2 logs every url, and many servers want their key in its path or query: of it only scheme and host are left."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                arg.copy_with(userinfo=b"", raw_path=b"/***") if isinstance(arg, httpx2.URL) else arg
                for arg in record.args
            )
        return True


logging.getLogger("httpx2").addFilter(_MaskUrl())
