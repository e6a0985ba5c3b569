"""Tool results as the model reads them: text, placeholders for what is not text, nothing that an encoder chokes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from arenarl.jsonl import LONE_SURROGATE
from arenarl.types import ToolResult

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_MAX_CHARS_PER_TOKEN = 16

TokenOffsets: TypeAlias = Callable[[str], Sequence[tuple[int, int]]]


def clean_text(text: str) -> str:
    """Text that every encoder accepts: no NUL, no terminal escapes, lone surrogates as U+FFFD."""
    return LONE_SURROGATE.sub("\ufffd", _ANSI.sub("", text).replace("\0", ""))


def result_text(content: Sequence[Mapping[str, Any]], structured: Any = None) -> str:
    """A tool result as text: its text blocks; without any, the structured content as compact JSON.

    What is not text leaves a placeholder, so that the model knows of it.

    Args:
        content: content blocks in wire form (camelCase keys).
    """
    blocks = [block_text(block) for block in content]
    if structured is not None and not any(block.get("type") == "text" for block in content):
        blocks.append(json.dumps(structured, ensure_ascii=False, separators=(",", ":")))
    return clean_text("\n".join(blocks))


def block_text(block: Mapping[str, Any]) -> str:
    """One content block as text; what has no text becomes a placeholder, what is unknown stays JSON."""
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        return block["text"]
    if kind in ("image", "audio"):
        return f"[{kind} {block.get('mimeType', '')}, {_kilobytes(block.get('data'))}]"
    if kind == "resource_link":
        return f"[resource {' '.join(str(block[key]) for key in ('name', 'uri', 'mimeType') if block.get(key))}]"
    resource = block.get("resource")
    if kind == "resource" and isinstance(resource, Mapping):
        if isinstance(resource.get("text"), str):
            return resource["text"]
        where = f"{resource.get('uri', '')} {resource.get('mimeType', '')}"
        return f"[resource {where}, {_kilobytes(resource.get('blob'))}]"
    return json.dumps(block, ensure_ascii=False, separators=(",", ":"))


def _kilobytes(base64: Any) -> str:
    return f"{(len(base64) if isinstance(base64, str) else 0) * 0.75 / 1000:.1f} kB"


def four_characters(text: str) -> list[tuple[int, int]]:
    """Token offsets where no tokenizer is at hand: four characters count as one token."""
    return [(start, min(start + 4, len(text))) for start in range(0, len(text), 4)]


def truncate_text(text: str, limit: int, token_offsets: TokenOffsets = four_characters) -> tuple[str, bool]:
    """(text, False) if it fits, else (head 70 %, omission mark, tail 30 %; True), cut at line ends where they are near.

    Args:
        limit: tokens that head and tail may have together, at least 1.
        token_offsets: gives the (start, end) of every token of a text.
    """
    edge = limit * _MAX_CHARS_PER_TOKEN  # of a very long text only the two ends are tokenised
    if len(text) <= 2 * edge and len(token_offsets(text)) <= limit:
        return text, False
    in_tail = limit * 3 // 10
    first, tail = token_offsets(text[:edge])[: limit - in_tail], text[-edge:]
    last = token_offsets(tail)[-in_tail:] if in_tail else []
    head, tail = text[: first[-1][1] if first else 0], tail[last[0][0] :] if last else ""
    if (cut := head.rfind("\n")) > len(head) // 2:
        head = head[: cut + 1]
    if 0 <= (cut := tail.find("\n")) < len(tail) // 2:
        tail = tail[cut + 1 :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters omitted ...]\n{tail}", True


def shorten(result: ToolResult, limit: int, token_offsets: TokenOffsets = four_characters) -> ToolResult:
    """The result with its text cut to about ``limit`` tokens."""
    text, cut = truncate_text(result.text, limit, token_offsets)
    return replace(result, text=text, truncated=True) if cut else result
