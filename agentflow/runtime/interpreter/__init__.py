"""Runs the op streams of one session.

Reading order: ``state_tree`` has the records of states and variables and spreads failures, ``interpreter``
runs the ops on both, and ``op_execution`` those that need a model. ``wired_text`` waits for the variables
that a text refers to, ``image_store`` keeps the images that the session has uploaded, and ``observation``
lets the client watch the scheduler.
"""
