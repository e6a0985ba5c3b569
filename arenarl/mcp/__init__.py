"""Any MCP server, many sessions, nothing leaks."""

from arenarl.mcp.config import ServerSpec
from arenarl.mcp.config_file import load_mcp_config
from arenarl.mcp.hub import ServerHub
from arenarl.mcp.paths import VIRTUAL_ROOT
from arenarl.mcp.pool import Workspace
from arenarl.mcp.schema import ToolSet, ToolSpec
from arenarl.mcp.session import McpSession
from arenarl.mcp.tape import Tape

__all__ = [
    "VIRTUAL_ROOT", "McpSession", "ServerHub", "ServerSpec", "Tape", "ToolSet", "ToolSpec", "Workspace", "load_mcp_config",
]  # fmt: skip
