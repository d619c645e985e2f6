"""The page: a playground, a chat, and live views of the engine, in a browser.

``pages`` serves the files in ``static``, which the directory ``ui`` of the repository makes.
"""
