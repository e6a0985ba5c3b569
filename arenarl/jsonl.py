"""JSON lines for records that must survive whatever a model or a tool wrote.

Floats survive the round trip exactly, numbers that are not finite become null, and text keeps every character: a lone
surrogate, which UTF-8 cannot hold, is written as its JSON escape.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def clean_json(value: Any) -> Any:
    """JSON data with lone surrogates replaced in every string and key: for what is sent on, which must be UTF-8."""
    if isinstance(value, str):
        return LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {clean_json(key): clean_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean_json(item) for item in value]
    return value


def plain(value: Any) -> Any:
    """What `json` should write for a value that it does not know. Shallow: `json` descends by itself."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):  # numpy, torch
        return value.tolist()
    return str(value)


def _finite(value: Any) -> Any:
    """A deep copy as plain JSON data in which numbers that are not finite are None."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return _finite(plain(value))


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON text of any value. It may hold lone surrogates: encode it with ``backslashreplace``, which escapes them."""
    try:
        return json.dumps(value, default=plain, ensure_ascii=False, allow_nan=False, indent=indent)
    except (ValueError, TypeError):  # a number that is not finite or a key that is no string: the slow way
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a file, one a line. A torn last line, left by a kill in the middle of a write, is ignored.

    Raises:
        ValueError: if any other line is not JSON.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield record
