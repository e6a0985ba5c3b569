"""A plain Python object as a tool server: its public methods are the tools."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from arenarl.errors import ConfigError


def as_server(target: Any) -> Any:
    """An MCP server: the object itself if it is one, else a server over its public methods.

    A tool has its method's name, docstring and type hints. What a method raises is shown to the model.

    Raises:
        ConfigError: if the object has no public method, or one whose signature cannot be a tool's.
    """
    from mcp.server import MCPServer
    from mcp.server.lowlevel import Server

    if isinstance(target, MCPServer | Server):
        return target
    server, name = MCPServer(type(target).__name__), type(target).__qualname__
    methods = {key: value for key, value in inspect.getmembers(target, callable) if _is_tool(target, key)}
    if not methods:
        raise ConfigError(f"{name} has no public method; give an object whose methods are tools, or an MCP server")
    for key, method in methods.items():
        try:
            server.add_tool(_speaking(method), name=key, description=inspect.getdoc(method) or "")
        except Exception as error:  # boundary: the signature is the user's
            raise ConfigError(f"method {name}.{key} cannot be a tool: {error}") from error
    return server


def _is_tool(target: Any, name: str) -> bool:
    return not name.startswith("_") and inspect.isroutine(inspect.getattr_static(type(target), name, None))


def _speaking(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with its exceptions made visible: the SDK hides all but its own ``ToolError``."""
    from mcp.server.mcpserver.exceptions import ToolError

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await method(*args, **kwargs)
            except Exception as error:
                raise ToolError(f"{type(error).__name__}: {error}") from error

        return call

    @functools.wraps(method)
    def call_now(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error

    return call_now
