"""An engine in a separate process.

``worker`` runs in it, ``child`` is the other end of its socket, ``supervisor`` starts it and keeps it alive,
and ``connection`` exchanges messages with it. ``deadlines`` decides when it hangs, ``request_journal`` keeps
its unfinished requests, ``medium_parts`` carries images to it, and ``shutdown_budget`` divides the time of a
shutdown.
"""
