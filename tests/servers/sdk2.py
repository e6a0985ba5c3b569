"""A well-behaved server of SDK 2.x. ``sdk2.py stdio`` talks over its pipes; ``sdk2.py http`` prints the port of its web server.

That has ``/mcp`` (streamable HTTP) and ``/sse``. Counts are kept per session id, and one count for sessions without.
"""

import socket
import sys
from collections import Counter

import mcp.types as types
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError


def make() -> MCPServer:
    app, counts = MCPServer("sdk2", log_level="CRITICAL"), Counter[str]()

    @app.tool(annotations=types.ToolAnnotations(read_only_hint=True))
    def echo(text: str) -> str:
        """Say it again."""
        return text

    @app.tool(annotations=types.ToolAnnotations(idempotent_hint=True, read_only_hint=False))
    def count(ctx: Context) -> int:
        """Count the calls of this session."""
        key = (ctx.headers or {}).get("mcp-session-id", "")
        counts[key] += 1
        return counts[key]

    @app.tool()
    def header(name: str, ctx: Context) -> str:
        """What the request says in a header."""
        return (ctx.headers or {}).get(name, "")

    @app.tool()
    def fail() -> str:
        """Fail."""
        raise ToolError("no such city")

    @app.tool()
    async def ask(ctx: Context) -> str:
        """Ask the client for its roots."""
        try:
            roots = await ctx.session.list_roots()
        except Exception as error:
            return f"refused: {type(error).__name__}"
        return f"got {roots}"

    @app.tool()
    async def grow(ctx: Context) -> str:
        """Have one more tool."""
        app.add_tool(lambda: "new", name=f"tool_{len(app._tool_manager.list_tools())}")
        await ctx.session.send_tool_list_changed()
        return "grown"

    return app


def main() -> None:
    app = make()
    if sys.argv[1] == "stdio":
        app.run("stdio")
        return
    import uvicorn

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        print(sock.getsockname()[1], flush=True)
        web = app.streamable_http_app()
        web.router.routes.extend(app.sse_app().routes)
        uvicorn.Server(uvicorn.Config(web, log_level="critical")).run(sockets=[sock])


if __name__ == "__main__":
    main()
