"""The commands of ``agentflow``. ``main`` runs them and ``command`` defines what they have in common; each
other file is one command, but ``server_query``, which queries a server for several of them. ``operating`` has
the commands of an operator.
"""
