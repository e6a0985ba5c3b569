"""Bytes from a foreign server to valid JSON-RPC messages; nothing that a server writes can stop the reader.

Pure: no process, no socket, no task, no SDK. What is broken in one answer becomes an error for the call that waits for it.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeGuard

from arenarl.jsonl import clean_json
from arenarl.mcp.results import block_text

_log = logging.getLogger(__name__)

# The SDK's codes for a closed connection and a timeout, and our own for answers that could not be delivered. A server's
# use of them is mapped to INTERNAL_ERROR, so that each code has one meaning.
CONNECTION_CLOSED, _TIMED_OUT = -32000, -32001
UNREADABLE, TOO_LARGE, REFUSED = -32012, -32013, -32014
INTERNAL_ERROR = -32603
_RESERVED = (CONNECTION_CLOSED, _TIMED_OUT, UNREADABLE, TOO_LARGE, REFUSED)

_EDGE = 4096
# Where the id of a message can be told from one within its data: at its head, and at its end.
_ID = rb'"id"\s*:\s*(?:"([^"\\]{1,64})"|(-?\d{1,18}))\s*'
_VERSION = rb'"jsonrpc"\s*:\s*"2\.0"\s*,\s*'
_HEADS = (
    re.compile(rb"\s*\{\s*" + _VERSION + _ID + rb',(?!\s*"method")'),
    re.compile(rb"\s*\{\s*" + _ID + rb',\s*"(?:jsonrpc|result|error)"'),
)
_END = re.compile(_ID + rb"\}\s*\Z")
_OBJECT = re.compile(rb'\{\s*"')

Message = dict[str, Any]


@dataclass
class LineSplitter:
    """Chunks to lines in linear time and bounded memory. Of a line over ``limit`` bytes only the two ends are kept."""

    limit: int
    _parts: list[bytes] = field(default_factory=list)
    _tail: bytes = b""
    _size: int = 0

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield (line, its true size) for every line that ends in the chunk."""
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._add(piece)
            yield b"".join(self._parts) + self._tail, self._size
            self._parts, self._tail, self._size = [], b"", 0
        self._add(rest)

    def _add(self, piece: bytes) -> None:
        if not piece:
            return
        self._size += len(piece)
        if self._size <= self.limit:
            self._parts.append(piece)
            return
        if len(self._parts) > 1 or not self._tail:
            whole = b"".join(self._parts) + piece
            self._parts, self._tail = [whole[:_EDGE]], whole[_EDGE:][-_EDGE:]
        else:
            self._tail = (self._tail + piece)[-_EDGE:]


class EventSplitter:
    """Chunks of a ``text/event-stream`` to events, as lenient and as bounded as `LineSplitter`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines = LineSplitter(limit)
        self._event, self._data, self._size = "message", list[bytes](), 0

    def feed(self, chunk: bytes) -> Iterator[tuple[str, bytes, int]]:
        """Yield (event, data, true size of the data) for every event that ends in the chunk."""
        for line, size in self._lines.feed(chunk):
            name, _, value = line.removesuffix(b"\r").partition(b":")
            if name == b"data":
                self._size += max(0, size - len(b"data:")) + bool(self._data)  # with the line end that joins them
                if self._size <= self._limit or not self._data:
                    self._data.append(value.removeprefix(b" "))
            elif name == b"event":
                self._event = value.removeprefix(b" ").decode("utf-8", "replace")
            elif not name and not value:
                if self._data:
                    yield self._event, b"\n".join(self._data), self._size
                self._event, self._data, self._size = "message", [], 0


class Inbox:
    """Remembers which calls wait for an answer, and turns what arrives into messages that the SDK accepts.

    Of the server's notifications only a change of its tools is passed on, once until they are listed anew: a flood costs
    a task each.

    Attributes:
        log: the last lines that were no messages, for diagnosis.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._limit = max_message_bytes
        self._lines = LineSplitter(max_message_bytes)
        self._waiting: dict[int | str, str] = {}
        self._announced = False
        self.log: deque[str] = deque(maxlen=50)

    def sent(self, message: Mapping[str, Any]) -> None:
        """Note a message that goes to the server."""
        key, method = _key(message.get("id")), message.get("method")
        if method == "notifications/cancelled":
            self._waiting.pop(_key((message.get("params") or {}).get("requestId")) or "", None)
        elif key is not None and method is not None:
            self._waiting[key] = method
            self._announced = self._announced and method != "tools/list"

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """Yield the messages that a chunk of the server's stdout completes."""
        for line, size in self._lines.feed(chunk):
            yield from self.receive(line, size)

    def receive(self, text: bytes, size: int, key: int | str | None = None) -> Iterator[Message]:
        """Yield the messages in a line of stdout, the body of a response or the data of an event.

        Args:
            size: of the whole text; of one over the limit only the ends need be given.
            key: the call that is answered here, whatever id the answer names; None if its id decides.
        """
        if size > self._limit:
            yield from self._fail(text, TOO_LARGE, f"the answer has {size} bytes, the limit is {self._limit}", key)
        elif text.strip():
            yield from self._parse(text, key)

    def fail(self, key: int | str | None, code: int, reason: str) -> Iterator[Message]:
        """Yield an error for the call of this id, if it still waits."""
        if self.waits(key):
            del self._waiting[key]
            yield {"jsonrpc": "2.0", "id": key, "error": {"code": code, "message": reason}}

    def waits(self, key: int | str | None) -> TypeGuard[int | str]:
        """Whether the call of this id waits for its answer."""
        return key is not None and key in self._waiting

    def _parse(self, text: bytes, key: int | str | None) -> Iterator[Message]:
        try:
            value = json.loads(text.decode("utf-8", "replace"), parse_constant=lambda _: None, parse_float=_finite)
            if b"\\u" in text:
                value = clean_json(value)
            items = value if isinstance(value, list) else [value]
            messages = [self._message(item, key) if isinstance(item, dict) else None for item in items]
        except (ValueError, RecursionError):
            self._note(text)
            if key is not None or _OBJECT.match(text.lstrip()):
                yield from self._fail(text, UNREADABLE, "the answer is not valid JSON", key)
            return
        if None in messages:
            self._note(text)
        yield from filter(None, messages)

    def _message(self, item: Message, key: int | str | None) -> Message | None:
        """The message as the SDK takes it; empty for one that nobody needs, None for what is no message."""
        if "method" in item:
            return self._demand(item)
        key = _key(item.get("id")) if key is None else key
        method = self._waiting.get(key) if key is not None else None
        if key is None or method is None:  # late, given twice, or no answer at all
            return None
        if item.get("error") is not None:
            answer = {"jsonrpc": "2.0", "id": key, "error": _repair_error(item["error"])}
        else:
            answer = {"jsonrpc": "2.0", "id": key, "result": repair_result(method, item.get("result"))}
        del self._waiting[key]
        return answer

    def _demand(self, item: Message) -> Message | None:
        """What the server asks or tells of itself, as far as it is passed on."""
        demand = _repair_demand(item)
        if demand and "id" not in demand:
            if self._announced:
                return {}
            self._announced = True
        return demand

    def _fail(self, text: bytes, code: int, reason: str, key: int | str | None) -> Iterator[Message]:
        """An error for the call that a broken text most likely answers: the one it names, or the only one waiting."""
        if key is None:
            named = _named(text)
            key = next((key for key in named if key in self._waiting), None)
            # An unreadable text may hold a late answer and the awaited one; one that is too large is only what it says.
            if key is None and len(self._waiting) == 1 and (not named or code == UNREADABLE):
                key = next(iter(self._waiting))
        yield from self.fail(key, code, reason)

    def _note(self, text: bytes) -> None:
        self.log.append(text[:500].decode("utf-8", "replace"))


def is_demand(message: Message) -> bool:
    """Whether the server asks something, and so will be sent a reply."""
    return "method" in message and "id" in message


def _named(text: bytes) -> list[int | str]:
    """The ids that a broken message gives itself."""
    matches = [*(head.match(text) for head in _HEADS), _END.search(text, max(0, len(text) - 200))]
    keys = (_key(m[1].decode("utf-8", "replace") if m[1] else int(m[2])) for m in matches if m)
    return [key for key in keys if key is not None]


def _finite(digits: str) -> float | None:
    """A number as JSON can carry it: 1e999 has no finite value, so it has none."""
    number = float(digits)
    return number if math.isfinite(number) else None


def _key(value: Any) -> int | str | None:
    """The id by which an answer finds its call; servers echo 7 as "7"."""
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"-?\d{1,18}", value) else value
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _repair_demand(item: Message) -> Message | None:
    """What the server asks or tells of itself, see `Inbox`."""
    method, key = item["method"], item.get("id")
    if item.get("jsonrpc") != "2.0" or not isinstance(method, str):
        return None
    if key is None:
        return {"jsonrpc": "2.0", "method": method} if method == "notifications/tools/list_changed" else {}
    if isinstance(key, bool) or not isinstance(key, int | str):
        return None
    params = item.get("params")
    return {"jsonrpc": "2.0", "id": key, "method": method, "params": params if isinstance(params, dict) else {}}


def _repair_error(error: Any) -> Message:
    if not isinstance(error, dict):
        return {"code": INTERNAL_ERROR, "message": str(error)}
    code, message = error.get("code"), error.get("message")
    if isinstance(code, bool) or not isinstance(code, int) or code in _RESERVED:
        code = INTERNAL_ERROR
    return {"code": code, "message": message if isinstance(message, str) else json.dumps(error)}


def repair_result(method: str, result: Any) -> Message:
    """A result that the SDK's typed layer takes. One odd tool must not void a listing, nor one odd block an answer."""
    fields = result if isinstance(result, dict) else {}
    if method == "initialize":
        return _repair_handshake(fields)
    if method == "server/discover":
        return _repair_discovery(fields)
    if method == "tools/list":
        return _repair_listing(fields)
    if method == "tools/call":
        return _repair_call(fields if isinstance(result, dict) else {"content": result})
    return fields


def _repair_handshake(result: Message) -> Message:
    info = result.get("serverInfo")
    name, version = (info.get("name"), info.get("version")) if isinstance(info, dict) else (None, None)
    return {
        "protocolVersion": str(result.get("protocolVersion", "missing")),
        "capabilities": {},  # tools are asked for whether or not they were announced
        "serverInfo": {"name": str(name), "version": str(version)},
    }


# What the 2026-07-28 protocol demands of a result beside its contents; older ones do not know it, and the SDK drops it.
_COMPLETE: Message = {"resultType": "complete"}
_CACHEABLE: Message = _COMPLETE | {"ttlMs": 0, "cacheScope": "private"}


def _repair_discovery(result: Message) -> Message:
    versions = result.get("supportedVersions")
    known = [version for version in versions if isinstance(version, str)] if isinstance(versions, list) else []
    return {"supportedVersions": known, "capabilities": {}} | _CACHEABLE


def _repair_listing(result: Message) -> Message:
    tools, cursor = result.get("tools"), result.get("nextCursor")
    kept = []
    for tool in tools if isinstance(tools, list) else []:
        if (repaired := _repair_tool(tool)) is None:
            _warn_dropped(json.dumps(tool)[:200])
        else:
            kept.append(repaired)
    return {"tools": kept, **_CACHEABLE} | ({"nextCursor": cursor} if isinstance(cursor, str) and cursor else {})


@lru_cache(maxsize=256)  # once per process, not once per episode
def _warn_dropped(tool: str) -> None:
    _log.warning("a tool without a name, or whose input is no object, is left out: %s", tool)


def _repair_tool(tool: Any) -> Message | None:
    """The fields that are used; None for a tool without a name or whose input cannot be an object."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"]:
        return None
    schema = tool.get("inputSchema")
    schema = dict(schema) if isinstance(schema, dict) else {}
    kinds = schema.get("type") or "object"
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        return None
    schema["type"] = "object"
    properties, required = schema.pop("properties", None), schema.pop("required", None)
    if isinstance(properties, dict):
        schema["properties"] = {
            name: value if isinstance(value, dict | bool) else {} for name, value in properties.items()
        }
    if isinstance(required, list):
        schema["required"] = [name for name in required if isinstance(name, str)]
    if not isinstance(schema.get("$schema", ""), str):
        del schema["$schema"]
    description, hints = tool.get("description"), tool.get("annotations")
    kept: Message = {"name": tool["name"], "inputSchema": schema}
    if isinstance(description, str):
        kept["description"] = description
    if isinstance(hints, dict):
        kept["annotations"] = {key: hints.get(key) is True for key in ("readOnlyHint", "idempotentHint")}
    return kept


def _repair_call(result: Message) -> Message:
    if result.get("resultType") == "input_required":
        text = "the tool wants to ask the user, and there is no user who could answer"
        return {"content": [{"type": "text", "text": text}], "isError": True} | _COMPLETE
    content, structured = result.get("content"), result.get("structuredContent")
    blocks = content if isinstance(content, list) else [] if content is None else [content]
    if structured is not None and not isinstance(structured, dict):
        blocks = blocks or [structured]
        structured = None
    kept = [_repair_block(block) for block in blocks]
    out: Message = {"content": kept, "isError": bool(result.get("isError")), **_COMPLETE}
    return out | ({"structuredContent": structured} if structured is not None else {})


_STRINGS = {
    "text": ("text",),
    "image": ("data", "mimeType"),
    "audio": ("data", "mimeType"),
    "resource_link": ("uri", "name"),
}


def _repair_block(block: Any) -> Message:
    if not isinstance(block, dict):
        return {"type": "text", "text": block if isinstance(block, str) else json.dumps(block)}
    kind = block.get("type")
    needed = _STRINGS.get(kind) if isinstance(kind, str) else None
    if needed and all(isinstance(block.get(key), str) for key in needed):
        return {key: block[key] for key in ("type", *needed)}
    return {"type": "text", "text": block_text(block)}
