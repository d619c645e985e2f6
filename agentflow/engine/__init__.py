"""The engine of one model: from a ``Submit`` to its tokens.

``docs/internals/plain-engine.md`` is the same engine in 300 lines, without the parts that make it fast. To
learn how this one works, read ``messages`` (to and from an engine), ``request`` with ``token_tree`` (the
choices of a select) and ``media_run`` (images in a prompt), ``batch``, ``runner`` (the interface to a model),
``cache`` from ``cache/radix_cache`` on, ``scheduling`` from ``scheduling/scheduler`` on, ``outputs`` (from
tokens to messages), and ``engine``, in this order.

Below this core: ``machine`` (processors, free memory, and processes that may fail), ``store`` (model files),
``media`` (decodes images, prepares them for a model, and finds them in prompts), ``grammar`` (constraints and
their automata), ``text`` (tokenizer, chat templates, tools), ``models`` (forward passes on torch), and
``tenant`` (whose states and cache a snapshot shows). Around it: ``adapters`` and ``constrained`` are parts of
the engine, and ``watching`` shows its work. ``client`` and ``generator`` are the event loop's side,
``process`` runs an engine in a separate process, ``options`` are its settings, and ``local_engine`` starts
one. ``simulator`` schedules without a model, or with a fake one.
"""
