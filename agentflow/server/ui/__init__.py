"""The page: a playground, a chat, and live views of the engine, in a browser.

``static`` has the built files, which the directory ``ui`` of the repository makes; ``pages`` serves them.
"""
