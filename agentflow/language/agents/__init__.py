"""Models that call tools: ``act`` is the loop, with results that may have images (``tool_content``).
``mcp`` gives it the tools of MCP servers."""
