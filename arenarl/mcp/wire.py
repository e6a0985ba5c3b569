"""Bytes from a foreign server to valid JSON-RPC messages; nothing that a server writes can stop the reader.

Pure: no process, no task, no SDK. What is broken in one answer becomes an error for the call that waits for it.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from arenarl.mcp.schema import block_text, clean_json

_log = logging.getLogger(__name__)

# Codes of our own for answers that could not be delivered. A server's use of them, or of the SDK's two codes for a closed
# connection and a timeout, is mapped to INTERNAL_ERROR, so that each code has one meaning.
UNREADABLE, TOO_LARGE = -32012, -32013
INTERNAL_ERROR = -32603
_RESERVED = (-32000, -32001, UNREADABLE, TOO_LARGE)

_EDGE = 4096
_ID = re.compile(rb'"id"\s*:\s*(?:"([^"\\]{1,64})"|(-?\d{1,18}))')
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


class Inbox:
    """Remembers which calls wait for an answer, and turns what arrives into messages that the SDK accepts.

    Attributes:
        log: the last lines on stdout that were no messages, for diagnosis.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._limit = max_message_bytes
        self._lines = LineSplitter(max_message_bytes)
        self._waiting: dict[int | str, str] = {}
        self.log: deque[str] = deque(maxlen=50)

    def sent(self, message: Mapping[str, Any]) -> None:
        """Note a message that goes to the server."""
        key, method = _key(message.get("id")), message.get("method")
        if method == "notifications/cancelled":
            self._waiting.pop(_key((message.get("params") or {}).get("requestId")) or "", None)
        elif key is not None and method is not None:
            self._waiting[key] = method

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """Yield the messages that a chunk of the server's stdout completes."""
        for line, size in self._lines.feed(chunk):
            if size > self._limit:
                yield from self._fail(line, TOO_LARGE, f"the answer has {size} bytes, the limit is {self._limit}")
            elif line.strip():
                yield from self._parse(line)

    def _parse(self, line: bytes) -> Iterator[Message]:
        try:
            value = json.loads(line.decode("utf-8", "replace"), parse_constant=lambda _: None)
            if b"\\u" in line:
                value = clean_json(value)
            items = value if isinstance(value, list) else [value]
            messages = [self._message(item) if isinstance(item, dict) else None for item in items]
        except (ValueError, RecursionError):
            self._note(line)
            if _OBJECT.match(line.lstrip()):
                yield from self._fail(line, UNREADABLE, "the answer is not valid JSON")
            return
        if None in messages:
            self._note(line)
        yield from filter(None, messages)

    def _message(self, item: Message) -> Message | None:
        if "method" in item:
            return item if item.get("jsonrpc") == "2.0" else None
        key = _key(item.get("id"))
        method = self._waiting.get(key) if key is not None else None
        if key is None or method is None:  # late, given twice, or no answer at all
            return None
        if item.get("error") is not None:
            answer = {"jsonrpc": "2.0", "id": key, "error": _repair_error(item["error"])}
        else:
            answer = {"jsonrpc": "2.0", "id": key, "result": repair_result(method, item.get("result"))}
        del self._waiting[key]
        return answer

    def _fail(self, line: bytes, code: int, reason: str) -> Iterator[Message]:
        """An error for the call that a broken line most likely answers: the one it names, or the only one waiting."""
        ids = (_key(m[1].decode("utf-8", "replace") if m[1] else int(m[2])) for m in _ID.finditer(line))
        key = next((key for key in ids if key in self._waiting), None)
        if key is None and len(self._waiting) == 1:
            key = next(iter(self._waiting))
        if key is not None:
            self._waiting.pop(key)
            yield {"jsonrpc": "2.0", "id": key, "error": {"code": code, "message": reason}}

    def _note(self, line: bytes) -> None:
        self.log.append(line[:500].decode("utf-8", "replace"))


def _key(value: Any) -> int | str | None:
    """The id by which an answer finds its call; servers echo 7 as "7"."""
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"-?\d{1,18}", value) else value
    return value if isinstance(value, int) and not isinstance(value, bool) else None


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


def _repair_listing(result: Message) -> Message:
    tools, cursor = result.get("tools"), result.get("nextCursor")
    kept = []
    for tool in tools if isinstance(tools, list) else []:
        if (repaired := _repair_tool(tool)) is None:
            _warn_dropped(json.dumps(tool)[:200])
        else:
            kept.append(repaired)
    return {"tools": kept} | ({"nextCursor": cursor} if isinstance(cursor, str) and cursor else {})


@lru_cache(maxsize=256)  # once per process, not once per episode
def _warn_dropped(tool: str) -> None:
    _log.warning("a tool without a name, or whose input is no object, is left out: %s", tool)


def _repair_tool(tool: Any) -> Message | None:
    """The three fields that are used; None for a tool without a name or whose input cannot be an object."""
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
    description = tool.get("description")
    kept: Message = {"name": tool["name"], "inputSchema": schema}
    return kept | ({"description": description} if isinstance(description, str) else {})


def _repair_call(result: Message) -> Message:
    content, structured = result.get("content"), result.get("structuredContent")
    blocks = content if isinstance(content, list) else [] if content is None else [content]
    if structured is not None and not isinstance(structured, dict):
        blocks = blocks or [structured]
        structured = None
    out: Message = {"content": [_repair_block(block) for block in blocks], "isError": bool(result.get("isError"))}
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
