"""The commands of ``agentflow``.

Reading order: ``main`` runs the commands, and ``command`` defines their common form. One file is one
command: ``run`` (a program on a file of inputs), ``chat``, ``models`` (lists models), ``pull`` (fetches
models), ``replay`` (shows a recording) and ``doctor`` (checks the machine). ``operating`` has the commands of
an operator. ``server_query`` queries a running server for several commands, and ``word_wrap`` wraps streamed
text.
"""
