"""The backends that run a session's ops. ``protocol/backend`` is their interface.

Reading order: ``open_session`` is ``af.session``, which chooses a backend. ``local`` interprets ops in this
process with an embedded engine. ``remote`` sends them to a server over a ``websocket``: ``op_queue`` keeps
the ops that the server has not acknowledged, ``cursors`` the position in its events. ``scripted`` interprets
ops with the answers of a script: ``scripted_generator`` chooses them, and ``scripted_answers`` fits them to
the parameters of each gen. ``replay`` answers from a recording. ``apis`` has the models behind HTTP APIs.
``several`` makes several backends the models of one session.
"""
