"""The example application: ``service`` with its page in ``static``, and ``sse``."""
