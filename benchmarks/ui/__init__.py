"""The page of the server in a headless Chromium, and the server's cost of watching."""
