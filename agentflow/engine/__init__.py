"""One model, served: from a ``Submit`` to the tokens that it gets.

To learn how it works, read ``request``, ``batch``, ``cache/radix_cache``, ``cache/kv_manager``,
``scheduling/fair_policy``, ``scheduling/scheduler``, ``engine``, ``runner`` and ``models/llama``, in this
order. Around this core: ``generator/`` and ``client`` are the event loop's side, ``local_engine``
starts an engine, ``process/`` runs it in a process of its own, ``grammar/`` constrains its output, ``text/``
has the tokenizer and chat templates, ``store/`` the model files, and ``simulator/`` schedules without a
model.
"""
