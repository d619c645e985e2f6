"""An engine in a separate process.

``worker`` runs in the process, ``child`` is the server's handle of it, ``supervisor`` keeps it alive, and
``connection`` exchanges messages with it. ``deadlines`` decides when it hangs, ``request_journal`` tracks its
unfinished requests, ``medium_parts`` divides images into messages, and ``shutdown_budget`` divides the time
of a shutdown.
"""
