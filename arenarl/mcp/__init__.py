"""Any MCP server, many sessions, nothing leaks."""

from arenarl.mcp.config import ServerSpec, load_mcp_config
from arenarl.mcp.hub import ServerHub
from arenarl.mcp.schema import ToolSet, ToolSpec
from arenarl.mcp.session import McpSession

__all__ = ["McpSession", "ServerHub", "ServerSpec", "ToolSet", "ToolSpec", "load_mcp_config"]
