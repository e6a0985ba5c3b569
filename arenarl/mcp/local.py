"""A plain Python object as a tool server: its public methods are the tools."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from arenarl.errors import ConfigError

if TYPE_CHECKING:
    from anyio import CapacityLimiter

_THREADS = 40  # of one server: those of another must not wait for them


def as_server(target: Any) -> Any:
    """An MCP server: the object itself if it is one, else a server over its public methods.

    A tool has its method's name, docstring and type hints. What a method raises is shown to the model. Methods that are
    no coroutines run in threads; one that nobody waits for any more is left to itself, and keeps no other waiting.

    Raises:
        ConfigError: if the object has no public method, or one whose signature cannot be a tool's.
    """
    from anyio import CapacityLimiter
    from mcp.server import MCPServer
    from mcp.server.lowlevel import Server

    if isinstance(target, MCPServer | Server):
        return target
    server, name = MCPServer(type(target).__name__), type(target).__qualname__
    methods = {key: value for key, value in inspect.getmembers(target, callable) if _is_tool(target, key)}
    if not methods:
        raise ConfigError(f"{name} has no public method; give an object whose methods are tools, or an MCP server")
    threads = CapacityLimiter(_THREADS)
    for key, method in methods.items():
        try:
            server.add_tool(_speaking(method, threads), name=key, description=inspect.getdoc(method) or "")
        except Exception as error:  # boundary: the signature is the user's
            raise ConfigError(f"method {name}.{key} cannot be a tool: {error}") from error
    return server


def _is_tool(target: Any, name: str) -> bool:
    return not name.startswith("_") and inspect.isroutine(inspect.getattr_static(type(target), name, None))


def _speaking(method: Callable[..., Any], threads: CapacityLimiter) -> Callable[..., Awaitable[Any]]:
    """The method with its exceptions made visible: the SDK hides all but its own ``ToolError``."""
    from anyio.to_thread import run_sync
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if inspect.iscoroutinefunction(method):
                return await method(*args, **kwargs)
            work = functools.partial(method, *args, **kwargs)
            return await run_sync(work, limiter=threads, abandon_on_cancel=True)
        except Exception as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error

    return call
