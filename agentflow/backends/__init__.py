"""The backends that run a session's ops.

``local`` interprets ops in this process, with an embedded engine; ``scripted`` with answers from a script.
``remote`` sends them to a server over a ``websocket``. ``replay`` answers from a recording. ``open_session``
is ``af.session``, which chooses among them."""
