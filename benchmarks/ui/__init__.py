"""The page of the server in a headless Chromium, and what watching costs the server."""
