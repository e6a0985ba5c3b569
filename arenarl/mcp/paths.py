"""One name for every episode's directory: what the model sees begins with ``/workspace``, wherever the directory is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

VIRTUAL_ROOT = "/workspace"
# A file name does not go on at either side. Behind a closing bracket, "*" or "~" stands the rest of another path.
_VIRTUAL = re.compile(rf"(?:(file://(?:localhost)?)|(?<![\w./~*?%$)\]}}\\-])){VIRTUAL_ROOT}(?![\w~+@%=-]|\.\w)")


class PathMap:
    """Exchanges the virtual root and the real one in texts and JSON data, ``file://`` URIs included.

    Inward, only a whole path is meant: "/workspace" and "/workspace/a", not "/workspaces" and "x/workspace". Outward, the
    folder that holds the root becomes "/", so that no random name of it is ever seen.

    Args:
        root: a resolved directory whose name is that of the virtual root, alone in a private folder.
    """

    def __init__(self, root: Path) -> None:
        assert f"/{root.name}" == VIRTUAL_ROOT
        self._root, self._quoted = str(root), quote(str(root))
        holder = str(root.parent)
        forms = "|".join(re.escape(form) for form in dict.fromkeys((holder, quote(holder))))
        self._real = re.compile(rf"(?:{forms})(?:/|(?![\w-]))")

    def inward(self, value: Any) -> Any:
        """JSON data from the model, for a server."""
        return _each_text(value, lambda text: _VIRTUAL.sub(self._to_real, text))

    def outward(self, value: Any) -> Any:
        """JSON data from a server, for the model."""
        return _each_text(value, lambda text: self._real.sub("/", text))

    def _to_real(self, match: re.Match[str]) -> str:
        return match[1] + self._quoted if match[1] else self._root


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each_text(item, change) for item in value]
    return value
