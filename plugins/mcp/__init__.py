"""MCP servers as tools of a session (docs/environments/mcp.md)."""

from turnlog.plugins.mcp.harnesses import McpConfig as McpConfig
from turnlog.plugins.mcp.harnesses import mcp_config as mcp_config
from turnlog.plugins.mcp.listing import ToolListing as ToolListing
from turnlog.plugins.mcp.listing import content_of as content_of
from turnlog.plugins.mcp.recipe import McpRecipe as McpRecipe
from turnlog.plugins.mcp.recipe import with_servers as with_servers
from turnlog.plugins.mcp.servers import BadServer as BadServer
from turnlog.plugins.mcp.servers import McpServer as McpServer
from turnlog.plugins.mcp.servers import list_call as list_call
