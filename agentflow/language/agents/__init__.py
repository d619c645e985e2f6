"""Models that call tools: ``act`` is the loop, and ``mcp`` gives it the tools of MCP servers."""
