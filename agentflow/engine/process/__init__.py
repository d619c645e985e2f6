"""An engine in a separate process.

``worker`` runs in it, ``supervisor`` starts it and keeps it alive, ``request_journal`` knows what it owes,
and ``shutdown_budget`` divides the time of a shutdown.
"""
