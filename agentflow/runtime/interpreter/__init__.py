"""Runs the op streams of one session.

Reading order: ``variables`` has the records of variables, and the events that the client receives,
``state_tree`` has the records of states and propagates failures; ``interpreter`` runs the ops on both, and
``op_execution`` runs the ops that need a model. ``checking`` has the interpreter of a server, which checks
the ops that it receives. ``wired_text`` waits for the variables that a text refers to, ``image_store`` keeps
the images that the session has uploaded, and ``observation`` lets the client watch the scheduler.
"""
