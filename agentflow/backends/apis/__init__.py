"""Models behind HTTP APIs: OpenAI, Anthropic and compatible servers."""
