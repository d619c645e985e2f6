"""An engine in a process of its own: ``ipc`` (the messages), ``child`` (a process and its socket), ``worker``
(what runs in it), ``request_journal`` (what it owes), ``supervisor`` (keeps it alive),
``shutdown_budget``."""
