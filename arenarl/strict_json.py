"""One JSON object in what a model wrote, strictly: a reply that has to be guessed at is no reply.

    no_json         it does not begin with a JSON object     bad_json        the object is broken
    two_objects     more than one object                     extra_text      text after the object
    nan             no finite number                         duplicate_key   a key that is given twice

A thought before the object and one code fence round it are allowed.
"""

from __future__ import annotations

import json
import math

_THINK_END, _FENCE = "</think>", "```"


class Unreadable(Exception):
    """Text without exactly one JSON object.

    Attributes:
        kind: one of those of the module. As text, "kind: detail".
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


def read_object(text: str) -> object:
    """The object. Raises Unreadable, and nothing else, whatever the text."""
    text = _said(text)
    if not text.startswith("{"):
        raise Unreadable("no_json", f"it begins with {text[:40]!r}")
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    try:
        value, end = decoder.raw_decode(text)
    except RecursionError:
        raise Unreadable("bad_json", "it is nested too deeply") from None
    except ValueError as error:
        raise Unreadable("bad_json", str(error)[:200]) from None
    if rest := text[end:].strip():
        raise Unreadable("two_objects" if "{" in rest else "extra_text", repr(rest[:40]))
    return value


def _said(text: str) -> str:
    """The text without a thought before it and a fence round it. The chat template may have opened the thought."""
    text = text.strip()
    if not text.startswith(("{", _FENCE)):
        end = text.find(_THINK_END)
        text = text[end + len(_THINK_END) :].strip() if end >= 0 else text
    if text.startswith(_FENCE) and text.endswith(_FENCE) and len(text) > 2 * len(_FENCE):
        text = text[len(_FENCE) : -len(_FENCE)].lstrip()
        text = text[4:] if text[:4].lower() == "json" else text
    return text.strip()


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise Unreadable("duplicate_key", repr(key[:40]))
        found[key] = value
    return found


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise Unreadable("nan", f"{number[:40]} is no number")
    return value
